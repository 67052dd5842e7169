"""`offbeat plan schedule` shows what a run's schedule predicts beside what its steps have taken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.report.buckets import bucket_times
from offbeat.report.records import Record, Records, StepRecord
from offbeat.report.scheduled_steps import scheduled_steps
from offbeat.report.trace import trace
from offbeat.scheduling import MadeSchedule, Prophet, ReduceScatterGather, play
from tests.scheduling.test_replanning import profile

if TYPE_CHECKING:
    from pathlib import Path

PROFILE = profile()
MADE = MadeSchedule(step=7, scheduler="Prophet()", profile=PROFILE, schedule=Prophet(1 << 14).schedule(PROFILE))
IN_TWO_ROUNDS = MadeSchedule(
    step=7,
    scheduler="ReduceScatterGather()",
    profile=PROFILE,
    schedule=ReduceScatterGather(1 << 18).schedule(PROFILE),
)
PLAYED = play(PROFILE, MADE.schedule)
STEP_S, LATE_S = 0.25, 0.004


def run_dir(folder: Path, *, scale: float = 1.0, made: MadeSchedule = MADE) -> Path:
    """A run of two workers, with ten steps behind the schedule in which all takes `scale` times what was predicted."""
    (folder / "schedule.json").write_bytes(made.to_bytes())
    played, gathers = play(PROFILE, made.schedule), made.schedule.gathers
    buckets = [
        {"index": i, "size_bytes": size, "parameters": [PROFILE.gradients[one.gradient].name for one in block.slices]}
        for i, (block, size) in enumerate(zip(made.schedule.blocks, made.schedule.sizes_bytes(PROFILE), strict=True))
    ]
    records = []
    for rank in range(2):
        records.append({"kind": "layout", "rank": rank, "step": 7, "time_s": 100.0, "buckets": buckets})
        for step in range(8, 20):
            # A step's record begins with its forward pass, and has the blocks of the backward before it.
            began_s, forward_s, late_s = 100.0 + step * STEP_S, 0.05, LATE_S * rank
            since_s = forward_s - STEP_S + late_s
            times = [
                (since_s + scale * a, since_s + scale * b) for a, b in zip(played.issued, played.done, strict=True)
            ]
            reduced, gathered = (
                times[: len(made.schedule.blocks)],
                dict(zip(gathers, times[len(made.schedule.blocks) :], strict=True)),
            )
            whole = [(a, gathered[i][1] if gathers else b) for i, (a, b) in enumerate(reduced)]
            records.append(
                {
                    "kind": "step", "rank": rank, "step": step, "time_s": began_s, "step_s": STEP_S, "compute_s": 0.2,
                    "communication_s": 0.1, "wait_s": 0.01, "early_wait_s": 0.01, "bytes_sent": 1, "samples": 4,
                    "weight": 1.0, "buckets_of": step - 1, "backward": [forward_s, forward_s + 0.12],
                    "buckets": whole, "between": [(reduced[i][1], gathered[i][0]) for i in sorted(gathers)],
                    "waits": [[0.001, 0.011, 6]],
                }
            )  # fmt: skip
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))
    return folder


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", "schedule", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output if not result.exception or result.exit_code == 0 else str(result.exception)


def test_prediction_bound_and_measurement_stand_beside_each_other(tmp_path: Path) -> None:
    folder = run_dir(tmp_path)
    code, text = command(folder, "--json", tmp_path / "shown.json", "--png", tmp_path / "shown.png")
    assert code == 0, text
    assert f"step predicted {PLAYED.step_s * 1e3:.1f} ms, measured 250.0 ms in 10 steps" in text
    assert "% of the bound" in text
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert len(shown["bursts"]) == 6
    assert [block["done_s"] for block in shown["blocks"]] == list(PLAYED.done)
    expected = [done_s + LATE_S / 2 for done_s in PLAYED.done]
    assert [block["measured_done_s"] for block in shown["blocks"]] == pytest.approx(expected)
    assert 0 < shown["block_end_error"] < 0.1
    assert shown["lower_bound_s"] <= shown["step_s"]
    assert (tmp_path / "shown.png").read_bytes().startswith(b"\x89PNG")


def test_both_rounds_are_shown_as_they_were_measured(tmp_path: Path) -> None:
    code, text = command(run_dir(tmp_path, made=IN_TWO_ROUNDS), "--json", tmp_path / "shown.json")
    assert code == 0, text
    shown = json.loads((tmp_path / "shown.json").read_text())
    played = play(PROFILE, IN_TWO_ROUNDS.schedule)
    assert [block["gradients"].startswith("gather of ") for block in shown["blocks"]] == [False] * 6 + [True] * 6
    for what, predicted_s in (("issued", played.issued), ("done", played.done)):
        expected_s = [one + LATE_S / 2 for one in predicted_s]
        assert [block[f"measured_{what}_s"] for block in shown["blocks"]] == pytest.approx(expected_s)
    assert 0 < shown["block_end_error"] < 0.1


def test_a_prediction_that_is_wrong_is_seen_to_be(tmp_path: Path) -> None:
    _, text = command(run_dir(tmp_path, scale=1.5), "--json", tmp_path / "shown.json")
    assert json.loads((tmp_path / "shown.json").read_text())["block_end_error"] == pytest.approx(0.5, abs=0.1), text


def test_ends_of_blocks_are_judged_by_the_last_steps(tmp_path: Path) -> None:
    slow = steps_of(run_dir(tmp_path, scale=2.0))
    usual = [
        msgspec.structs.replace(
            one, step=one.step + 20, buckets_of=one.buckets_of + 20, time_s=one.time_s + 20 * STEP_S
        )
        for one in steps_of(run_dir(tmp_path))
    ]
    errors = [scheduled_steps(MADE, steps).block_end_error or 0.0 for steps in (slow, slow + usual, usual)]
    assert errors[0] > 0.9
    assert errors[1] == errors[2] < 0.1


def test_another_scheduler_is_asked_with_the_same_profile(tmp_path: Path) -> None:
    code, text = command(run_dir(tmp_path), "--scheduler", "FIFO(262144)")
    assert code == 0
    assert "FIFO(bucket_bytes=262144), made behind step 7." in text
    assert "step predicted" in text
    assert "measured in" not in text


@pytest.mark.parametrize(
    ("name", "why"), [("Profet()", "Prophet"), ("FIFO(", "no part of a plan written as Python, such as 'Prophet()'")]
)
def test_what_is_no_scheduler_is_refused_with_the_way_out(tmp_path: Path, name: str, why: str) -> None:
    code, text = command(run_dir(tmp_path), "--scheduler", name)
    assert code != 0
    assert why in text


def test_a_run_without_a_schedule_and_one_that_is_damaged_are_told(tmp_path: Path) -> None:
    code, text = command(tmp_path)
    assert code != 0
    assert "there is no" in text
    assert "Plan(scheduling=Prophet())" in text
    (tmp_path / "schedule.json").write_bytes(MADE.to_bytes()[:100])
    code, text = command(tmp_path)
    assert code != 0
    assert f"Cannot show the schedule in {tmp_path / 'schedule.json'}:" in text


def records(folder: Path) -> list[Record]:
    return Records(run_dir(folder) / "metrics.jsonl").all()


def steps_of(folder: Path) -> list[StepRecord]:
    return [one for one in Records(folder / "metrics.jsonl").all() if isinstance(one, StepRecord)]


def test_the_trace_has_each_block_and_what_was_waited_for(tmp_path: Path) -> None:
    events = trace(records(tmp_path))["traceEvents"]
    label = PROFILE.gradients[MADE.schedule.blocks[6].slices[0].gradient].name
    waits = [event for event in events if event["name"] == f"waiting for block 7: {label}"]
    assert len(waits) == 24
    assert [event["dur"] for event in waits] == pytest.approx([10_000.0] * 24)
    block = next(event for event in events if event["name"] == f"block 7: {label}" and event["args"]["step"] == 10)
    backward_us = (100.0 + 10 * STEP_S + 0.05 - 100.0) * 1e6
    assert block["ts"] - backward_us == pytest.approx(PLAYED.issued[6] * 1e6, abs=2.0)


def test_the_report_has_blocks_at_their_own_step(tmp_path: Path) -> None:
    times = bucket_times(records(tmp_path))
    assert len(times) == len(MADE.schedule.blocks)
    assert [one.held_up_s > 0 for one in times] == [index == 6 for index in range(len(times))]
    assert times[0].issued_s == pytest.approx(0.05 + PLAYED.issued[0] + LATE_S / 2, abs=LATE_S)
