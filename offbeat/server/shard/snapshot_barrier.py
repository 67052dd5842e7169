"""Snapshots that are one version of all models on all shards: the coordinator sets a mark, and each shard keeps what it
has there, once all contributions before the mark have arrived whole at all shards.

If one never does, because its worker is lost, all shards give up this snapshot: what was noted of workers and data
counts it. The next one is made when it is due; if it was the last one, who comes back goes on from the one before.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from offbeat.coordinator.events import LifeOver
from offbeat.protocol.shards import SaveLastSnapshot, SnapshotMark, SnapshotSaved
from offbeat.protocol.training import SnapshotAck
from offbeat.server.shard.snapshot_builder import SnapshotBuilder, SnapshotSchedule
from offbeat.server.snapshot import SnapshotId, SnapshotModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.coordinator.coordinator import Coordinator
    from offbeat.coordinator.progress import TrainingProgress
    from offbeat.protocol.messages import FromShard, ToWorker
    from offbeat.server.shard.model_shard import ModelShard
    from offbeat.server.shard.peer import Peer
    from offbeat.server.shard.snapshot_store import SnapshotStore


class SnapshotBarrier:
    """One shard's part in them, for one life.

    Args:
        snapshots: where snapshots are kept; None for none: every mark is then missed.
        job: its name.
        every: updates between two.
        life: that they belong to; set anew when it begins.
        model_shards: of the models that are held here.
        coordinator: if this shard coordinates.
        followers: the other shards, if it does.
        say: sends something to a worker.
        tell_coordinator: sends something to the shard that coordinates, if that is another.
    """

    def __init__(
        self,
        snapshots: SnapshotStore | None,
        job: str,
        every: int,
        *,
        life: int,
        model_shards: Mapping[int, ModelShard],
        coordinator: Coordinator | None,
        followers: Sequence[Peer],
        say: Callable[[int, ToWorker], None],
        tell_coordinator: Callable[[FromShard], None],
    ) -> None:
        self._every, self.life = every, life
        self._model_shards, self._coordinator, self._followers = model_shards, coordinator, followers
        self._say, self._tell_coordinator = say, tell_coordinator
        self.snapshot_builder = None if snapshots is None else SnapshotBuilder(snapshots, job, self._written)
        self._schedule = SnapshotSchedule(every, least=0, life=life)
        self._progress: dict[int, TrainingProgress] = {}
        self._progress_before: dict[int, TrainingProgress] = {}  # of the last one that all shards have
        self._saves: list[asyncio.Future[None]] = []  # done with the last snapshot
        self._last_number = 0
        self._is_last = False  # the next one is
        self._looks_soon = False

    def number_from(self, least: int) -> None:
        """Snapshots of this life get numbers greater than this."""
        self._schedule = SnapshotSchedule(self._every, least=least, life=self.life)

    def go_on_from(self, identity: SnapshotId, version: int) -> None:
        """All shards have this one, made at this version of all models together."""
        self._schedule.start_from(identity, version, asyncio.get_running_loop().time())

    async def last(self) -> None:
        """Have all shards make a last snapshot, and wait for it; nothing if there is nothing to keep.

        From then on nothing is decided, so that nobody is told of an update that is not in it.
        """
        is_idle = self._coordinator is not None and not self._coordinator.started
        if self.snapshot_builder is None or not self._model_shards or is_idle:
            return
        future = asyncio.get_running_loop().create_future()
        self._saves.append(future)
        if self._coordinator is None:
            self._tell_coordinator(SaveLastSnapshot())
        else:
            self.ask_for_last()
        await future

    def ask_for_last(self) -> None:
        """The next snapshot is the last, and due now."""
        self._is_last = True
        self.look_soon()

    async def be_quiet(self) -> None:
        """Wait until no file is being written."""
        if self.snapshot_builder is not None and self.snapshot_builder.writing is not None:
            await asyncio.wait([self.snapshot_builder.writing])

    def look_soon(self) -> None:
        """See whether a snapshot is due, when all that follows from the present event has been decided."""
        if self.snapshot_builder is not None and self._coordinator is not None and not self._looks_soon:
            self._looks_soon = True
            asyncio.get_running_loop().call_soon(self._set_if_due, self._coordinator)

    def _set_if_due(self, coordinator: Coordinator) -> None:
        self._looks_soon = False
        if (
            coordinator.is_over
            or not coordinator.started
            or self._schedule.is_under_way
            or any(model_shard.unfilled for model_shard in self._model_shards.values())
        ):
            return
        now_s = asyncio.get_running_loop().time()
        if not self._is_last and not self._schedule.is_due(coordinator.version, now_s):
            return
        if self._is_last:
            coordinator.handle(LifeOver(now_s))
        self._progress = {model: coordinator.progress(model) for model in coordinator.models}
        before = self._schedule.last
        number = self._schedule.next(coordinator.version, len(self._followers) + 1)
        mark = SnapshotMark(number, None if before is None else (before.number, before.life), coordinator.is_over)
        for shard in self._followers:
            shard.say(mark)
        self.keep(mark)

    def keep(self, mark: SnapshotMark) -> None:
        """Keep all models as they are after what was decided so far."""
        if self.snapshot_builder is None:
            self._written(mark.number, False, 0.0)
            return
        self._last_number = mark.number if mark.is_last else 0
        plain = {
            model: msgspec.structs.replace(model_shard.details, back=None)
            for model, model_shard in self._model_shards.items()
        }
        self.snapshot_builder.begin(
            SnapshotId(mark.number, self.life),
            None if mark.keep is None else SnapshotId(*mark.keep),
            shards=len(self._followers) + 1,
            models=[
                SnapshotModel(model, self._model_shards[model].version, details, self._progress.get(model))
                for model, details in plain.items()
            ],
            blocks={model: model_shard.blocks for model, model_shard in self._model_shards.items()},
        )
        for model_shard in self._model_shards.values():
            model_shard.mark()

    def _written(self, number: int, well: bool, cost_s: float) -> None:
        """Report that this shard has written a snapshot, or could not."""
        if self._coordinator is None:
            self._tell_coordinator(SnapshotSaved(number, well, cost_s))
            self._end_last(number)
        else:
            self.saved(number, well, cost_s)

    def saved(self, number: int, well: bool, cost_s: float) -> None:
        """A shard has written a snapshot, or could not; the coordinator hears of all of them."""
        if self._schedule.saved(number, well, cost_s, asyncio.get_running_loop().time()):
            # Of the one before: it is what all go on from if this one is found to be damaged, and then what came in
            # between is lost, and has to be reported.
            for model, progress in self._progress_before.items():
                for worker, clock in progress.next.items():
                    self._say(worker, SnapshotAck(model, clock))
            self._progress_before = self._progress
        if not self._schedule.is_under_way:
            self._end_last(number)
            self.look_soon()

    def _end_last(self, number: int) -> None:
        if number != self._last_number:
            return
        saves, self._saves = self._saves, []
        for future in saves:
            if not future.done():
                future.set_result(None)
