"""Whole numbers of few bits, with one scale for all workers: what is sent is added as whole numbers, on any way.

Sapio et al., "Scaling distributed machine learning with in-network aggregation" (NSDI 2021), appendix C; but for the
scale, which is from the largest element of all workers, that they tell each other in a round before:

    round 1    m_i = max|z_i| of each worker;  m = the largest
    round 2    sum over workers of round(z_i k / m),  k = the largest integer / N, so that the sum fits
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from offbeat.codec.codec import Exchange, Exchanged, State
from offbeat.codec.promises import Promises
from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.payload import Gather, Gathered, Sum, Total

if TYPE_CHECKING:
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket

_DTYPES = {8: torch.int8, 32: torch.int32}


@dataclass(frozen=True)
class FixedPoint:
    """A codec that sends whole numbers of 8 or 32 bits, of which each worker more leaves less for the digits.

    Args:
        bits: of the integer that is added: of 8 bits 4 workers have 63 levels each.

    Raises:
        PlanError: if `bits` is neither.

    >>> FixedPoint(8)
    FixedPoint(bits=8)
    """

    bits: Literal[8, 32] = 8

    def __post_init__(self) -> None:
        if self.bits not in WholeNumbers() or self.bits not in _DTYPES:
            raise PlanError(f"Cannot add whole numbers of {self.bits!r} bits: choose 8 or 32 - at `plan.codec.bits`.")

    @property
    def needs(self) -> frozenset[type]:
        return frozenset({Gather, Sum})

    @property
    def promises(self) -> Promises:
        return Promises(
            linear=False,
            contraction=0.0,
            variance=None,
            rounds=2,
            passes=6.0,
            most_workers=(1 << (self.bits - 1)) - 1,
        )

    def payload_bytes(self, bucket: Bucket) -> float:
        """The bytes of the whole numbers, and of the largest element."""
        return bucket.numel * self.bits / 8 + 8.0

    def init(self, bucket: Bucket) -> State:
        """Make the state of a bucket, which is empty."""
        return {}

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        """Exchange the gradient in two rounds."""
        largest = grad.abs().amax().reshape(1) if len(grad) else grad.new_zeros(1)
        reply = yield Gather((largest.to(torch.float64),))
        assert isinstance(reply, Gathered)
        size = float(torch.stack([part.tensors[0] for part in reply.parts]).max())  # NaN if one is
        most = ((1 << (self.bits - 1)) - 1) // len(reply.parts)
        factor = most / size if size and math.isfinite(size) else 0.0
        whole = (grad.nan_to_num(0, 0, 0).double() * factor).round_().to(_DTYPES[self.bits])
        sent = torch.zeros_like(grad) if keep_sent else None
        reply = yield Sum(whole.clone() if keep_sent else whole)
        assert isinstance(reply, Total)
        if sent is not None and factor and reply.includes_own:
            sent.copy_(whole.double() / factor)
        if factor:
            grad.copy_(reply.tensor.double() / (factor * reply.weight))
        else:
            grad.fill_(0.0 if size == 0 else math.nan)  # of what is not finite all find the same
        return Exchanged(grad, sent, reply.weight)
