"""`offbeat serve`, `offbeat run --servers`, and a job that outlives its workers."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import TRAIN, offbeat, script, start

if TYPE_CHECKING:
    from pathlib import Path

SERVED = TRAIN.replace(
    "offbeat.init()", "offbeat.init(offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.ParameterServer()))"
)
WITHOUT_FABRIC = TRAIN.replace("offbeat.init()", "offbeat.init(offbeat.Plan(sync=offbeat.ASP()))")


def test_shards_beside_the_workers(tmp_path: Path) -> None:
    path = script(tmp_path, SERVED + "print('norm', float(model.weight.norm()) if run.settle() is None else 0)\n")
    code, output = offbeat("run", "--workers", 2, "--servers", 2, path, folder=tmp_path)
    assert code == 0, output
    norms = re.findall(r"norm ([\d.]+)", output)
    assert len(norms) == 2
    assert norms[0] == norms[1]


def test_a_job_outlives_a_worker_that_dies(tmp_path: Path) -> None:
    dying = SERVED.replace(
        "    optimizer.step()\n", "    optimizer.step()\n    if run.rank == 0 and step == 1: os.kill(os.getpid(), 9)\n"
    )
    path = script(tmp_path, "import os\n" + dying + "print('done')\n")
    code, output = offbeat("run", "--workers", 3, path, folder=tmp_path)
    assert code == 0, output
    assert "rank 0 was killed by SIGKILL; the others go on." in output
    assert output.count("done") == 2


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


def test_a_server_by_itself(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of more than sixteen bytes\n")
    with start("serve", "--job", "digits", "--token-file", "token", folder=tmp_path) as server:
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


def test_a_server_that_others_can_reach_needs_a_secret(tmp_path: Path) -> None:
    code, output = offbeat("serve", "--bind", "0.0.0.0", folder=tmp_path)
    assert code == 2
    assert output.startswith("offbeat: Cannot open a server on 0.0.0.0 without a token or certificates")
    assert len(output.strip().splitlines()) == 1
