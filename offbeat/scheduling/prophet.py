"""Prophet: blocks of gradients that fit the pauses of backward, in the order of the next forward pass.

Zhang et al., "Prophet: Speeding up distributed DNN training with predictable communication scheduling" (ICPP 2021).

Gradients are complete in bursts. A block is as large as what the link carries until the next burst, and holds the most
urgent of what is left: so nothing less urgent is under way when the next burst comes, and no link is ever idle. Where
the paper's program stops before a gradient that does not fit, this one cuts it. Behind the last burst nothing more
urgent can come, and blocks need only be so large that their latencies do not count, and so small that the forward pass
does not wait for what it does not need: of a few sizes that is taken which the timeline says is the fastest.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.scheduling.schedule import GradientSlice, Schedule, ScheduledBlock
from offbeat.scheduling.scheduler import check_size
from offbeat.scheduling.slices import joined
from offbeat.scheduling.timeline import play

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.scheduling.profile import BackwardProfile

_UNDER_WAY = 2  # blocks: the next one's latency is behind it when it is its turn
_GAPS = 2.0  # times the mean gap between gradients, from which on it is a pause between bursts
_LATENCIES = 2.0  # bursts that are closer are one
_LONGEST = (1.0, 4.0)  # latencies or gaps of the link that a burst takes, at most: the better of these
_AS_GOOD = 1.003  # of the fastest: each block costs something that the timeline knows nothing of
_MOST_BLOCKS = 512
_LAST_PART = 4  # of what is left at the end is in a block, so that the last ones are small


@dataclass(frozen=True)
class Prophet:
    """Sends, in each pause of backward, as much as fits it, the most urgent first.

    Args:
        least_bytes: of a block; smaller ones cost more than they bring.

    Raises:
        PlanError: if a block is to hold nothing.

    >>> Prophet()
    Prophet(least_bytes=65536)
    """

    least_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        check_size("least_bytes", self.least_bytes)

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile."""
        # What is shorter than a latency leaves the link idle, with two blocks under way.
        floor = max(profile.latency_s, profile.gap_s) * profile.bandwidth
        least = max(self.least_bytes, int(floor), profile.size_bytes // _MOST_BLOCKS)
        sizes = itertools.takewhile(lambda size: size < 2 * profile.size_bytes, (least << i for i in range(64)))
        bursts = [bursts_of(profile, longest) for longest in _LONGEST]
        plans = [
            Schedule.of_blocks_under_way(_blocks(profile, of_them, least, size), _UNDER_WAY)
            for size, of_them in itertools.product((least, *sizes), bursts)
        ]
        steps_s = [play(profile, plan).step_s for plan in plans]
        good = [plan for plan, step_s in zip(plans, steps_s, strict=True) if step_s <= _AS_GOOD * min(steps_s)]
        return min(good, key=lambda plan: len(plan.blocks))


def _blocks(
    profile: BackwardProfile, bursts: Sequence[Sequence[int]], least: int, tail_bytes: int
) -> list[ScheduledBlock]:
    """The blocks in order, with those behind the last burst of so many bytes."""
    pending, blocks, done_s = PendingSlices(profile), list[ScheduledBlock](), [0.0] * _UNDER_WAY
    for burst, following in itertools.pairwise(bursts):
        pending.add(burst)
        complete_s, first_s, next_s = (profile.gradients[i].ready_s for i in (burst[-1], following[0], following[-1]))
        enough = 1.0  # a short pause is used, too: the link does not idle
        while not pending.is_empty:
            issued_s = max(complete_s, done_s[-_UNDER_WAY])
            begins_s = max(issued_s + profile.latency_s, done_s[-1])
            # The next burst's first block has its own latency before it needs the link.
            room = (next_s + profile.latency_s - begins_s) * profile.bandwidth
            if room < enough:
                break
            blocks.append(pending.take(max(room, least)))
            done_s.append(begins_s + profile.takes_s(blocks[-1].size_bytes(profile)))
            enough = least if issued_s <= first_s else float("inf")  # one goes before what is there already, no more
    pending.add(bursts[-1])
    while not pending.is_empty:
        blocks.append(pending.take(max(least, min(tail_bytes, pending.size_bytes // _LAST_PART))))
    return blocks


class PendingSlices:
    """Slices of gradients that are complete and in no block yet, the most urgent first."""

    def __init__(self, profile: BackwardProfile) -> None:
        self._profile = profile
        self._slices: list[GradientSlice] = []  # the most urgent last
        self.size_bytes = 0

    def add(self, gradients: Sequence[int]) -> None:
        """Add whole gradients."""
        self._slices += [GradientSlice(i, 0, self._profile.gradients[i].numel) for i in gradients]
        self._slices.sort(key=lambda one: (-one.gradient, -one.start))
        self.size_bytes += sum(self._profile.gradients[i].size_bytes for i in gradients)

    @property
    def is_empty(self) -> bool:
        return not self._slices

    def take(self, most_bytes: float) -> ScheduledBlock:
        """Take the most urgent so many bytes, as far as they are of one kind."""
        block, left = list[GradientSlice](), most_bytes
        kind = self._profile.gradients[self._slices[-1].gradient].kind
        while self._slices and left > 0:
            one = self._slices[-1]
            gradient = self._profile.gradients[one.gradient]
            if gradient.kind != kind:
                break
            numel = min(one.numel, max(1, int(left // gradient.itemsize)))
            self._slices.pop()
            if numel < one.numel:
                self._slices.append(GradientSlice(one.gradient, one.start + numel, one.stop))
            block.append(GradientSlice(one.gradient, one.start, one.start + numel))
            left -= numel * gradient.itemsize
            self.size_bytes -= numel * gradient.itemsize
        return ScheduledBlock(joined(block))


def bursts_of(profile: BackwardProfile, longest: float = _LONGEST[-1]) -> list[list[int]]:
    """Gradients that are complete at about the same time, as lists of indices by the time at which they are.

    Args:
        longest: latencies or gaps of the link, whichever is more, that a burst takes.
    """
    arrivals = profile.arrivals
    ready = [profile.gradients[i].ready_s for i in arrivals]
    gaps = [after - before for before, after in itertools.pairwise(ready)]
    pause_s = max(_GAPS * sum(gaps) / max(1, len(gaps)), _LATENCIES * profile.latency_s)
    longest_s = longest * max(profile.latency_s, profile.gap_s)
    bursts = [[arrivals[0]]]
    for i, gap, at_s in zip(arrivals[1:], gaps, ready[1:], strict=True):
        # Where gradients come one by one there is no pause: then what comes within a few latencies is a burst.
        is_long = at_s - profile.gradients[bursts[-1][0]].ready_s > longest_s
        if gap > pause_s or is_long:
            bursts.append([])
        bursts[-1].append(i)
    return bursts
