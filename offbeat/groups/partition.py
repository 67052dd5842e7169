"""The distribution of groups and their rows to workers (Li and Kumar, PVLDB 14(11), 2021).

Wrap-around: groups follow each other, and each worker takes as many rows as it may. So at most `workers - 1` groups are
split, each into as few shards as possible, and nothing is copied. The paper gives a worker room for the larger of an
equal share and the largest group; with several configurations of a group, which may be at different shards at the same
time, an equal share is enough as long as a group has no more shards than configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, order=True)
class GroupShard:
    """Rows of a group that one worker holds.

    Args:
        group, worker: their numbers.
        begin, end: of the group's rows.
    """

    group: int
    worker: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """Return how many these are."""
        return self.end - self.begin


@dataclass(frozen=True)
class GroupPartition:
    """The workers of all groups.

    Args:
        capacity: rows that a worker was to take.
        home: (groups,), the worker of each group that is whole; -1 where one is split.
        shards: of those that are split, by group and then by rows.
    """

    capacity: int
    home: np.ndarray
    shards: tuple[GroupShard, ...]

    def loads(self, rows: np.ndarray, workers: int) -> np.ndarray:
        """Return the rows that each worker has.

        Args:
            rows: (groups,), of each.
        """
        whole = self.home >= 0
        made = np.bincount(self.home[whole], rows[whole], minlength=workers)
        for shard in self.shards:
            made[shard.worker] += shard.rows
        return made.astype(np.int64)


MOST_IMBALANCE = 1.15
"""The load of the busiest worker, as a multiple of the mean, up to which no group is split to lower it."""


def distribute(rows: np.ndarray, workers: int, configs: int, indivisible: np.ndarray) -> GroupPartition:
    """Distribute groups whole where that balances, and by `wrap_around` where it does not.

    A split costs what travels, and configurations of a group that are trained together where it is whole are parted.

    Args:
        rows: (groups,), of each.
        workers, configs: how many there are.
        indivisible: (groups,), which of them are not to be split.
    """
    home = np.zeros(len(rows), np.int64)
    loads = [(0, worker) for worker in range(workers)]
    for group in np.lexsort((np.arange(len(rows)), -rows)).tolist():
        load, worker = heappop(loads)
        home[group] = worker
        heappush(loads, (load + int(rows[group]), worker))
    if max(loads)[0] <= MOST_IMBALANCE * int(rows.sum()) / workers:
        return GroupPartition(max(1, max(loads)[0]), home, ())
    return wrap_around(rows, workers, configs, indivisible=indivisible)


def wrap_around(
    rows: np.ndarray,
    workers: int,
    configs: int,
    *,
    batch: int = 1,
    capacity: int = 0,
    indivisible: np.ndarray | None = None,
) -> GroupPartition:
    """Distribute groups, the largest first.

    Args:
        rows: (groups,), of each.
        workers, configs: how many there are.
        batch: a shard's end is a multiple of it, so that no mini-batch is in two shards.
        capacity: of a worker, in rows; 0 for max(n / p, max n_i / s), which no partition with less idle time has.
        indivisible: (groups,), which of them are not to be split: one that two workers would share is with the worker
            that would have its middle.
    """
    order = np.lexsort((np.arange(len(rows)), -rows))
    total, largest = int(rows.sum()), int(rows.max(initial=0))
    # Twice the same rows of a shard: a group may not have more shards than configurations.
    room = max(1, capacity or max(-(-total // workers), -(-largest // configs)))
    ends = np.cumsum(rows[order])
    begins = ends - rows[order]
    first = np.minimum(begins // room, workers - 1)
    last = np.minimum(np.maximum(ends - 1, begins) // room, workers - 1)
    if indivisible is not None:
        middle = np.minimum((begins + ends) // 2 // room, workers - 1)
        first, last = (np.where(indivisible[order], middle, one) for one in (first, last))
    home = np.full(len(rows), -1, np.int64)
    is_whole = first == last
    home[order[is_whole]] = first[is_whole]
    shards = []
    for at in np.flatnonzero(~is_whole):
        group, begin = int(order[at]), 0
        for worker in range(int(first[at]), int(last[at]) + 1):
            end = int(rows[group])
            if worker < last[at]:
                end = min(end, round(((worker + 1) * room - int(begins[at])) / batch) * batch)
            if end > begin:
                shards.append(GroupShard(group, worker, begin, end))
                begin = end
        if shards[-1].rows == rows[group]:  # rounding has made it whole
            home[group] = shards.pop().worker
    return GroupPartition(room, home, tuple(sorted(shards, key=lambda shard: (shard.group, shard.begin))))


def constrained(rows: np.ndarray, workers: int) -> GroupPartition:
    """Distribute groups, each split into equal shards or not at all, as boosted trees like it.

    A group gets as many shards as it has equal shares of all rows, rounded, but one at least; they go to the workers
    that have least, and to different ones.

    Args:
        rows: (groups,), of each.
        workers: how many there are.
    """
    room = max(1, -(-int(rows.sum()) // workers))
    home, shards = np.full(len(rows), -1, np.int64), []
    loads = [(0, worker) for worker in range(workers)]
    heapify(loads)
    for group in np.lexsort((np.arange(len(rows)), -rows)).tolist():
        count = min(workers, max(1, round(int(rows[group]) / room)))
        taken = [heappop(loads) for _ in range(count)]
        cuts = [int(rows[group]) * at // count for at in range(count + 1)]
        for (load, worker), begin, end in zip(taken, cuts[:-1], cuts[1:], strict=True):
            heappush(loads, (load + end - begin, worker))
            if count == 1:
                home[group] = worker
            else:
                shards.append(GroupShard(group, worker, begin, end))
    return GroupPartition(room, home, tuple(sorted(shards, key=lambda shard: (shard.group, shard.begin))))


def latin_rotation(configs: int, workers: Sequence[int], turn: int) -> dict[int, list[int]]:
    """Return which configurations each holder of a split group trains in one turn, of as many as there are holders.

    In each turn a configuration is at one holder, and after all turns it has been at every one once, however many
    configurations and holders there are.

    Args:
        configs: how many there are.
        workers: the holders.
        turn: from 0.
    """
    count = len(workers)
    return {
        worker: [config for config in range(configs) if (config + turn) % count == place]
        for place, worker in enumerate(workers)
    }
