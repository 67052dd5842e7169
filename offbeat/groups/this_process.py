"""Executors: where the groups of a table are fitted; and the one that does it in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offbeat.groups.buckets import BUCKET_BYTES, BucketFiles, cut_buckets
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.records import GroupModels, GroupRecords
from offbeat.groups.search_methods import Pooled

if TYPE_CHECKING:
    from offbeat.groups.group_job import JobMaker
    from offbeat.groups.table_input import TableInput

Progress = Callable[[int, int], None]
"""Called after each bucket with the number of groups that have ended, and of all."""


class Executor(Protocol):
    """The Protocol of where groups are fitted."""

    def fit(self, trainer: JobMaker, table: TableInput, progress: Progress) -> GroupModels:
        """Fit all groups of a table."""


@dataclass(frozen=True)
class ThisProcess:
    """Fit all groups in this process, bucket by bucket. An `Executor`.

    Args:
        bucket_bytes: of rows that are in memory together.
    """

    bucket_bytes: int = BUCKET_BYTES

    def fit(self, trainer: JobMaker, table: TableInput, progress: Progress) -> GroupModels:
        """Fit all groups of a table."""
        job = trainer.job(table.schema, trainer.classes(table.batches([trainer.target]), table.schema))
        index = GroupIndex.count(table.batches(job.by), job.by, table.schema)
        job.check(index)
        records = GroupRecords.empty(len(index), len(job.configs), job.width)
        with tempfile.TemporaryDirectory(prefix="offbeat-groups-") as folder:
            files = BucketFiles(Path(folder), index, cut_buckets(index.rows, 8 * len(job.schema), self.bucket_bytes))
            files.write(table.batches(job.schema.names), job.schema)
            ended = 0
            if isinstance(job.search, Pooled):
                for bucket in range(files.count):
                    rows = files.read(bucket)
                    records.put(rows.numbers, job.try_all(rows, index))
                records.choose_pooled(index.rows)
            for bucket in range(files.count):
                rows = files.read(bucket)
                if isinstance(job.search, Pooled):
                    found = job.fit_chosen(rows, index, records.part(rows.numbers))
                else:
                    found = job.fit(rows, index)
                records.put(rows.numbers, found)
                ended += len(rows.numbers)
                progress(ended, len(index))
            if job.small.fallback == "global" and len(index):
                records.fallback = job.model.fit_together(
                    lambda: (job.task(files.read(at), index) for at in range(files.count)), job.pooled(records, index)
                )
        return GroupModels(job.model, index, records, list(job.features), job.target, job.classes, job.tried)
