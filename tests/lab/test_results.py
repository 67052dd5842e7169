"""Result files: exactly the promised fields, checked before they are written, and following from the raw records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.errors import ScenarioError, WorkerLostError
from offbeat.lab import plots, results, runner
from offbeat.lab.recorder import Begun, Line, MeasuredStep, Metric, Note, RunTotals
from offbeat.lab.results import RawRun, ResultFile, RowResult, Spread
from offbeat.lab.run_result import RunResult
from offbeat.scenario import Scenario

if TYPE_CHECKING:
    from pathlib import Path

# The schema that the design promises; other programs read it.
FIELDS = [
    "scenario",
    "row",
    "system",
    "plan",
    "repeats",
    "seconds_per_step",
    "samples_per_s",
    "time_to_target_s",
    "final_metric",
    "bytes_sent_per_worker",
    "wait_s_per_worker",
    "staleness",
    "bound_s",
    "percent_of_bound",
    "ratio_to_baseline",
    "baseline",
    "events",
]

SCENARIO = """
[scenario]
name = "made-up"
[hosts]
count = 2
{network}
[workload]
kind = "script"
path = "{path}"
{target}
[run]
repeats = 3
steps = 2
warmup_steps = 3
[[row]]
name = "ddp"
system = "ddp"
[[row]]
name = "ours"
system = "offbeat"
"""


def raw(row: str, repeat: int, rank: int, step_s: float, **changes: Any) -> RawRun:
    """What a worker might have measured: two steps of 4 samples each, 1 MB of gradients, 10 ms of computation."""
    values: dict[str, Any] = {
        "row": row,
        "repeat": repeat,
        "rank": rank,
        "host": f"h{rank}",
        "step_s": [step_s, step_s],
        "wait_s": [step_s - 0.01, step_s - 0.01],
        "bytes_sent": 1000 + rank,
        "samples": 8,
        "gradient_bytes": 1_000_000,
        "compute_s": 0.01 * (rank + 1),
        "digest": "d",
        "gradient_error": None,
        "metrics": [],
        "notes": [],
    }
    return RawRun(**(values | changes))


# Seconds per step of each row's three repeats: the machine became slower all the time.
STEPS = {"ddp": [1.0, 2.0, 4.0], "ours": [0.5, 1.1, 3.9]}


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResultFile:
    return measure(tmp_path, monkeypatch, network='network = "loopback"')


def measure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, network: str, target: str = "", metrics: Any = None
) -> ResultFile:
    """A report whose workers are made up: `metrics` is, per row, what rank 0 measured in each repeat."""
    order: list[tuple[str, int]] = []

    def run_once(job: Any, places: Any, run_folder: Path, index: int, lab: str | None) -> RunResult:
        row = job.row.name
        order.append((row, index))
        own = {} if metrics is None else {"metrics": metrics[row][index]}
        workers = [raw(row, index, rank, STEPS[row][index], **own) for rank in range(2)]
        return RunResult(workers, events=["a stall"] if row == "ours" else [], buckets=4 if row == "ours" else 0)

    (folder / "work.py").write_text("")
    text = SCENARIO.format(network=network, path="work.py", target=target)
    monkeypatch.setattr(runner, "run_once", run_once)
    told: list[tuple[str, int]] = []
    made = runner.run(
        Scenario.from_toml(text),
        text,
        folder,
        command="offbeat lab run",
        tell=lambda row, repeat: told.append((row, repeat)),
    )
    # A B B A A B: what drifts hits all rows alike.
    rows = ("ddp", "ours", "ours", "ddp", "ddp", "ours")
    assert order == told == [(row, i // 2) for i, row in enumerate(rows)]
    return made


class Kept:
    """What is handed on while a scenario with made-up workers runs. Some of its runs do not end well.

    Args:
        ends: how a run of (row, repeat) ends otherwise.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, ends: dict[tuple[str, int], BaseException]
    ) -> None:
        self.reports: list[ResultFile] = []
        self.failed: dict[str, str] = {}
        self.begun: list[tuple[str, int]] = []
        self._folder = folder

        def run_once(job: Any, places: Any, run_folder: Path, index: int, lab: str | None) -> RunResult:
            row = job.row.name
            if (row, index) in ends:
                raise ends[row, index]
            return RunResult([raw(row, index, rank, STEPS[row][index]) for rank in range(2)], buckets=4)

        (folder / "work.py").write_text("")
        monkeypatch.setattr(runner, "run_once", run_once)

    def run(self) -> ResultFile:
        text = SCENARIO.format(network='network = "loopback"', path="work.py", target="")
        return runner.run(
            Scenario.from_toml(text),
            text,
            self._folder,
            command="offbeat lab run",
            tell=lambda row, repeat: self.begun.append((row, repeat)),
            keep=self.reports.append,
            fail=lambda row, error: self.failed.update({row: str(error)}),
        )


def test_every_run_is_handed_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A B B A, and then somebody has had enough."""
    kept = Kept(tmp_path, monkeypatch, {("ddp", 2): KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        kept.run()
    assert [{row.row: row.repeats for row in one.rows} for one in kept.reports] == [
        {"ddp": 1},
        {"ddp": 1, "ours": 1},
        {"ddp": 1, "ours": 2},
        {"ddp": 2, "ours": 2},
    ]
    assert kept.reports[-1].rows[1].ratio_to_baseline == pytest.approx((0.5 / 1.0 + 1.1 / 2.0) / 2)
    results.write(kept.reports[-1], tmp_path / "result.json")
    assert results.read(tmp_path / "result.json") == kept.reports[-1]


def test_the_others_go_on_after_a_row_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = WorkerLostError("Cannot measure row 'ours', repeat 1: rank 1 ended, its last output was\n  /home/me: no")
    kept = Kept(tmp_path, monkeypatch, {("ours", 1): error})
    report = kept.run()
    assert {row.row: row.repeats for row in report.rows} == {"ddp": 3, "ours": 1}
    assert kept.begun == [("ddp", 0), ("ours", 0), ("ours", 1), ("ddp", 1), ("ddp", 2)]
    assert kept.failed == {"ours": str(error)}
    assert report.failed == {"ours": "Cannot measure row 'ours', repeat 1: rank 1 ended, its last output was"}
    assert report.rows[1].ratio_to_baseline == pytest.approx(0.5)


def test_where_the_baseline_failed_another_row_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Kept(tmp_path, monkeypatch, {("ddp", 0): WorkerLostError("no")}).run()
    assert [(row.row, row.baseline, row.ratio_to_baseline) for row in report.rows] == [("ours", "ours", 1.0)]


def test_where_every_row_failed_there_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path, monkeypatch, {("ddp", 0): WorkerLostError("first"), ("ours", 0): WorkerLostError("second")})
    with pytest.raises(WorkerLostError, match="first"):
        kept.run()
    assert kept.failed == {"ddp": "first", "ours": "second"}
    assert kept.reports == []


def test_a_result_is_written_whole_or_not_at_all(
    report: ResultFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is ended while it writes leaves what was there before."""
    path = tmp_path / "result.json"
    results.write(report, path)
    before = path.read_bytes()

    def ended(part: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", ended)
    with pytest.raises(KeyboardInterrupt):
        results.write(msgspec.structs.replace(report, description="another"), path)
    assert path.read_bytes() == before


def test_the_fields_are_the_promised_ones(report: ResultFile) -> None:
    for row in report.rows:
        assert list(msgspec.to_builtins(row)) == FIELDS
    assert set(msgspec.to_builtins(report.rows[0].seconds_per_step)) == {"median", "min", "max"}
    assert set(msgspec.to_builtins(report.rows[0].staleness)) == {"mean", "max"}


def test_rows_sum_up_what_the_workers_measured(report: ResultFile) -> None:
    ddp, ours = report.rows
    assert ddp.seconds_per_step == Spread(median=2.0, min=1.0, max=4.0)
    assert ddp.samples_per_s == pytest.approx(8 / 2.0)
    assert ddp.bytes_sent_per_worker == [1000, 1001]
    assert ddp.wait_s_per_worker == pytest.approx([2 * 1.99, 2 * 1.99])
    # Each repeat against the baseline's next to it, not median against median.
    assert ours.ratio_to_baseline == pytest.approx(0.55)
    assert ddp.ratio_to_baseline == 1.0
    # Unshaped: the slowest worker's computation is the limit.
    assert ours.bound_s == pytest.approx(0.02)
    assert ours.percent_of_bound == pytest.approx(100 * 0.02 / 1.1)
    assert ours.events == ["a stall"]
    assert report.overhead_us_per_bucket == {"ours": pytest.approx((0.5 - 1.0) / 4 * 1e6)}


def test_the_envelope_says_where_it_comes_from(report: ResultFile) -> None:
    assert report.name == "made-up"
    assert Scenario.from_toml(report.scenario).digest == report.digest
    assert report.command == "offbeat lab run"
    assert set(report.versions) >= {"python", "torch", "offbeat"}
    assert set(report.hardware) >= {"processor", "cores", "kernel"}
    assert len(report.raw) == 2 * 3 * 2


@pytest.mark.parametrize(
    ("ours", "time_s", "ratio"),
    [
        # Reached every time: ratios of the times to it, 0.5, 0.5 and 2.
        ([[(1.0, 0.7), (2.0, 0.9)], [(3.0, 0.91)], [(16.0, 0.95)]], 3.0, 0.5),
        # Once not: no time to target, and the time per step is compared.
        ([[(1.0, 0.7), (2.0, 0.9)], [(3.0, 0.91)], [(16.0, 0.89)]], None, 0.55),
    ],
)
def test_time_to_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: Any, time_s: float | None, ratio: float
) -> None:
    ddp = [[(2.0, 0.85), (4.0, 0.9)], [(6.0, 0.9)], [(8.0, 0.9), (9.0, 0.8)]]
    made = measure(
        tmp_path,
        monkeypatch,
        network='network = "loopback"',
        target="target = 0.9",
        metrics={"ddp": ddp, "ours": ours},
    )
    assert made.rows[0].time_to_target_s == 6.0
    assert made.rows[0].final_metric == 0.9
    assert made.rows[1].time_to_target_s == time_s
    assert made.rows[1].ratio_to_baseline == pytest.approx(ratio)


def test_what_is_written_can_be_read(report: ResultFile, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    results.write(report, path)
    assert results.read(path) == report
    assert len(path.read_text().splitlines()) > len(report.rows) + len(report.raw), "one line each"


@pytest.mark.parametrize(
    ("field", "value"),
    [("bound_s", -1.0), ("bound_s", float("nan")), ("samples_per_s", "many"), ("repeats", 0), ("events", None)],
)
def test_a_bad_value_is_not_written(report: ResultFile, tmp_path: Path, field: str, value: Any) -> None:
    bad = msgspec.structs.replace(report, rows=[msgspec.structs.replace(report.rows[0], **{field: value})])
    with pytest.raises(msgspec.ValidationError, match=field):
        results.write(bad, tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_an_unknown_field_is_not_read(report: ResultFile) -> None:
    table = msgspec.to_builtins(report.rows[0]) | {"speedup": 2}
    with pytest.raises(msgspec.ValidationError, match="speedup"):
        msgspec.convert(table, RowResult)


def test_a_worker_that_recorded_no_end_measured_nothing() -> None:
    with pytest.raises(ScenarioError, match="Cannot measure row 'ddp': the worker program on h0 ended well but"):
        RawRun.from_lines([MeasuredStep(0, 1.0, 0.0)], row="ddp", repeat=0, rank=0, host="h0")
    with pytest.raises(ScenarioError, match="recorded no result"):
        RawRun.from_lines([], row="ddp", repeat=0, rank=0, host="h0")


def test_lines_become_a_record() -> None:
    lines: list[Line] = [
        Note("n"),
        MeasuredStep(0, 1.0, 0.25),
        Metric(4, 2.5, 0.9),
        MeasuredStep(1, 2.0, 0.5),
        RunTotals(7, 16, 40, 0.5, "d", 0.1),
    ]
    made = RawRun.from_lines(lines, row="ddp", repeat=2, rank=1, host="h1")
    assert (made.step_s, made.wait_s, made.metrics, made.notes) == ([1.0, 2.0], [0.25, 0.5], [(2.5, 0.9)], ["n"])
    assert (made.bytes_sent, made.samples, made.gradient_bytes, made.gradient_error) == (7, 16, 40, 0.1)


def test_a_step_that_is_done_again_counts_once_and_hides_no_time() -> None:
    """Steps 0 and 1; killed in step 2, 10 s after the beginning; started again from the end of step 0."""
    lines: list[Line] = [
        Begun(3, 0.0, 0.5),
        MeasuredStep(0, 1.0, 0.5, 4, 1.0),
        MeasuredStep(1, 1.0, 0.5, 4, 2.0),
        Begun(4, 10.0, 0.5),
        MeasuredStep(1, 1.5, 1.0, 4, 11.5),
        MeasuredStep(2, 1.0, 0.5, 4, 12.5),
        MeasuredStep(3, 1.0, 0.5, 4, 13.5),
        RunTotals(7, 16, 40, 0.5, "d", None),
    ]
    made = RawRun.from_lines(lines, row="ddp", repeat=0, rank=0, host="h0")
    assert made.step_s == [1.0, 1.0, 10.5, 1.0]
    assert sum(made.step_s) == 13.5
    assert made.wait_s == [0.5, 0.5, 10.0, 0.5]


@pytest.mark.parametrize("metrics", [None, {"ddp": [[(1.0, 0.5), (2.0, 0.7)]] * 3, "ours": [[(1.0, 0.6)]] * 3}])
def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: Any) -> None:
    made = measure(tmp_path, monkeypatch, network='network = "loopback"', metrics=metrics)
    plots.draw(made, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (tmp_path / "a.png").stat().st_size > 10_000
