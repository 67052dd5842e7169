"""A codec turns a bucket's gradient into payloads, and replies into an update.

`exchange` is a generator: it yields a payload, receives the reply, and may do so again (a method of two rounds is two
yields). The same definition serves every fabric, in process, over a network and in virtual time. Where one round is
enough, a codec is a `OneRoundCodec`, which can be decoded without being in an exchange: at a server.

Rules, checked by `offbeat.testing.check_codec`:

1. `init(bucket)` returns the state for that bucket, keyed by parameter name; the engine owns and saves it.
2. State is written only after the last yield, so an exchange can be thrown away and started again.
3. `grad` arrives multiplied by this worker's share of the whole (1/N in an ordinary step), so sums are means.
4. Conservation: with `keep_sent`, `sent` is what the others received of `grad`; `grad - sent` is the residual. It is
   zero where the reply says that this worker's contribution is not in it.
5. Random numbers are those of the turn: equal turns, equal payloads.
6. What it promises holds.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from offbeat.payload import Gathered, Payload, Total

if TYPE_CHECKING:
    import torch

    from offbeat.codec.promises import Promises
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket

State = dict[str, dict[str, "torch.Tensor"]]


@dataclass(frozen=True, eq=False)
class Exchanged:
    """The result of an exchange.

    Args:
        update: [D] the weighted mean of the workers' gradients; may share memory with `grad`.
        sent: [D] what of this worker's gradient the others received; None unless asked for.
        weight: of all that is in the update, in units in which "everyone once" is 1.
    """

    update: torch.Tensor
    sent: torch.Tensor | None = None
    weight: float = 1.0


Exchange = Generator[Payload, Total | Gathered, Exchanged]


class Codec(Protocol):
    """The Protocol of a codec: a frozen description of how a gradient is sent."""

    @property
    def needs(self) -> frozenset[type]:
        """The kinds of payload (`Sum`, `Gather`) that the fabric must carry for it."""

    @property
    def promises(self) -> Promises:
        """The promises that others may rely on."""

    def payload_bytes(self, bucket: Bucket) -> float:
        """The bytes that a worker brings into one exchange of a bucket, in all rounds; their mean, if they vary."""

    def init(self, bucket: Bucket) -> State:
        """The state of the first exchange of `bucket`; empty for a stateless codec."""

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        """Exchange one bucket.

        Args:
            grad: [D] flat; consumed: it may be overwritten.
            state: what `init` returned, or the last exchange left.
            turn: which exchange it is.
            keep_sent: whether to return `sent`.
        """


@runtime_checkable
class Rescales(Protocol):
    """A codec whose state is in the units of the gradient, such as a residual.

    Gradients are multiplied by 1/N before they are encoded where workers add them up, and are not where a server takes
    the mean; where a job goes from one to the other, so does what was not sent.
    """

    def rescale_(self, state: State, factor: float) -> None:
        """Change `state` to that of gradients which are `factor` times as large."""
