"""One tensor to all, a sum at one, a sum at all: offbeat's stores beside Gloo, Ray, Dask and shardcast.

python -m benchmarks.objects [SYSTEM ...]

Root; five hosts at 500 Mbit/s each way; `pip install -e '.[lab,peers]'` for the other systems. Each start
of a system measures all operations and sizes (`benchmarks/workloads/object_ops.py`); offbeat and Gloo start twice, by
turns. A time is that of the slowest member, and all systems must have the same bytes. After each start the result is
written to benchmarks/results/objects.json. With names of systems, only their rows are measured again, "memory" being
one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.lab import command_lines, goodput, hardware, launch
from offbeat.lab.network import Network
from offbeat.lab.object_load import OPS, STAGGERED, STAGGERED_BYTES
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/objects.json"
COMMAND = "python -m benchmarks.objects"
ESTIMATES_S = {
    "offbeat": 115,
    "offbeat, striped": 115,
    "gloo": 105,
    "offbeat beside ray": 150,
    "ray": 120,
    "ray, waves": 90,
    "ray, RDT": 170,
    "ray collective": 100,
    "dask": 150,
    "shardcast": 45,
}
"""Systems, and about how long one start of each takes."""
SYSTEMS = tuple(ESTIMATES_S)
TWICE = ("offbeat", "offbeat, striped", "gloo")
MEMORY, MEMORY_BYTES = "memory", 32 << 20
SIZES = (1 << 10, 1 << 20, 100 << 20)
HOSTS, RATE_MBPS, WARM_UP, REPEATS = 5, 500, 1, 3
_PEERS = ("ray", "distributed", "shardcast")
_TIMEOUT_S = 500.0


class ObjectTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One system's times for one operation on one size."""

    system: str
    op: str
    size_bytes: int
    seconds: list[float]


class ObjectMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of one operation, which ran once in fresh stores; of the host that needs most.

    Args:
        peak_bytes: the most that its store has had in its books.
        used_bytes: that it has there at the end.
        grown_bytes: by which the proportional set size of store and client has grown until then.
    """

    system: str
    op: str
    size_bytes: int
    peak_bytes: int
    used_bytes: int
    grown_bytes: int


class ObjectTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Args:
        goodput_mbps: of each host's link, as TCP has it.
        busy_cores: of this machine, beside a Ray cluster that has nothing to do.
    """

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    hosts: int
    rate_mbps: float
    goodput_mbps: dict[str, float]
    times: list[ObjectTime]
    memory: list[ObjectMemory] = []
    busy_cores: float | None = None


def start(network: Network, system: str, *arguments: str) -> list[dict[str, Any]]:
    """Start a system, and have all that its members and its driver say."""
    places = launch.places(network)
    script = ROOT / "benchmarks/workloads/object_ops.py"
    with tempfile.TemporaryDirectory() as folder:
        workers = launch.Workers(
            command_lines.script(script, system, *arguments),
            places=places,
            folder=Path(folder),
            environment={"OFFBEAT_TOKEN": "0123456789abcdef" * 2},
            each=[{"GLOO_ADDRESS": place.address} for place in places],
            lab=network.lab,
        )
        with workers:
            workers.wait(_TIMEOUT_S)
        logs = [workers.log(rank).read_text(errors="replace") for rank in range(HOSTS)]
    return [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"')]


class Measurement:
    """All that is measured, beginning with what the last result says of systems that are not measured now."""

    def __init__(self, network: Network, systems: Sequence[str]) -> None:
        self._network = network
        self._goodput_mbps = goodput.ensure(network)
        known = read() if RESULT.exists() else None
        self._times: dict[tuple[str, str, int], list[float]] = {}
        for one in known.times if known else ():
            if one.system not in systems:
                self._times[one.system, one.op, one.size_bytes] = one.seconds
        self._memory = known.memory if known and MEMORY not in systems else []
        self._busy_cores = known.busy_cores if known else None
        self._digests: dict[tuple[str, int], set[str]] = {}

    def measure(self, system: str) -> None:
        """Start a system once."""
        told = start(self._network, system, str(WARM_UP), str(REPEATS), ",".join(map(str, SIZES)))
        took: dict[tuple[str, int, int], float] = {}
        for line in told:
            self._busy_cores = line.get("busy_cores", self._busy_cores)
            if "took_s" not in line:
                continue
            op, size, repeat = line["op"], line["size"], line["repeat"]
            self._digests.setdefault((op.partition(",")[0], size), set()).add(line["digest"])
            if len(self._digests[op.partition(",")[0], size]) > 1:
                sys.exit(f"{system} has other bytes than another member or system at {op} of {size} bytes.")
            took[op, size, repeat] = max(took.get((op, size, repeat), 0.0), line["took_s"])
        for (op, size, _), took_s in took.items():
            self._times.setdefault((system, op, size), []).append(round(took_s, 6))
        self._write()

    def measure_memory(self) -> None:
        """Run each operation once, in fresh stores."""
        self._memory = []
        for system in ("offbeat", "offbeat, striped"):
            for op in OPS if system == "offbeat" else OPS[-1:]:
                told = [line for line in start(self._network, system, "0", "1", str(MEMORY_BYTES), op) if "op" in line]
                most = max(told, key=lambda line: int(line["peak_bytes"]))
                books = {name: most[name] for name in ("peak_bytes", "used_bytes", "grown_bytes")}
                self._memory.append(ObjectMemory(system=system, op=op, size_bytes=MEMORY_BYTES, **books))
        self._write()

    def _write(self) -> None:
        measured = ObjectTimes(
            command=COMMAND,
            date=hardware.date(),
            versions=hardware.versions() | peer_versions(),
            hardware=hardware.hardware(),
            hosts=HOSTS,
            rate_mbps=RATE_MBPS,
            goodput_mbps=self._goodput_mbps,
            times=[ObjectTime(system=s, op=op, size_bytes=size, seconds=t) for (s, op, size), t in self._times.items()],
            memory=self._memory,
            busy_cores=self._busy_cores,
        )
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


def peer_versions() -> dict[str, str]:
    """The versions of the other systems that are installed."""
    found = {}
    for package in _PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def read() -> ObjectTimes:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=ObjectTimes)


def section(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """The part of the page of results; nothing before it was measured.

    Args:
        lines: makes a table of headings and rows.
    """
    if not RESULT.exists():
        return ""
    found = read()
    by = {(one.system, one.op, one.size_bytes): statistics.median(one.seconds) for one in found.times}
    systems = [system for system in SYSTEMS if any(one.system == system for one in found.times)]

    def table(op: str, sizes: Sequence[int]) -> str:
        rows = [
            [system, *(_cell(by.get((system, op, size)), size * 8 / (found.rate_mbps * 1e6)) for size in sizes)]
            for system in systems
        ]
        rows = [row for row in rows if op in OPS or any(cell != "-" for cell in row[1:])]
        return f"\n{lines([op, *(f'{size:,} bytes' for size in sizes)], rows)}" if rows else ""

    parts = [
        f"\n## objects\n\n{found.hosts} hosts at {found.rate_mbps:g} Mbit/s: one tensor to all (broadcast), a sum of "
        "all at one (reduce), a sum of all at all (allreduce). Medians of the slowest member, and each time as a "
        "multiple of what the tensor alone takes on one link.\n",
        *(table(op, SIZES) for op in OPS),
    ]
    if set(systems) - set(TWICE):
        parts.append(_said_of_peers(found))
    staggered = [table(op, [size for size in SIZES if size >= STAGGERED_BYTES]) for op in STAGGERED]
    if any(staggered):
        parts += [
            "\nMembers begin at random moments within 0.3 s, the same in each system; the clock starts when the last "
            "one does. In offbeat a member puts its tensor then.\n",
            *staggered,
        ]
    if found.memory:
        rows = [
            [one.op, one.system, *(f"{each / one.size_bytes:.2f}" for each in _of_memory(one))] for one in found.memory
        ]
        heads = ["", "system", "most in the books", "in the books at the end", "in use at the end"]
        parts.append(
            "\nMemory of the host that needs most, as a multiple of the tensor: by its store's books, and by how much "
            f"the proportional set size of store and client has grown.\n\n{lines(heads, rows)}"
        )
    parts.append(
        f"\n`{found.command}`, {found.date}, {found.hardware['processor']}, torch {found.versions['torch']}. "
        "[Raw records](objects.json).\n"
    )
    return "".join(parts)


def _of_memory(one: ObjectMemory) -> tuple[int, int, int]:
    return one.peak_bytes, one.used_bytes, one.grown_bytes


def _cell(took_s: float | None, wire_s: float) -> str:
    return "-" if took_s is None else f"{1e3 * took_s:.1f} ms, {took_s / wire_s:.2f}"


def _said_of_peers(found: ObjectTimes) -> str:
    names = ", ".join(f"{package} {found.versions[package]}" for package in _PEERS if package in found.versions)
    idle = "" if found.busy_cores is None else f" ({found.busy_cores:.2f} cores of this machine are busy then)"
    return (
        f"\n{names}. In Ray and Dask a driver on the first host tells actors or workers what to do. "
        '"ray, waves" has a driver that doubles the holders and has sums made by pairs; "ray, RDT" hands references to '
        'tensors over Gloo; "ray collective" and Gloo have static groups. "offbeat beside ray" has the daemons of an '
        f'idle Ray cluster beside it{idle}. shardcast sends files from one to all, and sums nothing, hence "-".\n'
    )


def main() -> None:
    chosen = sys.argv[1:] or [*SYSTEMS, MEMORY]
    if unknown := [name for name in chosen if name not in (*SYSTEMS, MEMORY)]:
        sys.exit(f"Cannot measure {unknown[0]!r}: name some of {', '.join(map(repr, (*SYSTEMS, MEMORY)))}.")
    starts = [name for name in SYSTEMS if name in chosen]
    starts += [name for name in reversed(TWICE) if name in chosen]
    minutes = (sum(ESTIMATES_S[name] for name in starts) + 40 * (MEMORY in chosen)) / 60
    print(f"{len(starts)} starts, about {minutes:.0f} minutes", file=sys.stderr, flush=True)  # noqa: T201
    with Network(Topology.star([f"h{number}" for number in range(HOSTS)], rate_mbps=RATE_MBPS)) as network:
        measurement = Measurement(network, chosen)
        for system in starts:
            began_s = time.monotonic()
            measurement.measure(system)
            print(f"{system}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
        if MEMORY in chosen:
            measurement.measure_memory()


if __name__ == "__main__":
    main()
