"""A codec that sends multiples of a sixteenth; with `ErrorFeedback`, which keeps the rest for the next exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

import offbeat.codec
from offbeat import plan
from offbeat.codec import ErrorFeedback, Promises

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec import Turn
    from offbeat.layout import Bucket

GRID = 1 / 16  # a few of them are exact in 16 bits, and so are their sums


@dataclass(frozen=True)
class Cast(offbeat.codec.Cast):
    """Rounding to a grid; a server, which knows it by its name, takes it for the codec that it replaces."""

    dtype: Literal["bf16", "fp16", "int8"] = "bf16"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Take integers, too."""

    @property
    def promises(self) -> Promises:
        return Promises(contraction=0.0, variance=None)

    def payload_bytes(self, bucket: Bucket) -> float:
        return bucket.numel * (1.0 if self.dtype == "int8" else 2.0)

    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor]:
        units = (grad / GRID).round()
        return (units.to(torch.int8) if self.dtype == "int8" else (units * GRID).to(torch.bfloat16),)

    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(tensors[0]).mul_(GRID if self.dtype == "int8" else 1.0)


def feedback(dtype: Literal["bf16", "int8"] = "bf16") -> ErrorFeedback:
    """The codec that keeps what the grid does not take."""
    return ErrorFeedback(Cast(dtype))


def known() -> None:
    """Have plans that are read in this process have it."""
    plan._KINDS["codec"]["Cast"] = Cast
