"""Codecs of one round: a payload out, the reply in. What one worker brings can be decoded by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from offbeat.codec.codec import Exchange, Exchanged, State
from offbeat.payload import Gather, Gathered, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec.promises import Promises
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket
    from offbeat.payload import GatheredPart

EncodedShapes = tuple[tuple["torch.dtype", tuple[int, ...]], ...]


class OneRoundCodec(ABC):
    """A codec without a state that is described by `encode` and `decode`; the exchange is made of these.

    Attributes:
        is_plain: whether what is encoded is each element, in a float type, which nobody needs the codec to read.
    """

    is_plain = False

    @property
    @abstractmethod
    def promises(self) -> Promises:
        """The promises that others may rely on."""

    @property
    def needs(self) -> frozenset[type]:
        """`Sum` for what can be added on its way, `Gather` for all else."""
        return frozenset({Sum if self.promises.linear else Gather})

    @abstractmethod
    def payload_bytes(self, bucket: Bucket) -> float:
        """The bytes that a worker brings into one exchange of a bucket; their mean, if they vary."""

    @abstractmethod
    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, ...]:
        """Encode a gradient.

        Args:
            grad: [D] flat; it is left as it is, and may be what is returned.
            turn: which exchange it is.

        Returns:
            One tensor if the codec is linear, else any number of them.
        """

    @abstractmethod
    def encoded_shapes(self, numel: int, dtype: torch.dtype, turn: Turn) -> EncodedShapes:
        """The dtypes and shapes of what `encode` returns of `numel` elements, so that room is made for no more."""

    @abstractmethod
    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Decode what `encode` returned, or of a linear codec a sum of it.

        Args:
            tensors: as `encode` returned them; they are left as they are.
            turn: of the worker that encoded them.
            out: [D] in the gradient's dtype; overwritten.

        Returns:
            [D] `out`, or a tensor that is as it should be already.

        Raises:
            PeerError: if they cannot be what a worker has encoded in this turn.
        """

    def check_encoded(self, tensors: Sequence[torch.Tensor], numel: int) -> None:  # noqa: B027
        """See that tensors of the right shapes can be what `encode` returns of `numel` elements; by default all can.

        Raises:
            PeerError: if they cannot.
        """

    def accumulate_(self, total: torch.Tensor, tensors: Sequence[torch.Tensor], turn: Turn) -> None:
        """Add what `encode` returned on a worker to `total` [D]; arguments and errors as of `decode`."""
        total += self.decode(tensors, turn, torch.empty_like(total))

    def combine(self, parts: Sequence[GatheredPart], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Combine what all workers brought, in the order of their ranks: the sum [D] of what it says, in `out`."""
        out.zero_()
        for part in parts:
            self.accumulate_(out, part.tensors, turn.of(part.worker))
        return out

    def own_share(self, parts: Sequence[GatheredPart], total: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Find this worker's part of `total` [D]; over all workers these add up to it."""
        own = next(part for part in parts if part.worker == turn.rank)
        return self.decode(own.tensors, turn, torch.empty_like(total))

    def init(self, bucket: Bucket) -> State:
        """Make the state of a bucket, which is empty."""
        return {}

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        """Exchange the gradient in one round."""
        tensors = self.encode(grad, turn)
        if self.promises.linear:
            # A fabric may leave the sum where the payload was.
            sent = self.decode(tensors, turn, torch.empty_like(grad)) if keep_sent else None
            if sent is not None and sent.data_ptr() == tensors[0].data_ptr():
                sent = sent.clone()
            (tensor,) = tensors
            reply = yield Sum(tensor)
            assert isinstance(reply, Total)
            if sent is not None and not reply.includes_own:
                sent.zero_()
            update = self.decode((reply.tensor,), turn, grad)
        else:
            reply = yield Gather(tensors)
            assert isinstance(reply, Gathered)
            update = self.combine(reply.parts, turn, grad)
            sent = self.own_share(reply.parts, update, turn) if keep_sent else None
        return Exchanged(update if reply.weight == 1.0 else update.div_(reply.weight), sent, reply.weight)
