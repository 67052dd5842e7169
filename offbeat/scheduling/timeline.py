"""The timeline of a schedule: when each block is done, and what the next forward pass waits for.

The model: the link carries one block after the other; what is issued while it is busy has its latency behind it when it
is its turn. A parameter is stepped when all slices of its gradient are back.

    issued[i] = max(ready[i], issued[i - 1], done[after[i] - 1])
    done[i]   = max(issued[i] + latency, done[i - 1]) + max(gap, size[i] / bandwidth)
    begins[g] = max(begins[g - 1] + forward[g - 1], done of the last block of g), from the end of backward on

With two rounds each is an operation of half the bytes, and has a latency and a gap as any other: what an exchange takes
beyond its bytes is not known to halve with them. A gather is ready when its block is reduced and backward has ended,
and a block is done when it is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.scheduling.profile import BackwardProfile
    from offbeat.scheduling.schedule import Schedule


@dataclass(frozen=True)
class StepTimeline:
    """The timeline of one step, in seconds since backward began.

    Args:
        issued, done: of each operation: of all blocks, and behind them, with two rounds, of all gathers.
        begins: when the forward pass goes on with each gradient's parameter.
        step_s: from the beginning of backward to the end of the next forward pass.
    """

    issued: tuple[float, ...]
    done: tuple[float, ...]
    begins: tuple[float, ...]
    step_s: float


def play(profile: BackwardProfile, schedule: Schedule) -> StepTimeline:
    """Play one step."""
    issued: list[float] = []
    done: list[float] = []
    now_s = 0.0
    sizes, rounds = schedule.sizes_bytes(profile), 2 if schedule.gathers else 1
    ready = [max(profile.gradients[one.gradient].ready_s for one in block.slices) for block in schedule.blocks]
    operations = (*range(len(sizes)), *schedule.gathers)
    for number, (index, after) in enumerate(zip(operations, schedule.after, strict=True)):
        is_gather = number >= len(sizes)
        now_s = max(now_s, *((profile.backward_s, done[index]) if is_gather else (ready[index],)))
        now_s = max(now_s, done[after - 1] if after else 0.0)
        issued.append(now_s)
        begins_s = max(now_s + profile.latency_s, done[-1] if done else 0.0)
        done.append(begins_s + profile.takes_s(sizes[index] / rounds))
    fresh_s = [0.0] * len(profile.gradients)
    for index, done_s in zip(schedule.landing, done[-len(sizes) :], strict=True):
        for one in schedule.blocks[index].slices:
            fresh_s[one.gradient] = max(fresh_s[one.gradient], done_s)
    begins, at_s = [], profile.backward_s
    for gradient, ready_s in zip(profile.gradients, fresh_s, strict=True):
        begins.append(max(at_s, ready_s))
        at_s = begins[-1] + gradient.forward_s
    return StepTimeline(tuple(issued), tuple(done), tuple(begins), at_s)


def lower_bound_s(profile: BackwardProfile) -> float:
    """The time that no schedule can take less than: computing all, and sending all that a layer needs before it.

    For each gradient: those up to it are not sent before the first of them is complete, one byte after the other, and
    the layers from it on come behind that.
    """
    bound_s = profile.backward_s + profile.forward_s
    left_s, first_s, size = profile.forward_s, float("inf"), 0
    for one in profile.gradients:
        first_s, size = min(first_s, one.ready_s), size + one.size_bytes
        bound_s = max(bound_s, first_s + size / profile.bandwidth + left_s)
        left_s -= one.forward_s
    return bound_s
