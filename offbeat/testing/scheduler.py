"""The promises of every scheduler, checked."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from offbeat.scheduling import BackwardProfile, GradientTimes, play

if TYPE_CHECKING:
    from offbeat.scheduling import Schedule, Scheduler


def check_scheduler(scheduler: Scheduler, *, by_urgency: bool = True, profiles: int = 200) -> None:
    """Check that `scheduler` keeps what every scheduler promises.

    Args:
        scheduler: a frozen description.
        by_urgency: whether what is more urgent is to go first; not so where gradients are sent as they are complete.
        profiles: random ones that are tried.

    Raises:
        AssertionError: naming the rule that is broken, and the seed of the profile.
    """
    for seed in range(profiles):
        profile = random_profile(random.Random(seed))
        schedule = scheduler.schedule(profile)
        again = scheduler.schedule(dataclasses.replace(profile, gradients=tuple(profile.gradients)))
        where = f"{scheduler!r}: profile {seed}:"
        assert schedule == again, f"{where} the same profile gave another schedule, so that workers would differ"
        _check_whole(profile, schedule, where)
        _check_after(schedule, where)
        _check_gathers(scheduler, schedule, where)
        if by_urgency:
            _check_urgency(profile, schedule, where)


def random_profile(chance: random.Random) -> BackwardProfile:
    """A profile of up to 40 gradients that are complete in bursts or one by one, of any sizes."""
    count, pauses = chance.randint(1, 40), chance.random()
    ready_s, gradients = 0.0, list[GradientTimes]()
    for index in reversed(range(count)):
        if chance.random() < pauses:
            ready_s += chance.choice([0.0, 1e-4, 0.005, 0.03])
        numel = chance.choice([0, 1, 3, 64, 1000, 50_000, 1_000_000])
        kind = chance.choice(["float32 cpu"] * 5 + ["float64 cpu"])
        forward_s = chance.choice([0.0, 1e-4, 0.004])
        gradients.append(
            GradientTimes(f"layer{index}", numel, 8 if kind == "float64 cpu" else 4, kind, ready_s, forward_s)
        )
    latency_s, bandwidth = chance.choice([0.0, 1e-4, 0.003]), chance.choice([1e6, 2e7, 1e9])
    gap_s = chance.choice([0.0, 0.0, 0.004])
    return BackwardProfile(tuple(reversed(gradients)), ready_s, latency_s, bandwidth, gap_s)


def _check_whole(profile: BackwardProfile, schedule: Schedule, where: str) -> None:
    ends = [0] * len(profile.gradients)
    for block in schedule.blocks:
        assert block.slices, f"{where} a block is empty"
        kinds = {profile.gradients[one.gradient].kind for one in block.slices}
        assert len(kinds) == 1, f"{where} a block holds {' and '.join(sorted(kinds))}"
    for one in sorted((one for b in schedule.blocks for one in b.slices), key=lambda one: (one.gradient, one.start)):
        name = profile.gradients[one.gradient].name
        assert ends[one.gradient] == one.start, f"{where} {name} is not sent whole, and each element once"
        ends[one.gradient] = one.stop
    for end, gradient in zip(ends, profile.gradients, strict=True):
        assert end == gradient.numel, f"{where} {end} elements of {gradient.name} are sent, of {gradient.numel}"


def _check_after(schedule: Schedule, where: str) -> None:
    operations = len(schedule.blocks) + len(schedule.gathers)
    assert len(schedule.after) == operations, f"{where} it does not say for each operation what that waits for"
    for index, after in enumerate(schedule.after):
        assert 0 <= after <= index, f"{where} operation {index} waits for what is not before it"


def _check_gathers(scheduler: Scheduler, schedule: Schedule, where: str) -> None:
    """See that a second round has each block once, when it is reduced, in the order of the forward pass."""
    if not schedule.gathers:
        return
    assert getattr(scheduler, "needs_reduce_scatter", False), f"{where} two rounds, without needs_reduce_scatter = True"
    assert sorted(schedule.gathers) == list(range(len(schedule.blocks))), f"{where} not every block is gathered once"
    for index, after in zip(schedule.gathers, schedule.after[len(schedule.blocks) :], strict=True):
        assert after > index, f"{where} block {index} is gathered before it is reduced"
    most = [min(one.gradient for one in schedule.blocks[index].slices) for index in schedule.gathers]
    assert most == sorted(most), f"{where} blocks are not gathered in the order in which the forward pass needs them"


def _check_urgency(profile: BackwardProfile, schedule: Schedule, where: str) -> None:
    """See that a gradient that is complete waits for no more than one block that is less urgent, beside those that are
    under way when it is.
    """
    issued = play(profile, schedule).issued
    most = [min(one.gradient for one in block.slices) for block in schedule.blocks]
    least = [max(one.gradient for one in block.slices) for block in schedule.blocks]
    for later, block in enumerate(schedule.blocks):
        ready_s = max(profile.gradients[one.gradient].ready_s for one in block.slices)
        ahead = [i for i in range(later) if most[i] > least[later] and issued[i] > ready_s]
        assert len(ahead) <= 1, f"{where} block {later} is complete, and {len(ahead)} less urgent ones go first"
