"""One model for each group of a table, on a Ray cluster: actors are the workers of a fit.

    ray.init()
    trainer = GroupedTrainer(Logistic(), by="store", target="sold", executor=RayWorkers(8))
    fitted = trainer.fit(ray.data.read_parquet("s3://sales"))

Each actor takes a part of the rows: of a Ray Dataset one of `split`, which Ray reads on the cluster; of another table
what it reads of the files itself, which all nodes have to reach. Rows then go to the actors that fit them, and sums and
nets of split groups between actors, over stores of objects in them (`offbeat.groups.ranks`), not through Ray's own. The
driver gets the models of all groups. Actors hold what they need for one fit and end with it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.errors import NetworkError, OffbeatError
from offbeat.groups import GroupDataError
from offbeat.groups.buckets import BUCKET_BYTES
from offbeat.groups.carrier import ObjectCarrier
from offbeat.groups.records import GroupModels
from offbeat.groups.shared_fit import SharedFit
from offbeat.groups.table_input import DatasetTable

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.groups.group_job import JobMaker
    from offbeat.groups.table_input import TableInput
    from offbeat.groups.this_process import Progress

_LOOK_S = 0.5


@dataclass(frozen=True)
class RayWorkers:
    """Fit groups by actors of a Ray cluster to which this process is connected. An `Executor`.

    Args:
        count: of actors.
        num_cpus: of each.
        bucket_bytes: as of `Ranks`.
    """

    count: int
    num_cpus: float = 1
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise GroupDataError(f"Cannot fit by {self.count!r} actors: name a number of 1 or more.")

    def fit(self, trainer: JobMaker, table: TableInput, progress: Progress, folder: Path | None) -> GroupModels:
        """Fit all groups of a table.

        Args:
            folder: on each node, or the same one everywhere.

        Raises:
            NetworkError: if an actor is lost. What was left in the folder is not fitted again.
        """
        ray = _ray()
        meeting = ray.remote(num_cpus=0)(ActorMeeting).remote(self.count)
        is_dataset = isinstance(table, DatasetTable)
        how = {"own_rows": is_dataset, "bucket_bytes": self.bucket_bytes}
        parts = table.split(self.count) if isinstance(table, DatasetTable) else [ray.put(table)] * self.count
        first, worker = ray.util.get_node_ip_address(), ray.remote(num_cpus=self.num_cpus)(GroupWorker)
        actors = [worker.remote(rank, self.count, first) for rank in range(self.count)]
        try:
            calls = [
                actor.fit.remote(meeting, trainer, part, how, folder) for actor, part in zip(actors, parts, strict=True)
            ]
            return self._awaited(ray, calls, meeting, progress)
        finally:
            for actor in (*actors, meeting):
                ray.kill(actor)

    def _awaited(self, ray: Any, calls: list[Any], meeting: Any, progress: Progress) -> GroupModels:
        made, waiting, before = None, list(calls), (0, 0)
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=_LOOK_S)
            told = tuple(ray.get(meeting.progress.remote()))
            if told != before:
                progress(*told)
                before = told
            for call in ended:
                try:
                    found = ray.get(call)
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, OffbeatError):
                        raise error.cause from error
                    raise
                except ray.exceptions.RayActorError as error:
                    raise NetworkError(f"Cannot fit without worker {calls.index(call)}: its actor died.") from error
                made = found or made
        assert isinstance(made, GroupModels)
        return made


class ActorMeeting:
    """The actor by which the workers of a fit meet.

    Args:
        world: how many there are.
    """

    def __init__(self, world: int) -> None:
        self._world, self._failure = world, ""
        self._told: dict[int, dict[int, str]] = {}
        self._progress: dict[int, tuple[int, int]] = {}
        self._changed = asyncio.Condition()

    async def tell_all(self, turn: int, rank: int, text: str) -> list[str]:
        """Tell a text, and return what all say in this turn, once they have."""
        async with self._changed:
            self._told.setdefault(turn, {})[rank] = text
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(self._told[turn]) == self._world or bool(self._failure))
            if len(self._told[turn]) < self._world:
                raise NetworkError(self._failure)
            return [self._told[turn][one] for one in range(self._world)]

    async def note_failure(self, text: str) -> None:
        """Leave a note why a fit has failed, unless there is one."""
        async with self._changed:
            self._failure = self._failure or text
            self._changed.notify_all()

    async def failure(self) -> str:
        """Return the note; "" if there is none."""
        return self._failure

    async def note_progress(self, rank: int, ended: int, groups: int) -> None:
        """Note how many groups of one's own have ended."""
        self._progress[rank] = ended, groups

    async def progress(self) -> tuple[int, int]:
        """Return how many groups have ended, and of how many that are known of."""
        return sum(ended for ended, _ in self._progress.values()), sum(groups for _, groups in self._progress.values())


class GroupWorker:
    """An actor that is one worker of a fit.

    Args:
        first: an address of the cluster, towards which the others are.
    """

    def __init__(self, rank: int, world: int, first: str) -> None:
        self._rank, self._world = rank, world
        os.environ.setdefault("MASTER_ADDR", first)

    def fit(
        self, meeting: Any, trainer: JobMaker, table: TableInput, how: dict[str, Any], folder: Path | None
    ) -> GroupModels | None:
        """Fit this worker's groups; the first worker returns the models of all."""
        import torch

        torch.set_num_threads(1)
        carrier = ObjectCarrier(self._rank, self._world, MeetingByActor(meeting, self._rank))

        def progress(ended: int, groups: int) -> None:
            meeting.note_progress.remote(self._rank, ended, groups)

        try:
            made = SharedFit(carrier, trainer, table, **how).run(progress, folder)
        except BaseException as error:
            carrier.abandon(error)
            raise
        carrier.close()
        return None if self._rank else made


class MeetingByActor:
    """One worker's way to an `ActorMeeting`. A `MeetingPlace`."""

    def __init__(self, actor: Any, rank: int) -> None:
        self._actor, self._rank, self._turn = actor, rank, 0

    def tell_all(self, text: str) -> list[str]:
        """Tell the others a text, and return what all say, by rank. Collective."""
        self._turn += 1
        return list(_ray().get(self._actor.tell_all.remote(self._turn, self._rank, text)))

    def note_failure(self, text: str) -> None:
        """Leave a note why one's fit has failed, unless there is one."""
        _ray().get(self._actor.note_failure.remote(text))

    def failure(self) -> str:
        """Return the note; "" if there is none."""
        return str(_ray().get(self._actor.failure.remote()))


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise GroupDataError("Cannot fit on Ray: it is missing. `pip install 'offbeat[rdt,groups]'`.") from error
    if not ray.is_initialized():
        raise GroupDataError("Cannot fit on Ray: call ray.init() first.")
    return ray
