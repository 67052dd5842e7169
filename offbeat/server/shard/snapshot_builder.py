"""A shard's snapshots in the making: blocks are copied as each reaches the mark, and written by another thread."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from offbeat.server.snapshot import FORMAT, Snapshot, SnapshotHeader, SnapshotId, SnapshotModel, describe_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from offbeat.server.shard.snapshot_store import SnapshotStore
    from offbeat.server.snapshot import SnapshotTensor

_log = logging.getLogger("offbeat")
# Making snapshots takes at most this share of the time.
_MOST_SHARE = 0.02
# So long after one the next is due, however few updates there were; these were slow, and cost the more to lose.
_MOST_S = 10.0


class SnapshotBuilder:
    """The builder of one shard's snapshots, one at a time: `begin`, `take` for each block, and `written` is called.

    Args:
        snapshots: where they go.
        job: its name.
        written: called with number, whether it could be written, and the seconds that it took.
    """

    def __init__(self, snapshots: SnapshotStore, job: str, written: Callable[[int, bool, float], None]) -> None:
        self.snapshots = snapshots
        self._job, self._written = job, written
        self._missing: set[tuple[int, int]] = set()
        self._tensors: list[tuple[SnapshotTensor, torch.Tensor]] = []
        self._header: SnapshotHeader | None = None
        self._keep: SnapshotId | None = None
        self._copying_s = 0.0
        self.writing: asyncio.Future[bool] | None = None

    def begin(
        self,
        identity: SnapshotId,
        keep: SnapshotId | None,
        *,
        shards: int,
        models: Iterable[SnapshotModel],
        blocks: Mapping[int, Iterable[int]],
    ) -> None:
        """A new one.

        Args:
            keep: the one before, which is to stay.
            shards: of the server.
            models: at the mark.
            blocks: of each model, that are held here.
        """
        assert self._header is None
        self._header = SnapshotHeader(FORMAT, self._job, identity, shards, tuple(models))
        self._keep, self._tensors, self._copying_s = keep, [], 0.0
        self._missing = {(model, block) for model, held in blocks.items() for block in held}
        self._write_if_all_are_here()

    def take(
        self, model: int, block: int, values: torch.Tensor, state: Iterable[tuple[str, str, torch.Tensor]]
    ) -> None:
        """A block has reached the mark.

        Args:
            values: [D], which do not change any more.
            state: the optimizer's, which does not either.
        """
        if self._header is None:  # it was given up
            return
        began_s = time.perf_counter()
        self._tensors.append((describe_tensor(model, block, "", "", values), values))
        for name, key, tensor in state:
            self._tensors.append((describe_tensor(model, block, name, key, tensor), tensor))
        self._missing.discard((model, block))
        self._copying_s += time.perf_counter() - began_s
        self._write_if_all_are_here()

    def give_up(self) -> None:
        """A contribution that was to be in it is withdrawn: the snapshot under way is none, as `written` says."""
        if self._header is not None and self._missing:
            number, self._header, self._tensors = self._header.identity.number, None, []
            self._written(number, False, self._copying_s)

    def _write_if_all_are_here(self) -> None:
        if self._missing or self._header is None:
            return
        snapshot, self._tensors = Snapshot(self._header, self._tensors), []
        began_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        self.writing = loop.run_in_executor(None, self.snapshots.write, snapshot, self._keep)

        def done(writing: asyncio.Future[bool]) -> None:
            self._header = self.writing = None
            if not writing.cancelled():
                cost_s = time.perf_counter() - began_s + self._copying_s
                if (error := writing.exception()) is not None:
                    _log.error("Cannot make snapshot %d: %r.", snapshot.header.identity.number, error)
                well = error is None and writing.result()
                self._written(snapshot.header.identity.number, well, cost_s)

        self.writing.add_done_callback(done)


class SnapshotSchedule:
    """The schedule by which the coordinator has all shards make a snapshot; and which one all have.

    Args:
        every: updates between two, of all models together; fewer where they take longer than `_MOST_S`.
        least: numbers are greater than this.
        life: of the server.
    """

    def __init__(self, every: int, *, least: int, life: int) -> None:
        self._every, self._number, self._life = every, least, life
        self._at = -every  # so the first is made of what the job begins with
        self._ended_s = self._cost_s = 0.0
        self._missing = 0  # shards that have not written the one under way
        self._well = True
        self.last: SnapshotId | None = None  # that all shards have

    @property
    def is_under_way(self) -> bool:
        """Whether a shard has not written the last one yet."""
        return self._missing > 0

    def start_from(self, identity: SnapshotId, version: int, now_s: float) -> None:
        """All shards have this one."""
        self.last, self._at, self._ended_s = identity, version, now_s

    def is_due(self, version: int, now_s: float) -> bool:
        """Whether it is time for the next.

        Args:
            version: updates of all models together.
        """
        pause_s = self._cost_s * (1 - _MOST_SHARE) / _MOST_SHARE
        since_s, updates = now_s - self._ended_s, version - self._at
        is_time = updates >= self._every or (updates > 0 and since_s >= _MOST_S)
        return not self.is_under_way and is_time and since_s >= pause_s

    def next(self, version: int, shards: int) -> int:
        """The number of one that `shards` shards begin now."""
        self._number += 1
        self._at, self._missing, self._well, self._cost_s = version, shards, True, 0.0
        return self._number

    def saved(self, number: int, well: bool, cost_s: float, now_s: float) -> bool:
        """A shard is done; whether this snapshot is now complete on all."""
        if number != self._number or not self._missing:
            return False
        self._missing -= 1
        self._well &= well
        self._cost_s = max(self._cost_s, cost_s)
        if self._missing:
            return False
        self._ended_s = now_s
        if self._well:
            self.last = SnapshotId(number, self._life)
        return self._well
