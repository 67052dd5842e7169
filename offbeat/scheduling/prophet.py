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
from offbeat.scheduling.slices import joined
from offbeat.scheduling.timeline import play

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.scheduling.profile import BackwardProfile

_UNDER_WAY = 2  # blocks: the next one's latency is behind it when it is its turn
_GAPS = 2.0  # times the mean gap between gradients, from which on it is a pause between bursts
_LATENCIES = 2.0  # bursts that are closer are one
_AS_GOOD = 1.003  # of the fastest: each block costs something that the timeline knows nothing of
_MOST_BLOCKS = 512
_LAST_PART = 4  # of what is left at the end is in a block, so that the last ones are small


@dataclass(frozen=True)
class Prophet:
    """Sends, in each pause of backward, as much as fits it, the most urgent first.

    Args:
        least_bytes: of a block; smaller ones cost more than they bring.

    >>> Prophet()
    Prophet(least_bytes=65536)
    """

    least_bytes: int = 1 << 16

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile."""
        # What is shorter than a latency leaves the link idle, with two blocks under way.
        floor = max(profile.latency_s, profile.gap_s) * profile.bandwidth
        least = max(self.least_bytes, int(floor), profile.size_bytes // _MOST_BLOCKS)
        sizes = itertools.takewhile(lambda size: size < 2 * profile.size_bytes, (least << i for i in range(64)))
        plans = [Schedule.of_blocks_under_way(_blocks(profile, least, size), _UNDER_WAY) for size in (least, *sizes)]
        steps_s = [play(profile, plan).step_s for plan in plans]
        good = [plan for plan, step_s in zip(plans, steps_s, strict=True) if step_s <= _AS_GOOD * min(steps_s)]
        return min(good, key=lambda plan: len(plan.blocks))


def _blocks(profile: BackwardProfile, least: int, tail_bytes: int) -> list[ScheduledBlock]:
    """The blocks in order, with those behind the last burst of so many bytes."""
    pending, blocks, link_s = PendingSlices(profile), list[ScheduledBlock](), 0.0
    bursts = bursts_of(profile)
    for burst, following in itertools.pairwise(bursts):
        pending.add(burst)
        begins_s = max(profile.gradients[burst[-1]].ready_s + profile.latency_s, link_s)
        # The next burst's first block has its own latency before it needs the link.
        room = (profile.gradients[following[-1]].ready_s + profile.latency_s - begins_s) * profile.bandwidth
        # A short pause is used, too: a link that idles costs more than what is urgent loses to one block so small.
        most_blocks = None if room >= least else int(room > 0)
        for block in itertools.islice(pending.take(max(room, least)), most_blocks):
            blocks.append(block)
            link_s = begins_s = begins_s + profile.takes_s(block.size_bytes(profile))
    pending.add(bursts[-1])
    while pending.size_bytes:
        most = max(least, min(tail_bytes, pending.size_bytes // _LAST_PART))
        blocks += itertools.islice(pending.take(most), 1)
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

    def take(self, most_bytes: float) -> Iterator[ScheduledBlock]:
        """Take the most urgent so many bytes, as one block of each kind that follows another."""
        left = most_bytes
        while self._slices and left > 0:
            block, kind = list[GradientSlice](), self._profile.gradients[self._slices[-1].gradient].kind
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
            yield ScheduledBlock(joined(block))


def bursts_of(profile: BackwardProfile) -> list[list[int]]:
    """Gradients that are complete at about the same time, as lists of indices by the time at which they are."""
    arrivals = profile.arrivals
    ready = [profile.gradients[i].ready_s for i in arrivals]
    gaps = [after - before for before, after in itertools.pairwise(ready)]
    pause_s = max(_GAPS * sum(gaps) / max(1, len(gaps)), _LATENCIES * profile.latency_s)
    bursts = [[arrivals[0]]]
    for i, gap, at_s in zip(arrivals[1:], gaps, ready[1:], strict=True):
        # Where gradients come one by one there is no pause: then what comes within a few latencies is a burst.
        is_long = at_s - profile.gradients[bursts[-1][0]].ready_s > 2 * pause_s
        if gap > pause_s or is_long:
            bursts.append([])
        bursts[-1].append(i)
    return bursts
