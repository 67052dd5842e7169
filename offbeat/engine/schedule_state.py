"""A schedule in a checkpoint: where gradients lie decides in which order the workers' are added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.engine import state_checks
from offbeat.engine.schedule_monitor import read_profile
from offbeat.errors import DisagreementError, ModelError
from offbeat.scheduling import BackwardProfile, GradientSlice, Schedule, ScheduledBlock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def schedule_state(names: Sequence[str], schedule: Schedule) -> dict[str, Any]:
    """The state of a schedule of these gradients; `checked_schedule` reads it back."""
    blocks = [[[one.gradient, one.start, one.stop] for one in block.slices] for block in schedule.blocks]
    return {"names": list(names), "blocks": blocks, "after": list(schedule.after), "gathers": list(schedule.gathers)}


def checked_schedule(saved: Mapping[str, Any] | None, sizes: Mapping[str, int]) -> tuple[list[str], Schedule] | None:
    """The names of gradients and their schedule, out of a checkpoint; None if that has none of these gradients.

    Args:
        saved: what `schedule_state` made, or None.
        sizes: elements of each gradient that is trained now.

    Raises:
        ModelError: if an element of one is in no block, or in several, or what a block waits for is not before it.
    """
    if saved is None:
        return None
    names = list(state_checks.texts(saved["names"], "names of a schedule"))
    if set(names) != sizes.keys() or len(names) != len(sizes):
        return None  # other parameters are trained now
    blocks = []
    for block in saved["blocks"]:
        slices = [[state_checks.whole(number, "slice of a schedule") for number in one] for one in block]
        if not slices or any(len(one) != 3 or one[0] >= len(sizes) for one in slices):
            raise ModelError("Cannot go by the schedule of this checkpoint: it is damaged.")
        blocks.append(ScheduledBlock(tuple(GradientSlice(*one) for one in slices)))
    ends = [0] * len(sizes)
    for one in sorted((one for block in blocks for one in block.slices), key=lambda one: (one.gradient, one.start)):
        if one.start != ends[one.gradient] or one.stop < one.start:
            raise ModelError("Cannot go by the schedule of this checkpoint: a gradient is not in it whole, and once.")
        ends[one.gradient] = one.stop
    after = tuple(state_checks.whole(number, "order of a schedule") for number in saved["after"])
    # A checkpoint of before there were two rounds has none.
    gathers = tuple(state_checks.whole(number, "order of a schedule") for number in saved.get("gathers", ()))
    if gathers and (sorted(gathers) != list(range(len(blocks))) or not _waits(gathers, after[len(blocks) :])):
        raise ModelError(
            "Cannot go by the schedule of this checkpoint: not every block is gathered once, when reduced."
        )
    is_whole = ends == [sizes[name] for name in names]
    if not is_whole or len(after) != len(blocks) + len(gathers) or any(n > i for i, n in enumerate(after)):
        raise ModelError("Cannot go by the schedule of this checkpoint: it is of another model, or damaged.")
    return names, Schedule(tuple(blocks), after, gathers)


def _waits(gathers: Sequence[int], after: Sequence[int]) -> bool:
    """Whether each gather waits for its block to be reduced."""
    return all(number > index for index, number in zip(gathers, after, strict=False))


def checked_profile(saved: Mapping[str, Any], names: Sequence[str]) -> BackwardProfile | None:
    """The profile that a schedule in a checkpoint was made from; None if it has none.

    Raises:
        ModelError: if it is damaged, or of other gradients than these.
    """
    if (text := saved.get("profile")) is None:
        return None
    try:
        profile = read_profile(text, "the checkpoint")
    except DisagreementError as error:
        raise ModelError("Cannot go by the schedule of this checkpoint: its profile is damaged.") from error
    if [one.name for one in profile.gradients] != list(names):
        raise ModelError("Cannot go by the schedule of this checkpoint: its profile is of other gradients.")
    return profile
