"""What happened to a job, once each, with times; and how that reads in the report."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.cli.report import conclusion, write_report
from offbeat.report import Records
from offbeat.report.html_report import page
from offbeat.report.job_events import job_events, trained_s
from offbeat.report.records import OF_JOB, EventRecord, append, has_ended
from offbeat.report.trace import trace
from tests.report.fake_records import end, start, step, write

if TYPE_CHECKING:
    from pathlib import Path

GONE = "Rank 1 is gone: it hung up. The others continue."


def event(rank: int, at_s: float, what: str, text: str, number: int = 5, **more: Any) -> dict[str, Any]:
    return {"kind": "event", "rank": rank, "step": number, "time_s": 100.0 + at_s, "what": what, "text": text, **more}


def steps(ranks: int, count: int = 50) -> list[dict[str, Any]]:
    begun = [start(rank) | {"world": ranks} for rank in range(ranks)]
    return begun + [step(rank, number) for rank in range(ranks) for number in range(count)]


def told(tmp_path: Path, *records: dict[str, Any]) -> list[tuple[float, str, str, list[int]]]:
    found = job_events(Records(write(tmp_path, [*steps(3), *records])).all())
    return [(round(one.time_s - 100, 1), one.what, one.text, one.ranks) for one in found]


def test_what_all_workers_record_happened_once(tmp_path: Path) -> None:
    loss = [event(rank, 3 + 0.1 * rank, "server", GONE) for rank in (0, 2)]
    swap = [event(rank, 5 + 4 * rank, "swap", "ASP() decides.") for rank in range(3)]
    stall = [event(rank, 7, "stall", f"step 5: rank {rank} has waited 4 s.") for rank in (0, 1)]
    assert told(tmp_path, *loss, *swap, *stall) == [
        (3.0, "server", GONE, [0, 2]),
        (5.0, "swap", "ASP() decides.", [0, 1, 2]),
        (7.0, "stall", "step 5: rank 0 has waited 4 s.", [0, 1]),
    ]


def test_what_happens_again_is_another_event(tmp_path: Path) -> None:
    again = [event(0, 3, "server", GONE), event(0, 6, "server", GONE), event(2, 30, "server", GONE)]
    assert [(at_s, ranks) for at_s, _, _, ranks in told(tmp_path, *again)] == [(3.0, [0]), (6.0, [0]), (30.0, [2])]


def test_leaving_in_order_is_told_once_by_whoever_tells_it_best(tmp_path: Path) -> None:
    left = end(1, 50) | {"left": True}
    said = event(0, 10.2, "server", "Rank 1 was asked to leave, and left cleanly behind its step 50: 2 go on.")
    assert [text for _, _, text, _ in told(tmp_path, left, said)] == [said["text"]]
    assert [text for _, _, text, _ in told(tmp_path, left)] == [
        "Rank 1 was asked to leave, and left cleanly behind its step 50."
    ]


def test_ctrl_c_reads_as_what_it_was(tmp_path: Path) -> None:
    ends = [end(rank, 50, "KeyboardInterrupt: SIGTERM") for rank in range(3)]
    records = [*steps(3), event(OF_JOB, 9, "interrupted", "SIGINT: ending 3 workers.", -1), *ends]
    write(tmp_path, records)
    assert conclusion(tmp_path) == [
        "Ranks 0, 1 and 2 were asked to stop after 50 steps, by Ctrl-C or SIGTERM at the launcher."
    ]
    text = page(Records(tmp_path / "metrics.jsonl").all(), title="x")
    assert "KeyboardInterrupt" not in text
    assert "Rank 0 was asked to stop (SIGTERM) after 50 steps." in text


def test_a_worker_known_to_be_killed_is_said_to_be(tmp_path: Path) -> None:
    killed = event(1, 6, "killed", "Rank 1 was killed by SIGKILL.", -1)
    write(tmp_path, [*steps(3), killed, end(0, 50), end(2, 50)])
    assert conclusion(tmp_path) == [
        "Rank 1 was killed by SIGKILL after 50 recorded steps. Ranks 0 and 2 ended well after 50 steps."
    ]


def test_an_exit_code_is_an_event_where_the_worker_has_left_no_last_word(tmp_path: Path) -> None:
    exited = event(1, 6, "exited", "Rank 1 ended with exit code 7.", -1)
    assert [(what, text, of) for _, what, text, of in told(tmp_path, exited)] == [("exited", exited["text"], [1])]
    assert [text for _, _, text, _ in told(tmp_path, exited, end(1, 50, "SystemExit: 7"))] == [
        "Rank 1 ended with SystemExit: 7"
    ]


def test_the_page_shows_times_steps_and_the_plan_that_held_last(tmp_path: Path) -> None:
    swaps = [event(rank, 5, "swap", "ASP() decides.", plan='[sync]\nkind = "ASP"\n') for rank in range(3)]
    records = Records(write(tmp_path, [*steps(3), event(0, 3, "server", GONE), *swaps])).all()
    text = page(records, title="x", plan='[sync]\nkind = "SSP"\n')
    rows = re.findall(r"<tr><td>(\d*)</td><td title=\"[^\"]*\">([^<]*)</td><td>([^<]*)</td><td[^>]*>([^<]*)</td>", text)
    assert rows == [("1", "3.0 s", "step 5", "server"), ("2", "5.0 s", "step 5", "swap")]
    assert text.index("Plan at the end") < text.index("kind = &quot;ASP&quot;") < text.index("Plan at the beginning")
    assert text.index("Plan at the beginning") < text.index("kind = &quot;SSP&quot;")
    assert "Plan at the end" not in page(records[:5], title="x", plan='[sync]\nkind = "SSP"\n')


def test_cards_do_not_mix_workers(tmp_path: Path) -> None:
    """Steps of one beside steps per second of another would be nobody's."""
    begun = [start(rank) for rank in range(2)]
    fast = [step(0, number, compute_s=0.05, wait_s=0.05) for number in range(80)]
    slow = [step(1, number, compute_s=0.2, wait_s=0.2) for number in range(20)]
    text = page(Records(write(tmp_path, [*begun, *fast, *slow])).all(), title="x")
    assert "<b>20 to 80</b><span>steps per worker</span>" in text
    assert "<b>2.5 to 10</b><span>steps per second and worker</span>" in text


def test_the_launcher_writes_what_workers_cannot(tmp_path: Path) -> None:
    path = write(tmp_path, [*steps(1), end(0, 50)])
    append(path, EventRecord(rank=OF_JOB, step=-1, time_s=120.0, what="interrupted", text="SIGINT."))
    assert has_ended(path), "what is of the whole job is no worker's record"
    append(path, EventRecord(rank=0, step=-1, time_s=0.0, what="exited", text="Rank 0 ended with exit code 2."))
    assert has_ended(path), "who has exited has ended"
    assert [one.what for one in job_events(Records(path).all())] == ["interrupted"]
    append(tmp_path / "nowhere" / "metrics.jsonl", EventRecord(rank=0, step=0, time_s=0.0, what="killed", text=""))
    assert not (tmp_path / "nowhere").exists()


def test_time_begins_with_the_prepared_model(tmp_path: Path) -> None:
    assert trained_s(Records(write(tmp_path, steps(2))).all()) == pytest.approx(50 * 0.2)
    assert trained_s([]) == 0.0


def test_the_trace_has_the_server_as_a_lane_per_worker(tmp_path: Path) -> None:
    served = [
        record | {"plan": "Plan(sync=SSP(bound=4), fabric=ParameterServer())"} if record["kind"] == "start" else record
        for record in steps(2, 4)
    ]
    gone = [event(rank, 0.3, "server", GONE) for rank in range(2)]
    made = trace(Records(write(tmp_path, [*served, *gone])).all())["traceEvents"]
    processes = {one["args"]["name"]: one["pid"] for one in made if one["name"] == "process_name"}
    server = processes["parameter server"]
    of_server = [one for one in made if one["pid"] == server]
    names = {one["args"]["name"] for one in of_server if one["name"] == "thread_name"}
    assert names == {"contributions of rank 0", "contributions of rank 1"}
    assert sum(one["ph"] == "X" for one in of_server) == 8
    assert [one["args"]["text"] for one in of_server if one["ph"] == "i"] == [GONE]
    without = trace(Records(write(tmp_path, steps(2, 4))).all())["traceEvents"]
    assert not [one for one in without if one["pid"] == server]


def test_resources_stand_beside_each_worker(tmp_path: Path) -> None:
    used = [
        {"kind": "resources", "rank": 1, "time_s": 101.0 + n, "cpu_cores": 1.5, "memory_bytes": 2_000_000 + n}
        | {"sent_bytes_per_s": 1e6}
        for n in range(3)
    ]
    write(tmp_path, [*steps(2), *used])
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<td>1.5</td><td>2 MB</td>" in text
    for title in ("processor,", "memory, MB", "sent, MB/s"):
        assert title in text, "panels of the picture"


def test_contributions_that_were_dropped_are_events_of_their_moments(tmp_path: Path) -> None:
    many = [step(1, number) | {"dropped": True} for number in (60, 61, 75)]
    one = step(2, 400) | {"dropped": True}
    far = step(1, 1400) | {"dropped": True}
    told_of = [(what, text, ranks) for _, what, text, ranks in told(tmp_path, *many, one, far)]
    assert told_of == [
        ("dropped", "3 contributions of rank 1 in steps 60 to 75 were dropped: they are not in the "
         "parameters.", [1]),
        ("dropped", "The contribution of rank 2 in step 400 was dropped: it is not in the parameters.", [2]),
        ("dropped", "The contribution of rank 1 in step 1400 was dropped: it is not in the parameters.", [1]),
    ]  # fmt: skip
