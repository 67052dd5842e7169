"""`offbeat serve`, `offbeat run --servers`, and a job that outlives its workers."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import TRAIN, clean_environment, offbeat, script, start

if TYPE_CHECKING:
    from pathlib import Path

SERVED = TRAIN.replace(
    "offbeat.init()", "offbeat.init(offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.ParameterServer()))"
)
WITHOUT_FABRIC = TRAIN.replace("offbeat.init()", "offbeat.init(offbeat.Plan(sync=offbeat.ASP()))")


@pytest.mark.slow
def test_shards_beside_the_workers(tmp_path: Path) -> None:
    path = script(tmp_path, SERVED + "print('norm', float(model.weight.norm()) if run.settle() is None else 0)\n")
    code, output = offbeat("run", "--workers", 2, "--servers", 2, path, folder=tmp_path, cold=True)
    assert code == 0, output
    norms = re.findall(r"norm ([\d.]+)", output)
    assert len(norms) == 2
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    "fabric", ["ParameterServer()", pytest.param("ParameterServer(collocated=True)", marks=pytest.mark.slow)]
)
def test_a_job_outlives_a_worker_that_dies(tmp_path: Path, fabric: str) -> None:
    dying = SERVED.replace("ParameterServer()", fabric).replace(
        "    optimizer.step()\n", "    optimizer.step()\n    if run.rank == 0 and step == 1: os.kill(os.getpid(), 9)\n"
    )
    path = script(tmp_path, "import os\n" + dying + "print('done')\n")
    code, output = offbeat("run", "--workers", 3, path, folder=tmp_path, timeout_s=150)
    assert code == 0, output
    assert "rank 0 was killed by SIGKILL; the others continue." in output
    assert output.count("done") == 2


@pytest.mark.slow
def test_collocated_shards_under_torchrun(tmp_path: Path) -> None:
    # One write per line: under torchrun both workers write to the same pipe.
    tell = "run.settle()\nos.write(1, f'norm {float(model.weight.norm())}\\n'.encode())\n"
    collocated = SERVED.replace("ParameterServer()", "ParameterServer(collocated=True)")
    path = script(tmp_path, "import os\n" + collocated + tell)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    norms = re.findall(r"norm ([\d.]+)", done.stdout)
    assert len(norms) == 2
    assert norms[0] == norms[1]


@pytest.mark.slow
def test_a_job_whose_workers_all_fail_has_failed(tmp_path: Path) -> None:
    path = script(tmp_path, SERVED + "raise RuntimeError('the disk is full')\n")
    code, output = offbeat("run", "--workers", 2, path, folder=tmp_path)
    assert code == 1, output
    assert "RuntimeError: the disk is full" in output


def test_a_policy_that_needs_a_server_says_so(tmp_path: Path) -> None:
    code, output = offbeat("run", "--workers", 2, script(tmp_path, WITHOUT_FABRIC), folder=tmp_path)
    assert code == 2, output
    assert "Cannot use ASP() on ProcessGroup()" in output
    assert "ParameterServer()" in output


@pytest.mark.slow
def test_a_server_by_itself(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of more than sixteen bytes\n")
    with start("serve", "--job", "digits", "--token-file", "token", folder=tmp_path, cold=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            address = re.findall(r"serving job digits at (127\.0\.0\.1:\d+);", line)[0]
            environment = (
                f"import os\nos.environ.update(OFFBEAT_SERVERS={address!r}, OFFBEAT_JOB='digits', OFFBEAT_TOKEN="
            )
            path = script(tmp_path, environment + "'a wrong secret of some length')\n" + SERVED)
            code, output = offbeat("run", "--workers", 2, path, folder=tmp_path)
            assert code != 0
            assert f"Cannot join {address}" in output
            assert "secret" not in output
            path = script(tmp_path, environment + "'a secret of more than sixteen bytes')\n" + SERVED)
            code, output = offbeat("run", "--workers", 2, path, folder=tmp_path)
            assert code == 0, output
            assert server.wait(10) == 0, "it ends with its last worker"
        finally:
            server.kill()
        rest = server.stdout.read()
        assert "127.0.0.1" in rest, "who was refused is logged with its address"
        assert "a secret" not in rest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_server_that_is_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    with start("serve", folder=tmp_path) as server:
        assert server.stdout is not None
        server.stdout.readline()
        server.send_signal(number)
        assert server.wait(10) == 0


def test_a_shard_that_dials_can_be_told_to_end(tmp_path: Path) -> None:
    """Also while nobody answers it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with start("serve", "--coordinator", address, folder=tmp_path) as server, silent.accept()[0]:
            server.send_signal(signal.SIGTERM)
            assert server.wait(10) == 0


BAD_INPUT: dict[str, tuple[tuple[str, ...], str]] = {
    "a port in use": (("--port", "{taken}"), "Cannot open a server on 127.0.0.1, port {taken}: "),
    "no folder": (("--snapshots", "token/kept"), "Cannot keep snapshots in token/kept: Not a directory."),
    "no address": (("--coordinator", "here"), "Cannot dial 'here': an address is host:port"),
    "half of TLS": (("--certificate", "a.pem"), "Cannot use TLS with a part of its files: name certificate, key and"),
    "no TLS": (
        ("--certificate", "a.pem", "--key", "a.key", "--authority", "b.pem"),
        "Cannot use the certificates in a.pem, a.key and b.pem: [Errno 2] No such file or directory.",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_what_a_server_cannot_use_is_said_in_a_sentence(tmp_path: Path, name: str) -> None:
    arguments, says = BAD_INPUT[name]
    (tmp_path / "token").write_text("a secret of more than sixteen bytes\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        code, output = offbeat("serve", *(one.format(taken=taken) for one in arguments), folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert output.startswith(f"offbeat: {says.format(taken=taken)}")


@pytest.mark.slow
def test_servers_that_the_plan_does_not_use(tmp_path: Path) -> None:
    code, output = offbeat("run", "--workers", 2, "--servers", 1, script(tmp_path, TRAIN), folder=tmp_path)
    assert code == 0, output
    (said,) = [line for line in output.splitlines() if "Nobody uses the parameter server at 127.0.0.1:" in line]
    assert "the plan's fabric is ProcessGroup()." in said
    assert "`offbeat run --fabric 'ParameterServer()'`" in said


def test_a_server_that_others_can_reach_needs_a_secret(tmp_path: Path) -> None:
    code, output = offbeat("serve", "--bind", "0.0.0.0", folder=tmp_path)
    assert code == 2
    assert output.startswith("offbeat: Cannot open a server on 0.0.0.0 without a token or certificates")
    assert len(output.strip().splitlines()) == 1


def test_an_empty_secret_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    code, output = offbeat("serve", "--token-file", "token", folder=tmp_path)
    assert (code, output.strip().splitlines()[1:]) == (2, [])
    assert output.startswith("offbeat: Cannot use the token in token: the file is empty")


GOES_ON = """
import os, signal, time, torch, offbeat
run = offbeat.init(offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.ParameterServer(patience_s=120)))
model = torch.nn.Linear(100, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
for step in range(30):
    if run.rank == 0 and step == 10:
        os.kill(int(os.environ["SERVER"]), signal.SIGTERM)
    model.module.weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
run.settle()
print("rounds", -float(model.module.weight.mean()))
"""


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_a_server_that_is_told_to_end_and_started_again_has_lost_nothing(tmp_path: Path) -> None:
    serving = ("serve", "--job", "j", "--port", free_port(), "--snapshots", tmp_path / "kept", "--every", "1000")
    with start(*serving, folder=tmp_path) as server:
        address = re.findall(r"at (\S+);", server.stdout.readline())[0]  # type: ignore[union-attr]
        variables = {"OFFBEAT_SERVERS": address, "OFFBEAT_JOB": "j", "SERVER": str(server.pid)}
        path = script(tmp_path, f"import os\nos.environ.update({variables})\n" + GOES_ON)
        with start("run", "--workers", 2, path, folder=tmp_path) as job:
            try:
                assert server.wait(100) == 0, "the fault was injected"
                with start(*serving, folder=tmp_path) as again:
                    try:
                        output, _ = job.communicate(timeout=100)
                        assert job.returncode == 0, output
                        assert re.findall(r"rounds ([\d.]+)", output) == ["30.0", "30.0"]
                        assert "resumes from version" in output
                        assert "nothing is lost." in output
                        assert again.wait(20) == 0, "it ends with its last worker"
                    finally:
                        again.kill()
            finally:
                job.kill()
                server.kill()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["lock"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
