"""What do others notice of a store that is struck? `python -m benchmarks.object_faults`, root.

Five hosts at 200 Mbit/s read or sum one object, a sixth keeps the directory (benchmarks/workloads/object_struck.py).
Measured are the longest time after the strike in which a store that still reads gets nothing, when the last one has
all, and the bytes that stores received beyond what they need. With "slow link" host 2 has a tenth of the rate from the
beginning; "absent" is the same without host 2. Writes benchmarks/results/object_faults.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.workloads.object_struck import READERS, STRUCK, VICTIM, WORLD
from offbeat.lab import command_lines, goodput, hardware, launch
from offbeat.lab.network import Network
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/object_faults.json"
COMMAND = "python -m benchmarks.object_faults"
FAULTS = {
    "broadcast": ("none", "absent", "slow link", *STRUCK, "directory"),
    "reduce": ("none", *STRUCK, "directory"),
}
RATE_MBPS, SIZE_BYTES, REPEATS, _TIMEOUT_S = 200, 64 << 20, 2, 130.0


class StruckObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run.

    Args:
        took_s: from the beginning until the last one that is not struck has all; with a slow link, of the others.
        paused_s: the longest time after the strike in which one that still reads got nothing.
        again_bytes: that stores which were not struck received beyond what they need.
    """

    op: str
    fault: str
    took_s: float
    paused_s: float
    again_bytes: int


class StruckObjects(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    rate_mbps: float
    size_bytes: int
    runs: list[StruckObject]


def run(network: Network, op: str, fault: str) -> StruckObject:
    """Run one, and strike it."""
    places = launch.places(network)
    arcs = [arc for arc in network.topology.arcs if places[VICTIM].host in (arc.source, arc.target)]
    if fault == "slow link":
        _shape(network, arcs, RATE_MBPS / 10)
    others = [rank for rank in range(WORLD) if rank != VICTIM or fault not in STRUCK]
    script = ROOT / "benchmarks/workloads/object_struck.py"
    with tempfile.TemporaryDirectory() as folder:
        workers = launch.Workers(
            command_lines.script(script, op, fault, str(SIZE_BYTES)),
            places=places,
            folder=Path(folder),
            environment={"OFFBEAT_TOKEN": "0123456789abcdef" * 2},
            each=[{"GLOO_ADDRESS": place.address} for place in places],
            lab=network.lab,
        )
        with workers:
            until_s, is_cut = time.monotonic() + _TIMEOUT_S, False
            while not all(told := [_said(workers.log(rank), "seen") for rank in others]):
                if time.monotonic() > until_s:
                    logs = "\n".join(workers.log(rank).read_text()[-1000:] for rank in range(WORLD))
                    sys.exit(f"{op}, {fault}: not done within {_TIMEOUT_S:g} s:\n{logs}")
                if fault == "cut link" and not is_cut and _said(workers.log(VICTIM), "struck_s"):
                    is_cut = True
                    for arc in arcs:
                        network.shape_arc(arc, arc.rate_mbps, is_cut=True)
                time.sleep(0.002)
            struck = _said(workers.log(VICTIM), "struck_s")
    _shape(network, arcs, RATE_MBPS)
    readers = [one for one in told if one["took_s"] is not None]
    is_slow = fault == "slow link"
    ours = [one["took_s"] for rank, one in zip(others, told, strict=True) if rank != VICTIM or not is_slow]
    if len({one["digest"] for one in readers}) != 1:
        sys.exit(f"{op}, {fault}: members have other bytes.")
    received = sum(one["seen"][-1][2] for one in told)
    return StruckObject(
        op=op,
        fault=fault,
        took_s=round(max(one for one in ours if one is not None), 3),
        paused_s=round(max((_pause(one["seen"], struck["struck_s"]) for one in readers), default=0.0), 3)
        if struck
        else 0.0,
        again_bytes=received - _needed(op, len(readers)),
    )


def _needed(op: str, readers: int) -> int:
    """The bytes that the stores that are not struck have to receive."""
    if op == "broadcast":
        return readers * SIZE_BYTES
    return 3 * SIZE_BYTES  # along a chain of three


def _pause(seen: list[list[float]], after_s: float) -> float:
    """The longest time after a strike without new bytes."""
    longest, last_s, before = 0.0, after_s, None
    for at_s, have, _ in seen:
        if at_s < after_s:
            before = have
        elif have != before:
            longest, last_s, before = max(longest, at_s - last_s), at_s, have
    return longest


def _shape(network: Network, arcs: Sequence[Any], rate_mbps: float) -> None:
    for arc in arcs:
        network.shape_arc(arc, rate_mbps)


def _said(log: Path, key: str) -> dict[str, Any]:
    """The line of a worker that has this key; empty before it is there."""
    for line in log.read_text(errors="replace").splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n") and key in (found := json.loads(line)):
            return dict(found)
    return {}


def read() -> StruckObjects:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=StruckObjects)


def section(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """The part of the page of results; nothing before it was measured.

    Args:
        lines: makes a table of headings and rows.
    """
    if not RESULT.exists():
        return ""
    found = read()
    rows = []
    for op, faults in FAULTS.items():
        for fault in faults:
            runs = [one for one in found.runs if (one.op, one.fault) == (op, fault)]
            again = [one.again_bytes / 2**20 for one in runs]
            rows.append(
                [
                    op,
                    fault,
                    f"{max(one.paused_s for one in runs):.2f} s" if fault in (*STRUCK, "directory") else "-",
                    f"{min(one.took_s for one in runs):.2f} to {max(one.took_s for one in runs):.2f} s",
                    f"{min(again):.1f} to {max(again):.1f} MiB",
                ]
            )
    return (
        f"\n### A store is struck\n\n{len(READERS)} hosts read {found.size_bytes >> 20} MiB from one in a chain, or "
        f"one sums the first three of their objects, at {found.rate_mbps:g} Mbit/s. The second host's store is killed, "
        "stopped or cut off once it has received half, or the directory is killed and started again. Of "
        f"{REPEATS} runs: the longest time for which a store got nothing, when all others had it, and what was "
        "received more than once.\n\n"
        f"{lines(['', 'struck', 'nothing for', 'others done after', 'received again'], rows)}\n"
        f"`{found.command}`, {found.date}. [Raw records](object_faults.json).\n"
    )


def main() -> None:
    runs = []
    with Network(Topology.star([f"h{number}" for number in range(WORLD)], rate_mbps=RATE_MBPS)) as network:
        goodput.ensure(network)
        for _ in range(REPEATS):
            for op, faults in FAULTS.items():
                for fault in faults:
                    runs.append(one := run(network, op, fault))
                    print(one, file=sys.stderr, flush=True)  # noqa: T201
    measured = StruckObjects(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        rate_mbps=RATE_MBPS,
        size_bytes=SIZE_BYTES,
        runs=runs,
    )
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


if __name__ == "__main__":
    main()
