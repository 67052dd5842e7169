"""The gradient as it is: exact, linear, stateless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.codec.one_round import OneRoundCodec
from offbeat.codec.promises import Promises

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from offbeat.codec.one_round import EncodedShapes
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket

_PROMISES = Promises()


@dataclass(frozen=True)
class Dense(OneRoundCodec):
    """The codec that sends every element in the gradient's own dtype; the default.

    >>> Dense()
    Dense()
    """

    is_plain = True

    @property
    def promises(self) -> Promises:
        return _PROMISES

    def payload_bytes(self, bucket: Bucket) -> float:
        """Count the bytes of all elements."""
        return bucket.size_bytes

    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor]:
        """Send the gradient as it is."""
        return (grad,)

    def encoded_shapes(self, numel: int, dtype: torch.dtype, turn: Turn) -> EncodedShapes:
        """The shape of all elements."""
        return ((dtype, (numel,)),)

    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Take the sum as it is."""
        return tensors[0]
