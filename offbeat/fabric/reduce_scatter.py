"""A sum in two rounds over a torch group: a reduce-scatter, and later an all-gather.

    reduce-scatter   each worker sends each other one that one's part of the tensor, and adds up what it received
    all-gather       each worker sends its part of the sum to all

Each round sends (N-1)/N of the tensor; together they send what an all-reduce does. Parts are sent by an all-to-all: for
a reduce-scatter torch 2.13 sends as much over Gloo as for a whole all-reduce (measured). They are added in the order of
ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

    from offbeat.fabric.spare_memory import SpareMemory


class PartSums:
    """A tensor's sum in two rounds. Call order: `scatter`; once that is done `gather`; once that is done `memory`.

    Args:
        group: of the workers that take part; there are as many parts.
        whole: [D] contiguous; it is only read.
        spare: where the memory is taken that both rounds work in.

    Attributes:
        memory: [P >= D] what it works in; the first D are the sum in the end.
    """

    def __init__(self, group: dist.ProcessGroup, whole: torch.Tensor, spare: SpareMemory) -> None:
        self._group, self._whole = group, whole
        self._rank, self._world = group.rank(), group.size()
        self._most = -(-whole.numel() // self._world)  # elements of a part; the last ones may have fewer, or none
        self.memory = spare.take(self._world * self._most, whole.dtype, whole.device)
        self._part: torch.Tensor | None = None

    def scatter(self) -> Any:
        """Begin to send each worker its part; returns torch's handle.

        Raises:
            RuntimeError: if the group is broken.
        """
        # As bytes: Gloo does not know all dtypes.
        itemsize = self._whole.element_size()
        sent = [itemsize * self._numel_of(rank) for rank in range(self._world)]
        received = [sent[self._rank]] * self._world
        into = self.memory.view(torch.uint8)[: sum(received)]
        return self._group.alltoall_base(into, self._whole.view(torch.uint8), received, sent)

    def gather(self) -> Any:
        """Add up this worker's part, and begin to send it to all; returns torch's handle.

        Raises:
            RuntimeError: if the group is broken.
        """
        numel = self._numel_of(self._rank)
        part = self._part = torch.zeros(self._most, dtype=self._whole.dtype, device=self._whole.device)
        for rank in range(self._world):
            part[:numel] += self.memory[rank * numel : (rank + 1) * numel]
        return self._group._allgather_base(self.memory.view(torch.uint8), part.view(torch.uint8))

    def _numel_of(self, rank: int) -> int:
        """The elements of a worker's part."""
        return max(0, min(self._most, self._whole.numel() - rank * self._most))


def sent_bytes_of_round(size_bytes: int, world: int) -> int:
    """Count the bytes that a worker puts on the network for one of the two rounds."""
    return (world - 1) * size_bytes // world
