"""Copies of tensors to the host that take their time, where there is no GPU; see `offbeat.fabric.staging`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class LateCopies:
    """The copies of what lies elsewhere, as it were: each is there a few looks later."""

    def __init__(self, seed: int) -> None:
        self.looks = 0  # at copies that were not there
        self._numbers = random.Random(seed)

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], LateCopy]:
        hosts = [torch.full_like(tensor, 77) for tensor in tensors]
        return hosts, LateCopy(self, tensors, hosts, self._numbers.randrange(4))


class LateCopy:
    """A copy under way. A `CopyEvent`."""

    def __init__(
        self, copies: LateCopies, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor], looks: int
    ) -> None:
        self._copies, self._tensors, self._hosts, self._looks = copies, tensors, hosts, looks

    def query(self) -> bool:
        self._copies.looks += self._looks > 0
        self._looks -= 1
        if self._looks >= 0:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._looks = 0
        for host, tensor in zip(self._hosts, self._tensors, strict=True):
            host.copy_(tensor)
