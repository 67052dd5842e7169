"""Buffers (BatchNorm statistics and the like), kept equal on all workers.

DistributedDataParallel broadcasts rank 0's buffers before a forward pass, so ranks differ after the last step, and a
forward pass on one rank alone hangs. Here they travel at the end of backward, next to the last buckets: after each step
every rank holds the same, and a forward pass never communicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from offbeat.fabric import Fabric, Pending


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view in which no element stands for several, as those of an expanded tensor do: what can be written to."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class Buffers:
    """The buffers of one model.

    Args:
        module: the user's model; its `_ddp_params_and_buffers_to_ignore` is honoured as DDP does.
        fabric: what carries them.
    """

    def __init__(self, module: torch.nn.Module, fabric: Fabric) -> None:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._tensors = [distinct(b) for name, b in module.named_buffers() if name not in ignored and b.numel()]
        self._fabric = fabric
        self._kinds = sorted({(str(b.dtype), str(b.device)) for b in self._tensors})
        self._under_way: list[tuple[list[torch.Tensor], torch.Tensor, Pending]] = []

    def start(self, source: int) -> list[Pending]:
        """Begin to overwrite every rank's buffers with those of `source`, one broadcast per dtype. Collective."""
        for kind in self._kinds:
            tensors = [b for b in self._tensors if (str(b.dtype), str(b.device)) == kind]
            flat = torch.cat([b.detach().reshape(-1) for b in tensors])
            self._under_way.append((tensors, flat, self._fabric.broadcast(flat, source)))
        return [pending for _, _, pending in self._under_way]

    def finish(self, source: int) -> None:
        """Take over what arrived; only after every pending of `start` is done."""
        with torch.no_grad():
            for tensors, flat, _ in self._under_way:
                if self._fabric.rank != source:
                    parts = flat.split([b.numel() for b in tensors])
                    for buffer, part in zip(tensors, parts, strict=True):
                        buffer.copy_(part.view(buffer.shape))
        self._under_way.clear()
