"""Rows on their way to the workers that fit their groups."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from offbeat.groups.buckets import BucketFiles
    from offbeat.groups.group_index import GroupIndex
    from offbeat.groups.group_job import GroupJob
    from offbeat.groups.partition import GroupPartition


@dataclass
class RowsInTransit:
    """The rows of each worker.

    Args:
        is_left_out: (buckets,), of which no row is sent.
        firsts: by bucket of a split group, the place among all rows of that group of the next one read here.
    """

    job: GroupJob
    index: GroupIndex
    files: BucketFiles
    partition: GroupPartition
    is_left_out: np.ndarray
    firsts: dict[int, int]

    def sent(self, part: pa.Table | None, workers: int) -> list[pa.Table]:
        """Return what each worker gets of a part of the table; of None nothing."""
        if part is None:
            return [self.job.schema.empty_table()] * workers
        buckets = self.files.buckets[self.index.numbers_of(part)]
        owners = self.partition.home[buckets]  # a copy
        for bucket, first in self.firsts.items():
            which = np.flatnonzero(buckets == bucket)
            shards = [shard for shard in self.partition.shards if shard.group == bucket]
            places = np.searchsorted([shard.end for shard in shards], first + np.arange(len(which)), side="right")
            owners[which] = np.array([shard.worker for shard in shards])[places]
            self.firsts[bucket] = first + len(which)
        owners[self.is_left_out[buckets]] = workers  # nobody
        order = np.argsort(owners, kind="stable")
        ends = np.searchsorted(owners[order], np.arange(workers + 1))
        moved = part.take(pa.array(order))
        return [moved.slice(begin, end - begin) for begin, end in itertools.pairwise(ends.tolist())]
