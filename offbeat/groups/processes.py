"""A fit by processes of this machine, each of which maps the buckets that it fits.

    GroupedTrainer(Net(...), by="store", target="sold", executor=Processes(8)).fit("sales/*.parquet")

They are fresh interpreters, which takes two seconds: for fits that take longer. The largest buckets come first. All
share the pages of the files, so no group has to be split.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.groups.buckets import BUCKET_BYTES, read_bucket
from offbeat.groups.fitting import GroupStatus
from offbeat.groups.table_input import GroupDataError
from offbeat.groups.this_process import fit_buckets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from offbeat.groups.buckets import BucketFiles
    from offbeat.groups.group_index import GroupIndex
    from offbeat.groups.group_job import GroupJob, JobMaker
    from offbeat.groups.records import GroupModels, GroupRecords
    from offbeat.groups.table_input import TableInput
    from offbeat.groups.this_process import FittedBucket, Progress

_log = logging.getLogger("offbeat")


@dataclass(frozen=True)
class Processes:
    """Fit groups by processes of this machine. An `Executor`.

    A process that is killed, as for want of memory, is replaced, and the buckets that were not done are fitted again;
    where one kills its process a second time, by itself, its halves are tried, and at last a single group that does is
    a row with the status `killed`.

    Args:
        count: of processes; None for the processors that this process may use.
        bucket_bytes: of rows that a process has in memory together.
    """

    count: int | None = None
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.count is not None and (type(self.count) is not int or self.count < 1):
            raise GroupDataError(f"Cannot fit by {self.count!r} processes: name a number of 1 or more.")

    def fit(self, trainer: JobMaker, table: TableInput, progress: Progress, folder: Path | None) -> GroupModels:
        """Fit all groups of a table."""
        return fit_buckets(self.run, self.bucket_bytes, trainer, table, progress, folder)

    def run(self, job: GroupJob, index: GroupIndex, files: BucketFiles, left: Sequence[int]) -> Iterator[FittedBucket]:
        """Fit the buckets that are left.

        Raises:
            GroupDataError: if loky is missing.
        """
        waiting, count = list(left), self.count or len(os.sched_getaffinity(0))
        for bucket, made in self._together(job, index, files, waiting, count):
            waiting.remove(bucket)
            yield bucket, *made
        if waiting:
            _log.warning("A process that fits groups was killed: %d buckets are fitted again.", len(waiting))
        for bucket, made in self._together(job, index, files, list(waiting), count):
            waiting.remove(bucket)
            yield bucket, *made
        for bucket in waiting:
            yield bucket, *self._cautiously(job, index, files, bucket)

    def _together(
        self, job: GroupJob, index: GroupIndex, files: BucketFiles, buckets: Sequence[int], count: int
    ) -> Iterator[tuple[int, tuple[np.ndarray, GroupRecords]]]:
        """Fit buckets, until a process is killed."""
        if not buckets:
            return
        executor_of, killed = _loky()
        with executor_of(max_workers=min(count, len(buckets)), initializer=_one_thread) as executor:
            tasks = {
                executor.submit(_fit, job.of(numbers), index.hashes[numbers], files.path(bucket)): bucket
                for bucket in buckets
                for numbers in (np.flatnonzero(files.buckets == bucket),)
            }
            try:
                for task in as_completed(tasks):
                    yield tasks[task], task.result()
            except killed:
                return

    def _cautiously(
        self, job: GroupJob, index: GroupIndex, files: BucketFiles, bucket: int
    ) -> tuple[np.ndarray, GroupRecords]:
        """Fit a bucket in a process of its own; in halves where that is killed, down to single groups."""
        numbers = np.flatnonzero(files.buckets == bucket)
        records = job.records(len(numbers))
        executor_of, killed = _loky()
        parts, executor = [np.arange(len(numbers))], None
        with ExitStack() as executors:
            while parts:
                which = parts.pop()
                if executor is None:
                    executor = executors.enter_context(executor_of(max_workers=1, initializer=_one_thread))
                try:
                    task = executor.submit(
                        _fit, job.of(numbers[which]), index.hashes[numbers], files.path(bucket), which
                    )
                    records.put(which, task.result()[1])
                except killed:
                    executor = None
                    if len(which) == 1:
                        records.status[which] = GroupStatus.KILLED
                    else:
                        parts += np.array_split(which, 2)
        return numbers, records


def _fit(
    job: GroupJob, hashes: np.ndarray, path: Path, which: np.ndarray | None = None
) -> tuple[np.ndarray, GroupRecords]:
    """Fit a bucket, or some of its groups, in another process."""
    rows = read_bucket(path)
    if which is not None:
        rows, hashes = rows.groups(which), hashes[which]
    return rows.numbers, job.fit(rows, hashes)


def _one_thread() -> None:
    """Two threads on small matrices are slower than one, and here is a process for each processor."""
    import torch

    torch.set_num_threads(1)


def _loky() -> tuple[Any, type[Exception]]:
    try:
        from loky import ProcessPoolExecutor
        from loky.process_executor import BrokenProcessPool
    except ModuleNotFoundError as error:
        raise GroupDataError("Cannot fit by processes: loky is missing. `pip install 'offbeat[groups]'`.") from error
    return ProcessPoolExecutor, BrokenProcessPool
