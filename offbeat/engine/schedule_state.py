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
        ModelError: if it is no schedule of these gradients (`Schedule.trouble`).
    """
    if saved is None:
        return None
    names = list(state_checks.texts(saved["names"], "names of a schedule"))
    if set(names) != sizes.keys() or len(names) != len(sizes):
        return None  # other parameters are trained now
    blocks = []
    for block in saved["blocks"]:
        slices = [[state_checks.whole(number, "slice of a schedule") for number in one] for one in block]
        if any(len(one) != 3 for one in slices):
            raise ModelError("Cannot go by the schedule of this checkpoint: it is damaged.")
        blocks.append(ScheduledBlock(tuple(GradientSlice(*one) for one in slices)))
    after = tuple(state_checks.whole(number, "order of a schedule") for number in saved["after"])
    # A checkpoint of before there were two rounds has none.
    gathers = tuple(state_checks.whole(number, "order of a schedule") for number in saved.get("gathers", ()))
    schedule = Schedule(tuple(blocks), after, gathers)
    if trouble := schedule.trouble([sizes[name] for name in names]):
        raise ModelError(
            f"Cannot go by the schedule of this checkpoint: {trouble}. It is damaged: use another checkpoint."
        )
    return names, schedule


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
