"""What is made of a run's records: sums, trace, page; and that damage in the file is survived."""

from __future__ import annotations

import html.parser
import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from offbeat.cli.report import conclusion, write_report
from offbeat.errors import ScenarioError
from offbeat.fabric import ParameterServer
from offbeat.history import HistoryEnded, HistoryHeader, LifeBegan, Record, UpdateJudged, write_log
from offbeat.plan import Plan
from offbeat.report import Records, pace, tally
from offbeat.report.html_report import page
from offbeat.report.plots import colour
from offbeat.report.trace import trace
from offbeat.robust import Krum
from tests.report.fake_records import a_run, start, step, write

if TYPE_CHECKING:
    from pathlib import Path


def test_sums_per_worker(tmp_path: Path) -> None:
    records = Records(write(tmp_path, a_run())).all()
    zero, one = tally(records)
    assert (zero.steps, zero.samples, zero.bytes_sent, zero.host) == (50, 1600, 50_000, "host0")
    assert zero.wait_s == pytest.approx(9.0)
    assert zero.waiting_share == pytest.approx(0.9)
    assert zero.steps_per_s == pytest.approx(5.0)
    assert zero.samples_per_s == pytest.approx(160.0)
    assert zero.values == {"loss": 0.02, "accuracy": 0.975, "bad": None}
    assert one.error == "ValueError: <x>"
    assert pace(records) == (
        "Rank 1 sets the pace: it computes 190.0 ms per step and waits 5% of the time; "
        "the others compute 20.0 ms per step and wait 90%."
    )


def test_whom_the_rule_rejected_is_in_the_report(tmp_path: Path) -> None:
    """It is known from the history; where there is none, that is said."""
    write(tmp_path, a_run())
    write_report(tmp_path)
    assert "the rule" not in (tmp_path / "report.html").read_text(), "there is none in the plan"
    (tmp_path / "plan.toml").write_text(Plan(fabric=ParameterServer(), rule=Krum(0)).to_toml())
    write_report(tmp_path)
    assert "has rejected is not known. Cannot verify" in (tmp_path / "report.html").read_text()
    (tmp_path / "history").mkdir()
    judged = [UpdateJudged(0, step + 1, ((0, step, 1.0), (1, step, 0.0))) for step in range(8)]
    began = HistoryHeader(1, "coordinator", "job", 0, 0.0, "now"), LifeBegan(0, 1, "")
    records: list[Record] = [*began, *judged, HistoryEnded()]
    write_log(tmp_path / "history" / "coordinator.log", records)
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    rows = re.findall(r"<tr><td>rank (\d)</td><td>(\d+)</td><td>(\d+)</td></tr>", text)
    assert rows == [("0", "8", "0"), ("1", "8", "8")]


def test_what_is_written_while_one_looks_is_read_once(tmp_path: Path) -> None:
    records = [step(0, number) for number in range(6)]
    whole = write(tmp_path, records).read_bytes()
    path = write(tmp_path, records[:1])
    reader = Records(path)
    seen = [len(reader.new())]
    for end in (2, 4, 6):
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[:end]))
        seen.append(len(reader.new()))
    assert seen == [1, 1, 2, 2]


def test_nobody_sets_the_pace_of_equals(tmp_path: Path) -> None:
    records = [step(rank, number) for number in range(5) for rank in (0, 1)]
    assert "No worker stands out" in pace(Records(write(tmp_path, records)).all())


def test_what_differs_is_given_as_a_range(tmp_path: Path) -> None:
    waits = {0: 0.047, 1: 0.06, 2: 0.0695}
    records = [step(rank, number, wait_s=wait_s) for number in range(9) for rank, wait_s in waits.items()]
    assert "all compute 100.0 ms per step and wait 32 to 41% of the time" in pace(
        Records(write(tmp_path, records)).all()
    )
    records = [*records, *(step(3, number, compute_s=0.16, wait_s=0.0) for number in range(9))]
    assert pace(Records(write(tmp_path, records)).all()).endswith(
        "the others compute 100.0 ms per step and wait 32 to 41%."
    )


def test_workers_are_compared_over_the_steps_that_all_have(tmp_path: Path) -> None:
    """Rank 1 was killed, its last records lost with it: just when rank 0 had become slow."""
    alike = [step(rank, number) for number in range(10) for rank in (0, 1)]
    slow = [step(0, number, compute_s=1.0) for number in range(10, 20)]
    assert "No worker stands out" in pace(Records(write(tmp_path, [*alike, *slow])).all())
    assert pace(Records(write(tmp_path, [*alike[: 2 * 4], *slow])).all()) == ""  # 4 steps in common
    assert pace(Records(write(tmp_path, [start(0), start(1), *slow])).all()) == ""


def test_the_steps_of_two_models_are_told_apart(tmp_path: Path) -> None:
    both = [step(rank, number) for number in range(3) for rank in (0, 1) for _ in range(2)]
    assert "No worker stands out" in pace(Records(write(tmp_path, both)).all())  # 3 steps of either: 6


def test_several_slow_workers_are_not_called_equal(tmp_path: Path) -> None:
    """Two of four are slow: neither waits much longer than the other, and still two wait for them."""
    costs = {0: (0.19, 0.01), 1: (0.18, 0.02), 2: (0.02, 0.18), 3: (0.02, 0.18)}
    records = [step(r, n, compute_s=c, wait_s=w) for n in range(5) for r, (c, w) in costs.items()]
    assert pace(Records(write(tmp_path, records)).all()).startswith("Rank 0 ")


def test_rates_leave_out_the_start_up(tmp_path: Path) -> None:
    """The first step holds imports and preparation: 20 s here, and none of it is the training's."""
    records = [step(0, 0, compute_s=20.0, wait_s=0.0), *(step(0, n, compute_s=0.1, wait_s=0.1) for n in range(1, 11))]
    (worker,) = tally(Records(write(tmp_path, records)).all())
    assert worker.steps == 11
    assert worker.samples == 11 * 32
    assert worker.steps_per_s == pytest.approx(5.0)
    assert worker.samples_per_s == pytest.approx(160.0)
    assert worker.waiting_share == pytest.approx(0.5)
    assert worker.compute_per_step_s == pytest.approx(0.1)
    (alone,) = tally(Records(write(tmp_path, records[:1])).all())
    assert alone.steps_per_s == pytest.approx(0.05)


def test_a_folder_used_twice_shows_its_last_run(tmp_path: Path) -> None:
    again = [{**record, "pid": 8} if record["kind"] == "start" else record for record in a_run()]
    reader = Records(write(tmp_path, [*a_run(), *again[: 2 + 3 * 25]]))
    assert {worker.steps for worker in tally(reader.all())} == {25}
    assert reader.earlier == 1
    two_models = [start(0), start(0), step(0, 0)]  # of one process: not two runs
    reader = Records(write(tmp_path, two_models))
    assert len(reader.all()) == 3
    assert reader.earlier == 0


def test_three_runs_of_different_size_in_one_folder(tmp_path: Path) -> None:
    """The last one has fewer workers: what the others did in the run before it is not its own."""
    runs = [[{**start(rank), "pid": 10 * run + rank} for rank in range(world)] for run, world in enumerate((4, 4, 2))]
    reader = Records(write(tmp_path, [record for run in runs for record in run]))
    assert [record.rank for record in reader.all()] == [0, 1]
    assert reader.earlier == 2


def test_the_page_says_that_there_was_an_earlier_run(tmp_path: Path) -> None:
    others = [[{**r, "pid": pid} if r["kind"] == "start" else r for r in a_run()] for pid in (8, 9)]
    note = "The folder holds 2 earlier runs, too: only the newest is shown."
    write(tmp_path, [*a_run(), *others[0], *others[1]])
    write_report(tmp_path)
    assert note in (tmp_path / "report.html").read_text()
    assert note in conclusion(tmp_path)
    write(tmp_path, a_run())
    write_report(tmp_path)
    assert "earlier run" not in (tmp_path / "report.html").read_text() + "".join(conclusion(tmp_path))


def test_a_torn_line_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    torn, whole = json.dumps(step(0, 0), separators=(",", ":")), json.dumps(step(1, 0), separators=(",", ":"))
    (tmp_path / "metrics.jsonl").write_text(f"{torn[:60]}{whole}\n")
    reader = Records(tmp_path / "metrics.jsonl")
    assert [record.rank for record in reader.all()] == [1]
    assert reader.damaged == 1


def test_a_step_that_took_no_time_is_survived(tmp_path: Path) -> None:
    write(tmp_path, [start(0), step(0, 0, compute_s=0.0, wait_s=0.0)])
    assert len(write_report(tmp_path)) == 2


def test_a_long_run_is_traced_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.report.trace._MOST_SLICES", 3 * 2 * 10)  # 3 slices a step, 2 workers, 10 steps
    made = trace(Records(write(tmp_path, a_run())).all())
    slices = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 60
    assert {event["args"]["step"] for event in slices if "step" in event["args"]} == set(range(40, 50))
    assert made["otherData"]["first step"] == 40


def test_no_two_workers_share_a_colour() -> None:
    assert len({colour(rank) for rank in range(64)}) == 64


def test_records_are_followed_while_they_grow(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = Records(path)
    assert reader.new() == []
    lines = [msgspec.json.encode(step(0, number)) + b"\n" for number in range(3)]
    path.write_bytes(lines[0] + lines[1][:40])
    assert [record.step for record in reader.new()] == [0]  # type: ignore[union-attr]
    path.write_bytes(b"".join(lines))
    assert [record.step for record in reader.new()] == [1, 2]  # type: ignore[union-attr]
    assert reader.damaged == 0


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, a_run())
    whole = len(Records(path).all())
    path.write_bytes(b'{"kind":"step","rank":0,\n\xff\xfe\n{"kind":"new"}\n[]\n' + path.read_bytes() + b'{"kind":"st')
    reader = Records(path)
    assert len(reader.all()) == whole
    assert reader.damaged == 4


def test_the_trace_is_well_formed(tmp_path: Path) -> None:
    events = json.loads(json.dumps(trace(Records(write(tmp_path, a_run())).all())))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 50 * 2 * 3
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    assert min(times) == 0
    assert all(event["dur"] >= 0 for event in slices)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names[0, 0] == "rank 0 on host0"
    assert {names[1, track] for track in (1, 2, 10)} == {"compute", "waiting", "communication, bucket 1"}
    assert {(event["pid"], event["tid"]) for event in slices} <= set(names)
    bucket = next(event for event in slices if event["tid"] == 10)
    assert bucket["args"]["parameters"] == "fc.bias, fc.weight"
    # On one track slices follow each other: Perfetto would stack them otherwise.
    for track in {(event["pid"], event["tid"]) for event in slices}:
        ends = 0.0
        for event in (event for event in slices if (event["pid"], event["tid"]) == track):
            assert event["ts"] >= ends - 1
            ends = event["ts"] + event["dur"]


class _Tags(html.parser.HTMLParser):
    """Fails on tags that are not closed in order, and collects what the page would load."""

    VOID = frozenset({"meta", "br", "img", "link", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [
            value for name, value in attrs if name in ("src", "href") and value and not value.startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    text = page(Records(write(tmp_path, a_run())).all(), title="a <run>", plan="[codec]\nkind = 'Dense'")
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.loads == []
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "script" not in tags.seen
    assert "&lt;script&gt;" in text
    assert "a &lt;run&gt;" in text
    assert "97.5%" in text
    assert text.count("<figure") == 7  # over time; loss, accuracy, bad; step times, shares; buckets


def test_the_page_without_matplotlib_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    text = page(Records(write(tmp_path, a_run())).all(), title="x")
    assert "matplotlib is not installed" in text


def test_one_record_is_enough(tmp_path: Path) -> None:
    for records in ([start(0)], [step(0, 0)], [a_run()[-1]]):
        write(tmp_path, records)
        assert [path.name for path in write_report(tmp_path)] == ["trace.json", "report.html"]


def test_folders_without_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"no metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"{half a li")
    with pytest.raises(ScenarioError, match="holds 10 bytes but no whole record"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(ScenarioError, match="is empty, because no worker prepared a model"):
        write_report(tmp_path)
