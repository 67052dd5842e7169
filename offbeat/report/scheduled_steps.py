"""The predictions of a run's schedule, and what its steps have taken: for `offbeat plan schedule`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from offbeat.report.records import StepRecord
from offbeat.scheduling import MadeSchedule, bursts_of, lower_bound_s, play

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.report.records import Record
    from offbeat.scheduling import BackwardProfile

_SKIPPED = 2  # steps behind a new schedule: memory is still being found
_LAST = 20  # steps, by which the predicted ends of blocks are judged: what is far behind was another link's
_LONG = 60  # characters


class Burst(msgspec.Struct, frozen=True):
    """Gradients that are complete at about the same time.

    Args:
        ready_s: when the last of them is, since backward began.
        gradients: how many.
    """

    ready_s: float
    gradients: int
    size_bytes: int


class ShownBlock(msgspec.Struct, frozen=True):
    """One block, or where gradients are reduced and gathered apart, one of its two rounds.

    Args:
        gradients: that are in it, in words.
        after: how many of the first are done before it is issued.
        issued_s, done_s: as predicted, since backward began.
        measured_issued_s, measured_done_s: in the median of the last 20 steps; None if that was not measured.
    """

    gradients: str
    size_bytes: int
    after: int
    issued_s: float
    done_s: float
    measured_issued_s: float | None = None
    measured_done_s: float | None = None


class ScheduledSteps(msgspec.Struct, frozen=True):
    """A schedule, what it predicts, and what the steps that went by it have taken.

    Args:
        made_behind_step: of the run.
        why: it was made anew; "" for the first.
        bursts: in which gradients are complete.
        step_s: from the beginning of backward to the end of the next forward pass, as predicted.
        lower_bound_s: less than which no schedule takes.
        measured_step_s: the median over steps, of the slowest worker; None if none went by this schedule.
        block_end_error: how far the measured ends of blocks are from the predicted ones, relative to these: the median
            over blocks, whose measured ends are those of the median of the last 20 steps; None likewise.
        measured_steps: so many steps went by it.
    """

    scheduler: str
    made_behind_step: int
    why: str
    latency_s: float
    gap_s: float
    bandwidth: float
    backward_s: float
    forward_s: float
    bursts: list[Burst]
    blocks: list[ShownBlock]
    step_s: float
    lower_bound_s: float
    measured_step_s: float | None = None
    block_end_error: float | None = None
    measured_steps: int = 0

    @property
    def efficiency(self) -> float:
        """The lower bound as a share of what is predicted."""
        return self.lower_bound_s / self.step_s if self.step_s else 1.0


def scheduled_steps(made: MadeSchedule, records: Sequence[Record] = ()) -> ScheduledSteps:
    """The predictions of a schedule, beside what the records say.

    Args:
        records: of the run whose schedule it is; none where it is only asked what another scheduler would do.
    """
    profile, played = made.profile, play(made.profile, made.schedule)
    steps = _steps_of(records, made)
    measured = _measured(_last_of(steps), made.schedule.gathers)
    names = [_words(profile, [one.gradient for one in block.slices]) for block in made.schedule.blocks]
    sizes = made.schedule.sizes_bytes(profile)
    operations = [*range(len(names)), *made.schedule.gathers]
    blocks = [
        ShownBlock(
            gradients=f"{'gather of ' if number >= len(names) else ''}{names[index]}",
            size_bytes=sizes[index],
            after=made.schedule.after[number],
            issued_s=played.issued[number],
            done_s=played.done[number],
            measured_issued_s=None if measured is None else measured[number][0],
            measured_done_s=None if measured is None else measured[number][1],
        )
        for number, index in enumerate(operations)
    ]
    errors = [
        abs(one.measured_done_s - one.done_s) / one.done_s
        for one in blocks
        if one.measured_done_s is not None and one.done_s > 0
    ]
    periods = _periods_s(steps)
    return ScheduledSteps(
        scheduler=made.scheduler,
        made_behind_step=made.step,
        why=made.why,
        latency_s=profile.latency_s,
        gap_s=profile.gap_s,
        bandwidth=profile.bandwidth,
        backward_s=profile.backward_s,
        forward_s=profile.forward_s,
        bursts=[
            Burst(
                ready_s=max(profile.gradients[i].ready_s for i in burst),
                gradients=len(burst),
                size_bytes=sum(profile.gradients[i].size_bytes for i in burst),
            )
            for burst in bursts_of(profile)
        ],
        blocks=blocks,
        step_s=played.step_s,
        lower_bound_s=lower_bound_s(profile),
        measured_step_s=statistics.median(periods) if periods else None,
        block_end_error=statistics.median(errors) if errors else None,
        measured_steps=len({step.step for step in steps}),
    )


def lines(shown: ScheduledSteps) -> list[str]:
    """A screen for people."""
    again = f" Made anew: {shown.why}." if shown.why else ""
    measured = ""
    if shown.measured_step_s is not None:
        measured = f", measured {_ms(shown.measured_step_s)} in {shown.measured_steps} steps"
    text = [
        f"{shown.scheduler}, made behind step {shown.made_behind_step}.{again}",
        f"backward {_ms(shown.backward_s)}, forward {_ms(shown.forward_s)}; the link carries "
        f"{shown.bandwidth / 1e6:.4g} MB of gradients in a second, with a latency of {_ms(shown.latency_s)} and a gap "
        f"of {_ms(shown.gap_s)}",
        f"step predicted {_ms(shown.step_s)}{measured}; at least {_ms(shown.lower_bound_s)}: the prediction is at "
        f"{shown.efficiency:.1%} of the bound",
    ]
    if shown.measured_step_s is not None and shown.measured_step_s < shown.lower_bound_s:
        text.append("steps take less than that bound: when the first ones were measured, machines or links were busier")
    if shown.block_end_error is not None:
        text.append(
            f"ends of blocks are {shown.block_end_error:.1%} from the predicted ones, in the median of the last steps"
        )
    text += ["", "burst  complete at    gradients        MB"]
    text += [
        f"{number:>5}  {_ms(one.ready_s):>11}  {one.gradients:>11}  {one.size_bytes / 1e6:>8.3f}"
        for number, one in enumerate(shown.bursts, 1)
    ]
    text += ["", "block        MB  behind      issued        done    measured  gradients"]
    for number, block in enumerate(shown.blocks, 1):
        seen = "" if block.measured_done_s is None else _ms(block.measured_done_s)
        text.append(
            f"{number:>5}  {block.size_bytes / 1e6:>8.3f}  {block.after:>6}  {_ms(block.issued_s):>10}  "
            f"{_ms(block.done_s):>10}  {seen:>10}  {block.gradients}"
        )
    return text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _words(profile: BackwardProfile, gradients: Sequence[int]) -> str:
    names = [profile.gradients[i].name for i in gradients]
    text = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def _steps_of(records: Sequence[Record], made: MadeSchedule) -> list[StepRecord]:
    """The records that hold exchanges by this schedule."""
    return [
        record
        for record in records
        if isinstance(record, StepRecord)
        and record.buckets_of >= made.step + _SKIPPED
        and len(record.buckets) == len(made.schedule.blocks)
        and len(record.between) == len(made.schedule.gathers)
    ]


def _last_of(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The records of the last steps."""
    last = max((step.step for step in steps), default=0)
    return [step for step in steps if step.step > last - _LAST]


def _measured(steps: Sequence[StepRecord], gathers: Sequence[int]) -> list[tuple[float, float]] | None:
    """The times at which each operation was issued and done in the median step, since its own step's backward began.

    Args:
        gathers: as of the schedule.
    """
    began = {(step.rank, step.step): step.time_s + step.backward[0] for step in steps if step.backward is not None}
    found = []
    for step in steps:
        if (began_s := began.get((step.rank, step.buckets_of))) is not None:
            late_s = step.time_s - began_s
            found.append([(issued_s + late_s, done_s + late_s) for issued_s, done_s in _operations(step, gathers)])
    if not found:
        return None
    return [
        (statistics.median(one[0] for one in block), statistics.median(one[1] for one in block))
        for block in zip(*found, strict=True)
    ]


def _operations(step: StepRecord, gathers: Sequence[int]) -> list[tuple[float, float]]:
    """The times at which each operation of a schedule was issued and done."""
    if not gathers:
        return step.buckets
    reduced = [(issued_s, done_s) for (issued_s, _), (done_s, _) in zip(step.buckets, step.between, strict=True)]
    return reduced + [(step.between[index][1], step.buckets[index][1]) for index in gathers]


def _periods_s(steps: Sequence[StepRecord]) -> list[float]:
    """The time from the beginning of each step's backward to that of the next, of the slowest worker."""
    began: Mapping[tuple[int, int], float] = {
        (step.rank, step.step): step.time_s + step.backward[0] for step in steps if step.backward is not None
    }
    slowest: dict[int, float] = {}
    for (rank, step), at_s in began.items():
        if (next_s := began.get((rank, step + 1))) is not None:
            slowest[step] = max(slowest.get(step, 0.0), next_s - at_s)
    return list(slowest.values())
