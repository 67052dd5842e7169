"""The timeline of a schedule: when each block is done, and what the next forward pass waits for.

The model: the link carries one block after the other; what is issued while it is busy has its latency behind it when it
is its turn. A parameter is stepped when all slices of its gradient are back.

    issued[i] = max(ready[i], issued[i - 1], done[after[i] - 1])
    done[i]   = max(issued[i] + latency, done[i - 1]) + max(gap, size[i] / bandwidth)
    begins[g] = max(begins[g - 1] + forward[g - 1], done of the last block of g), from the end of backward on
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
        issued, done: of each block.
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
    fresh_s = [0.0] * len(profile.gradients)
    now_s = 0.0
    for block, size, after in zip(schedule.blocks, schedule.sizes_bytes(profile), schedule.after, strict=True):
        now_s = max(now_s, *(profile.gradients[one.gradient].ready_s for one in block.slices))
        now_s = max(now_s, done[after - 1] if after else 0.0)
        issued.append(now_s)
        done.append(max(now_s + profile.latency_s, done[-1] if done else 0.0) + profile.takes_s(size))
        for one in block.slices:
            fresh_s[one.gradient] = max(fresh_s[one.gradient], done[-1])
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
