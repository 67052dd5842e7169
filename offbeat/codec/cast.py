"""The gradient in 16 bits: half the bytes, linear, stateless.

The sum is formed in the 16-bit type, as in torch's `bf16_compress_hook` and `fp16_compress_hook`. bf16 keeps float32's
range with 8 bits of precision; fp16 has 11 bits and overflows above 65,504.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from offbeat.codec.one_round import OneRoundCodec
from offbeat.codec.promises import Promises
from offbeat.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec.one_round import EncodedShapes
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PROMISES = Promises(variance=None, passes=2.0)  # it rounds to the nearest


@dataclass(frozen=True)
class Cast(OneRoundCodec):
    """A codec that sends every element in 16 bits, as bf16 or fp16.

    Raises:
        PlanError: if `dtype` is neither.

    >>> Cast("bf16")
    Cast(dtype='bf16')
    """

    dtype: Literal["bf16", "fp16"] = "bf16"
    is_plain = True

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise PlanError(f"Cannot cast to {self.dtype!r}: choose 'bf16' or 'fp16' - at `plan.codec.dtype`.")

    @property
    def promises(self) -> Promises:
        return _PROMISES

    def payload_bytes(self, bucket: Bucket) -> float:
        """Two bytes for each element."""
        return 2.0 * bucket.numel

    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor]:
        """Round each element to the nearest."""
        return (grad.to(_DTYPES[self.dtype]),)

    def encoded_shapes(self, numel: int, dtype: torch.dtype, turn: Turn) -> EncodedShapes:
        """The shape of all elements, of the narrow type."""
        return ((_DTYPES[self.dtype], (numel,)),)

    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Widen each element to the gradient's dtype."""
        return out.copy_(tensors[0])
