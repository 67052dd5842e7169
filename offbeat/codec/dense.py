"""The gradient as it is: exact, linear, stateless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.codec.codec import Exchange, Exchanged, State
from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    import torch

    from offbeat.layout import Bucket


@dataclass(frozen=True)
class Dense:
    """The codec that sends every element in the gradient's own dtype; the default.

    >>> Dense()
    Dense()
    """

    @property
    def needs(self) -> frozenset[type]:
        return frozenset({Sum})

    def init(self, bucket: Bucket) -> State:
        """Make the state of a bucket, which is empty."""
        return {}

    def exchange(self, grad: torch.Tensor, state: State, *, keep_sent: bool = False) -> Exchange:
        """Exchange the gradient as it is, in one round."""
        sent = grad.clone() if keep_sent else None
        reply = yield Sum(grad)
        assert isinstance(reply, Total)
        if sent is not None and not reply.includes_own:
            sent.zero_()
        update = reply.tensor if reply.weight == 1.0 else reply.tensor.div_(reply.weight)
        return Exchanged(update, sent)
