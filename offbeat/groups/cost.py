"""Forecasts of fits: how each bucket will be fitted, why, and how long it takes, by one worker or several.

    print(trainer.explain("sales/*.parquet"))

The table is read, and its groups are counted; then a few groups of some buckets are fitted and timed. What a row costs
in other buckets lies between those. The makespan of several workers is that of the fit's own partition and scheduler
on a virtual timeline, without what travels between them.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offbeat.groups.buckets import BUCKET_BYTES, BucketFiles, cut_buckets
from offbeat.groups.fitting import similar_sizes
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.hopping import HoppingModel
from offbeat.groups.overrides import GroupOverrides
from offbeat.groups.search_methods import Pooled
from offbeat.groups.unit_scheduler import TrainingUnit, UnitScheduler
from offbeat.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from offbeat.groups.buckets import GroupRows
    from offbeat.groups.group_job import GroupJob, JobMaker
    from offbeat.groups.table_input import TableInput

_PILOT_BUCKETS, _PILOT_GROUPS, _PILOT_ROWS = 6, 128, 1 << 15
_SHOWN = 12


@dataclass(frozen=True)
class BucketForecast:
    """The fit of one bucket.

    Args:
        how: "batched", "one by one" or "split over n workers"; `why` in words.
        groups, rows: how many there are.
        seconds: of one worker.
    """

    how: str
    why: str
    groups: int
    rows: int
    seconds: float


@dataclass(frozen=True)
class WorkersForecast:
    """The fit by so many workers.

    Args:
        seconds: until the last one ends.
        idle_share: of all their time.
    """

    workers: int
    seconds: float
    idle_share: float


@dataclass(frozen=True)
class FitForecast:
    """The forecast of a fit; printed, it is two tables.

    Args:
        configs: tried in each group.
        reading_s: of counting groups and sorting rows into buckets, by one worker.
        buckets: the largest groups first.
        workers: from one on.
    """

    groups: int
    rows: int
    configs: int
    reading_s: float
    buckets: tuple[BucketForecast, ...]
    workers: tuple[WorkersForecast, ...]

    @property
    def seconds(self) -> float:
        """Return the time in one process."""
        return self.reading_s + sum(bucket.seconds for bucket in self.buckets)

    def __str__(self) -> str:
        lines = [
            f"{self.groups:,} groups, {self.rows:,} rows, configurations: {self.configs}. {self.seconds:.3g} s in this "
            f"process, {self.reading_s:.3g} s of them to count groups and sort rows",
            "",
            f"{'bucket':>6} {'groups':>9} {'rows':>12} {'seconds':>8}  how, and why",
        ]
        for number, one in enumerate(self.buckets[:_SHOWN]):
            lines.append(f"{number:>6} {one.groups:>9,} {one.rows:>12,} {one.seconds:>8.2g}  {one.how}: {one.why}")
        if rest := self.buckets[_SHOWN:]:
            rows, seconds = sum(one.rows for one in rest), sum(one.seconds for one in rest)
            lines.append(f"{'others':>6} {sum(one.groups for one in rest):>9,} {rows:>12,} {seconds:>8.2g}")
        lines += ["", f"{'workers':>7} {'seconds':>8} {'idle':>6}"]
        lines += [f"{one.workers:>7} {one.seconds:>8.3g} {one.idle_share:>6.0%}" for one in self.workers]
        return "\n".join(lines)


def forecast(maker: JobMaker, table: TableInput, workers: int, bucket_bytes: int = BUCKET_BYTES) -> FitForecast:
    """Return the forecast of a fit.

    Args:
        workers: the most that are asked about.
        bucket_bytes: as of `ThisProcess`.
    """
    begin = time.perf_counter()
    job = maker.job(table.schema, maker.classes(table.batches([maker.target]), table.schema))
    index = GroupIndex.count(table.batches(job.by), job.by, table.schema)
    job = job.checked(index)
    counting_s = time.perf_counter() - begin
    buckets = cut_buckets(index.rows, 8 * len(job.schema), bucket_bytes)
    rows, groups = np.bincount(buckets, index.rows).astype(np.int64), np.bincount(buckets)
    pilot = FitPilot(job, table, index, buckets)
    seconds = pilot.seconds(buckets)
    sorting_s = pilot.reading_s + pilot.writing_s_a_row * int(rows.sum())
    made, of_workers = [], []
    for count in range(1, workers + 1):
        shares = _shares(job, rows, groups, count)
        of_workers.append(_simulated(job, shares, seconds, counting_s + sorting_s, count))
    for bucket, second in enumerate(seconds.tolist()):
        how, why = "batched", f"{groups[bucket]:,} groups of similar sizes share each step"
        holders = len(shares[bucket])
        if pilot.obstacle:
            how, why = "one by one", pilot.obstacle
        elif holders > 1:
            how, why = f"split over {holders} workers", f"with {workers} workers, its one group is more than a share"
        elif groups[bucket] == 1:
            why = "one large group, all configurations in each step"
        made.append(BucketForecast(how, why, int(groups[bucket]), int(rows[bucket]), second))
    return FitForecast(
        len(index), int(rows.sum()), len(job.configs), counting_s + sorting_s, tuple(made), tuple(of_workers)
    )


class FitPilot:
    """A few groups of a table, fitted and timed.

    Attributes:
        obstacle: why models are trained one by one; empty if they are not.
        reading_s: of reading the table once more, and finding the group of each row.
        writing_s_a_row: of sorting rows into buckets.
    """

    def __init__(self, job: GroupJob, table: TableInput, index: GroupIndex, buckets: np.ndarray) -> None:
        self._job, self._index = replace(job, overrides=GroupOverrides(), fixed=()), index
        self.obstacle, self.reading_s = "", 0.0
        self._fixed, self._slopes = np.zeros(0), np.zeros(0)
        count = int(buckets.max()) + 1 if len(buckets) else 0
        self._tried = np.unique(np.linspace(0, count - 1, min(count, _PILOT_BUCKETS)).round().astype(np.int64))
        picked = [self._picked(np.flatnonzero(buckets == bucket)) for bucket in self._tried]
        numbers = np.sort(np.concatenate(picked)) if picked else np.zeros(0, np.int64)
        mine = GroupIndex(index.keys.take(numbers), index.rows[numbers])
        if job.is_shrunk:  # how long it takes hardly depends on the parents
            self._job = replace(self._job, parents=np.zeros((len(mine), job.width)))
        with tempfile.TemporaryDirectory(prefix="offbeat-groups-") as folder:
            files = BucketFiles(Path(folder), mine, np.searchsorted(self._tried, buckets[numbers]))
            begin = time.perf_counter()
            files.write(self._parts(table, numbers), job.schema)
            total = max(1, int(mine.rows.sum()))
            self.writing_s_a_row = max(0.0, time.perf_counter() - begin - self.reading_s) / total
            self._measure(files, mine)

    def seconds(self, buckets: np.ndarray) -> np.ndarray:
        """Return how long each bucket takes.

        Args:
            buckets: (groups,), the bucket of each.
        """
        count = int(buckets.max()) + 1 if len(buckets) else 0
        order = np.argsort(buckets, kind="stable")
        sizes = np.split(self._index.rows[order], np.searchsorted(buckets[order], np.arange(1, count)))
        made = np.zeros(count)
        for bucket in range(count):
            fixed, slope = (np.interp(bucket, self._tried, one) for one in (self._fixed, self._slopes))
            made[bucket] = fixed * _parts(sizes[bucket]) + slope * sizes[bucket].sum()
        return made

    def _picked(self, numbers: np.ndarray) -> np.ndarray:
        """Groups of a bucket, of all its sizes."""
        order = numbers[np.argsort(self._index.rows[numbers], kind="stable")]
        mean = max(1.0, float(self._index.rows[numbers].mean()))
        count = min(len(order), max(2, min(_PILOT_GROUPS, int(_PILOT_ROWS / mean))))
        return order[np.unique(np.linspace(0, len(order) - 1, count).round().astype(np.int64))]

    def _parts(self, table: TableInput, numbers: np.ndarray) -> Iterator[pa.Table]:
        """The rows of some groups, out of all."""
        is_mine = np.zeros(len(self._index) + 1, np.bool_)
        is_mine[numbers] = True
        parts = table.batches(self._job.schema.names)
        while True:
            begin = time.perf_counter()
            if (part := next(parts, None)) is None:
                return
            made = part.take(np.flatnonzero(is_mine[self._index.numbers_of(part)]))
            self.reading_s += time.perf_counter() - begin
            yield made

    def _measure(self, files: BucketFiles, index: GroupIndex) -> None:
        """Fit a quarter of the groups, and all of them: what is fixed, and what each row costs."""
        fixed, slopes = [], []
        passes = 2 if isinstance(self._job.search, Pooled) else 1
        for bucket in range(files.count):
            whole = files.read(bucket).some(1, _PILOT_ROWS)
            quarter = whole.some(4, max(1, _PILOT_ROWS // 4))
            self._timed(quarter, index)  # what is needed once is no cost of a bucket
            small_s = min(self._timed(quarter, index) for _ in range(2))
            whole_s = min(self._timed(whole, index) for _ in range(2))
            small_parts, parts = (_parts(np.diff(one.offsets)) for one in (quarter, whole))
            small_rows, most = (max(1, int(one.offsets[-1])) for one in (quarter, whole))
            # Each part of similar sizes has a cost of its own, beside that of its rows.
            ratio = parts / small_parts
            more = most - ratio * small_rows
            slope = (whole_s - ratio * small_s) / more if more > 0 else 0.0
            slope = float(np.clip(slope, 0.2 * whole_s / most, whole_s / most))
            slopes.append(passes * slope)
            fixed.append(passes * (whole_s - slope * most) / parts)
        self._fixed, self._slopes = np.array(fixed), np.array(slopes)

    def _timed(self, rows: GroupRows, index: GroupIndex) -> float:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            begin = time.perf_counter()
            self._job.of(rows.numbers).fit(rows, index.hashes[rows.numbers])
            seconds = time.perf_counter() - begin
        for one in told:
            if "one by one" in str(one.message):
                self.obstacle = str(one.message).partition(": ")[2].rstrip(".")
        return seconds


def _parts(counts: np.ndarray) -> int:
    """Return the number of parts of similar sizes in which groups are fitted."""
    return max(1, sum(1 for _ in similar_sizes(counts, counts > 0, 1)))


def _shares(job: GroupJob, rows: np.ndarray, groups: np.ndarray, workers: int) -> list[dict[int, float]]:
    """Return the share of rows that each worker has of each bucket, as `Ranks` distributes them."""
    partition = job.distribute(rows, groups, workers)
    made: list[dict[int, float]] = [{int(home): 1.0} if home >= 0 else {} for home in partition.home]
    for shard in partition.shards:
        made[shard.group][shard.worker] = shard.rows / int(rows[shard.group])
    return made


def _simulated(
    job: GroupJob, shares: list[dict[int, float]], seconds: np.ndarray, reading_s: float, workers: int
) -> WorkersForecast:
    """Run the units of a fit on a virtual timeline."""
    costs, holders = dict[TrainingUnit, float](), dict[tuple[int, int], int]()
    for bucket, mine in enumerate(shares):
        for place, (worker, share) in enumerate(mine.items()):
            holders[bucket, place] = worker
            if isinstance(job.model, HoppingModel) and len(mine) > 1:  # a configuration is at one shard at a time
                for config in range(len(job.configs)):
                    unit = TrainingUnit(bucket, config, place)
                    costs[unit] = float(seconds[bucket]) * share / len(job.configs)
            else:  # parts of a sum are computed at the same time
                costs[TrainingUnit(bucket, place, place)] = float(seconds[bucket]) * share
    scheduler, timeline = UnitScheduler(costs, holders), Timeline()
    running = dict[int, TrainingUnit]()

    def begin() -> None:
        for worker in range(workers):
            if worker not in running and (unit := scheduler.next(worker)) is not None:
                running[worker] = unit
                timeline.after(costs[unit], lambda worker=worker, unit=unit: end(worker, unit))  # type: ignore[misc]

    def end(worker: int, unit: TrainingUnit) -> None:
        del running[worker]
        scheduler.done(worker, unit)
        begin()

    begin()
    timeline.run()
    total = reading_s / workers + timeline.now_s
    busy = reading_s + sum(costs.values())
    return WorkersForecast(workers, total, max(0.0, 1 - busy / (workers * total)) if total else 0.0)
