"""A codec with a residual: it sends multiples of a sixteenth, and keeps the rest for the next exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

import offbeat.codec
from offbeat import plan
from offbeat.codec import Exchange, Exchanged, Promises, State, Turn
from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    from offbeat.layout import Bucket

GRID = 1 / 16  # a few of them are exact in 16 bits, and so are their sums


@dataclass(frozen=True)
class Cast(offbeat.codec.Cast):
    """Error feedback onto a grid; a server, which knows it by its name, takes it for the codec that it replaces."""

    dtype: Literal["bf16", "fp16", "int8"] = "bf16"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Take integers, too."""

    @property
    def promises(self) -> Promises:
        return Promises(contraction=0.0, variance=None)

    def payload_bytes(self, bucket: Bucket) -> float:
        return bucket.numel * (1.0 if self.dtype == "int8" else 2.0)

    def init(self, bucket: Bucket) -> State:
        return {slot.name: {"residual": torch.zeros(slot.numel, dtype=bucket.dtype)} for slot in bucket.slots}

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        whole = grad + torch.cat([tensors["residual"] for tensors in state.values()])
        units = (whole / GRID).round()
        sent = units * GRID
        reply = yield Sum(units.to(torch.int8) if self.dtype == "int8" else sent.to(torch.bfloat16))
        assert isinstance(reply, Total)
        sent *= reply.includes_own
        rest = (whole - sent).split([tensors["residual"].numel() for tensors in state.values()])
        for tensors, residual in zip(state.values(), rest, strict=True):
            tensors["residual"].copy_(residual)
        update = reply.tensor.to(grad.dtype) * (GRID if self.dtype == "int8" else 1.0) / reply.weight
        return Exchanged(update, sent if keep_sent else None, reply.weight)

    def rescale_(self, state: State, factor: float) -> None:
        for tensors in state.values():
            tensors["residual"].mul_(factor)


def known() -> None:
    """Have plans that are read in this process have it."""
    plan._KINDS["codec"]["Cast"] = Cast
