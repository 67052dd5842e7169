"""docs/multi-node.md: its commands, typed on three hosts of a lab, do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from offbeat.lab import command_lines
from offbeat.lab.network import Network
from offbeat.plan import Plan
from offbeat.topology import Topology
from tests.cli.commands import clean_environment
from tests.docs.command_line import commands
from tests.lab.permissions import needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "multi-node.md").read_text()
HOSTS = ("node1", "node2", "store")
SHELL = [textwrap.dedent(block) for block in re.findall(r"^ *```sh\n(.*?)^ *```$", PAGE, re.DOTALL | re.MULTILINE)]
(PLAN,) = (textwrap.dedent(block) for block in re.findall(r"^ *```toml\n(.*?)^ *```$", PAGE, re.DOTALL | re.MULTILINE))
DOCTOR, FIRST, SECOND, RUN_FIRST, RUN_SECOND, ELASTIC_FIRST, ELASTIC_SECOND, *SERVED = SHELL
CERTS, SERVE, EXPORT, TOP, BY_HAND = SERVED
PROGRAMS = {"python": "", "torchrun": "-m torch.distributed.run", "offbeat": "-m offbeat"}
# Debian's /etc/hosts: a machine's own name is loopback's, and no other name is known.
ETC_HOSTS = "127.0.0.1 localhost\n127.0.1.1 {host}\n"
MACHINE = 'hostname "$1" && mount --bind "$2/etc-hosts" /etc/hosts && cd "$2" && exec bash -ec "$3"'
PATIENCE_S = 150


class Machines:
    """Three hosts of a lab, each with a folder, a name and an /etc/hosts of its own."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        shims = folder / "bin"
        shims.mkdir()
        for name, how in PROGRAMS.items():
            (shims / name).write_text(f'#!/bin/sh\nexec {sys.executable} {how} "$@"\n')
            (shims / name).chmod(0o755)
        self._path = f"{shims}{os.pathsep}{os.environ['PATH']}"
        for number, host in enumerate(HOSTS, 1):
            assert network.address(host) == f"10.77.0.{number}", "the page's address"
            (folder / host).mkdir()
            (folder / host / "etc-hosts").write_text(ETC_HOSTS.format(host=host))
            shutil.copy(ROOT / "examples" / "digits.py", folder / host)

    def type(self, host: str, command: str) -> subprocess.Popen[str]:
        """Begin a command on a host."""
        own = ["unshare", "--uts", "--mount", "bash", "-c", MACHINE, "bash", host, str(self.folder / host), command]
        environment = clean_environment() | self.network.mark() | {"PATH": self._path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command_lines.entered(self.network.namespace(host), own),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, **typed: str) -> dict[str, str]:
        """What commands print that are typed on several hosts at once, and end well."""
        started = {host: self.type(host, command) for host, command in typed.items()}
        return {host: output(process) for host, process in started.items()}


def output(process: subprocess.Popen[str], code: int = 0) -> str:
    try:
        said, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    assert process.returncode == code, said
    return said


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Network(Topology.star(list(HOSTS), rate_mbps=200), directory=tmp_path / "lab") as network:
        (tmp_path / "machines").mkdir()
        yield Machines(network, tmp_path / "machines")


def workers_below(pid: int) -> list[int]:
    """The workers that a launcher has started."""
    below = psutil.Process(pid).children(recursive=True)
    return [one.pid for one in below if "offbeat.cli.worker_main" in one.cmdline()]


def with_certificates(machines: Machines) -> None:
    """Steps 1 and 3: made on the server's machine, and what workers need is copied to theirs."""
    machines.run(store=CERTS)
    for host in ("node1", "node2"):
        (machines.folder / host / "certs").mkdir()
        for name in ("authority.pem", "worker.pem", "worker.key"):
            shutil.copy(machines.folder / "store" / "certs" / name, machines.folder / host / "certs")
        (machines.folder / host / "plan.toml").write_text(PLAN)


def serving(machines: Machines, stack: ExitStack) -> subprocess.Popen[str]:
    """Step 2; the server, once it says that workers may come."""
    server = stack.enter_context(machines.type("store", f"exec {SERVE}"))
    stack.callback(server.kill)
    assert server.stdout is not None
    assert server.stdout.readline().strip() in PAGE
    return server


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestTyped:
    pytestmark = needs_root

    def test_two_machines(self, machines: Machines) -> None:
        assert "gloo would use" in machines.run(node1=DOCTOR)["node1"]
        said = machines.run(
            node1=f"export OFFBEAT_RUN_DIR=runs/first\n{FIRST}\noffbeat report runs/first", node2=SECOND
        )
        assert "epoch 2: " in said["node1"]
        assert "epoch" not in said["node2"]
        assert (machines.folder / "node1" / "runs" / "first" / "report.html").exists()

    def test_two_machines_by_offbeat_run(self, machines: Machines) -> None:
        said = machines.run(node1=RUN_FIRST, node2=RUN_SECOND)
        assert "[0] epoch 2: " in said["node1"]
        assert "epoch" not in said["node2"]
        assert "\nRank 0 ended well after " in said["node1"]
        assert "\nRank 1 ended well after " in said["node2"]

    def test_a_job_that_outlives_its_first_worker(self, machines: Machines) -> None:
        with ExitStack() as stack:
            first, second = machines.type("node1", f"exec {ELASTIC_FIRST}"), machines.type("node2", ELASTIC_SECOND)
            stack.callback(first.kill)
            stack.callback(second.kill)
            assert first.stdout is not None
            said = ""
            while "epoch 1" not in said:
                line = first.stdout.readline()
                assert line, said
                said += line
            (worker,) = workers_below(first.pid)
            os.kill(worker, signal.SIGKILL)
            there = output(second)
            said += output(first, 128 + signal.SIGKILL)
            for end, printed in (("; the others continue.", said), ("the learning rate stays as it is.", there)):
                (line,) = (line for line in printed.splitlines() if line.endswith(end))
                shown = re.sub(r"^\[1\] | died .* last seen.*?\.", "", line)
                assert shown in re.sub(r" died .* last seen.*?\.", "", " ".join(PAGE.split()))
            assert "[1] epoch 6: " in there

    @pytest.mark.parametrize("launcher", ["torchrun", "offbeat run"])
    def test_a_server_on_a_third(self, machines: Machines, launcher: str) -> None:
        first, second = FIRST, SECOND
        if launcher == "offbeat run":
            first, second = (one.replace("digits.py", "--plan plan.toml digits.py") for one in (RUN_FIRST, RUN_SECOND))
        with_certificates(machines)
        with ExitStack() as stack:
            server = serving(machines, stack)
            workers = [machines.type("node1", EXPORT + first), machines.type("node2", EXPORT + second)]
            shown = ""
            while "rank" not in shown and workers[0].poll() is None:
                looked = machines.type("node2", EXPORT + TOP)
                shown, _ = looked.communicate(timeout=PATIENCE_S)
            said = [output(worker) for worker in workers]
            assert "epoch 2: " in said[0]
            assert "SSP(bound=4)" in shown
            assert output(server) == "", "it ends with the last worker, and refused nobody"

    def test_a_job_that_outlives_a_machine(self, machines: Machines) -> None:
        with_certificates(machines)
        with ExitStack() as stack:
            server = serving(machines, stack)
            first = machines.type("node1", EXPORT + BY_HAND)
            second = machines.type(
                "node2", EXPORT + BY_HAND.replace("RANK=0", "RANK=1").replace("python", "exec python")
            )
            assert first.stdout is not None
            said = ""
            while "epoch 1" not in said:
                line = first.stdout.readline()
                assert line, said
                said += line
            os.kill(second.pid, signal.SIGKILL)
            second.communicate()
            assert "epoch 6: " in output(first)
            assert "Rank 1 is gone" in output(server)


def test_its_plan_is_one() -> None:
    assert Plan.from_toml(PLAN).is_served


def test_its_commands_have_the_options_it_names() -> None:
    known = commands()
    tried = 0
    for line in "\n".join(SHELL).replace("\\\n", " ").splitlines():
        if line.startswith("offbeat "):
            name = line.split()[1]
            ours = {option for parameter in known[name].params for option in parameter.opts}
            assert set(re.findall(r" (--[\w-]+)", line.partition("digits.py")[0])) <= ours, line
            tried += 1
    assert tried == 8
