"""Updates in the making, for the history: each is recorded once, when it has been made in all blocks of a shard."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from offbeat.history import Made, Used

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from offbeat.fabric.server.messages import About
    from offbeat.history import Record
    from offbeat.sync import Push


class Making:
    """One model's updates at one shard.

    Args:
        model: which of several.
        blocks: how many the shard holds.
        record: writes the history.
    """

    def __init__(self, model: int, blocks: int, record: Callable[[Record], None]) -> None:
        self._model, self._blocks, self._record = model, blocks, record
        self._times: Counter[int] = Counter()  # blocks in which an update was made, by version
        self._used: dict[int, dict[Push, tuple[float, int]]] = {}  # by version: weight, and in how many blocks

    def made(self, version: int, rate: float, parts: Iterable[tuple[Push, About]]) -> None:
        """An update was made in one more block, of these contributions."""
        used = self._used.setdefault(version, {})
        for push, about in parts:
            used[push] = (about.weight, used.get(push, (0.0, 0))[1] + 1)
        self._times[version] += 1
        if self._times[version] < self._blocks:
            return
        self._record(
            Made(
                self._model,
                version,
                self._times.pop(version),
                rate,
                tuple(Used(*push, *how) for push, how in sorted(self._used.pop(version).items())),
            )
        )
