"""Elements of the gradient that are drawn at random; where they are is drawn by who decodes, too, and never sent.

Wangni et al., "Gradient sparsification for communication-efficient distributed optimization" (NeurIPS 2018); Stich et
al., "Sparsified SGD with memory" (NeurIPS 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from offbeat.codec.one_round import OneRoundCodec
from offbeat.codec.promises import Promises
from offbeat.codec.topk import check_ratio, count_of
from offbeat.errors import PeerError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec.one_round import EncodedShapes
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket


@dataclass(frozen=True)
class RandomK(OneRoundCodec):
    """A codec that sends elements which are drawn anew in each step.

    Args:
        ratio: of the elements of each bucket; at least one is sent.
        support: "shared" if all workers send the same elements, which can be added on their way; "private" if each
            draws its own, so that together they send more of them.
        is_unbiased: whether what is sent is multiplied by 1 / ratio, so that on average nothing is left out. Then
            there is no residual to feed back.

    Raises:
        PlanError: if `ratio` is 0 or less, or above 1, or `support` is another.

    >>> RandomK(0.1)
    RandomK(ratio=0.1, support='shared', is_unbiased=False)
    """

    ratio: float = 0.01
    support: Literal["shared", "private"] = "shared"
    is_unbiased: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio, "plan.codec.ratio")
        if self.support not in ("shared", "private"):
            raise PlanError(
                f"Cannot draw elements that are {self.support!r}: choose 'shared' or 'private' "
                "- at `plan.codec.support`."
            )

    @property
    def promises(self) -> Promises:
        return Promises(
            linear=self.support == "shared",
            support=self.support,
            contraction=None if self.is_unbiased and self.ratio < 1 else self.ratio,
            variance=1 / self.ratio - 1 if self.is_unbiased else None,
            passes=1 + 6 * self.ratio,
        )

    def payload_bytes(self, bucket: Bucket) -> float:
        """The elements that are sent."""
        return float(count_of(self.ratio, bucket.numel) * bucket.dtype.itemsize)

    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor]:
        """Encode as the elements that are drawn, in order."""
        chosen = grad[self._drawn(len(grad), turn).to(grad.device)]
        return (chosen.mul_(len(grad) / len(chosen)) if self.is_unbiased else chosen,)

    def encoded_shapes(self, numel: int, dtype: torch.dtype, turn: Turn) -> EncodedShapes:
        """The shapes of the elements that are drawn."""
        return ((dtype, (count_of(self.ratio, numel),)),)

    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Put the elements where they belong, between zeros."""
        out.zero_()
        self.accumulate_(out, tensors, turn)
        return out

    def accumulate_(self, total: torch.Tensor, tensors: Sequence[torch.Tensor], turn: Turn) -> None:
        """Add the elements where they belong."""
        indices = self._drawn(len(total), turn).to(total.device)
        (values,) = tensors
        if values.shape != indices.shape or values.dtype != total.dtype:
            raise PeerError(
                f"Cannot decode {list(values.shape)} elements of {values.dtype}: {len(indices)} of {total.dtype} are "
                "sent."
            )
        total.index_add_(0, indices, values)

    def _drawn(self, numel: int, turn: Turn) -> torch.Tensor:
        """The elements that are sent, in order."""
        count = count_of(self.ratio, numel)
        return torch.from_numpy(turn.chosen(count, numel, what="elements", private=self.support == "private"))
