"""A schedule: blocks of gradients, in the order in which they are sent.

It is the same on all workers, and holds until another is agreed on: on an ordered fabric exchanges match by order of
issue, so that nothing may depend on what happens to be complete first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.scheduling.profile import BackwardProfile


@dataclass(frozen=True)
class GradientSlice:
    """A part of one gradient.

    Args:
        gradient: its index in the profile.
        start, stop: of the elements that are in it.
    """

    gradient: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ScheduledBlock:
    """Slices of gradients that are exchanged in one operation.

    Args:
        slices: one after the other, of gradients of one kind.
    """

    slices: tuple[GradientSlice, ...]

    def size_bytes(self, profile: BackwardProfile) -> int:
        return sum(one.numel * profile.gradients[one.gradient].itemsize for one in self.slices)


@dataclass(frozen=True)
class Schedule:
    """Blocks in the order in which they are sent.

    Args:
        blocks: each element of each gradient is in exactly one.
        after: for each block, how many of the first blocks are done before it is issued.
    """

    blocks: tuple[ScheduledBlock, ...]
    after: tuple[int, ...]

    def sizes_bytes(self, profile: BackwardProfile) -> list[int]:
        """The size of each block."""
        return [block.size_bytes(profile) for block in self.blocks]

    def describe(self, profile: BackwardProfile) -> str:
        """One line per block: what two workers must have in common."""
        return "\n".join(
            f"behind {done}: "
            + ", ".join(f"{profile.gradients[one.gradient].name}[{one.start}:{one.stop}]" for one in block.slices)
            for block, done in zip(self.blocks, self.after, strict=True)
        )

    @classmethod
    def of_blocks_under_way(cls, blocks: Sequence[ScheduledBlock], most: int | None = None) -> Schedule:
        """A schedule that has at most so many blocks under way; any number if None."""
        return cls(tuple(blocks), tuple(0 if most is None else max(0, i - most + 1) for i in range(len(blocks))))

    @classmethod
    def of_bytes_under_way(cls, blocks: Sequence[ScheduledBlock], most: int, profile: BackwardProfile) -> Schedule:
        """A schedule that has at most so many bytes under way; a block that is larger goes alone."""
        after, first, size = [], 0, 0
        sizes = [block.size_bytes(profile) for block in blocks]
        for i, own in enumerate(sizes):
            while first < i and size + own > most:
                size -= sizes[first]
                first += 1
            after.append(first)
            size += own
        return cls(tuple(blocks), tuple(after))
