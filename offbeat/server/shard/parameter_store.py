"""The parameters that a shard holds, and the optimizer that moves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.errors import PeerError
from offbeat.protocol.training import DensePayload
from offbeat.server.aggregator import BlockContribution
from offbeat.server.optimizers import OUTER, BlockOptimizer, hold
from offbeat.server.pushed_block import DTYPES, PushedBlock
from offbeat.sync.outer_sgd import apply_change_

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec
    from offbeat.protocol.shards import ScaleContributions
    from offbeat.server.aggregator import Aggregator
    from offbeat.server.blocks import Block
    from offbeat.sync import OuterSGD


@dataclass(frozen=True, eq=False)
class BlockReference:
    """The vector that contributions to a block are compared with.

    Args:
        version: of the block, that it came with.
        values: [D], which do not change any more.
    """

    version: int
    values: torch.Tensor


@dataclass(frozen=True)
class BlockImage:
    """The state of a block at one version.

    Args:
        version: updates it had.
        values: [D], which do not change any more.
        state: the optimizer's, as of `ParameterStore.state_of`; it does not change either.
        reference: the latest one.
    """

    version: int
    values: torch.Tensor
    state: list[tuple[str, str, torch.Tensor]]
    reference: BlockReference | None = None


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
        self._references: dict[int, BlockReference] = {}  # the latest, of the blocks that have any
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
        judgement: ScaleContributions | None = None,
    ) -> None:
        """One step of the optimizer in one block.

        Args:
            parts: gradients; not changed.
            hyper: the optimizer's hyper-parameters, by group.
            rate: the learning rate is multiplied by it.
            unused: names of parameters that no contribution has a gradient for; they stay as they are.
            judgement: of the update, if it was judged.
        """
        held, mean = self._held[block], self._combine(block, parts, judgement)
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

    def move(
        self,
        block: int,
        parts: Sequence[BlockContribution],
        *,
        outer: OuterSGD | None,
        rate: float,
        judgement: ScaleContributions | None = None,
    ) -> None:
        """Move one block by the combined change of workers that step by themselves.

        Args:
            parts: changes; not changed.
            outer: how the mean is applied; None for a plain average.
            rate: the step is multiplied by it.
            judgement: of the update, if it was judged.
        """
        value = self.values[block]
        mean = self._combine(block, parts, judgement)
        if mean is not None:
            momentum = self._outer_momentum.get(block)
            if momentum is None or (outer is not None and not momentum.numel()):  # or plain averages before
                momentum = self._outer_momentum[block] = torch.zeros_like(value if outer is not None else value[:0])
            apply_change_(value, mean, outer=outer, momentum=momentum, rate=rate)

    def reference(self, block: int, parts: Sequence[BlockContribution]) -> BlockReference | None:
        """The reference for the next update: the mean of those that come with it, or the latest one before.

        Where it is the update before, there is one from the beginning: zeros. There is none where nobody looks at it.
        """
        if not self._aggregator.needs_reference:
            return None
        dtype, version = self.values[block].dtype, self.versions[block] + 1
        own = [one.part.decode(dtype) for one in parts if one.is_reference and one.weight > 0]
        if own:
            return BlockReference(version, own[0] if len(own) == 1 else torch.stack(own).mean(0))
        if block not in self._references and self._aggregator.keeps_update:
            return BlockReference(0, torch.zeros_like(self.values[block]))
        return self._references.get(block)

    def _combine(
        self, block: int, parts: Sequence[BlockContribution], judgement: ScaleContributions | None
    ) -> torch.Tensor | None:
        """Make one block of the next update, and keep the reference for the one after it."""
        reference, scale = self.reference(block, parts), 0.0 if judgement is None else judgement.reference
        row = None if reference is None else reference_row(reference, scale)
        contributions = [one for one in parts if not one.is_reference]
        combined = self._aggregator.combine(contributions, self.values[block].dtype, row)
        self.versions[block] += 1
        if self._aggregator.keeps_update:
            reference = None if combined is None else BlockReference(self.versions[block], combined)
        elif reference is not None and reference.version == self.versions[block]:
            is_finite = judgement.keeps_reference if judgement else bool(torch.isfinite(reference.values).all())
            reference = reference if is_finite else None
        if reference is not None:
            self._references[block] = reference
        return combined

    def image(self, block: int, values: torch.Tensor) -> BlockImage:
        """Copy the state of the block as it is now.

        Args:
            values: a copy of its values, which does not change any more.
        """
        state = [(name, key, tensor.clone()) for name, key, tensor in self.state_of(block)]
        return BlockImage(self.versions[block], values, state, self._references.get(block))

    def restore(self, block: int, image: BlockImage) -> None:
        """Have the block be what it was."""
        self.versions[block] = image.version
        self.values[block].copy_(image.values)
        self.forget_state(block)
        for name, key, tensor in image.state:
            self.set_state(block, name, key, tensor.clone())
        if image.reference is not None:
            self._references[block] = image.reference

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
        """Reset the optimizer's state in this block, as if it had made no step, and forget the reference."""
        held = self._held[block]
        if held is not None:
            held.optimizer.state.clear()
        self._outer_momentum.pop(block, None)
        self._references.pop(block, None)

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


def reference_row(reference: BlockReference, scale: float | None = None) -> BlockContribution:
    """The reference as the last of the contributions that it is compared with."""
    return BlockContribution(-1, 1.0, PushedBlock(DensePayload(), reference.values), scale, is_reference=True)
