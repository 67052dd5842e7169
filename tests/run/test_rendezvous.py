"""How workers find each other on several machines: Gloo listens where the others reach it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from offbeat.run import rendezvous
from offbeat.run.environment import Environment
from tests.cli.commands import clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """What Gloo is told, on a machine of two interfaces, of a job of two workers under torchrun on two machines."""

    def chosen(
        *,
        own: str = "127.0.1.1",
        towards: str = "10.0.0.2",
        outward: tuple[tuple[str, str], ...] = (("eth0", "10.0.0.2"), ("docker0", "172.17.0.1")),
        **environment: str,
    ) -> str | None:
        for name in ("GLOO_SOCKET_IFNAME", "OFFBEAT_STORE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.setenv(name, "")  # what the function sets goes away with the test, too
            monkeypatch.delenv(name)
        for name, value in ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"} | environment).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(rendezvous, "resolve_hostname", lambda: own)
        monkeypatch.setattr(rendezvous, "interface_addresses", lambda: {"lo": "127.0.0.1", **dict(outward), "tun": ""})
        monkeypatch.setattr(rendezvous, "address_towards", lambda host: towards)
        rendezvous._choose_interface(2, Environment())
        return os.environ.get("GLOO_SOCKET_IFNAME")

    return chosen


def test_the_interface_by_which_the_first_machine_is_reached(chooses: Callable[..., str | None]) -> None:
    assert chooses() == "eth0"
    assert chooses(own="") == "eth0", "Gloo would take loopback"
    assert chooses(LOCAL_WORLD_SIZE="0") == "eth0", "started without torchrun, by hand"


def test_what_is_right_already_stays(chooses: Callable[..., str | None]) -> None:
    assert chooses(own="10.0.0.2") is None, "the name of the machine resolves to where others reach it"
    assert chooses(GLOO_SOCKET_IFNAME="docker0") == "docker0"
    assert chooses(LOCAL_WORLD_SIZE="2") is None, "all are on this machine"
    assert chooses(OFFBEAT_STORE="/tmp/store") is None, "offbeat run"


def test_the_first_machine_may_not_know_itself_by_that_name(chooses: Callable[..., str | None]) -> None:
    """--master-addr node1, which is 127.0.1.1 on node1 itself."""
    assert chooses(towards="127.0.0.1", outward=(("eth0", "10.0.0.1"),)) == "eth0"
    assert chooses(towards="127.0.0.1") is None, "one of two: Gloo's error names GLOO_SOCKET_IFNAME"
    assert chooses(towards="127.0.0.1", outward=(("eth0", "10.0.0.1"),), LOCAL_WORLD_SIZE="0") is None


@pytest.mark.slow
def test_the_first_one_there_says_where_it_waits() -> None:
    """Nobody else may ever come: another address, another port, a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with subprocess.Popen(
        [sys.executable, "-c", "import offbeat; offbeat.init(timeout=0.5)"],
        env=clean_environment() | environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.kill()
    assert said.startswith("waiting 0.")
    assert f" s for the meeting of all workers at 127.0.0.1:{port}; " in said
