"""Groups of unequal sizes on four hosts: `Ranks()`, beside whole groups and single models as tasks.

python -m benchmarks.groups_scheduling [MODEL ...]

Root; four hosts at 200 Mbit/s each way, about an hour. What hosts do is told in
`benchmarks/workloads/group_hosts.py`: the same solver in all systems, on one thread for each host; rows are Parquet
files on the one disk of this machine, so GTP and MTP read them without a network. Systems take turns. With "hops" what
nets send is measured: the bytes of seven epochs less those of one are the hops of six, for rows and the last validation
are in both. A host's memory is that above the idle process, told in equal shares of the rows. Where there are fewer
cores than hosts, hosts wait for each other's cores: that is no idle time, but it hides much of what unequal loads cost.
Writes benchmarks/results/groups_scheduling.json.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from benchmarks.workloads.group_hosts import GTP, MTP, RANKS, RATES, GroupWork, HostUse
from offbeat.lab import command_lines, goodput, hardware, launch
from offbeat.lab.arc_counters import HEADER_BYTES
from offbeat.lab.network import Network
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/groups_scheduling.json"
COMMAND = "python -m benchmarks.groups_scheduling"
HOSTS, RATE_MBPS, REPEATS, FEATURES, FILES = 4, 200, 3, 20, 8
UNITS = 1024  # so many that training configurations together saves little: else split nets cannot be faster
HOPS, HOP_EPOCHS, HOP_UNITS = "hops", (1, 7), 2048
MODELS = {"net": (120_000, 2), "logistic": (1_500_000, 1)}
"""Rows of a table, and epochs."""
_TIMEOUT_S = 300.0


class GroupsRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run.

    Args:
        shape: of the table.
        share_bytes: of an equal share of the rows, as numbers of 8 bytes.
        hosts: by rank.
    """

    shape: str
    model: str
    system: str
    epochs: int
    rows: int
    share_bytes: int
    hosts: list[HostUse]

    @property
    def wall_s(self) -> float:
        """The time until the last host had ended."""
        return max(one.wall_s for one in self.hosts)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that all hosts have sent, without headers."""
        return sum(one.sent_bytes - HEADER_BYTES * one.packets for one in self.hosts)


class GroupsSchedules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Args:
        hop_bytes: of one configuration of a net: its weights and the optimizer's numbers.
    """

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    rate_mbps: float
    goodput_mbps: dict[str, float]
    hop_bytes: int
    runs: list[GroupsRun]


def _shares() -> dict[str, np.ndarray]:
    """The share of all rows that each group has, by shape."""
    zipf = 1 / np.arange(1, 19) ** 0.92
    pareto = np.random.default_rng(0).pareto(1.16, 280) + 1
    images = np.random.default_rng(1).lognormal(0, 0.9, 44)
    shapes = {
        "40 groups, one of 40 %": np.array([0.4] + [0.6 / 39] * 39),
        "6 groups, two dominate": np.array([0.42, 0.4, 0.06, 0.05, 0.04, 0.03]),
        "18 groups": zipf,
        "280 groups": np.minimum(pareto, 100),
        "44 groups": images,
    }
    return {name: shares / shares.sum() for name, shares in shapes.items()}


SHARES = _shares()
ONE = "1 group"
"""One group, of which each host has a quarter: a fit sends little but hopping models."""


def write_table(shares: np.ndarray, rows: int, folder: Path) -> None:
    """Write the files: rows of groups in random order, with a class that each group's own weights tell."""
    chance = np.random.default_rng(2)
    ends = np.round(np.append(0, shares.cumsum()) * rows).astype(np.int64)
    group = chance.permutation(np.repeat(np.arange(len(shares)), np.diff(ends)))
    truth = chance.normal(size=(len(shares), FEATURES))
    for number, part in enumerate(np.array_split(group, FILES)):
        x = chance.normal(size=(len(part), FEATURES))
        y = np.tanh(x * truth[part]).sum(1) + chance.logistic(size=len(part)) > 0
        columns = {"group": part, **{f"x{at}": x[:, at] for at in range(FEATURES)}, "y": y.astype(np.int64)}
        parquet.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=1 << 16)


def run(network: Network, work: GroupWork, shape: str, rows: int, share_bytes: int) -> GroupsRun:
    """Run one system once."""
    with tempfile.TemporaryDirectory() as folder:
        workers = launch.Workers(
            command_lines.script(ROOT / "benchmarks/workloads/group_hosts.py", msgspec.json.encode(work).decode()),
            places=launch.places(network),
            folder=Path(folder),
            environment={},
            each=[{}] * HOSTS,
            lab=network.lab,
        )
        with workers:
            workers.wait(_TIMEOUT_S)
        logs = [workers.log(rank).read_text() for rank in range(HOSTS)]
    lines = [line for log in logs for line in log.splitlines() if line.startswith('{"rank"')]
    return GroupsRun(
        shape=shape,
        model=work.model,
        system=work.system,
        epochs=work.epochs,
        rows=rows,
        share_bytes=share_bytes,
        hosts=[msgspec.json.decode(line, type=HostUse) for line in lines],
    )


class Measurement:
    """All that is measured, beginning with what the last result says of parts that are not measured now."""

    def __init__(self, network: Network, parts: Sequence[str]) -> None:
        self._network, self._goodput_mbps = network, goodput.ensure(network)
        known = msgspec.json.decode(RESULT.read_bytes(), type=GroupsSchedules).runs if RESULT.exists() else []
        self._runs = [one for one in known if _part_of(one) not in parts]

    def measure_shapes(self, model: str) -> None:
        """Measure all systems on all shapes, by turns."""
        rows, epochs = MODELS[model]
        for shape, shares in SHARES.items():
            with tempfile.TemporaryDirectory(prefix="offbeat-rows-") as folder:
                write_table(shares, rows, Path(folder))
                for repeat in range(REPEATS):
                    for system in (RANKS, GTP, MTP)[:: -1 if repeat % 2 else 1]:
                        self._run(system, model, epochs, UNITS, shape, rows, folder)

    def measure_hops(self) -> None:
        """Measure what a net of one group sends in some epochs, and in more of them."""
        rows = MODELS["net"][0] // 10
        with tempfile.TemporaryDirectory(prefix="offbeat-rows-") as folder:
            write_table(np.ones(1), rows, Path(folder))
            for _ in range(REPEATS):
                for epochs in HOP_EPOCHS:
                    self._run(RANKS, "net", epochs, HOP_UNITS, ONE, rows, folder)

    def _run(self, system: str, model: str, epochs: int, hidden: int, shape: str, rows: int, folder: str) -> None:
        share_bytes = 8 * (FEATURES + 2) * rows // HOSTS
        work = GroupWork(
            system=system,
            files=f"{folder}/*.parquet",
            model=model,
            hidden=hidden,
            epochs=epochs,
            bucket_bytes=share_bytes // 2,  # a group of an eighth of a share has a bucket of its own
        )
        self._runs.append(made := run(self._network, work, shape, rows, share_bytes))
        print(told(made), file=sys.stderr, flush=True)  # noqa: T201
        measured = GroupsSchedules(
            command=COMMAND,
            date=hardware.date(),
            versions=hardware.versions() | {"pyarrow": pa.__version__},
            hardware=hardware.hardware(),
            rate_mbps=RATE_MBPS,
            goodput_mbps=self._goodput_mbps,
            hop_bytes=4 * 3 * (HOP_UNITS * (FEATURES + 2) + 1),
            runs=self._runs,
        )
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


def told(one: GroupsRun) -> str:
    """Say what a run has used, in a line."""
    use = one.hosts
    return (
        f"{one.model}, {one.epochs} epochs, {one.shape}, {one.system}: {one.wall_s:.1f} s, "
        f"processors {sum(host.cpu_s for host in use):.1f} s, "
        f"idle {sum(host.idle_s for host in use) / sum(host.wall_s for host in use):.0%}, "
        f"sent {one.sent_bytes / 1e6:.1f} MB (at most {max(host.sent_bytes for host in use) / 1e6:.1f} by a host), "
        f"memory {max(host.peak_bytes for host in use) / one.share_bytes:.2f} shares, "
        f"loss {sum(host.loss for host in use) / sum(host.rows for host in use):.4f}"
    )


def hops(found: GroupsSchedules) -> tuple[float, float]:
    """Return the bytes that two more epochs have sent, and those of as many moves as there have to be."""
    sent = {
        epochs: statistics.median(
            one.sent_bytes for one in found.runs if _part_of(one) == HOPS and one.epochs == epochs
        )
        for epochs in HOP_EPOCHS
    }
    fewer, more = HOP_EPOCHS
    return sent[more] - sent[fewer], (more - fewer) * len(RATES) * (HOSTS - 1) * found.hop_bytes


def _part_of(one: GroupsRun) -> str:
    return HOPS if one.shape == ONE else one.model


def main() -> None:
    known = (*MODELS, HOPS)
    parts = sys.argv[1:] or known
    if unknown := [name for name in parts if name not in known]:
        sys.exit(f"Cannot measure {unknown[0]!r}: name some of {', '.join(map(repr, known))}.")
    with Network(Topology.star([f"h{number}" for number in range(HOSTS)], rate_mbps=RATE_MBPS)) as network:
        measurement = Measurement(network, parts)
        for part in parts:
            if part == HOPS:
                measurement.measure_hops()
            else:
                measurement.measure_shapes(part)
    if HOPS in parts:
        sent, least = hops(msgspec.json.decode(RESULT.read_bytes(), type=GroupsSchedules))
        print(f"hops sent {sent / 1e6:.2f} MB, {sent / least:.3f} of {least / 1e6:.2f} MB", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
