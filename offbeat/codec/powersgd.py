"""Matrices of low rank: each gradient as a product of two thin ones, by one step of subspace iteration in two rounds.

Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed optimization" (NeurIPS 2019),
algorithm 1. With M the mean gradient of a parameter [n, m], and Q [m, r] of the step before:

    round 1    P = sum over workers of M_i Q;  P = orthonormal columns of P
    round 2    Q = sum over workers of M_i' P
    update     P Q'

Both rounds are sums, since each is linear in M_i; the second one's result is what the workers sent. Parameters of one
dimension, and those that would not become smaller, go along with the first round as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.codec.codec import Exchange, Exchanged, State
from offbeat.codec.promises import Promises
from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket, Slot

_Q = "q"


@dataclass(frozen=True)
class PowerSGD:
    """A codec that sends matrices of low rank; what they leave out needs `ErrorFeedback(PowerSGD(...))`.

    Args:
        rank: of the matrices.

    Raises:
        PlanError: if `rank` is below 1.

    >>> PowerSGD(4)
    PowerSGD(rank=4)
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank not in WholeNumbers(1):
            raise PlanError(
                f"Cannot send matrices of rank {self.rank!r}: a whole number, 1 at least - at `plan.codec.rank`."
            )

    @property
    def needs(self) -> frozenset[type]:
        return frozenset({Sum})

    @property
    def promises(self) -> Promises:
        # Any projection contracts; how much depends on the spectrum. The state Q is the same on all workers.
        return Promises(
            linear=False, contraction=0.0, variance=None, rounds=2, keeps_shared_state=True, passes=2.0 + self.rank
        )

    def payload_bytes(self, bucket: Bucket) -> float:
        """The two thin matrices, and all of those that are not made smaller."""
        shapes = [self._shape(slot) for slot in bucket.slots]
        thin = sum((n + m) * r for n, m, r in shapes if r)
        return float((thin + sum(n * m for n, m, r in shapes if not r)) * bucket.dtype.itemsize)

    def init(self, bucket: Bucket) -> State:
        """Make the state of a bucket: a Q of zeros, in whose place one is drawn."""
        return {
            slot.name: {_Q: torch.zeros(m, r, dtype=_working(bucket.dtype), device=bucket.device)} if r else {}
            for slot, (_, m, r) in ((slot, self._shape(slot)) for slot in bucket.slots)
        }

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        """Exchange the gradient in two rounds."""
        own = grad.to(_working(grad.dtype))
        own = own.clone() if own.data_ptr() == grad.data_ptr() else own
        matrices = []  # of each thin parameter: its gradient here [n, m], Q [m, r], and its name
        whole = []  # [D'] of the others
        for slot in turn.bucket.slots:
            n, m, r = self._shape(slot)
            part = own[slot.offset : slot.offset + slot.numel]
            if r:
                matrices.append((part.view(n, m), _usable(state[slot.name][_Q], turn, slot.name), slot.name))
            else:
                whole.append(part)
        reply = yield Sum(torch.cat([(matrix @ q).view(-1) for matrix, q, _ in matrices] + whole))
        assert isinstance(reply, Total)
        sizes = [matrix.shape[0] * q.shape[1] for matrix, q, _ in matrices]
        thin = reply.tensor.split([*sizes, sum(map(len, whole))])
        rest = thin[-1].clone()
        bases = [
            torch.linalg.qr(p.view(matrix.shape[0], -1)).Q for p, (matrix, _, _) in zip(thin, matrices, strict=False)
        ]
        own_qs = [matrix.T @ p for p, (matrix, _, _) in zip(bases, matrices, strict=True)]
        first, is_first_own = reply.weight, reply.includes_own
        if matrices:
            reply = yield Sum(torch.cat([q.reshape(-1) for q in own_qs]))
            assert isinstance(reply, Total)
            totals = reply.tensor.div_(reply.weight).split([q.numel() for q in own_qs])
        else:
            totals = ()
        sent = torch.zeros_like(grad) if keep_sent else None
        thin_at = whole_at = 0
        for slot in turn.bucket.slots:
            place = slice(slot.offset, slot.offset + slot.numel)
            if self._shape(slot)[2]:
                basis, own_q = bases[thin_at], own_qs[thin_at]
                q = totals[thin_at].view(own_q.shape)
                grad[place] = (basis @ q.T).view(-1)
                if sent is not None and reply.includes_own:
                    sent[place] = (basis @ own_q.T).view(-1)
                state[slot.name][_Q].copy_(q)
                thin_at += 1
            else:
                if sent is not None and is_first_own:
                    sent[place] = own[place]
                grad[place] = rest[whole_at : whole_at + slot.numel] / first
                whole_at += slot.numel
        return Exchanged(grad, sent, reply.weight)

    def _shape(self, slot: Slot) -> tuple[int, int, int]:
        """The parameter as a matrix [n, m], and the rank of the thin ones; 0 if it goes as it is."""
        n = slot.shape[0] if slot.shape else 1
        n = n if n and slot.numel % n == 0 and not slot.is_part else 1
        m = slot.numel // n
        rank = min(self.rank, n, m)
        return n, m, rank if rank * (n + m) < n * m else 0


def _working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which it computes: products of 16 bits would lose what the next rounds build on."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _usable(q: torch.Tensor, turn: Turn, name: str) -> torch.Tensor:
    """Q with columns that lead somewhere: of a gradient of zeros nothing is left, and so there is none at first."""
    lost = ~(q.square().sum(0) > 0) | ~torch.isfinite(q).all(0)
    if bool(lost.any()):
        drawn = torch.randn(q.shape, generator=turn.generator(torch.device("cpu"), what=name), dtype=q.dtype)
        q = torch.where(lost, drawn.to(q.device), q)
    return torch.linalg.qr(q).Q if math.prod(q.shape) else q
