"""Hosts with less memory: who uses more is killed and named, and no cgroup stays; elsewhere it is refused."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import NetworkError, WorkerLostError
from offbeat.lab import memory_cgroup
from offbeat.lab.launch import Workers, places
from offbeat.lab.network import Network
from offbeat.lab.refusals import refusals
from offbeat.scenario import Scenario
from offbeat.topology import Host, Link, Topology
from tests.lab.permissions import needs_root

if TYPE_CHECKING:
    from pathlib import Path

USES = """
import mmap, os, sys
size = int(sys.argv[1 + int(os.environ["RANK"])]) << 20
memory = mmap.mmap(-1, size)
for at in range(0, size, 4096):
    memory[at] = 1
"""
SMALL = """
[scenario]
name = "small"
[[host]]
name = "a"
rate_mbps = 100
memory_mb = 100
[[host]]
name = "b"
rate_mbps = 100
[workload]
kind = "replay"
profile = "resnet50"
[[row]]
name = "ddp"
system = "ddp"
"""


def why_not() -> str:
    """Why memory cannot be limited here; "" if it can."""
    try:
        memory_cgroup.check()
    except NetworkError as error:
        return str(error)
    return ""


@pytest.mark.lab
@needs_root[1]
def test_the_kernel_kills_whoever_uses_more_than_its_host_has(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    topology = Topology((Host("a", memory_mb=100), Host("b")), (Link("a", "switch", 100), Link("b", "switch", 100)))
    with Network(topology, directory=tmp_path / "labs") as network:
        folders = [folder / network.namespace("a") for folder in (memory_cgroup._V1, memory_cgroup._V2)]
        assert sum(folder.is_dir() for folder in folders) == 1
        for sizes in ((50, 200), (200, 50)):
            command = [sys.executable, "-S", "-c", USES, *map(str, sizes)]
            with Workers(
                command, places=places(network), folder=tmp_path, environment={}, each=[{}, {}], lab=network.lab
            ) as workers:
                if sizes[0] < 100:
                    workers.wait(30)
                else:
                    with pytest.raises(WorkerLostError, match=r"rank 0 on host a was killed by SIGKILL for want of"):
                        workers.wait(30)
    assert not any(folder.exists() for folder in folders)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of version 2, in which there is nothing yet."""
    monkeypatch.setattr(memory_cgroup, "_V1", tmp_path / "memory")
    monkeypatch.setattr(memory_cgroup, "_V2", tmp_path)
    return tmp_path


def test_version_2_is_told_in_its_own_words(cgroups: Path) -> None:
    (cgroups / "cgroup.controllers").write_text("cpu memory pids\n")
    memory_cgroup.make("offbeat-0-a", 100)
    assert (cgroups / "cgroup.subtree_control").read_text() == "+memory"
    assert (cgroups / "offbeat-0-a" / "memory.max").read_text() == "100000000"
    events = cgroups / "offbeat-0-a" / "memory.events"
    for killed in (0, 12):
        events.write_text(f"low 0\noom 3\noom_kill {killed}\noom_group_kill 0\n")
        assert memory_cgroup.has_killed("offbeat-0-a") == bool(killed)
    assert not memory_cgroup.has_killed(None)


def test_a_machine_that_cannot_limit_memory_refuses_before_anything_starts(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario.from_toml(SMALL)
    (cgroups / "cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(NetworkError, match=r"there is no memory controller of cgroups, neither in .*host\.memory_mb"):
        memory_cgroup.check()
    assert "no memory controller" in str(refusals(scenario)[-1])
    (cgroups / "cgroup.controllers").write_text("memory\n")
    (cgroups / "cgroup.subtree_control").mkdir()  # cannot be written, as on a read-only file system
    with pytest.raises(NetworkError, match=r"Cannot limit the memory of a host: .* cannot be changed"):
        memory_cgroup.check()
    monkeypatch.setattr("offbeat.lab.network.require_rights", lambda: None)
    with pytest.raises(NetworkError, match="Cannot limit the memory"):
        Network(scenario.topology, directory=cgroups / "labs")
    assert not (cgroups / "labs").exists()
