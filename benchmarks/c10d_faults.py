"""How soon does unmodified DDP know that a worker is lost? `python -m benchmarks.c10d_faults`, root, five minutes.

Three hosts train by DistributedDataParallel, by turns on Gloo and on the backend "offbeat". Then the second one is
killed, or stopped (SIGSTOP), or its link is cut. The file benchmarks/results/c10d_faults.json says how long it takes
until each of the others knows, and what it is told. A stopped worker may continue, so it should be named soon and end
the job at the group's timeout; the two other faults should end the job at once, and within 5 s. The group's timeout is
30 s; torch's own default is 30 minutes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.workloads import ddp_struck
from offbeat.lab import command_lines, hardware, launch
from offbeat.lab.network import Network
from offbeat.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/c10d_faults.json"
COMMAND = "python -m benchmarks.c10d_faults"
FAULTS = ("SIGKILL", "SIGSTOP", "cut link")
BACKENDS = ("gloo", "offbeat")
STRUCK, REPEATS, SPARE_S = 1, 3, 15.0
_NAMES = "while its machine answers"  # in the line of the log about who stands still
_TEXT = """
[scenario]
name = "c10d_faults"
description = "3 hosts, DDP, one is struck"
[hosts]
count = 3
rate_mbps = 200
[workload]
kind = "script"
path = "workloads/ddp_struck.py"
[[row]]
name = "ddp"
system = "ddp"
"""


class StruckRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault on one backend.

    Args:
        knew_s: by rank of those that were not struck, seconds until it knew; None if it did not, by 15 s behind the
            group's timeout.
        said: what it was told, its first line.
        named_s: by rank, seconds until its log named the one that stands still; None if it did not.
    """

    fault: str
    backend: str
    knew_s: dict[str, float | None]
    said: dict[str, str]
    named_s: dict[str, float | None] = msgspec.field(default_factory=dict)


class StruckRuns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    timeout_s: float
    runs: list[StruckRun]


def strike(network: Network, fault: str, backend: str) -> StruckRun:
    """Train, strike, and listen."""
    places = launch.places(network)
    script = ROOT / "benchmarks/workloads/ddp_struck.py"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {"OFFBEAT_TOKEN": "0123456789abcdef" * 2}
        workers = launch.Workers(
            command_lines.script(script, backend), places=places, folder=folder, environment=environment,
            each=[{} for _ in places], lab=network.lab,
        )  # fmt: skip
        arcs = [arc for arc in network.topology.arcs if places[STRUCK].host in (arc.source, arc.target)]
        with workers:
            while not all(_said(workers.log(rank), "trains") for rank in range(len(places))):
                time.sleep(0.05)
            began_s = time.time()
            if fault == "cut link":
                for arc in arcs:
                    network.shape_arc(arc, arc.rate_mbps, is_cut=True)
            else:
                os.kill(workers._processes[STRUCK].pid, getattr(signal, fault))
            others = [rank for rank in range(len(places)) if rank != STRUCK]
            named_s: dict[str, float | None] = {str(rank): None for rank in others}
            while time.time() < began_s + ddp_struck.TIMEOUT_S + SPARE_S:
                for rank in others:
                    if named_s[str(rank)] is None and _NAMES in workers.log(rank).read_text(errors="replace"):
                        named_s[str(rank)] = round(time.time() - began_s, 3)
                if all(_said(workers.log(rank), "knows") for rank in others):
                    break
                time.sleep(0.05)
            told = {str(rank): _said(workers.log(rank), "knows") for rank in others}
        for arc in arcs:
            network.shape_arc(arc, arc.rate_mbps)
    return StruckRun(
        fault=fault,
        backend=backend,
        knew_s={rank: round(one["knows"] - began_s, 3) if one else None for rank, one in told.items()},
        said={rank: one.get("said", "") for rank, one in told.items()},
        named_s=named_s,
    )


def _said(log: Path, key: str) -> dict[str, Any]:
    """The line of a worker that has this key; empty before it is there."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and key in (found := json.loads(line)):
            return dict(found)
    return {}


def read() -> StruckRuns:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=StruckRuns)


def section(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """The part of the page of results; nothing before it was measured.

    Args:
        lines: makes a table of headings and rows.
    """
    if not RESULT.exists():
        return ""
    found = read()
    rows = []
    for fault in FAULTS:
        for backend in BACKENDS:
            runs = [one for one in found.runs if (one.fault, one.backend) == (fault, backend)]
            knew = [value for one in runs for value in one.knew_s.values()]
            times = [value for value in knew if value is not None]
            told = f"{min(times):.1f} to {max(times):.1f}" if times else "-"
            missing = f", {len(knew) - len(times)} of {len(knew)} never" if len(times) < len(knew) else ""
            said = max((text for one in runs for text in one.said.values()), key=len).replace("|", "/")
            named = [value for one in runs for value in one.named_s.values() if value is not None]
            names = f"{min(named):.1f} to {max(named):.1f}" if named else "-"
            rows.append([fault, backend, names, told + missing, said[:300]])
    return (
        "\n### A lost worker under unmodified DDP\n\nThree hosts; the second is struck. Seconds until the others know, "
        f"over {REPEATS} runs by turns, and what they are told; the group's timeout is {found.timeout_s:g} s. "
        "The third column is when their logs named one that stands still.\n\n"
        f"{lines(['', 'backend', 'named', 'seconds', 'told'], rows)}\n`{found.command}`, {found.date}. "
        "[Raw records](c10d_faults.json).\n"
    )


def main() -> None:
    runs = []
    with Network(Scenario.from_toml(_TEXT).topology) as network:
        for number in range(REPEATS):
            for fault in FAULTS:
                for backend in BACKENDS if number % 2 else reversed(BACKENDS):
                    runs.append(one := strike(network, fault, backend))
                    print(one, file=sys.stderr, flush=True)  # noqa: T201
    measured = StruckRuns(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        timeout_s=ddp_struck.TIMEOUT_S,
        runs=runs,
    )
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


if __name__ == "__main__":
    main()
