"""A worker's progress in exchanges that all workers number alike, told when they meet again behind a loss."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class GroupProgress(msgspec.Struct, frozen=True):
    """The exchanges of one fabric that a worker has completed: all before `below`, and some beyond."""

    below: _Count
    beyond: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=1 << 20)] = ()

    def has(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    @property
    def end(self) -> int:
        """The number behind the last one."""
        return max(self.beyond, default=self.below - 1) + 1
