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
    """Blocks in the order in which they are sent, in one round or in two.

    With two rounds all blocks are reduced (a reduce-scatter each), in order, and then gathered (an all-gather each) in
    an order of its own. An operation is a block's one round, or one of its two.

    Args:
        blocks: each element of each gradient is in exactly one.
        after: for each operation, how many of the first operations are done before it is issued.
        gathers: indices of all blocks in the order in which they are gathered; none if one round is all.
    """

    blocks: tuple[ScheduledBlock, ...]
    after: tuple[int, ...]
    gathers: tuple[int, ...] = ()

    @property
    def landing(self) -> tuple[int, ...]:
        """Indices of the blocks in the order in which they are done."""
        return self.gathers or tuple(range(len(self.blocks)))

    def sizes_bytes(self, profile: BackwardProfile) -> list[int]:
        """The size of each block."""
        return [block.size_bytes(profile) for block in self.blocks]

    def trouble(self, sizes: Sequence[int]) -> str:
        """The reason why this is no schedule of these gradients, in words; "" if it is one.

        What a file or a checkpoint holds is checked by it.

        Args:
            sizes: elements of each gradient.
        """
        slices = [one for block in self.blocks for one in block.slices]
        if not all(block.slices for block in self.blocks) or any(not 0 <= s.gradient < len(sizes) for s in slices):
            return "a block holds no gradient, or one that is not there"
        ends = [0] * len(sizes)
        for one in sorted(slices, key=lambda one: (one.gradient, one.start, one.stop)):
            if one.start != ends[one.gradient] or one.stop < one.start:
                return "a gradient is not in it whole, and once"
            ends[one.gradient] = one.stop
        if ends != list(sizes):
            return "a gradient is not in it whole, and once"
        count = len(self.blocks)
        if self.gathers and sorted(self.gathers) != list(range(count)):
            return "not every block is gathered once"
        if len(self.after) != count + len(self.gathers):
            return f"it says of {len(self.after)} operations when they are issued, and has {count + len(self.gathers)}"
        if any(not 0 <= done <= number for number, done in enumerate(self.after)):
            return "an operation waits for one that comes later"
        if any(done <= index for index, done in zip(self.gathers, self.after[count:], strict=False)):
            return "a block is gathered before it is reduced"
        return ""

    def describe(self, profile: BackwardProfile) -> str:
        """One line per operation: what two workers must have in common."""
        operations = [
            ", ".join(f"{profile.gradients[one.gradient].name}[{one.start}:{one.stop}]" for one in block.slices)
            for block in self.blocks
        ]
        operations += [f"gather of block {index}" for index in self.gathers]
        return "\n".join(f"behind {done}: {text}" for text, done in zip(operations, self.after, strict=True))

    @classmethod
    def of_blocks_under_way(cls, blocks: Sequence[ScheduledBlock], most: int | None = None) -> Schedule:
        """A schedule that has at most so many blocks under way; any number if None."""
        return cls(tuple(blocks), tuple(0 if most is None else max(0, i - most + 1) for i in range(len(blocks))))

    @classmethod
    def of_two_rounds(cls, blocks: Sequence[ScheduledBlock]) -> Schedule:
        """A schedule that reduces blocks in order, and gathers them in the order of the forward pass."""
        gathers = sorted(range(len(blocks)), key=lambda i: min(one.gradient for one in blocks[i].slices))
        return cls(tuple(blocks), (*(0 for _ in blocks), *(i + 1 for i in gathers)), tuple(gathers))

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
