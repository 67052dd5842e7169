"""Executors: where the groups of a table are fitted; and the one that does it in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offbeat.groups.buckets import BUCKET_BYTES, BucketFiles, cut_buckets
from offbeat.groups.fit_folder import FitFolder
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.parents import ParentModels, config_of_all
from offbeat.groups.records import GroupModels, GroupRecords, ParentLevel
from offbeat.groups.search_methods import Pooled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from offbeat.groups.buckets import GroupRows
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
            yield bucket, rows.numbers, job.of(rows.numbers).fit(rows, index.hashes[rows.numbers])


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
    levels: list[ParentLevel] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-groups-") as temporary:
        fit = _LevelFit(run, bucket_bytes, table, Path(temporary) / "groups", job, index, folder)
        of_all = fit.of_all(config_of_all(job, fit.tasks)) if job.is_shrunk and len(index) else None
        for columns in job.parent_columns:
            place, kept = Path(temporary) / f"parents {columns}", folder and folder / f"parents {columns}"
            above = _LevelFit(run, bucket_bytes, table, place, job.of_parents(columns), index.prefix(columns), kept)
            found = above.run(lambda ended, groups: None, levels, of_all)
            levels.append(ParentLevel(above.index, found.coefficients))
        records = fit.run(progress, levels, of_all)
        if of_all is not None:
            records.fallback = of_all
        elif job.small.has_global and len(index):
            records.fallback = fit.of_all(job.pooled(records, index))
    return GroupModels(job.model, index, records, list(job.features), job.target, job.classes, job.tried, tuple(levels))


class _LevelFit:
    """The fit of all groups, or of the parents on one level.

    Args:
        place: for the files of buckets.
        folder: as of `Executor.fit`.
    """

    def __init__(
        self,
        run: BucketRun,
        bucket_bytes: int,
        table: TableInput,
        place: Path,
        job: GroupJob,
        index: GroupIndex,
        folder: Path | None,
    ) -> None:
        place.mkdir()
        self._run, self._job, self.index = run, job, index
        self._files = BucketFiles(place, index, cut_buckets(index.rows, 8 * len(job.schema), bucket_bytes))
        self._kept = None if folder is None else FitFolder(folder, job, index, self._files.buckets)
        self._files.write(table.batches(job.schema.names), job.schema)

    def run(self, progress: Progress, levels: Sequence[ParentLevel], of_all: np.ndarray | None) -> GroupRecords:
        """Fit the buckets that the folder does not have.

        Args:
            levels: above these groups.
            of_all: (width,), the model of all rows; None if nothing is shrunk toward parents.
        """
        job, index, files = self._job, self.index, self._files
        if of_all is not None:
            above = ParentModels(tuple(levels), of_all)
            job = replace(job, parents=above.stacked[above.places_of(index.keys)])
        records = job.records(len(index))
        done = {} if self._kept is None else self._kept.read()
        ended = 0
        for numbers, part in done.values():
            records.put(numbers, part)
            ended += len(numbers)
        tried = None
        if isinstance(job.search, Pooled) and len(job.configs) > 1:
            tried = job.records(len(index))
            for bucket in range(files.count):
                rows = files.read(bucket)
                tried.put(rows.numbers, job.of(rows.numbers).try_all(rows, index.hashes[rows.numbers]))
            job = replace(job, choice=tried.best_of_all(index.rows))
        for bucket, numbers, made in self._run(job, index, files, [at for at in range(files.count) if at not in done]):
            records.put(numbers, made)
            if self._kept is not None:
                self._kept.write(bucket, numbers, records)
            ended += len(numbers)
            progress(ended, len(index))
        if tried is not None:
            records.losses, records.held_losses, records.steps = tried.losses, tried.held_losses, tried.steps
        return records

    def tasks(self) -> Iterator[tuple[GroupRows, BucketTask]]:
        """Read the rows of each bucket, and the same as numbers."""
        for bucket in range(self._files.count):
            rows = self._files.read(bucket)
            yield rows, self._job.task(rows, self.index.hashes[rows.numbers])

    def of_all(self, config: Any) -> np.ndarray:
        """Fit one model to all rows."""
        return self._job.model.fit_together(lambda: (task for _, task in self.tasks()), config)


def task_of(job: GroupJob, index: GroupIndex, files: BucketFiles, bucket: int) -> BucketTask:
    """Return the rows of a bucket as numbers."""
    rows = files.read(bucket)
    return job.task(rows, index.hashes[rows.numbers])
