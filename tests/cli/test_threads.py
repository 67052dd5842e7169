"""Several workers on a machine share its cores, unless somebody has said how many threads there are to be."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from offbeat import Plan
from offbeat.cli import launch, threads
from offbeat.cli.join_target import JoinTarget
from offbeat.server.launch import ShardAnnouncement, ShardSettings, start_shard
from tests.cli.commands import script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cold
TELLS = "import os; print('threads', os.environ.get('OMP_NUM_THREADS'), os.environ.get('MKL_NUM_THREADS'))"


@pytest.fixture(autouse=True)
def _sixteen_cores_and_nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.setattr(threads, "_quotas", lambda *where: [])
    for name in threads.SAID:
        monkeypatch.delenv(name, raising=False)


def run(folder: Path, capsys: pytest.CaptureFixture[str], workers: int, joining: JoinTarget | None = None) -> str:
    """What `offbeat run` says of a script that tells its environment."""
    job = launch.LaunchSpec(
        script=script(folder, TELLS),
        arguments=(),
        workers=workers,
        plan=Plan().to_toml(),
        servers=0,
        timeout_s=5.0,
        run_dir=folder,
        joining=joining,
    )
    assert launch.Launch(job, Console(highlight=False, soft_wrap=True)).run() == 0
    return capsys.readouterr().out


def test_each_of_several_workers_gets_its_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(tmp_path, capsys, 3)
    assert "3 workers on 16 cores: 5 torch threads each; OMP_NUM_THREADS chooses another number." in said
    assert sorted(re.findall(r"\[(\d)\] threads (.*)", said)) == [(rank, "5 None") for rank in "012"]


@pytest.mark.parametrize("name", threads.SAID)
def test_what_the_environment_says_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "7")
    said = run(tmp_path, capsys, 2)
    assert said.count("threads 7 None" if name == "OMP_NUM_THREADS" else "threads None 7") == 2
    assert "torch thread" not in said


def test_one_worker_has_the_machine_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, capsys, 1) == "[0] threads None None\n"


def test_who_joins_shares_with_those_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "workers_here", lambda: {11, 12, 13})
    said = run(tmp_path, capsys, 1, JoinTarget({"WORLD_SIZE": "1"}, 3, Plan()))
    assert "4 workers of all jobs on this machine, 3 of which run already, on 16 cores: 4 torch threads each;" in said
    assert "[3] threads 4 None" in said


def test_the_workers_of_this_machine_are_found() -> None:
    sleeps = "import time; print(flush=True); time.sleep(60)"
    # The other one has its sentinel; torchrun may have started it, which gives no hint.
    other = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {SENTINEL!r}])\ntime = 0\n{sleeps}"
    commands = (["-c", sleeps, "-m", "offbeat.cli.worker_main", "train.py"], ["-c", other], ["-c", sleeps])
    processes = [
        subprocess.Popen([sys.executable, *one], stdout=subprocess.PIPE, start_new_session=True) for one in commands
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        found, deadline_s = threads.workers_here(), time.monotonic() + 5
        while len(found.intersection(process.pid for process in processes)) < 2 and time.monotonic() < deadline_s:
            found = threads.workers_here()  # what has just been started may not show its command yet
        assert [process.pid in found for process in processes] == [True, True, False]
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


SENTINEL = 'import time; time.sleep(60)  # as in sentinel_client.py: runpy.run_module("offbeat.diagnosis"'


def test_a_shard_computes_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the workers do, to whom the environment belongs if one of them starts it."""
    popen, told = subprocess.Popen, list[str]()

    def tells(command: list[str], *, pass_fds: tuple[int, ...], **how: Any) -> subprocess.Popen[bytes]:
        announcement = ShardAnnouncement("threads=$OMP_NUM_THREADS").to_json().replace('"', r"\"")
        return popen(["bash", "-c", f'echo "{announcement}" >&{pass_fds[0]}'], pass_fds=pass_fds, **how)

    monkeypatch.setattr(subprocess, "Popen", tells)
    for said in ({}, {"OMP_NUM_THREADS": "7"}):
        process, answer = start_shard(ShardSettings(job="j"), environment={**os.environ, **said})
        told.append(answer)
        process.wait()
    assert told == ["threads=1", "threads=1"]


@pytest.mark.parametrize(
    ("cgroups", "files", "cores"),
    [
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, 16, id="no limit"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000"}, 3, id="around it"),
        pytest.param("0::/on-the-host\n", {"cpu.max": "200000 100000"}, 2, id="in a container"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000"}, 1, id="less than one"),
        pytest.param("0::/\n", {"cpu.max": "2000000 100000"}, 16, id="more than there are"),
        pytest.param("0::/\n", {"cpu.max": "nonsense"}, 16, id="nonsense"),
        pytest.param(
            "4:memory:/x\n1:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "400000", "cpu/x/cpu.cfs_period_us": "100000"},
            4,
            id="version 1",
        ),
        pytest.param(
            "1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16, id="version 1, no limit"
        ),
        pytest.param("", {}, 16, id="no cgroups"),
    ],
)
def test_a_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    if cgroups:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert threads.usable_cores(tmp_path) == cores
