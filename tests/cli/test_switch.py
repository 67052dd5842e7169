"""`offbeat switch`: a switch by itself, a job that it sums for, and what its operator sees."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from offbeat.cli.certs import make
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from tests.cli.commands import TRAIN, offbeat, script, start
from tests.switch.local_switch import served_switch

if TYPE_CHECKING:
    from pathlib import Path

WIDE = TRAIN.replace("Linear(4, 2)", "Linear(64, 64)").replace("randn(3, 4)", "randn(3, 64)")


@pytest.mark.slow
def test_a_switch_by_itself(tmp_path: Path) -> None:
    path = script(tmp_path, WIDE + "print('norm', float(model.weight.norm()))\n")
    with start("switch", "serve", folder=tmp_path) as served:
        try:
            assert served.stdout is not None
            said = served.stdout.readline()
            address = re.findall(r"summing at (127\.0\.0\.1:\d+): ", said)[0]
            code, output = offbeat("run", "--workers", 2, "--fabric", f'Switch("{address}")', path, folder=tmp_path)
            assert code == 0, output
            norms = re.findall(r"norm ([\d.]+)", output)
            assert len(norms) == 2
            assert norms[0] == norms[1]
            code, output = offbeat("switch", "ctl", address, folder=tmp_path)
            assert code == 0, output
            assert "no job is summed by this switch (udp)" in output
            served.send_signal(signal.SIGTERM)
            assert served.wait(10) == 0
        finally:
            served.kill()


def test_a_switch_that_is_not_there_refuses_the_plan(tmp_path: Path) -> None:
    where = ["--workers", 2, "--timeout", 2, "--fabric", 'Switch("127.0.0.1:9")']
    code, output = offbeat("run", *where, script(tmp_path, TRAIN), folder=tmp_path)
    assert code == 2, output
    assert "Start the switch with `offbeat switch serve`" in output
    assert "All have arrived" not in output


@pytest.mark.parametrize(
    ("whom", "says"),
    [("b:0", "this switch has no such job"), ("a:1", "its workers are 0"), ("a:70", "its workers are 0")],
)
def test_whoever_is_not_there_is_not_evicted(whom: str, says: str, tmp_path: Path) -> None:
    with served_switch() as address:
        client = ControlClient(address)
        client.join("a", JobShape(0, 2))
        code, output = offbeat("switch", "ctl", address, "--evict", whom, folder=tmp_path)
        client.close()
    assert code == 2
    assert says in " ".join(output.split())


def test_a_worker_is_evicted_from_the_tables_of_its_job_too(tmp_path: Path) -> None:
    with served_switch() as address:
        client = ControlClient(address)
        for name in ("a", "a-0-0", "b"):
            client.join(name, JobShape(0, 2))
        code, output = offbeat("switch", "ctl", address, "--evict", "a:0", folder=tmp_path)
        left = {job.job: len(job.members) for job in client.status().jobs}
        client.close()
    assert code == 0, output
    assert left == {"b": 1}, "a job ends with its last worker"


@pytest.mark.slow
def test_a_switch_with_certificates(tmp_path: Path) -> None:
    make(tmp_path / "certs")
    path = script(tmp_path, WIDE + "print('norm', float(model.weight.norm()))\n")

    def files(of: str) -> list[str]:
        folder = tmp_path / "certs"
        return [
            f"--certificate={folder}/{of}.pem", f"--key={folder}/{of}.key", f"--authority={folder}/authority.pem",
        ]  # fmt: skip

    variables = {
        f"OFFBEAT_{name.upper()}": text for name, text in (one[2:].split("=") for one in files("worker"))
    }  # as a worker's machine has them
    with start("switch", "serve", *files("server"), folder=tmp_path) as served:
        try:
            assert served.stdout is not None
            address = re.findall(r"summing at (127\.0\.0\.1:\d+): ", served.stdout.readline())[0]
            code, output = offbeat("switch", "ctl", address, folder=tmp_path)
            assert code == 2, "it says nothing to whoever shows no certificate"
            code, output = offbeat("switch", "ctl", address, *files("worker"), folder=tmp_path)
            assert (code, "no job is summed by this switch (udp)" in output) == (0, True), output
            code, output = offbeat("switch", "doctor", address, *files("worker"), folder=tmp_path)
            assert (code, "the credentials are accepted" in output) == (0, True), output
            arguments = ("run", "--workers", 2, "--fabric", f'Switch("{address}")', path)
            code, output = offbeat(*arguments, folder=tmp_path, variables=variables)
            assert (code, len(set(re.findall(r"norm ([\d.]+)", output)))) == (0, 1), output
        finally:
            served.kill()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "--bind", "0.0.0.0"), "--trusted-network"),
        (("serve", "--bind", "0.0.0.0", "--trusted-network"), "without a token"),
        (("serve", "--certificate", "a.pem"), "Cannot use TLS with a part of its files: name certificate, key and"),
        (("serve", "--target", "xdp"), "--interfaces port0,port1"),
        (("serve", "--interfaces", "lo"), "Cannot use --interfaces with --target udp"),
        (("ctl", "127.0.0.1:9"), "Cannot reach 127.0.0.1:9"),
        (
            ("ctl", "127.0.0.1:9", "--key", "a.key"),
            "Cannot use TLS with a part of its files: name certificate, key and",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    code, output = offbeat("switch", *arguments, folder=tmp_path)
    assert code == 2, output
    assert says in output


def test_a_job_without_a_switch_says_how_to_start_one(tmp_path: Path) -> None:
    code, output = offbeat("run", "--workers", 2, "--fabric", "Switch()", script(tmp_path, WIDE), folder=tmp_path)
    assert code == 2, output
    assert "offbeat switch serve" in output
