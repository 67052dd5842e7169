"""One worker's part of a fit by several: what all have to know, whose rows go where, and the groups of its own."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
import torch

from offbeat.errors import DisagreementError
from offbeat.groups.buckets import BucketFiles, cut_buckets
from offbeat.groups.fit_description import description_of, difference
from offbeat.groups.fit_folder import FitFolder
from offbeat.groups.fitting import BucketTask, GroupStatus, joined
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.hopping import HopGroup, HoppingModel, blocks_of
from offbeat.groups.partition import GroupPartition
from offbeat.groups.records import GroupModels, GroupRecords
from offbeat.groups.row_exchange import RowsInTransit
from offbeat.groups.search_methods import Halving, Pooled
from offbeat.groups.split_hops import HopCoordinator, HoppingShards, ShardRows
from offbeat.groups.split_sums import SummedShard
from offbeat.groups.summing import SummingModel
from offbeat.groups.table_input import GroupDataError
from offbeat.groups.table_messages import table_in, table_message
from offbeat.groups.this_process import task_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.groups.carrier import Carrier
    from offbeat.groups.group_job import GroupJob, JobMaker
    from offbeat.groups.summing import Summing
    from offbeat.groups.table_input import TableInput
    from offbeat.groups.this_process import FittedBucket, Progress

T = TypeVar("T")


class SharedFit:
    """One worker's part of a fit.

    Args:
        carrier: to the others, all of which make this.
        table: the same one everywhere; or this worker's own rows.
        own_rows, bucket_bytes: as of `Ranks`, the same everywhere.
    """

    def __init__(
        self, carrier: Carrier, trainer: JobMaker, table: TableInput, *, own_rows: bool, bucket_bytes: int
    ) -> None:
        self._carrier, self._trainer, self._table, self._bucket_bytes = carrier, trainer, table, bucket_bytes
        self._part = (0, 1) if own_rows else (carrier.rank, carrier.world)
        self._told = 0

    def run(self, progress: Progress, folder: Path | None = None) -> GroupModels:
        """Fit all groups, and return the models of all workers.

        Args:
            folder: as of `Executor.fit`; of this worker, or the same one everywhere.
        """
        job = self._job()
        own = GroupIndex.count(self._batches(job.by), job.by, self._table.schema)
        counted = self._tables_of_all(own.as_table())
        index = GroupIndex.merged([GroupIndex.of_table(table, job.by) for table in counted])
        job = job.checked(index)
        buckets = cut_buckets(index.rows, 8 * len(job.schema), self._bucket_bytes)
        records = job.records(len(index))
        kept = self._folder(folder, job, index, buckets)
        is_done, mine = self._done(kept, buckets, records)
        # The model of all rows is one of those of finished groups, too.
        is_left_out = np.zeros_like(is_done) if job.small.has_global else is_done
        rows = np.bincount(buckets, index.rows).astype(np.int64) * ~is_left_out
        partition = job.distribute(rows, np.bincount(buckets), self._carrier.world)
        left = GroupPartition(
            partition.capacity,
            np.where(is_done, -1, partition.home),
            tuple(shard for shard in partition.shards if not is_done[shard.group]),
        )
        with tempfile.TemporaryDirectory(prefix="offbeat-groups-") as temporary:
            files = BucketFiles(Path(temporary), index, buckets)
            firsts = self._firsts(index, own, buckets, partition)
            sent = RowsInTransit(job, index, files, partition, is_left_out, firsts)
            mine_rows = int(partition.loads(rows, self._carrier.world)[self._carrier.rank])
            files.write(self._received(sent), job.schema, mine_rows)
            for bucket, numbers, part in self._fit_all(job, index, files, left, records, progress):
                records.put(numbers, part)
                if kept is not None:
                    kept.write(bucket, numbers, records)
                mine.append(numbers)
            self._exchange(records, np.concatenate(mine) if mine else np.zeros(0, np.int64))
            if job.small.has_global and len(index):
                self._fit_fallback(job, index, files, partition, records)
        return GroupModels(job.model, index, records, list(job.features), job.target, job.classes, job.tried)

    # -- what all have to know -----------------------------------------------------------------------------------

    def _job(self) -> GroupJob:
        trainer, schema = self._trainer, self._table.schema
        values = trainer.classes(self._batches([trainer.target]), schema)
        if values is not None:
            told = self._tables_of_all(pa.table({"value": values}))
            values = pa.concat_tables(told)["value"].unique()
        job = trainer.job(schema, values)
        if job.model.dtype is object:
            raise GroupDataError(
                f"Cannot fit {type(job.model).__name__} by several workers: they exchange models as numbers "
                "or texts, and its are objects of another library. Fit it on one machine, executor=ThisProcess() or "
                "Processes()."
            )
        if job.parent_columns or job.is_shrunk:
            raise GroupDataError(
                "Cannot fit parents of groups with Ranks, by several workers: use Small(fallback='global'), or fit on "
                "one machine, executor=ThisProcess() or Processes()."
            )
        if job.small.has_global and not isinstance(job.model, SummingModel):
            raise GroupDataError(
                f"Cannot fit one {type(job.model).__name__} to the rows of all workers: use Small(fallback='skip'), or "
                "fit on one machine, executor=ThisProcess() or Processes()."
            )
        if isinstance(job.search, Halving | Pooled) or job.overrides.keys:
            what = "override groups" if job.overrides.keys else f"search by {type(job.search).__name__}"
            raise GroupDataError(f"Cannot {what} with Ranks, by several workers: fit in one process, or without.")
        said = f"{type(job.model).__name__} of {len(job.configs)} configurations, {job.width} numbers, for {job.schema}"
        mine = f"{description_of(job)}\nbucket_bytes: {self._bucket_bytes}"
        for rank, one in enumerate(self._tables_of_all(pa.table({"fit": [said], "description": [mine]}))):
            if (other := one["fit"][0].as_py()) != said:
                raise DisagreementError(
                    f"Cannot fit together: worker {self._carrier.rank} fits {said}, and worker {rank} {other}. Give "
                    "all the same model and columns of the same types."
                )
            if differs := difference(mine, one["description"][0].as_py()):
                raise DisagreementError(
                    f"Cannot fit together: workers {self._carrier.rank} and {rank} differ in the {differs}. Give all "
                    "of them the same GroupedTrainer."
                )
        return job

    def _folder(self, folder: Path | None, job: GroupJob, index: GroupIndex, buckets: np.ndarray) -> FitFolder | None:
        """Open the folder; the first worker makes it if it is the same one everywhere."""
        if folder is None:
            return None
        made = FitFolder(folder, job, index, buckets) if self._carrier.rank == 0 else None
        self._tables_of_all(pa.table({"made": [True]}))
        return made or FitFolder(folder, job, index, buckets)

    def _done(
        self, kept: FitFolder | None, buckets: np.ndarray, records: GroupRecords
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Find which buckets were fitted before, and take in the records of those that this worker is the first to
        have."""
        done = {} if kept is None else kept.read()
        found = np.zeros(int(buckets.max(initial=-1)) + 1, np.bool_)
        found[list(done)] = True
        mine, is_done = list[np.ndarray](), np.zeros_like(found)
        for rank, table in enumerate(self._tables_of_all(pa.table({"done": found}))):
            its = table["done"].to_numpy()
            if rank == self._carrier.rank:
                for bucket in np.flatnonzero(its & ~is_done).tolist():
                    records.put(*done[bucket])
                    mine.append(done[bucket][0])
            is_done |= its
        return is_done, mine

    def _firsts(
        self, index: GroupIndex, own: GroupIndex, buckets: np.ndarray, partition: GroupPartition
    ) -> dict[int, int]:
        """The place of this worker's first row among all rows of each group that is split, by bucket."""
        split = sorted({shard.group for shard in partition.shards})
        if not split:
            return {}
        mine = np.bincount(buckets[index.numbers_of(own.keys)], own.rows, minlength=len(partition.home))[split]
        name = self._name("rows of split groups")
        self._carrier.publish(f"{name}/{self._carrier.rank}", {"": torch.from_numpy(mine)})
        before = np.zeros(len(split))
        for rank in range(self._carrier.rank):
            before += self._carrier.move(f"{name}/{rank}").get()[""].numpy()
        return dict(zip(split, before.astype(np.int64).tolist(), strict=True))

    # -- rows ----------------------------------------------------------------------------------------------------

    def _batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        return self._table.batches(columns, *self._part)

    def _received(self, transit: RowsInTransit) -> Iterator[pa.Table]:
        """The rows of this worker, in the order of the table: those of all workers, turn by turn."""
        carrier, own = self._carrier, self._batches(transit.job.schema.names)
        name, turn, has_more = self._name("rows"), 0, True
        while has_more:
            part = next(own, None)
            parts = transit.sent(part, carrier.world)
            for rank, table in enumerate(parts):
                if rank != carrier.rank:
                    message = table_message(table, has_more=part is not None)
                    carrier.publish(f"{name}/{turn}/{carrier.rank}/{rank}", message)
            coming = [
                None if rank == carrier.rank else carrier.move(f"{name}/{turn}/{rank}/{carrier.rank}")
                for rank in range(carrier.world)
            ]
            has_more = part is not None
            for rank, future in enumerate(coming):
                if future is None:
                    yield parts[rank]
                    continue
                table, has_its = table_in(future.get(), transit.job.schema)
                has_more |= has_its
                yield table
            for rank in range(carrier.world) if turn else ():  # all have those of the turn before
                if rank != carrier.rank:
                    carrier.drop(f"{name}/{turn - 1}/{carrier.rank}/{rank}")
            turn += 1

    # -- fits ----------------------------------------------------------------------------------------------------

    def _fit_all(
        self,
        job: GroupJob,
        index: GroupIndex,
        files: BucketFiles,
        partition: GroupPartition,
        records: GroupRecords,
        progress: Progress,
    ) -> Iterator[FittedBucket]:
        """Fit this worker's groups, and those that the first worker tells the others of."""
        rank, has_come = self._carrier.rank, threading.Event()
        hops, coordinator = None, None
        splits = list[tuple[int, SummedShard[GroupRecords]]]()
        wholes = np.flatnonzero(partition.home == rank).tolist()
        if isinstance(job.model, HoppingModel):
            groups, shards = self._prepare_hops(job, index, files, partition, records)
            if rank == 0 and groups:
                coordinator = HopCoordinator(self._carrier, groups, job)
            if any(rank in one.holders for one in groups.values()):
                hops = HoppingShards(self._carrier, job, groups, shards, has_come.set, waits=not wholes)
        else:
            for bucket, holders in self._split(partition):
                hashes = index.hashes[files.buckets == bucket]
                work = job.fit_shard(files.read(bucket), hashes, holders.index(rank), len(holders))
                splits.append((bucket, SummedShard(self._carrier, f"split/{bucket}", holders, work, has_come.set)))
        groups_of, ended = np.bincount(files.buckets), 0
        total = int(groups_of[wholes].sum()) + sum(shard.holders[0] == rank for _, shard in splits)
        total += 0 if coordinator is None else len(coordinator.groups)
        while splits or wholes or hops is not None:
            has_come.clear()
            if (ready := next((one for one in splits if one[1].is_ready), None)) is not None:
                bucket, shard = ready
                shard.advance()
                if not shard.has_ended:
                    continue
                splits.remove(ready)
                if shard.holders[0] == rank:
                    ended += 1
                    yield bucket, np.flatnonzero(files.buckets == bucket), shard.result
            elif hops is not None and hops.is_ready:
                hops.advance(waits=not wholes)
                hops = None if hops.has_ended else hops
                continue
            elif wholes:
                bucket = wholes.pop(0)
                rows = files.read(bucket)
                yield bucket, rows.numbers, job.fit(rows, index.hashes[rows.numbers])
                ended += len(rows.numbers)
                if hops is not None and hops.is_idle:
                    hops.ask_again(waits=not wholes)
            elif hops is not None and hops.is_idle:
                hops.ask_again(waits=True)
                continue
            else:
                has_come.wait()
                continue
            progress(ended, total)
        if coordinator is not None:
            coordinator.join()
            for bucket in coordinator.groups:
                yield bucket, np.flatnonzero(files.buckets == bucket), coordinator.records(bucket)
                ended += 1
                progress(ended, total)

    def _split(self, partition: GroupPartition) -> list[tuple[int, list[int]]]:
        """The buckets of split groups of which this worker has rows, and all holders of each."""
        found: dict[int, list[int]] = {}
        for shard in partition.shards:
            found.setdefault(shard.group, []).append(shard.worker)
        return [(bucket, holders) for bucket, holders in found.items() if self._carrier.rank in holders]

    def _prepare_hops(
        self, job: GroupJob, index: GroupIndex, files: BucketFiles, partition: GroupPartition, records: GroupRecords
    ) -> tuple[dict[int, HopGroup], dict[int, ShardRows]]:
        """The split groups that can be trained, of all workers, and this worker's rows of them."""
        assert isinstance(job.model, HoppingModel)
        rank, shards = self._carrier.rank, dict[int, ShardRows]()
        for bucket, holders in self._split(partition):
            hashes = index.hashes[files.buckets == bucket]
            work = job.prepare_shard(files.read(bucket), hashes, holders.index(rank), len(holders))
            trained, held, status = self._run(f"prepare/{bucket}", holders, work)
            shards[bucket] = ShardRows(trained, held)
            if rank == holders[0]:
                self._carrier.publish(f"hop/status/{bucket}", {"": torch.tensor([int(status)])})
        groups: dict[int, HopGroup] = {}
        for bucket in sorted({shard.group for shard in partition.shards}):
            status = GroupStatus(int(self._carrier.move(f"hop/status/{bucket}").get()[""]))
            records.status[files.buckets == bucket] = status
            if status == GroupStatus.OK:
                mine = [shard for shard in partition.shards if shard.group == bucket]
                blocks = blocks_of(job.model, job.configs, len(mine))
                groups[bucket] = HopGroup(
                    tuple(shard.worker for shard in mine),
                    tuple(shard.rows for shard in mine),
                    tuple(map(tuple, blocks)),
                    tuple(job.model.epochs_of(job.configs[block[0]]) for block in blocks),
                )
        return groups, shards

    def _run(self, name: str, holders: Sequence[int], work: Summing[T]) -> T:
        """Run a fit whose sums come from several workers to its end."""
        has_come = threading.Event()
        shard = SummedShard(self._carrier, name, holders, work, has_come.set)
        while not shard.has_ended:
            has_come.wait()
            has_come.clear()
            while shard.is_ready and not shard.has_ended:
                shard.advance()
        return shard.result

    def _exchange(self, records: GroupRecords, mine: np.ndarray) -> None:
        """Have the records of all workers."""
        name, carrier = self._name("records"), self._carrier
        part = {key: torch.from_numpy(_narrowed(value)) for key, value in records.of(mine).items()}
        carrier.publish(f"{name}/{carrier.rank}", {"numbers": torch.from_numpy(mine), **part})
        for rank in range(carrier.world):
            if rank != carrier.rank:
                told = {key: _widened(value.numpy()) for key, value in carrier.move(f"{name}/{rank}").get().items()}
                records.put(told.pop("numbers", np.zeros(0, np.int64)), told)

    def _fit_fallback(
        self, job: GroupJob, index: GroupIndex, files: BucketFiles, partition: GroupPartition, records: GroupRecords
    ) -> None:
        """Fit one model to the rows of all workers."""
        assert isinstance(job.model, SummingModel)
        rank, world = self._carrier.rank, self._carrier.world
        held = {shard.group for shard in partition.shards if shard.worker == rank}
        mine = sorted({*np.flatnonzero(partition.home == rank).tolist(), *held})
        nothing = BucketTask.empty(len(job.features))

        def usable(bucket: int) -> BucketTask:
            return joined([task_of(job, index, files, bucket)], takes_missing=job.model.takes_missing)

        work = job.model.fit_summed(
            lambda: (usable(bucket) for bucket in mine) if mine else (nothing,),
            [job.pooled(records, index)],
        )
        found = self._run(self._name("fallback"), range(world), work)
        records.fallback = found.coefficients[0, 0]

    # -- messages ------------------------------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        """The name of the next exchange, the same on all workers."""
        self._told += 1
        return f"{self._told} {what}"

    def _tables_of_all(self, table: pa.Table) -> list[pa.Table]:
        name, carrier = self._name("tables"), self._carrier
        carrier.publish(f"{name}/{carrier.rank}", table_message(table))
        return [table_in(carrier.move(f"{name}/{rank}").get(), table.schema)[0] for rank in range(carrier.world)]


def _narrowed(values: np.ndarray) -> np.ndarray:
    """Numbers in half the bytes where that keeps them: those of nets are of float32."""
    if values.dtype != np.float64:
        return values
    with np.errstate(over="ignore"):
        half = values.astype(np.float32)
    return half if np.array_equal(half, values, equal_nan=True) else values


def _widened(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64) if values.dtype == np.float32 else values
