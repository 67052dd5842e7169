"""The parameters that a shard holds, and the optimizer that moves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.errors import PeerError
from offbeat.server.optimizers import OUTER, BlockOptimizer, hold
from offbeat.server.pushed_block import DTYPES
from offbeat.sync.outer_sgd import apply_change_

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec
    from offbeat.server.aggregator import Aggregator, BlockContribution
    from offbeat.server.blocks import Block
    from offbeat.sync import OuterSGD


@dataclass(frozen=True)
class BlockImage:
    """The state of a block at one version.

    Args:
        version: updates it had.
        values: [D], which do not change any more.
        state: the optimizer's, as of `ParameterStore.state_of`; it does not change either.
    """

    version: int
    values: torch.Tensor
    state: list[tuple[str, str, torch.Tensor]]


class ParameterStore:
    """Some blocks of one model.

    Args:
        blocks: those that this shard holds.
        optimizer: the user's.
        aggregator: makes one gradient or change of the contributions of an update.

    Raises:
        PeerError: if a block or the optimizer cannot be held.
    """

    def __init__(self, blocks: Sequence[Block], optimizer: OptimizerSpec, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._pieces: dict[int, dict[str, torch.Tensor]] = {}
        self._held: dict[int, BlockOptimizer | None] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}
        self._outer_momentum: dict[int, torch.Tensor] = {}  # of changes; of the blocks that have any
        for block in blocks:
            if block.dtype not in DTYPES:
                raise PeerError(f"Cannot hold parameters of type {block.dtype!r} at a server.")
            # Not zeroed: that would keep the event loop busy for seconds where a model is large, and nobody is given
            # any of it before all of it has come.
            value = torch.empty(block.numel, dtype=DTYPES[block.dtype])
            views = value.split([piece.numel for piece in block.pieces])
            pieces = {piece.name: view for piece, view in zip(block.pieces, views, strict=True)}
            self.values[block.index], self._pieces[block.index] = value, pieces
            self._held[block.index] = hold(optimizer, list(pieces.items()))
            self.versions[block.index] = 0

    def update(
        self,
        block: int,
        parts: Sequence[BlockContribution],
        *,
        hyper: Sequence[Hyper],
        rate: float,
        unused: Set[str] = frozenset(),
    ) -> None:
        """One step of the optimizer in one block.

        Args:
            parts: gradients; not changed.
            hyper: the optimizer's hyper-parameters, by group.
            rate: the learning rate is multiplied by it.
            unused: names of parameters that no contribution has a gradient for; they stay as they are.
        """
        self.versions[block] += 1
        held, mean = self._held[block], self._aggregator.combine(parts, self.values[block].dtype)
        if held is None or mean is None:
            return
        pieces = self._pieces[block]
        grads = mean.split([piece.numel() for piece in pieces.values()])
        for (name, piece), grad in zip(pieces.items(), grads, strict=True):
            piece.grad = None if name in unused else grad
        held.set_hyper(hyper, rate)
        held.optimizer.step()
        for piece in pieces.values():
            piece.grad = None

    def move(self, block: int, parts: Sequence[BlockContribution], *, outer: OuterSGD | None, rate: float) -> None:
        """Move one block by the combined change of workers that step by themselves.

        Args:
            parts: changes; not changed.
            outer: how the mean is applied; None for a plain average.
            rate: the step is multiplied by it.
        """
        self.versions[block] += 1
        value = self.values[block]
        mean = self._aggregator.combine(parts, value.dtype)
        if mean is not None:
            momentum = self._outer_momentum.get(block)
            if momentum is None or (outer is not None and not momentum.numel()):  # or plain averages before
                momentum = self._outer_momentum[block] = torch.zeros_like(value if outer is not None else value[:0])
            apply_change_(value, mean, outer=outer, momentum=momentum, rate=rate)

    def image(self, block: int, values: torch.Tensor) -> BlockImage:
        """Copy the state of the block as it is now.

        Args:
            values: a copy of its values, which does not change any more.
        """
        return BlockImage(
            self.versions[block], values, [(name, key, tensor.clone()) for name, key, tensor in self.state_of(block)]
        )

    def restore(self, block: int, image: BlockImage) -> None:
        """Have the block be what it was."""
        self.versions[block] = image.version
        self.values[block].copy_(image.values)
        self.forget_state(block)
        for name, key, tensor in image.state:
            self.set_state(block, name, key, tensor.clone())

    def state_of(self, block: int) -> list[tuple[str, str, torch.Tensor]]:
        """The optimizer's state in one block: (parameter, key, tensor), each tensor [D] of its piece or a scalar."""
        held, state = self._held[block], []
        pieces = self._pieces[block]
        for name, piece in pieces.items() if held is not None else ():
            assert held is not None
            for key, value in held.optimizer.state.get(piece, {}).items():
                if value is not None:
                    state.append((name, key, value if isinstance(value, torch.Tensor) else torch.tensor(value)))
        momentum = self._outer_momentum.get(block)
        if momentum is not None and momentum.numel():
            views = momentum.split([piece.numel() for piece in pieces.values()])
            state += [(name, OUTER, view) for name, view in zip(pieces, views, strict=True)]
        return state

    def forget_state(self, block: int) -> None:
        """Reset the optimizer's state in this block, as if it had made no step."""
        held = self._held[block]
        if held is not None:
            held.optimizer.state.clear()
        self._outer_momentum.pop(block, None)

    def set_state(self, block: int, name: str, key: str, value: torch.Tensor) -> None:
        """Take over one tensor that `state_of` returned.

        Raises:
            PeerError: if there is no such parameter in the block, or this optimizer keeps no such tensor.
        """
        held, pieces = self._held.get(block), self._pieces.get(block, {})
        piece = pieces.get(name)
        if piece is None or (held is None and key != OUTER):
            raise PeerError(f"Cannot take over {key} of {name} in block {block}: there is no such piece here.")
        if key == OUTER:
            if value.shape != piece.shape:
                raise PeerError(
                    f"Cannot take over {key} of {name}: it has {value.numel()} elements, not {piece.numel()}."
                )
            momentum = self._outer_momentum.setdefault(block, torch.zeros_like(self.values[block]))
            views = momentum.split([piece.numel() for piece in pieces.values()])
            dict(zip(pieces, views, strict=True))[name].copy_(value)
            return
        assert held is not None
        held.check_state(piece, name, key, value)
        held.optimizer.state[piece][key] = value
