"""Runs the `offbeat` command as users do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from tests import warm

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMAND = [sys.executable, "-c", "from offbeat.cli import main; main()"]

# The smallest script that trains: four steps of a linear model.
TRAIN = """
import torch, offbeat
run = offbeat.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def start(
    *arguments: object, folder: Path, cold: bool = False, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """The command, running.

    Args:
        variables: of the environment, beside those of the tests.
        cold: in a new interpreter, as a shell starts it, and its workers and shards in new ones; else see `tests.warm`.
    """
    return (warm.ColdPopen if cold else subprocess.Popen)(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=clean_environment() | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def offbeat(
    *arguments: object,
    folder: Path,
    timeout_s: float = 50,
    cold: bool = False,
    variables: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and output; the rest as of `start`."""
    with start(*arguments, folder=folder, cold=cold, variables=variables) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return process.returncode, output


def clean_environment() -> dict[str, str]:
    ours = ("OFFBEAT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GLOO_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"COLUMNS": "200"}


def descendants(pid: int) -> set[int]:
    """All processes below `pid`, with their start times' worth of certainty: only those alive now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, grown = {pid}, True
    while grown:
        new = {child for child, parent in parents.items() if parent in found} - found
        found |= new
        grown = bool(new)
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    """Those that run, zombies left out."""
    running = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            running.add(pid)
    return running
