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
        archive: where snapshots are kept; None for none: every mark is then missed.
        job: its name.
        every: updates between two.
        life: that they belong to; set anew when it begins.
        tables: of the models that are held here.
        lead: if this shard coordinates.
        followers: the other shards, if it does.
        say: sends something to a worker.
        tell_chief: sends something to the shard that coordinates, if that is another.
    """

    def __init__(
        self,
        archive: SnapshotStore | None,
        job: str,
        every: int,
        *,
        life: int,
        tables: Mapping[int, ModelShard],
        lead: Coordinator | None,
        followers: Sequence[Peer],
        say: Callable[[int, ToWorker], None],
        tell_chief: Callable[[FromShard], None],
    ) -> None:
        self._every, self.life = every, life
        self._tables, self._lead, self._followers = tables, lead, followers
        self._say, self._tell_chief = say, tell_chief
        self.keeping = None if archive is None else SnapshotBuilder(archive, job, self._written)
        self._rhythm = SnapshotSchedule(every, least=0, life=life)
        self._progress: dict[int, TrainingProgress] = {}
        self._progress_before: dict[int, TrainingProgress] = {}  # of the last one that all shards have
        self._saves: list[asyncio.Future[None]] = []  # done with the last snapshot
        self._last_number = 0
        self._is_last = False  # the next one is
        self._looks_soon = False

    def number_from(self, least: int) -> None:
        """Snapshots of this life get numbers greater than this."""
        self._rhythm = SnapshotSchedule(self._every, least=least, life=self.life)

    def go_on_from(self, identity: SnapshotId, version: int) -> None:
        """All shards have this one, made at this version of all models together."""
        self._rhythm.start_from(identity, version, asyncio.get_running_loop().time())

    async def last(self) -> None:
        """Have all shards make a last snapshot, and wait for it; nothing if there is nothing to keep.

        From then on nothing is decided, so that nobody is told of an update that is not in it.
        """
        is_idle = self._lead is not None and not self._lead.started
        if self.keeping is None or not self._tables or is_idle:
            return
        future = asyncio.get_running_loop().create_future()
        self._saves.append(future)
        if self._lead is None:
            self._tell_chief(SaveLastSnapshot())
        else:
            self.ask_for_last()
        await future

    def ask_for_last(self) -> None:
        """The next snapshot is the last, and due now."""
        self._is_last = True
        self.look_soon()

    async def be_quiet(self) -> None:
        """Wait until no file is being written."""
        if self.keeping is not None and self.keeping.writing is not None:
            await asyncio.wait([self.keeping.writing])

    def look_soon(self) -> None:
        """See whether a snapshot is due, when all that follows from the present event has been decided."""
        if self.keeping is not None and self._lead is not None and not self._looks_soon:
            self._looks_soon = True
            asyncio.get_running_loop().call_soon(self._set_if_due, self._lead)

    def _set_if_due(self, lead: Coordinator) -> None:
        self._looks_soon = False
        if (
            lead.is_over
            or not lead.started
            or self._rhythm.is_under_way
            or any(table.unfilled for table in self._tables.values())
        ):
            return
        now_s = asyncio.get_running_loop().time()
        if not self._is_last and not self._rhythm.is_due(lead.version, now_s):
            return
        if self._is_last:
            lead.handle(LifeOver(now_s))
        self._progress = {model: lead.progress(model) for model in lead.models}
        before = self._rhythm.last
        number = self._rhythm.next(lead.version, len(self._followers) + 1)
        mark = SnapshotMark(number, None if before is None else (before.number, before.life), lead.is_over)
        for shard in self._followers:
            shard.say(mark)
        self.keep(mark)

    def keep(self, mark: SnapshotMark) -> None:
        """Keep all models as they are after what was decided so far."""
        if self.keeping is None:
            self._written(mark.number, False, 0.0)
            return
        self._last_number = mark.number if mark.is_last else 0
        plain = {model: msgspec.structs.replace(table.details, back=None) for model, table in self._tables.items()}
        self.keeping.begin(
            SnapshotId(mark.number, self.life),
            None if mark.keep is None else SnapshotId(*mark.keep),
            shards=len(self._followers) + 1,
            models=[
                SnapshotModel(model, self._tables[model].version, details, self._progress.get(model))
                for model, details in plain.items()
            ],
            blocks={model: table.blocks for model, table in self._tables.items()},
        )
        for table in self._tables.values():
            table.mark()

    def _written(self, number: int, well: bool, cost_s: float) -> None:
        """Report that this shard has written a snapshot, or could not."""
        if self._lead is None:
            self._tell_chief(SnapshotSaved(number, well, cost_s))
            self._end_last(number)
        else:
            self.saved(number, well, cost_s)

    def saved(self, number: int, well: bool, cost_s: float) -> None:
        """A shard has written a snapshot, or could not; the coordinator hears of all of them."""
        if self._rhythm.saved(number, well, cost_s, asyncio.get_running_loop().time()):
            # Of the one before: it is what all go on from if this one is found to be damaged, and then what came in
            # between is lost, and has to be reported.
            for model, progress in self._progress_before.items():
                for worker, clock in progress.next.items():
                    self._say(worker, SnapshotAck(model, clock))
            self._progress_before = self._progress
        if not self._rhythm.is_under_way:
            self._end_last(number)
            self.look_soon()

    def _end_last(self, number: int) -> None:
        if number != self._last_number:
            return
        saves, self._saves = self._saves, []
        for future in saves:
            if not future.done():
                future.set_result(None)
