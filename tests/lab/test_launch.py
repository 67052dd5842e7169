"""Workers: torchrun's environment, one culprit named with its last words, and nobody left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, get_args

import pytest

from offbeat.errors import WorkerLostError
from offbeat.lab import command_lines
from offbeat.lab.bridged_links import INTERFACE
from offbeat.lab.command_lines import LAST_LINES
from offbeat.lab.jobs import jobs
from offbeat.lab.launch import Shards, Workers, loopback_places, places
from offbeat.lab.network import Network
from offbeat.scenario import Scenario, System
from offbeat.topology import Topology
from tests.cli.commands import alive, descendants
from tests.lab.permissions import needs_root
from tests.patience import soon

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HOSTS = ["a", "b", "c"]
SLEEP = "import time; time.sleep(300)"


def workers(folder: Path, code: str, hosts: list[str] = HOSTS) -> Workers:
    """Python that runs `code` as a worker of each host; RANK is in its environment as `rank`."""
    command = [sys.executable, "-S", "-c", f"import os, sys\nrank = int(os.environ['RANK'])\n{code}"]
    each = [{"OWN": f"of {host}"} for host in hosts]
    return Workers(command, places=loopback_places(hosts), folder=folder, environment={"ALL": "of all"}, each=each)


def test_the_environment_is_torchruns(tmp_path: Path) -> None:
    code = "import json; json.dump(dict(os.environ), open(os.environ['OFFBEAT_LAB_RESULT'], 'w'))"
    with workers(tmp_path, code) as started:
        started.wait(30)
        seen = [json.loads(started.result(rank).read_text()) for rank in range(3)]
    for rank, environment in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "ALL": "of all",
            "OWN": f"of {HOSTS[rank]}",
        }
        assert {name: environment[name] for name in expected} == expected
    assert len({environment["MASTER_PORT"] for environment in seen}) == 1


ROWS = """
[scenario]
name = "threads"
[hosts]
count = 2
network = "loopback"
[workload]
kind = "script"
path = "work.py"
"""


def test_all_processes_of_all_systems_have_the_same_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this process was started with: workers of each system, and the shards of a server."""
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen: dict[str, dict[str, str]] = {}

    def threads(name: str, environment: Mapping[str, str]) -> None:
        seen[name] = {key: value for key, value in environment.items() if key.endswith("_NUM_THREADS")}

    class NoProcess:
        pid = 0

        def kill(self) -> None: ...

        def wait(self) -> None: ...

    def start(self: Workers, command: list[str], log: Path, environment: dict[str, str]) -> NoProcess:
        threads(f"{environment['OFFBEAT_LAB_SYSTEM']} {environment['RANK']}", environment)
        return NoProcess()

    def start_shard(settings: Any, *, environment: Mapping[str, str], **rest: Any) -> tuple[NoProcess, str]:
        threads("shard", environment)
        return NoProcess(), "127.0.0.1:1"

    monkeypatch.setattr(Workers, "_start", start)
    monkeypatch.setattr("os.killpg", lambda pid, number: None)
    monkeypatch.setattr("offbeat.server.launch.start_shard", start_shard)
    (tmp_path / "work.py").write_text("")
    rows = "".join(f'[[row]]\nname = "{system}"\nsystem = "{system}"\n' for system in get_args(System))
    made = loopback_places(["h0", "h1"])
    for job in jobs(Scenario.from_toml(ROWS + rows), tmp_path):
        environment = job.environment(tmp_path / "run")
        with Workers(
            job.command,
            places=made,
            folder=tmp_path,
            environment=environment,
            each=job.each(made),
            are_restarted=job.restarts,
        ):
            pass
    with Shards(made[:1], folder=tmp_path, timeout_s=5.0):
        pass
    assert set(seen) == {"shard", *(f"{system} {rank}" for system in get_args(System) for rank in range(2))}
    assert all(found == seen["ddp 0"] for found in seen.values())
    assert set(seen["ddp 0"].values()) == {"1"}
    assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} <= set(seen["ddp 0"])


def test_the_first_to_die_is_named_with_its_last_words(tmp_path: Path) -> None:
    code = f"""
if rank == 1:
    for line in range(100): print('line', line)
    raise RuntimeError('the disk is full')
{SLEEP}"""
    others = descendants(os.getpid())  # such as the server that other tests fork from
    start_s = time.monotonic()
    with workers(tmp_path, code) as started:
        with pytest.raises(WorkerLostError, match="rank 1 on host b ended with exit code 1") as caught:
            started.wait(30)
        left = descendants(os.getpid()) - others
    text = str(caught.value)
    assert text.endswith("RuntimeError: the disk is full")
    assert len(text.splitlines()) == LAST_LINES + 1
    assert len(left) >= 2, "the others had ended before"
    assert not alive(left)
    assert time.monotonic() - start_s < 10


def test_who_was_killed_is_named_before_who_broke_over_it(tmp_path: Path) -> None:
    code = f"""
if rank == 2: os.kill(os.getpid(), 9)
{SLEEP}"""
    with (
        workers(tmp_path, code) as started,
        pytest.raises(WorkerLostError, match="rank 2 on host c was killed by SIGKILL"),
    ):
        started.wait(30)


def test_the_time_limit_names_who_still_runs(tmp_path: Path) -> None:
    code = f"""
if rank == 0: sys.exit()
print('at step 7')
{SLEEP}"""
    with (
        workers(tmp_path, code) as started,
        pytest.raises(
            WorkerLostError, match=r"after 1\.5 s rank 1 on b, 2 on c still run\..*\(run\.timeout_s\)"
        ) as caught,
    ):
        started.wait(1.5)
    assert "at step 7" in str(caught.value)


def test_what_workers_started_ends_with_them(tmp_path: Path) -> None:
    code = f"""
import subprocess
subprocess.Popen([sys.executable, '-S', '-c', '{SLEEP}'])
print('started', flush=True)
{SLEEP}"""
    before = descendants(os.getpid())
    with workers(tmp_path, code) as started:
        assert soon(lambda: all("started" in started.log(rank).read_text() for rank in range(3)))
        family = descendants(os.getpid()) - before
        assert len(family) == 6
    assert soon(lambda: not alive(family))


def test_workers_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """The kernel sees to it, outside of namespaces as well."""
    code = f"""
import os, subprocess, sys
from offbeat.lab import command_lines
worker = subprocess.Popen(command_lines.entered(None, [sys.executable, "-S", "-c", "print('up', flush=True); {SLEEP}"]))
print(worker.pid, flush=True)
worker.wait()
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "up\n"
    launcher.kill()
    launcher.communicate()
    assert soon(lambda: not alive({pid}))


def test_a_worker_of_a_dead_launcher_does_not_start(tmp_path: Path) -> None:
    """The launcher died before the worker could ask the kernel for its signal."""
    command = command_lines.entered(None, [sys.executable, "-S", "-c", "print('it started')"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the parent 1 is gone" in done.stderr


class TestInNamespaces:
    pytestmark = needs_root

    def test_each_worker_is_on_its_host(self, tmp_path: Path) -> None:
        code = """
import json, os, socket
from pathlib import Path
own = {line.split()[1] for line in Path('/proc/net/fib_trie').read_text().splitlines() if '|--' in line}
names = sorted(name for _, name in socket.if_nameindex())
environment = [os.environ[name] for name in ('RANK', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME', 'OFFBEAT_LAB')]
Path(os.environ['OFFBEAT_LAB_RESULT']).write_text(json.dumps([sorted(own), names, environment]))
"""
        command = [sys.executable, "-S", "-c", code]
        with Network(Topology.star(["a", "b"], rate_mbps=100), directory=tmp_path / "records") as net:
            with Workers(
                command, places=places(net), folder=tmp_path, environment={}, each=[{}, {}], lab=net.lab
            ) as started:
                started.wait(30)
                seen = [json.loads(started.result(rank).read_text()) for rank in range(2)]
            for rank, (own, names, environment) in enumerate(seen):
                assert net.address("ab"[rank]) in own
                assert net.address("ba"[rank]) not in own
                assert names == [INTERFACE, "lo"]
                assert environment == [str(rank), net.address("a"), INTERFACE, net.lab]
