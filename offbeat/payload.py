"""Payloads: the data that workers exchange, and the replies.

A payload is *linear* (`Sum`) or *opaque* (`Gather`). A linear one may be added anywhere on its way: in a ring, at a
server, in a switch. An opaque one must reach every decoder unopened.

The reply to a `Sum` is a `Total`: the sum of the contributions and the sum of their weights, so that an aggregate that
some workers did not take part in says so. The reply to a `Gather` is one `GatheredPart` per worker, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, eq=False)
class Sum:
    """A tensor that may be added to its likes on the way.

    Args:
        tensor: [D] contiguous, already multiplied by the worker's weight. It belongs to the fabric from here on, which
            may overwrite it with the total.
        tail: [T] a few numbers of the same dtype that are added along with it (the engine's bookkeeping), or None. It
            is of the same workers as the total; a sum without one is of all, whatever the policy.
        exact: whether it has to be a sum of floats, of all workers, also over a fabric whose others are not (see
            `Offers.exact`): small numbers beside large ones keep their digits.
    """

    tensor: torch.Tensor
    tail: torch.Tensor | None = None
    exact: bool = False

    @property
    def size_bytes(self) -> int:
        return _size_bytes(self.tensor) + (0 if self.tail is None else _size_bytes(self.tail))


@dataclass(frozen=True, eq=False)
class Gather:
    """Tensors that every decoder must see as they are.

    Args:
        tensors: any shapes and dtypes; the shapes may differ between workers, number and dtypes may not.
    """

    tensors: tuple[torch.Tensor, ...]

    @property
    def size_bytes(self) -> int:
        return sum(_size_bytes(t) for t in self.tensors)


@dataclass(frozen=True, eq=False)
class Total:
    """Reply to `Sum`.

    Args:
        tensor: [D] the sum over the workers that took part.
        weight: the sum of their weights, in units in which "everyone took part once" is exactly 1.0.
        tail: [T] the sum of the tails, or None.
        includes_own: whether this worker's contribution is in it.
    """

    tensor: torch.Tensor
    weight: float = 1.0
    tail: torch.Tensor | None = None
    includes_own: bool = True


@dataclass(frozen=True, eq=False)
class GatheredPart:
    """One worker's part of the reply to `Gather`."""

    worker: int
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Gathered:
    """Reply to `Gather` as a codec gets it.

    Args:
        parts: one of each worker, in rank order.
        weight: the sum of their weights, in units in which "everyone once" is 1.0.
    """

    parts: Sequence[GatheredPart]
    weight: float = 1.0


Payload = Sum | Gather
Reply = Total | list[GatheredPart]


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
