"""How a run ended, and what became NaN: said on the page and after the final table."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.cli.report import conclusion, write_report
from offbeat.report import Records
from offbeat.report.nonfinite import nonfinite
from offbeat.report.outcome import RunOutcome, ending, read_stalls
from tests.report.fake_records import end, log, start, step, write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOST = "WorkerLostError: step 6: rank 0 has waited 0.0 s in all-reduce.\n  rank 1 on vm died."
DEAD = {"rank": 1, "host": "vm", "reason": "dead", "text": "died 0.3 s ago.", "detail": ""}


def trained(*steps: int) -> list[dict[str, Any]]:
    """One worker per number of steps."""
    begun = [start(rank) | {"world": len(steps)} for rank in range(len(steps))]
    return begun + [step(rank, number) for rank, count in enumerate(steps) for number in range(count)]


def stall(folder: Path, rank: int, *culprits: dict[str, Any], **about: Any) -> Path:
    path = folder / f"stall-rank{rank}.json"
    path.write_text(json.dumps({"rank": rank, "step": 6, "culprits": culprits, "fatal": True, "note": ""} | about))
    return path


def how(folder: Path, records: Sequence[dict[str, Any]]) -> RunOutcome:
    return ending(Records(write(folder, list(records))).all(), read_stalls(folder, since_s=0))


def test_all_ended_well(tmp_path: Path) -> None:
    assert how(tmp_path, [*trained(6, 6), end(0, 6), end(1, 6)]) == RunOutcome(
        True, "All 2 workers ended well after 6 steps."
    )
    assert how(tmp_path, [*trained(1), end(0, 1)]) == RunOutcome(True, "The worker ended well after 1 step.")
    told = {"kind": "event", "rank": 0, "step": 3, "time_s": 101.0, "what": "stall", "text": "step 3: ..."}
    stall(tmp_path, 0, DEAD, fatal=False, step=3)  # it was waited for, and came
    assert how(tmp_path, [*trained(6), told, end(0, 6)]) == RunOutcome(
        True, "The worker ended well after 6 steps. 1 stall was reported on the way."
    )


def test_a_job_whose_workers_were_all_told_to_leave_did_not_come_to_its_end(tmp_path: Path) -> None:
    ends = [end(rank, 6) | {"left": True} for rank in (0, 1)]
    assert how(tmp_path, [*trained(6, 6), *ends]) == RunOutcome(
        True, "All 2 workers were asked to stop, and left cleanly after 6 steps."
    )
    assert how(tmp_path, [*trained(6, 6), ends[0], end(1, 6)]).text == "All 2 workers ended well after 6 steps."


def test_a_job_that_was_told_to_stop_as_its_workers_ended(tmp_path: Path) -> None:
    said = {"kind": "event", "rank": -1, "step": -1, "time_s": 111.0, "what": "interrupted", "text": "SIGTERM: ending."}
    assert how(tmp_path, [*trained(6, 6), end(0, 6), end(1, 6), said]).text == (
        "All 2 workers ended well after 6 steps, though the job was asked to stop."
    )


def test_what_was_warned_of_is_said_again_once(tmp_path: Path) -> None:
    """Each worker has said so for itself, long ago."""
    warned = [
        {"kind": "event", "rank": rank, "step": 3, "time_s": 101.0, "what": "warning", "text": f"Rank {rank} trains."}
        for rank in (0, 1)
    ]
    assert how(tmp_path, [*trained(6, 6), *warned, end(0, 6), end(1, 6)]).text == (
        "All 2 workers ended well after 6 steps. Rank 0 trains."
    )


def test_who_joined_a_job_does_not_miss_those_of_the_beginning(tmp_path: Path) -> None:
    """They are in another folder; whose rank is missing in this one is missed all the same."""
    joined = [start(rank) | {"world": 1} for rank in (3, 4)]
    assert how(tmp_path, [*joined, step(3, 0), step(4, 0), end(3, 1), end(4, 1)]) == RunOutcome(
        True, "All 2 workers ended well after 1 step."
    )
    text = how(tmp_path, [*joined, step(3, 0), end(3, 1)]).text
    assert text == "Rank 4 left no last word (killed?) after no recorded step. Rank 3 ended well after 1 step."


def test_what_happened_to_the_server_is_told_once(tmp_path: Path) -> None:
    told = {"kind": "event", "step": 3, "time_s": 101.0, "what": "server", "text": "It was restarted."}
    records = [*trained(6, 6), told | {"rank": 0}, told | {"rank": 1}, end(0, 6), end(1, 6)]
    assert how(tmp_path, records).text == "All 2 workers ended well after 6 steps. It was restarted."


def test_what_was_waited_for_is_not_told_once_that_is_over(tmp_path: Path) -> None:
    waits = {"kind": "event", "step": 3, "time_s": 101.0, "what": "pause", "text": "No validator takes part."}
    over = waits | {"time_s": 102.0, "what": "resumption", "text": "A validator takes part: training goes on."}
    records = [*trained(6, 6), *(one | {"rank": rank} for one in (waits, over) for rank in (0, 1))]
    assert how(tmp_path, [*records, end(0, 6), end(1, 6)]).text == "All 2 workers ended well after 6 steps."
    again = waits | {"rank": 0, "time_s": 103.0}
    assert how(tmp_path, [*records, again, end(0, 6), end(1, 6)]).text.endswith("6 steps. No validator takes part.")


def test_who_raised_is_named_before_who_waited_for_it(tmp_path: Path) -> None:
    stall(tmp_path, 0, DEAD | {"reason": "raised", "text": "raised an exception after 6 steps:"})
    ends = [end(0, 6, LOST), end(1, 6, "ValueError: a bad batch.\nmore"), end(2, 6, "KeyboardInterrupt: SIGTERM")]
    found = how(tmp_path, [*trained(6, 6, 6), *ends])
    assert found == RunOutcome(
        False,
        "Rank 1 ended after 6 steps with ValueError: a bad batch. Rank 2 was asked to stop after 6 steps, "
        "by SIGTERM or Ctrl-C. Rank 0 gave up waiting after 6 steps (WorkerLostError).",
    )


def test_who_was_killed_left_no_word_but_the_others_know(tmp_path: Path) -> None:
    stall(tmp_path, 0, DEAD)
    stall(tmp_path, 2, DEAD)
    found = how(tmp_path, [*trained(6, 5, 6), end(0, 6, LOST), end(2, 6, LOST)])
    assert found.lines == [
        "Rank 1 left no last word (killed?) after 5 recorded steps. "
        "Ranks 0 and 2 gave up waiting after 6 steps (WorkerLostError).",
        "Ranks 0 and 2 report rank 1 (dead): died 0.3 s ago.",
    ]


def test_an_exit_code_is_said_where_a_last_word_is_missing(tmp_path: Path) -> None:
    told = {"kind": "event", "rank": 1, "step": -1, "time_s": 111.0, "text": "Rank 1 ended with exit code 7."}
    records = [*trained(6, 5), end(0, 6, LOST), told | {"what": "exited"}]
    assert how(tmp_path, records).text == (
        "Rank 1 ended with exit code 7 after 5 recorded steps. Rank 0 gave up waiting after 6 steps (WorkerLostError)."
    )
    ends = [end(0, 6, LOST), end(1, 5, "SystemExit: 7")]
    said = how(tmp_path, [*trained(6, 5), *ends, told | {"what": "exited"}])
    assert "exit code" not in said.text, "its own last word says so better"
    written = Records(write(tmp_path, trained(6, 6, 6))).all()
    assert ending(written, exit_codes={0: 0, 1: 0, 2: -9}).text == (
        "Ranks 0 and 1 ended with exit code 0 after 6 recorded steps: what came then was not recorded. "
        "Rank 2 was killed by SIGKILL after 6 recorded steps: what came then was not recorded."
    )
    assert ending(written, exit_codes={0: 0}).text == (
        "Rank 0 ended with exit code 0 after 6 recorded steps: what came then was not recorded. "
        "Ranks 1 and 2 left no last word (killed, or still running?) after 6 recorded steps."
    )


def test_a_worker_without_a_record_is_missed(tmp_path: Path) -> None:
    records = [record for record in trained(6, 6) if record["rank"] == 0]
    assert how(tmp_path, [*records, end(0, 6)]).text == (
        "Rank 1 left no last word (killed?) after no recorded step. Rank 0 ended well after 6 steps."
    )
    assert how(tmp_path, trained(6, 6)).text == (
        "Ranks 0 and 1 left no last word (killed, or still running?) after 6 recorded steps."
    )


def test_the_same_error_everywhere_is_said_once(tmp_path: Path) -> None:
    ends = [end(rank, 6, "DisagreementError: step 6: not the same") for rank in range(12)]
    assert how(tmp_path, [*trained(*[6] * 12), *ends]).text == (
        "12 workers (ranks 0 to 11) ended after 6 steps with DisagreementError: step 6: not the same."
    )


def test_reports_that_do_not_bear_on_the_end_are_left_out(tmp_path: Path) -> None:
    stall(tmp_path, 0, DEAD | {"reason": "sleeping"}, fatal=False, step=5)  # step 5 was completed later
    stall(tmp_path, 1, fatal=False, step=6, note="All have arrived: what is left is the transfer itself.")
    (tmp_path / "stall-rank2.json").write_text('{"rank": 2, "cul')
    stall(tmp_path, 3, {"rank": 1, "reason": "absent"}, step=9)  # nobody says more before they have met
    (tmp_path / "stall-rank4.json").write_bytes(b"\xff")
    stall(tmp_path, 5, fatal=False, step=9, server="The parameter server at a:1 has been silent for 4.3 s.")
    assert [str(suspect) for suspect in how(tmp_path, trained(6, 6, 6, 6, 6)).suspects] == [
        "Rank 1 reports no culprit: All have arrived: what is left is the transfer itself.",
        "Rank 3 reports rank 1 (absent).",
        "Rank 5 reports the parameter server: The parameter server at a:1 has been silent for 4.3 s.",
    ]


def test_an_error_that_only_others_could_tell_is_quoted(tmp_path: Path) -> None:
    detail = "Traceback (most recent call last):\n  File ...\nValueError: a bad batch\n"
    stall(tmp_path, 0, DEAD | {"reason": "raised", "text": "raised an exception after 6 steps:", "detail": detail})
    (suspect,) = how(tmp_path, [*trained(6, 6), end(0, 6, LOST)]).suspects
    assert suspect.text == "raised an exception after 6 steps: ValueError: a bad batch"
    detail += "rank 0 was asked, too.\n  All have arrived: the transfer itself is slow.\n"  # more of its message
    stall(tmp_path, 0, DEAD | {"reason": "raised", "text": "raised an exception after 6 steps:", "detail": detail})
    assert how(tmp_path, [*trained(6, 6), end(0, 6, LOST)]).suspects == (suspect,)


def test_page_and_terminal_say_how_it_ended(tmp_path: Path) -> None:
    write(tmp_path, [*trained(6, 5), end(0, 6, LOST)])
    stall(tmp_path, 0, DEAD | {"text": "died <at once>."})
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    top = text[: text.index('<div class="cards">')]
    assert "How it ended</h2>" in top
    assert "Rank 1 left no last word (killed?)" in top
    assert "Rank 0 reports rank 1 (dead): died &lt;at once&gt;." in top
    lines = conclusion(tmp_path)
    assert len(lines) == 2
    assert lines[1] == "Rank 0 reports rank 1 (dead): died <at once>."


def test_stall_reports_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [*trained(6, 5), end(0, 6, LOST)])
    os.utime(stall(tmp_path, 0, DEAD), (99.0, 99.0))  # the run began at 100
    assert len(conclusion(tmp_path)) == 1
    assert conclusion(tmp_path / "nothing") == ["Nothing was recorded."]


def test_from_which_step_on_a_value_is_not_finite(tmp_path: Path) -> None:
    logs = [
        log(rank, n, loss=None if n >= 3 else 1.0, gn=None if n >= 3 else 2.0, lr=None if n == 1 else 0.1, acc=0.5)
        for n in range(6)
        for rank in (0, 1)
    ]
    advice = 'Plan(nonfinite="raise") or "skip" would have noticed it in the gradients.'
    said = (
        "loss and gn were NaN or Inf from step 3 on, on ranks 0 and 1. "
        f"lr was NaN or Inf 2 times, first at step 1 on ranks 0 and 1. {advice}"
    )
    write(tmp_path, [*trained(6, 6), *logs, end(0, 6), end(1, 6)])
    assert said in conclusion(tmp_path)
    write_report(tmp_path)
    assert said.replace('"', "&quot;") in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("choice", ["raise", "skip"])
def test_no_advice_to_who_follows_it(tmp_path: Path, choice: str) -> None:
    begun = start(0) | {"plan": f"Plan(sync=BSP(), nonfinite='{choice}')"}
    records = Records(write(tmp_path, [begun, log(0, 7, loss=1.0), log(0, 8, loss=None)])).all()
    assert nonfinite(records) == "loss was NaN or Inf from step 8 on, on rank 0."
    assert nonfinite(Records(write(tmp_path, [log(0, 7, loss=1.0)])).all()) == ""


def test_workers_of_other_machines_are_not_missed(tmp_path: Path) -> None:
    """They write into a folder of their own machine, as under torchrun and `offbeat run --nodes`."""
    here = [start(rank) | {"world": 4, "first_here": 2, "here": 2} for rank in (2, 3)]
    both = [*here, step(2, 0), step(3, 0), end(2, 1)]
    assert how(tmp_path, [*both, end(3, 1)]) == RunOutcome(True, "Ranks 2 and 3 ended well after 1 step.")
    assert how(tmp_path, both).text == (
        "Rank 3 left no last word (killed?) after 1 recorded step. Rank 2 ended well after 1 step."
    )
    assert how(tmp_path, [here[0], step(2, 0), end(2, 1)]).text == (
        "Rank 3 left no last word (killed?) after no recorded step. Rank 2 ended well after 1 step."
    )
