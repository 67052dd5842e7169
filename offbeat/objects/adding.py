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
_Bytes = memoryview | bytearray


class TorchArithmetic:
    """Arithmetic on the bytes of tensors.

    Args:
        op: how two are made one.
        dtype: in which that is done, as torch calls it.
    """

    def __init__(self, op: ReduceOp, dtype: str) -> None:
        self._combine, self._dtype = _OPS[op], getattr(torch, dtype)

    def add(self, out: memoryview, own: memoryview, received: _Bytes, own_dtype: str, received_dtype: str) -> None:
        """out = own and received, made one; `out` may be `own`. Without `own` it is what was received."""
        total, theirs = torch.frombuffer(out, dtype=self._dtype), self._read(received, received_dtype)
        if len(own):
            self._combine(self._read(own, own_dtype), theirs, out=total)
        else:
            total.copy_(theirs)

    def divide(self, memory: memoryview, divisor: int) -> None:
        """Divide what is there."""
        torch.frombuffer(memory, dtype=self._dtype).div_(divisor)

    def convert(self, out: memoryview, memory: memoryview, dtype: str, to: str) -> None:
        """Write elements of one dtype into `out` as another one."""
        torch.frombuffer(out, dtype=getattr(torch, to)).copy_(torch.frombuffer(memory, dtype=getattr(torch, dtype)))

    def _read(self, memory: _Bytes, dtype: str) -> Tensor:
        return torch.frombuffer(memory, dtype=getattr(torch, dtype)).to(self._dtype)
