"""The parameters that a shard holds, and the optimizer that moves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.errors import PeerError
from offbeat.fabric.server.optimizers import Held, hold

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from offbeat.fabric.server.blocks import Block
    from offbeat.fabric.server.optimizers import Hyper, OptimizerSpec

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


class Store:
    """Some blocks of one model.

    Args:
        blocks: those that this shard holds.
        optimizer: the user's.

    Raises:
        PeerError: if a block or the optimizer cannot be held.
    """

    def __init__(self, blocks: Sequence[Block], optimizer: OptimizerSpec) -> None:
        self._pieces: dict[int, dict[str, torch.Tensor]] = {}
        self._held: dict[int, Held | None] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}
        for block in blocks:
            if block.dtype not in DTYPES:
                raise PeerError(f"Cannot hold parameters of type {block.dtype!r} at a server.")
            value = torch.zeros(block.numel, dtype=DTYPES[block.dtype])
            views = value.split([piece.numel for piece in block.pieces])
            pieces = {piece.name: view for piece, view in zip(block.pieces, views, strict=True)}
            self.values[block.index], self._pieces[block.index] = value, pieces
            self._held[block.index] = hold(optimizer, list(pieces.items()))
            self.versions[block.index] = 0

    def update(
        self,
        block: int,
        parts: Sequence[tuple[torch.Tensor, float]],
        *,
        hyper: Sequence[Hyper],
        rate: float,
        unused: Set[str] = frozenset(),
    ) -> None:
        """One step of the optimizer in one block.

        Args:
            parts: gradients [D] with their weights; consumed.
            hyper: the optimizer's hyper-parameters, by group.
            rate: the learning rate is multiplied by it.
            unused: names of parameters that no contribution has a gradient for; they stay as they are.
        """
        self.versions[block] += 1
        held = self._held[block]
        total = sum(weight for _, weight in parts)
        if held is None or total == 0:
            return
        mean = _mean(parts, total, self.values[block].dtype)
        pieces = self._pieces[block]
        grads = mean.split([piece.numel() for piece in pieces.values()])
        for (name, piece), grad in zip(pieces.items(), grads, strict=True):
            piece.grad = None if name in unused else grad
        held.set_hyper(hyper, rate)
        held.optimizer.step()
        for piece in pieces.values():
            piece.grad = None

    def state_of(self, block: int) -> list[tuple[str, str, torch.Tensor]]:
        """The optimizer's state in one block: (parameter, key, tensor), each tensor [D] of its piece or a scalar."""
        held = self._held[block]
        if held is None:
            return []
        return [
            (name, key, value if isinstance(value, torch.Tensor) else torch.tensor(value))
            for name, piece in self._pieces[block].items()
            for key, value in held.optimizer.state.get(piece, {}).items()
            if value is not None
        ]

    def set_state(self, block: int, name: str, key: str, value: torch.Tensor) -> None:
        """Take over one tensor that `state_of` returned.

        Raises:
            PeerError: if there is no such parameter in the block, or the tensor has another shape.
        """
        held, piece = self._held.get(block), self._pieces.get(block, {}).get(name)
        if held is None or piece is None or value.numel() not in (1, piece.numel()):
            raise PeerError(f"Cannot take over {key} of {name} in block {block}: there is no such piece here.")
        held.optimizer.state[piece][key] = value


def _mean(parts: Sequence[tuple[torch.Tensor, float]], total: float, dtype: torch.dtype) -> torch.Tensor:
    """The weighted mean of `parts`, summed in their order; overwrites the first."""
    (first, weight), *others = parts
    mean = first.to(dtype)
    if not others:
        return mean
    equal = all(w == weight for _, w in others)
    # As DistributedDataParallel does: multiplied by 1/N before it is added.
    mean.mul_(1 / len(parts) if equal else weight / total)
    for part, w in others:
        mean.add_(part.to(dtype).mul_(1 / len(parts) if equal else w / total))
    return mean
