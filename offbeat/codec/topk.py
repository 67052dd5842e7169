"""The largest elements of each gradient, wherever they are.

Aji and Heafield, "Sparse communication for distributed gradient descent" (EMNLP 2017); with error feedback, without
which the rest is lost: Stich et al., "Sparsified SGD with memory" (NeurIPS 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.codec.one_round import OneRoundCodec
from offbeat.codec.promises import Promises
from offbeat.errors import PeerError, PlanError
from offbeat.number_range import RealNumbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec.one_round import EncodedShapes
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket


@dataclass(frozen=True)
class TopK(OneRoundCodec):
    """A codec that sends the elements that are largest by their size, and where they are.

    Args:
        ratio: of the elements of each bucket; at least one is sent.

    Raises:
        PlanError: if `ratio` is 0 or less, or above 1.

    >>> TopK(0.01)
    TopK(ratio=0.01)
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio, "plan.codec.ratio")

    @property
    def promises(self) -> Promises:
        return Promises(linear=False, support="private", contraction=self.ratio, variance=None, passes=10.0)

    def payload_bytes(self, bucket: Bucket) -> float:
        """The bytes of the elements that are sent, and four more for each one's index."""
        return count_of(self.ratio, bucket.numel) * (bucket.dtype.itemsize + 4.0)

    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode as indices [K] int32, ascending, and values [K]."""
        sizes = grad.abs()
        count = count_of(self.ratio, len(grad))
        indices = sizes.topk(count, sorted=False).indices.sort().values
        return indices.to(torch.int32), grad[indices]

    def encoded_shapes(self, numel: int, dtype: torch.dtype, turn: Turn) -> EncodedShapes:
        """The shapes of the indices, and the values."""
        count = count_of(self.ratio, numel)
        return (torch.int32, (count,)), (dtype, (count,))

    def check_encoded(self, tensors: Sequence[torch.Tensor], numel: int) -> None:
        """See that the indices are of the block, and ascend."""
        check_indices(tensors[0], numel)

    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Put each value where it belongs, between zeros."""
        out.zero_()
        self.accumulate_(out, tensors, turn)
        return out

    def accumulate_(self, total: torch.Tensor, tensors: Sequence[torch.Tensor], turn: Turn) -> None:
        """Add each value where it belongs."""
        indices, values = checked_sparse(tensors, total)
        total.index_add_(0, indices, values)


def check_ratio(ratio: float, where: str) -> None:
    """See that it is the part of something that is sent.

    Raises:
        PlanError: if it is not.
    """
    if ratio not in RealNumbers(above=0, most=1):
        raise PlanError(
            f"Cannot send {ratio!r} of a gradient: the ratio is above 0 and at most 1, such as 0.01 for a hundredth "
            f"- at `{where}`."
        )


def count_of(ratio: float, numel: int) -> int:
    """The number of elements that are a part of so many; at least one.

    >>> count_of(0.01, 250), count_of(0.01, 3)
    (2, 1)
    """
    return max(1, round(ratio * numel))


def checked_sparse(tensors: Sequence[torch.Tensor], total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See that these are indices [K] into `total` [D], which ascend, and their values [K].

    Raises:
        PeerError: if they are not.
    """
    kinds = [(one.dtype, one.dim()) for one in tensors]
    if kinds != [(torch.int32, 1), (total.dtype, 1)] or len(tensors[0]) != len(tensors[1]):
        raise PeerError(
            f"Cannot decode {[(list(one.shape), one.dtype) for one in tensors]} as indices and values of "
            f"{total.dtype}: there are as many of both."
        )
    check_indices(tensors[0], len(total))
    return tensors[0], tensors[1]


def check_indices(indices: torch.Tensor, numel: int) -> None:
    """See that these are indices [K] of `numel` elements, which ascend.

    Raises:
        PeerError: if they are not.
    """
    ends = [int(indices[0]), int(indices[-1])] if len(indices) else []
    if any(not 0 <= end < numel for end in ends):
        raise PeerError(f"Cannot decode indices {ends[0]} to {ends[1]}: there are {numel} elements.")
    if bool((indices[1:] <= indices[:-1]).any()):
        raise PeerError("Cannot decode indices that do not ascend: a worker sends each element once.")
