"""Error reset: what is not sent of a step is applied to the worker's own model at once, and averaged in later.

CSER: Xie et al., "CSER: communication-efficient SGD with error reset" (NeurIPS 2020). Error feedback delays what was
not sent; here replicas part instead, by what they have not told each other, and now and then that is averaged away, or
a part of it. One worker, with its parameters x, the consensus a = x - e that all have in common, and any codec C:

    partial_sync(delta; C)    c = C(delta);   m = mean of c over the workers      the only thing that is sent
                              a -= m;         x += c - m

    each step, variant "explicit"         partial_sync(what the optimizer's step has changed; step)
    each step, variant "block_average"    partial_sync(a - x; step)
    every H-th, behind that or instead    partial_sync(a - x; reset)              the error reset

e is what x has that the consensus lacks; it is never stored, since x and a are. Momentum is that of the worker's own
optimizer (M-CSER). "explicit" is the paper's algorithm 2, "block_average" what its authors' trainers do: with a codec
whose support is shared it averages blocks of the model itself, which drifts less at as many bytes. Others of the paper:

    step=Dense()                       synchronous SGD
    reset=Dense(), step=None           local SGD
    reset=GRBS(...), step=None         CSER-PL
    reset=GRBS(...), every=1           CSEA

A worker sends 1 / R of the bytes of synchronous SGD, by section 4 of the paper, with the ratios of both codecs:

    R = 1 / (1 / R_step + 1 / (R_reset H))         explicit;  block_average sends no `step` where it sends a `reset`
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from offbeat.codec.codec import Codec  # noqa: TC001 - read when a plan is
from offbeat.codec.dense import Dense
from offbeat.codec.error_feedback import ErrorFeedback
from offbeat.codec.grbs import GRBS
from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.short_name import short_name

if TYPE_CHECKING:
    import torch

    from offbeat.codec.codec import Exchange, State
    from offbeat.codec.promises import Promises
    from offbeat.codec.turn import Purpose, Turn
    from offbeat.layout import Bucket


@dataclass(frozen=True)
class PartialSync:
    """One partial synchronization behind a step.

    Args:
        codec: of what is sent.
        of: what it is of: "step" for the change of the last step, "residual" for all that x is ahead of the consensus.
    """

    codec: Codec
    of: Literal["step", "residual"] = "residual"

    @property
    def purpose(self) -> Purpose:
        return "change" if self.of == "step" else "reset"


@dataclass(frozen=True)
class ErrorReset:
    """A codec that leaves what it does not send in the worker's own model, and resets that every few steps.

    Args:
        reset: how what was not sent is averaged in.
        step: how each step is sent; None to send nothing between two resets.
        every: steps between two resets; None where the policy says so, as `LocalSGD(8)`.
        variant: "block_average" or "explicit"; see above. The first takes codecs with a shared support alone.

    Raises:
        PlanError: if a value cannot be.

    >>> ErrorReset(GRBS(8), step=GRBS(64), every=8)
    ErrorReset(reset=GRBS(ratio=8, block=256), step=GRBS(ratio=64, block=256), every=8, variant='block_average')
    """

    reset: Codec = field(default_factory=lambda: GRBS(8))
    step: Codec | None = None
    every: int | None = None
    variant: Literal["block_average", "explicit"] = "block_average"

    def __post_init__(self) -> None:
        given = {"reset": self.reset} | ({} if self.step is None else {"step": self.step})
        for name, codec in given.items():
            if isinstance(codec, type) or not hasattr(codec, "promises"):
                raise PlanError(
                    f"Cannot send with {short_name(codec)}: use a codec, such as GRBS(8) - at `plan.codec.{name}`."
                )
            if isinstance(codec, ErrorFeedback) or codec.promises.offset:
                raise PlanError(
                    f"Cannot reset the error of {short_name(codec)}: what it does not send is kept already. Use the "
                    f"codec within - at `plan.codec.{name}`."
                )
            if codec.promises.contraction is None:
                raise PlanError(
                    f"Cannot reset the error of {short_name(codec)}: it may be larger than what it is of, so that "
                    "replicas would part without end. Use a codec that only leaves out, such as GRBS(8) - at "
                    f"`plan.codec.{name}`."
                )
            shared = codec.promises.linear and codec.promises.support != "private"
            if self.variant == "block_average" and not shared:
                raise PlanError(
                    f"Cannot average blocks of the model with {short_name(codec)}: each worker would send others. Use "
                    "variant='explicit', or GRBS(...) - at `plan.codec.variant`."
                )
        if self.variant not in ("block_average", "explicit"):
            raise PlanError(
                f"Cannot reset errors by {self.variant!r}: choose 'block_average' or 'explicit' "
                "- at `plan.codec.variant`."
            )
        if self.every is not None and self.every not in WholeNumbers(1):
            raise PlanError(
                f"Cannot reset the error every {self.every!r} steps: choose a whole number from 1 "
                "- at `plan.codec.every`."
            )
        if self.step is not None and self.every is None:
            raise PlanError(
                f"Cannot send each step with {self.step!r} and never reset the error: say how often, as in every=8 "
                "- at `plan.codec.every`."
            )

    @property
    def inner(self) -> Codec:
        """The codec of a reset, which is all that is sent where the policy has the cadence."""
        return self.reset

    def behind(self, number: int) -> tuple[PartialSync, ...]:
        """The synchronizations behind step `number`, from 0; all of them resets where the policy has the cadence.

        >>> [len(ErrorReset(step=GRBS(64), every=2, variant="explicit").behind(number)) for number in range(4)]
        [1, 2, 1, 2]
        >>> [sync.codec.ratio for number in range(4) for sync in ErrorReset(step=GRBS(64), every=2).behind(number)]
        [64, 8, 64, 8]
        """
        is_reset = self.every is None or (number + 1) % self.every == 0
        resets = (PartialSync(self.reset),) if is_reset else ()
        if self.step is None:
            return resets
        if self.variant == "block_average":
            return resets or (PartialSync(self.step),)
        return (PartialSync(self.step, "step"), *resets)

    def of(self, purpose: Purpose) -> Codec:
        """The codec of what is sent for that purpose."""
        return self.step if purpose == "change" and self.step is not None else self.reset

    @property
    def sends_steps(self) -> bool:
        """Whether the change of a step is sent by itself, so that the parameters before it have to be kept."""
        return self.step is not None and self.variant == "explicit"

    @property
    def needs(self) -> frozenset[type]:
        return self.reset.needs | (frozenset() if self.step is None else self.step.needs)

    @property
    def promises(self) -> Promises:
        return dataclasses.replace(self.reset.promises, offset="carried", passes=self.reset.promises.passes + 4)

    def payload_bytes(self, bucket: Bucket) -> float:
        """The bytes behind a step behind which anything is sent; their mean over a cycle."""
        sent = [sync for number in range(self.every or 1) if (sync := self.behind(number))]
        return sum(one.codec.payload_bytes(bucket) for syncs in sent for one in syncs) / len(sent)

    def init(self, bucket: Bucket) -> State:
        """Make the state of a bucket, which is that of the codec of the reset."""
        return self.reset.init(bucket)

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        """Exchange what is reset, as the codec within does."""
        return (yield from self.reset.exchange(grad, state, turn, keep_sent=keep_sent))


FULL = PartialSync(Dense())
