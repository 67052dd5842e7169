"""One tensor to all, a sum at one, a sum at all: stores of objects beside Gloo. `python -m benchmarks.objects`, root.

Five hosts at 500 Mbit/s each way. The systems run by turns; each start of one measures all operations and sizes
(`benchmarks/workloads/object_ops.py`). A time is that of the slowest member, and all must have the same bytes. Writes
benchmarks/results/objects.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.workloads.object_ops import OPS
from offbeat.lab import command_lines, goodput, hardware, launch
from offbeat.lab.network import Network
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/objects.json"
COMMAND = "python -m benchmarks.objects"
SYSTEMS = ("offbeat", "offbeat, striped", "gloo")
SIZES = (1 << 10, 1 << 20, 32 << 20, 100 << 20)
HOSTS, RATE_MBPS, STARTS, REPEATS = 5, 500, 2, 3
_TIMEOUT_S = 300.0


class ObjectTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One system's times for one operation on one size."""

    system: str
    op: str
    size_bytes: int
    seconds: list[float]


class ObjectTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Args:
        goodput_mbps: of each host's link, as TCP has it.
    """

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    hosts: int
    rate_mbps: float
    goodput_mbps: dict[str, float]
    times: list[ObjectTime]


def measure_start(network: Network, system: str) -> dict[tuple[int, str], list[float]]:
    """Start a system, and measure all of it."""
    places = launch.places(network)
    script = ROOT / "benchmarks/workloads/object_ops.py"
    sizes = ",".join(map(str, SIZES))
    with tempfile.TemporaryDirectory() as folder:
        workers = launch.Workers(
            command_lines.script(script, system, str(REPEATS), sizes),
            places=places,
            folder=Path(folder),
            environment={"OFFBEAT_TOKEN": "0123456789abcdef" * 2},
            each=[{"GLOO_ADDRESS": place.address} for place in places],
            lab=network.lab,
        )
        with workers:
            until_s = time.monotonic() + _TIMEOUT_S
            logs = [""] * HOSTS
            while not all('"ends"' in log for log in logs):
                if time.monotonic() > until_s:
                    sys.exit(f"{system} is not done within {_TIMEOUT_S:g} s:\n{logs[0][-2000:]}")
                if any(process.poll() for process in workers._processes):
                    sys.exit(f"A worker of {system} has failed:\n" + "\n".join(log[-1000:] for log in logs))
                time.sleep(0.2)
                logs = [workers.log(rank).read_text() for rank in range(HOSTS)]
    told = [[json.loads(line) for line in log.splitlines() if line.startswith('{"size"')] for log in logs]
    found: dict[tuple[int, str], list[float]] = {}
    for lines in zip(*told, strict=True):
        digests = {line["digest"] for line in lines if line["digest"]}
        if len(digests) != 1:
            sys.exit(f"{system} has given its members other bytes at {lines[0]['op']} of {lines[0]['size']} bytes.")
        found.setdefault((lines[0]["size"], lines[0]["op"]), []).append(max(line["took_s"] for line in lines))
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
    rows = []
    for size in SIZES:
        wire_s = size * 8 / (found.rate_mbps * 1e6)
        for op in OPS:
            times = [by[system, op, size] for system in SYSTEMS]
            rows.append([op, f"{size:,}", *(f"{1e3 * t:.1f} ms, {t / wire_s:.2f}" for t in times)])
    return (
        f"\n## objects\n\n{found.hosts} hosts at {found.rate_mbps:g} Mbit/s: one tensor to all (broadcast), a sum of "
        "all at one (reduce), a sum of all at all (allreduce). Medians of the slowest member, and each time as a "
        "multiple of what the tensor alone takes on one link.\n\n"
        f"{lines(['', 'bytes', *SYSTEMS], rows)}\n`{found.command}`, {found.date}, {found.hardware['processor']}, "
        f"torch {found.versions['torch']}. [Raw records](objects.json).\n"
    )


def main() -> None:
    times: dict[tuple[str, str, int], list[float]] = {}
    with Network(Topology.star([f"h{number}" for number in range(HOSTS)], rate_mbps=RATE_MBPS)) as network:
        carried = goodput.ensure(network)
        for number in range(STARTS):
            for system in SYSTEMS if number % 2 else reversed(SYSTEMS):
                for (size, op), seconds in measure_start(network, system).items():
                    times.setdefault((system, op, size), []).extend(round(one, 6) for one in seconds)
                    print(system, op, size, seconds, file=sys.stderr, flush=True)  # noqa: T201
    measured = ObjectTimes(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        hosts=HOSTS,
        rate_mbps=RATE_MBPS,
        goodput_mbps=carried,
        times=[ObjectTime(system=s, op=op, size_bytes=size, seconds=t) for (s, op, size), t in times.items()],
    )
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


if __name__ == "__main__":
    main()
