"""Workload: one of four hosts that fit groups together. Run by benchmarks/groups_scheduling.py.

    python group_hosts.py WORK

WORK is a `GroupWork` in JSON. All systems cut the same buckets (a large group, or small ones together) and train them
by the same code; they differ in who has which rows. `Ranks()` reads a quarter of the files on each host, and rows
travel over the links. GTP gives whole buckets to hosts, the longest first; each host reads all files, which are on the
one disk of this machine, and keeps its own rows. MTP gives away (bucket, configuration), the longest first, whenever a
host is free; each host writes all rows to bucket files of its own, and has the last buckets in memory.

Each host prints one line of JSON, a `HostUse`. It is idle while its main thread neither runs nor waits for a core.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import nn

from offbeat.groups import AdamW, GroupedTrainer, Logistic, Net, Ranks, ThisProcess
from offbeat.groups.buckets import BucketFiles, cut_buckets
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.hopping import HoppingModel
from offbeat.groups.partition import wrap_around
from offbeat.groups.records import GroupRecords
from offbeat.groups.search import Grid
from offbeat.groups.summing import run_alone
from offbeat.groups.table_input import open_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

    from offbeat.groups.fitting import BucketTask
    from offbeat.groups.group_job import GroupJob

RANKS, GTP, MTP = "Ranks()", "GTP", "MTP"
RATES = (3e-3, 1e-3, 3e-4, 1e-4)
PENALTIES = (0.1, 1.0, 10.0, 100.0)


class GroupWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work of all hosts.

    Args:
        files: a pattern of Parquet files.
        model: "net" or "logistic", in four configurations.
        hidden: units of the net's one hidden layer.
        bucket_bytes: as of `Ranks`.
    """

    system: str
    files: str
    model: str
    hidden: int
    epochs: int
    bucket_bytes: int


class HostUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resources that a host has used.

    Args:
        wall_s: until all hosts have ended.
        sent_bytes, packets: by the counters of its interface.
        peak_bytes: of resident memory above that of the idle process.
        loss: the sum over its groups' rows of the mean loss of those held out, by the chosen configuration.
        rows: of its groups.
    """

    rank: int
    wall_s: float
    cpu_s: float
    idle_s: float
    sent_bytes: int
    packets: int
    peak_bytes: int
    loss: float
    rows: int


def trainer_of(work: GroupWork, executor: Ranks | ThisProcess) -> GroupedTrainer:
    """Return the trainer of all systems."""

    def make(features: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, work.hidden), nn.ReLU(), nn.Linear(work.hidden, 1))

    if work.model == "net":
        optimizer = AdamW(lr=Grid(*RATES))
        model: Net | Logistic = Net(make, optimizer=optimizer, loss="log", batch=128, epochs=work.epochs)
    else:
        model = Logistic(l2=Grid(*PENALTIES))
    return GroupedTrainer(model, by="group", target="y", executor=executor)


class WholeBuckets:
    """The buckets of a table, as `Ranks` cuts them, for systems in which rows do not travel."""

    def __init__(self, work: GroupWork, folder: Path) -> None:
        trainer, self._table = trainer_of(work, ThisProcess()), open_table(work.files)
        schema = self._table.schema
        self.job: GroupJob = trainer.job(schema, trainer.classes(self._table.batches([trainer.target]), schema))
        self.index = GroupIndex.count(self._table.batches(self.job.by), self.job.by, schema)
        self.buckets = cut_buckets(self.index.rows, 8 * len(self.job.schema), work.bucket_bytes)
        self.rows = np.bincount(self.buckets, self.index.rows).astype(np.int64)
        self.longest_first: list[int] = np.argsort(-self.rows, kind="stable").tolist()
        self._files = BucketFiles(folder, self.index, self.buckets)
        self.records = GroupRecords.empty(len(self.index), len(self.job.configs), self.job.width)
        # A net that hops is not fitted anew to the rows that were held out, so it is not here either.
        world, hops = dist.get_world_size(), isinstance(self.job.model, HoppingModel)
        cut = wrap_around(
            self.rows, world, len(self.job.configs) if hops else world, indivisible=np.bincount(self.buckets) > 1
        )
        self._is_final = (cut.home < 0) & hops

    def write(self, kept: np.ndarray) -> None:
        """Read the table, and write the rows of some buckets to files.

        Args:
            kept: (buckets,), whether they are kept.
        """

        def parts() -> Iterator[pa.Table]:
            for part in self._table.batches(self.job.schema.names):
                yield part.filter(pa.array(kept[self.buckets[self.index.numbers_of(part)]]))

        self._files.write(parts(), self.job.schema, int(self.rows[kept].sum()))

    def read(self, bucket: int) -> tuple[BucketTask, BucketTask]:
        """Return the rows of a bucket that models are trained on, and those that are held out."""
        rows = self._files.read(bucket)
        trained, held, _ = run_alone(self.job.prepare_shard(rows, self.index.hashes[rows.numbers], 0, 1))
        return trained, held

    def fit(self, bucket: int) -> None:
        """Fit a bucket in all configurations."""
        if not self._is_final[bucket]:
            rows = self._files.read(bucket)
            self.records.put(rows.numbers, self.job.fit(rows, self.index.hashes[rows.numbers]))
            return
        trained, held = self.read(bucket)
        found = self.job.model.fit(trained, self.job.configs)
        losses = [held.means(one) for one in self.job.losses(held, found.coefficients)]
        self.choose(bucket, np.stack(losses, 1))

    def fit_one(self, rows: tuple[BucketTask, BucketTask], config: int) -> np.ndarray:
        """Return (groups,): the mean loss of rows that were held out, in one configuration."""
        trained, held = rows
        found = self.job.model.fit(trained, [self.job.configs[config]])
        return held.means(next(self.job.losses(held, found.coefficients)))

    def choose(self, bucket: int, losses: np.ndarray) -> None:
        """Choose a configuration for each group of a bucket, and fit it to all rows.

        Args:
            losses: (groups, configs).
        """
        numbers = np.flatnonzero(self.buckets == bucket)
        self.records.held_losses[numbers] = losses
        chosen = np.nan_to_num(losses, nan=np.inf).argmin(1)
        self.records.chosen[numbers] = chosen
        if self._is_final[bucket]:
            return
        rows = self._files.read(bucket)
        task = self.job.task(rows, self.index.hashes[rows.numbers])
        for at in np.unique(chosen):
            which = np.flatnonzero(chosen == at)
            self.records.coefficients[numbers[which]] = self.job.model.fit(
                task.groups(which), [self.job.configs[at]]
            ).coefficients[:, 0]


def by_groups(work: GroupWork, folder: Path) -> tuple[GroupRecords, GroupIndex]:
    """Fit whole buckets, each on the host that has least when its turn comes."""
    whole = WholeBuckets(work, folder)
    home, loads = np.zeros(len(whole.rows), np.int64), np.zeros(dist.get_world_size(), np.int64)
    for bucket in whole.longest_first:
        home[bucket] = loads.argmin()
        loads[home[bucket]] += whole.rows[bucket]
    whole.write(home == dist.get_rank())
    for bucket in whole.longest_first:
        if home[bucket] == dist.get_rank():
            whole.fit(bucket)
    return whole.records, whole.index


def by_models(work: GroupWork, folder: Path, store: Store) -> tuple[GroupRecords, GroupIndex]:
    """Fit (bucket, configuration) wherever a host is free; whoever ends a bucket chooses."""
    whole = WholeBuckets(work, folder)
    whole.write(np.ones(len(whole.rows), np.bool_))
    configs = len(whole.job.configs)
    tasks = [(bucket, config) for bucket in whole.longest_first for config in range(configs)]
    memory: OrderedDict[int, tuple[BucketTask, BucketTask]] = OrderedDict()
    most = int(whole.rows.sum()) // 2
    while (number := store.add("task", 1) - 1) < len(tasks):
        bucket, config = tasks[number]
        if bucket not in memory:
            while memory and sum(whole.rows[one] for one in memory) + whole.rows[bucket] > most:
                memory.popitem(last=False)
            memory[bucket] = whole.read(bucket)
        memory.move_to_end(bucket)
        losses = whole.fit_one(memory[bucket], config).tobytes()
        store.set(f"loss/{bucket}/{config}", losses)  # type: ignore[arg-type]  # it takes bytes
        if store.add(f"ended/{bucket}", 1) == configs:
            told = [np.frombuffer(store.get(f"loss/{bucket}/{one}")) for one in range(configs)]
            whole.choose(bucket, np.stack(told, 1))
    return whole.records, whole.index


def _counters() -> tuple[int, int]:
    """The bytes and packets that this host's interfaces have sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = [line.split(":")[1].split() for line in lines if line.split(":")[0].strip() != "lo"]
    return sum(int(one[8]) for one in fields), sum(int(one[9]) for one in fields)


def _memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


def _busy_s() -> float:
    """The time for which the main thread has run or waited for a core."""
    ran, waited, _ = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
    return (int(ran) + int(waited)) * 1e-9


def main() -> None:
    work = msgspec.json.decode(sys.argv[1], type=GroupWork)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    chance = np.random.default_rng(0)
    schema = open_table(work.files).schema
    names = [name for name in schema.names if name.startswith("x")]
    few = {
        "group": np.arange(512) % 2,
        **{name: chance.normal(size=512) for name in names},
        "y": np.arange(512) % 3 % 2,
    }
    trainer_of(msgspec.structs.replace(work, epochs=1), ThisProcess()).fit(pa.table(few))  # what is loaded by use
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, (bytes_before, packets_before) = _memory("VmRSS"), _counters()
    busy_s, cpu_s, began_s = _busy_s(), time.process_time(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="offbeat-groups-") as folder:
        if work.system == RANKS:
            fitted = trainer_of(work, Ranks(bucket_bytes=work.bucket_bytes)).fit(work.files)
            records, index = fitted.records, fitted.index
        elif work.system == GTP:
            records, index = by_groups(work, Path(folder))
        else:
            records, index = by_models(work, Path(folder), store)
        busy_s, cpu_s = _busy_s() - busy_s, time.process_time() - cpu_s
        dist.barrier()
        wall_s = time.perf_counter() - began_s
    sent, packets = _counters()
    mine = np.isfinite(records.held_losses).all(1) & (work.system != RANKS or rank == 0)
    loss = np.take_along_axis(records.held_losses, records.chosen[:, None], 1)[:, 0]
    use = HostUse(
        rank=rank,
        wall_s=round(wall_s, 3),
        cpu_s=round(cpu_s, 3),
        idle_s=round(wall_s - busy_s, 3),
        sent_bytes=sent - bytes_before,
        packets=packets - packets_before,
        peak_bytes=_memory("VmHWM") - before,
        loss=float((loss * index.rows)[mine].sum()),
        rows=int(index.rows[mine].sum()),
    )
    sys.stdout.write(msgspec.json.encode(use).decode() + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
