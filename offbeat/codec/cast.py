"""The gradient in 16 bits: half the bytes, linear, stateless.

The sum is formed in the 16-bit type, as in torch's `bf16_compress_hook` and `fp16_compress_hook`. bf16 keeps float32's
range with 8 bits of precision; fp16 has 11 bits and overflows above 65,504.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from offbeat.codec.codec import Exchange, Exchanged, State
from offbeat.errors import PlanError
from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    from offbeat.layout import Bucket

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast:
    """A codec that sends every element in 16 bits, as bf16 or fp16.

    Raises:
        PlanError: if `dtype` is neither.

    >>> Cast("bf16")
    Cast(dtype='bf16')
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise PlanError(f"Cannot cast to {self.dtype!r}: choose 'bf16' or 'fp16' - at `plan.codec.dtype`.")

    @property
    def needs(self) -> frozenset[type]:
        return frozenset({Sum})

    def init(self, bucket: Bucket) -> State:
        """Make the state of a bucket, which is empty."""
        return {}

    def exchange(self, grad: torch.Tensor, state: State, *, keep_sent: bool = False) -> Exchange:
        """Exchange the gradient in 16 bits, in one round."""
        wire = grad.to(_DTYPES[self.dtype])
        sent = wire.to(grad.dtype) if keep_sent else None
        reply = yield Sum(wire)
        assert isinstance(reply, Total)
        if sent is not None and not reply.includes_own:
            sent.zero_()
        update = grad.copy_(reply.tensor)
        return Exchanged(update if reply.weight == 1.0 else update.div_(reply.weight), sent)
