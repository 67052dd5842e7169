"""Which tests need root, and how to start a lab in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from offbeat.lab.namespace import DIRECTORY

if TYPE_CHECKING:
    from pathlib import Path

needs_root = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: builds network namespaces"),
]

# Builds a lab of two hosts whose record lies in argv[1], with a worker on each that only sleeps, and goes on sleeping.
OWNER = """
import sys
from pathlib import Path
from offbeat.lab.launch import Workers, places
from offbeat.lab.network import Network
from offbeat.topology import Topology

folder = Path(sys.argv[1])
with Network(Topology.star(["a", "b"], rate_mbps=50), directory=folder) as network:
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    with Workers(
        command, places=places(network), folder=folder, environment={}, each=[{}, {}], lab=network.lab
    ) as workers:
        print(network.lab, *(process.pid for process in workers._processes), network._reaper.pid, flush=True)
        workers.wait(300)
"""


class Owner:
    """A lab that another process owns: its identity, its workers' and its reaper's process ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.lab, *pids = line.split()
        *self.workers, self.reaper = map(int, pids)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def namespaces_of(lab: str) -> set[str]:
    """The network namespaces of a lab that exist now."""
    return {path.name for path in DIRECTORY.glob(f"offbeat-{lab}-*")}
