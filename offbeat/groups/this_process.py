"""Executors: where the groups of a table are fitted; and the one that does it in this process."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offbeat.groups.buckets import BUCKET_BYTES, BucketFiles, cut_buckets
from offbeat.groups.fit_folder import FitFolder
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.records import GroupModels, GroupRecords
from offbeat.groups.search_methods import Pooled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from offbeat.groups.fitting import BucketTask
    from offbeat.groups.group_job import GroupJob, JobMaker
    from offbeat.groups.table_input import TableInput

Progress = Callable[[int, int], None]
"""Called after each bucket with the number of groups that have ended, and of all."""


class Executor(Protocol):
    """The Protocol of where groups are fitted."""

    def fit(self, trainer: JobMaker, table: TableInput, progress: Progress, folder: Path | None) -> GroupModels:
        """Fit all groups of a table.

        Args:
            folder: of what a fit that was ended has fitted; what is fitted now is added there.
        """


@dataclass(frozen=True)
class ThisProcess:
    """Fit all groups in this process, bucket by bucket. An `Executor`.

    Args:
        bucket_bytes: of rows that are in memory together.
    """

    bucket_bytes: int = BUCKET_BYTES

    def fit(self, trainer: JobMaker, table: TableInput, progress: Progress, folder: Path | None) -> GroupModels:
        """Fit all groups of a table."""
        return fit_buckets(self.run, self.bucket_bytes, trainer, table, progress, folder)

    def run(self, job: GroupJob, index: GroupIndex, files: BucketFiles, left: Sequence[int]) -> Iterator[FittedBucket]:
        """Fit the buckets that are left, one after another."""
        for bucket in left:
            rows = files.read(bucket)
            yield bucket, rows.numbers, job.fit(rows, index.hashes[rows.numbers])


FittedBucket = tuple[int, "np.ndarray", GroupRecords]
"""The number of a bucket, the numbers of its groups, and their records."""
BucketRun = Callable[["GroupJob", GroupIndex, BucketFiles, "Sequence[int]"], "Iterator[FittedBucket]"]
"""Fits the buckets that are left, in any order."""


def fit_buckets(
    run: BucketRun,
    bucket_bytes: int,
    trainer: JobMaker,
    table: TableInput,
    progress: Progress,
    folder: Path | None,
) -> GroupModels:
    """Fit all groups of a table that this process reads.

    Args:
        bucket_bytes: of rows that are in memory together.
    """
    job = trainer.job(table.schema, trainer.classes(table.batches([trainer.target]), table.schema))
    index = GroupIndex.count(table.batches(job.by), job.by, table.schema)
    job = job.checked(index)
    records = job.records(len(index))
    with tempfile.TemporaryDirectory(prefix="offbeat-groups-") as temporary:
        files = BucketFiles(Path(temporary), index, cut_buckets(index.rows, 8 * len(job.schema), bucket_bytes))
        kept = None if folder is None else FitFolder(folder, job, index, files.buckets)
        done = {} if kept is None else kept.read()
        ended = 0
        for numbers, part in done.values():
            records.put(numbers, part)
            ended += len(numbers)
        files.write(table.batches(job.schema.names), job.schema)
        tried = None
        if isinstance(job.search, Pooled) and len(job.configs) > 1:
            tried = job.records(len(index))
            for bucket in range(files.count):
                rows = files.read(bucket)
                tried.put(rows.numbers, job.try_all(rows, index.hashes[rows.numbers]))
            job = replace(job, choice=tried.choose_pooled(index.rows))
        for bucket, numbers, made in run(job, index, files, [at for at in range(files.count) if at not in done]):
            records.put(numbers, made)
            if kept is not None:
                kept.write(bucket, numbers, records)
            ended += len(numbers)
            progress(ended, len(index))
        if tried is not None:
            records.losses, records.held_losses, records.steps = tried.losses, tried.held_losses, tried.steps
        if job.small.fallback == "global" and len(index):
            records.fallback = job.model.fit_together(
                lambda: map(functools.partial(task_of, job, index, files), range(files.count)),
                job.pooled(records, index),
            )
    return GroupModels(job.model, index, records, list(job.features), job.target, job.classes, job.tried)


def task_of(job: GroupJob, index: GroupIndex, files: BucketFiles, bucket: int) -> BucketTask:
    """Return the rows of a bucket as numbers."""
    rows = files.read(bucket)
    return job.task(rows, index.hashes[rows.numbers])
