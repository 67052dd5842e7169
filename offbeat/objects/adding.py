"""Torch's arithmetic on the bytes of objects, loaded where objects are added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from offbeat.protocol.objects import ReduceOp

_OPS: dict[ReduceOp, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
}


class TorchArithmetic:
    """Arithmetic on the bytes of tensors.

    Args:
        op: how two are made one.
        dtype: of their elements, as torch calls it.
    """

    def __init__(self, op: ReduceOp, dtype: str) -> None:
        self._combine, self._dtype = _OPS[op], getattr(torch, dtype)

    def add(self, out: memoryview, own: memoryview, received: bytearray) -> None:
        """out = own and received, made one; `out` may be `own`."""
        mine, theirs = torch.frombuffer(own, dtype=self._dtype), torch.frombuffer(received, dtype=self._dtype)
        self._combine(mine, theirs, out=torch.frombuffer(out, dtype=self._dtype))

    def divide(self, memory: memoryview, divisor: int) -> None:
        """Divide what is there."""
        torch.frombuffer(memory, dtype=self._dtype).div_(divisor)
