"""Updates in the making, for the history: each is recorded once, when no block of a shard will be updated anew."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.history import UpdateMade, UsedContribution
from offbeat.sync import Push

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from offbeat.history import Record
    from offbeat.server.aggregator import BlockContribution


@dataclass
class _Update:
    """The contributions of an update in each block, with their weights and scales."""

    rate: float
    blocks: dict[int, dict[Push, tuple[float, float | None]]] = field(default_factory=dict)


class UpdateRecorder:
    """One model's updates at one shard.

    Args:
        model: which of several.
        blocks: how many the shard holds.
        record: writes the history.
    """

    def __init__(self, model: int, blocks: int, record: Callable[[Record], None]) -> None:
        self._model, self._blocks, self._record = model, blocks, record
        self._open: dict[int, _Update] = {}  # by version

    def made(self, version: int, block: int, rate: float, parts: Iterable[tuple[Push, BlockContribution]]) -> None:
        """An update was made in a block, of these contributions; if it was before, that has been undone.

        A reference weighs nothing: it is never applied.
        """
        update = self._open.setdefault(version, _Update(rate))
        update.blocks[block] = {push: (0.0 if part.is_reference else part.weight, part.scale) for push, part in parts}

    def close(self, is_final: Callable[[int], bool]) -> None:
        """Record the updates that stay as they are.

        Args:
            is_final: whether that is so, by version.
        """
        done = [v for v, update in self._open.items() if len(update.blocks) == self._blocks and is_final(v)]
        for version in done:
            update, times, said = self._open.pop(version), Counter[Push](), dict[Push, tuple[float, float | None]]()
            for used in update.blocks.values():
                times.update(used.keys())
                said |= used
            uses = tuple(UsedContribution(*push, said[push][0], times[push], said[push][1]) for push in sorted(times))
            self._record(UpdateMade(self._model, version, len(update.blocks), update.rate, uses))
