"""Error feedback: what was not sent of a gradient is sent along with the next one.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); Karimireddy et al., "Error feedback fixes SignSGD
and other gradient compression schemes" (ICML 2019).

    whole    = grad + residual              what is to be sent
    residual = whole - sent                 what the others have not received of it

What a codec leaves out is in the residual, and so is all that a worker brought too late for a sum of the first k
(`KSync(k, late="carry")` on a switch). So updates and residuals add up to the gradients.

A gradient counts once, whole or in parts, with the factor of the update that it is sent to: where the workers weigh W
together, an update is the sum of what they sent divided by W, of new gradients and of residuals alike. So

    sum of W update + residuals = sum of gradients
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offbeat.codec.codec import Codec, Exchange, Exchanged, Rescales, State
from offbeat.codec.dense import Dense
from offbeat.errors import PlanError
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.codec.promises import Promises
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket

RESIDUAL, _INNER = "residual", "inner."  # keys of a parameter's state: ours, and before those of the codec within


@dataclass(frozen=True)
class ErrorFeedback:
    """A codec that sends with each gradient what `inner` has not sent of those before.

    What is carried counts in full: it is added to the next gradient, and nothing is divided by it. So the codec's state
    is a residual as large as the gradient, on each worker.

    Args:
        inner: how it is sent.

    Raises:
        PlanError: if `inner` is no codec, or feeds back by itself.

    >>> ErrorFeedback()
    ErrorFeedback(inner=Dense())
    """

    inner: Codec = field(default_factory=Dense)

    def __post_init__(self) -> None:
        if isinstance(self.inner, type) or not hasattr(self.inner, "promises"):
            raise PlanError(
                f"Cannot feed back the error of {short_name(self.inner)}: use a codec, such as Cast() - at "
                "`plan.codec.inner`."
            )
        if self.inner.promises.offset:
            raise PlanError(
                f"Cannot feed back the error of {short_name(self.inner)}: it keeps that in the worker's own "
                "parameters. Use it by itself, or the codec within - at `plan.codec.inner`."
            )
        if isinstance(self.inner, ErrorFeedback):
            raise PlanError(
                f"Cannot feed back the error of {short_name(self.inner)}: it leaves none. Use "
                f"{short_name(self.inner.inner)} - at `plan.codec.inner`."
            )
        if self.inner.promises.contraction is None:
            raise PlanError(
                f"Cannot feed back the error of {short_name(self.inner)}: it may be larger than what it is of, so "
                "that the residual would grow without end. Use a codec that only leaves out or rounds to the "
                "nearest, such as TopK(0.01) - at `plan.codec.inner`."
            )

    @property
    def needs(self) -> frozenset[type]:
        return self.inner.needs

    def init(self, bucket: Bucket) -> State:
        """Make the state of a bucket: no residual, and that of the codec within."""
        inner = self.inner.init(bucket)
        return {
            slot.name: {
                RESIDUAL: torch.zeros(slot.numel, dtype=bucket.dtype, device=bucket.device),
                **{_INNER + key: tensor for key, tensor in inner.get(slot.name, {}).items()},
            }
            for slot in bucket.slots
        }

    @property
    def promises(self) -> Promises:
        return dataclasses.replace(self.inner.promises, passes=self.inner.promises.passes + 4)

    def payload_bytes(self, bucket: Bucket) -> float:
        """The bytes of the codec within."""
        return self.inner.payload_bytes(bucket)

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        """Exchange the gradient and the residual, as the codec within does."""
        sizes = [len(tensors[RESIDUAL]) for tensors in state.values()]
        whole = torch.cat([tensors[RESIDUAL] for tensors in state.values()]).add_(grad)
        inner = _inner_of(state)
        exchanged: Exchanged = yield from self.inner.exchange(grad.copy_(whole), inner, turn, keep_sent=True)
        assert exchanged.sent is not None, f"{short_name(self.inner)} does not say what it has sent"
        left = whole.sub_(exchanged.sent).split(sizes)
        for (name, tensors), part in zip(state.items(), left, strict=True):
            tensors[RESIDUAL].copy_(part)
            tensors.update({_INNER + key: tensor for key, tensor in inner[name].items()})
        return dataclasses.replace(exchanged, sent=exchanged.sent if keep_sent else None)

    def rescale_(self, state: State, factor: float) -> None:
        """Change the residual, and the state of the codec within, to that of gradients `factor` times as large."""
        for tensors in state.values():
            if RESIDUAL in tensors:
                tensors[RESIDUAL].mul_(factor)
        if isinstance(self.inner, Rescales):
            self.inner.rescale_(_inner_of(state), factor)


def innermost(codec: Codec) -> Codec:
    """The codec that decides what is sent, whatever is wrapped around it.

    >>> innermost(ErrorFeedback())
    Dense()
    """
    while (inner := getattr(codec, "inner", None)) is not None:
        codec = inner
    return codec


def _inner_of(state: State) -> State:
    """The state of the codec within; the same tensors."""
    return {
        name: {key.removeprefix(_INNER): tensor for key, tensor in tensors.items() if key.startswith(_INNER)}
        for name, tensors in state.items()
    }
