"""The noun of codecs that leave what is not sent in the worker's own model: its offset from the common parameters.

ZenoPS: Xie, Koyejo, Gupta, "ZenoPS: a distributed learning system integrating communication efficiency and security"
(Algorithms 15(7), 2022). For workers that step by themselves at a parameter server, whether they wait for each other or
not: x the worker's parameters, s those that it began with, x_server what the server has when it answers.

    u        = x - s                      what its own steps, and an offset that is carried, add up to
    server   applies C(u), or what a rule makes of it and others
    offset   = u - C(u)                   all of u, where a policy has dropped it
    x        = x_server + offset
    s        = x_server                   `Carry`: the offset is in the next u; nothing is lost
             = x_server + offset          `LookAhead`: it only leads the next steps, and is gone with them

Where all workers wait for each other the first is `ErrorReset(C)`, whose consensus is x_server.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.codec.codec import Codec  # noqa: TC001 - read when a plan is
from offbeat.codec.error_feedback import ErrorFeedback
from offbeat.codec.grbs import GRBS
from offbeat.codec.one_round import OneRoundCodec
from offbeat.errors import PlanError
from offbeat.short_name import short_name

if TYPE_CHECKING:
    import torch

    from offbeat.codec.codec import Exchange, State
    from offbeat.codec.promises import Promises
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket


@dataclass(frozen=True)
class LocalOffset(ABC):
    """A codec around another one whose leavings stay in the worker's own parameters.

    Attributes:
        offset: what becomes of them with the next contribution.

    Raises:
        PlanError: if `inner` has no decoder of its own, or what it does not send may grow without end.
    """

    offset: ClassVar[Literal["carried", "dropped"]]
    inner: Codec = field(default_factory=lambda: GRBS(5))

    def __post_init__(self) -> None:
        inner = self.inner
        if not isinstance(inner, OneRoundCodec):
            other = "a codec of one round, such as GRBS(8)"
            way = short_name(inner.inner) if isinstance(inner, ErrorFeedback) else other
            raise PlanError(f"Cannot keep what {short_name(inner)} does not send: use {way} - at `plan.codec.inner`.")
        if inner.promises.contraction is None:
            raise PlanError(
                f"Cannot keep what {short_name(inner)} does not send: it may be larger than what it is of, so that "
                "the worker's parameters would part from the common ones without end. Use a codec that only leaves "
                "out, such as GRBS(8) - at `plan.codec.inner`."
            )

    @property
    def needs(self) -> frozenset[type]:
        return self.inner.needs

    @property
    def promises(self) -> Promises:
        return dataclasses.replace(self.inner.promises, offset=self.offset, passes=self.inner.promises.passes + 4)

    def payload_bytes(self, bucket: Bucket) -> float:
        """The bytes of the codec within."""
        return self.inner.payload_bytes(bucket)

    def init(self, bucket: Bucket) -> State:
        """Make the state of a bucket, which is that of the codec within: the offset is in the parameters."""
        return self.inner.init(bucket)

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        """Exchange as the codec within does."""
        return (yield from self.inner.exchange(grad, state, turn, keep_sent=keep_sent))
