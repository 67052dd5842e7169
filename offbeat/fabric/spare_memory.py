"""The memory of exchanges that are over, for those that follow."""

from __future__ import annotations

from collections import deque

import torch


class SpareMemory:
    """The memory of exchanges that are over, for those that follow.

    To touch fresh pages takes three times as long as to copy a gradient into pages that are there. What no exchange has
    asked for in a few times as many exchanges as were ever kept is released.
    """

    def __init__(self) -> None:
        self._spare: deque[tuple[int, torch.Tensor]] = deque()  # with the number of the exchange that it was of

    def take(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Find memory of this size, which is uninitialized; on the host unless told otherwise."""
        device = device or torch.device("cpu")
        for i, (_, memory) in enumerate(self._spare):
            if (memory.numel(), memory.dtype, memory.device) == (numel, dtype, device):
                del self._spare[i]
                return memory
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, memory: torch.Tensor, number: int, kept: int) -> None:
        """Take back what exchange `number` worked in; `kept` is how many exchanges are kept at most."""
        self._spare.append((number, memory))
        while self._spare[0][0] < number - 4 * kept:
            self._spare.popleft()
