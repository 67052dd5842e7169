"""Gradients, cut into slices and packed into blocks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from offbeat.scheduling.schedule import GradientSlice, ScheduledBlock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from offbeat.scheduling.profile import BackwardProfile


def cut(profile: BackwardProfile, gradient: int, most_bytes: float) -> Iterator[GradientSlice]:
    """Yield one gradient in slices of equal size, as far as that goes, and of at most so many bytes."""
    one = profile.gradients[gradient]
    count = max(1, min(one.numel, -(-one.size_bytes // max(1, int(most_bytes)))))
    edges = [one.numel * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield GradientSlice(gradient, start, stop)


def pack(profile: BackwardProfile, slices: Iterable[GradientSlice], least_bytes: float) -> Iterator[ScheduledBlock]:
    """Yield blocks of consecutive slices, each closed when it holds so much, or the next one is of another kind."""
    block: list[GradientSlice] = []
    size = 0
    for one in slices:
        gradient = profile.gradients[one.gradient]
        if block and (size >= least_bytes or gradient.kind != profile.gradients[block[0].gradient].kind):
            yield ScheduledBlock(joined(block))
            block, size = [], 0
        block.append(one)
        size += one.numel * gradient.itemsize
    if block:
        yield ScheduledBlock(joined(block))


def joined(slices: Iterable[GradientSlice]) -> tuple[GradientSlice, ...]:
    """Make one slice of those that continue each other."""
    found: list[GradientSlice] = []
    for one in slices:
        if found and found[-1].gradient == one.gradient and found[-1].stop == one.start:
            found[-1] = GradientSlice(one.gradient, found[-1].start, one.stop)
        else:
            found.append(one)
    return tuple(found)
