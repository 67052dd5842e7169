"""Shards below `offbeat run`: they end with it, however it ends, and what looks after one is looked after itself."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.cli.shards import LocalShards
from offbeat.clock import VirtualClock
from offbeat.server.launch import RestartNote, ShardAnnouncement, ShardSettings
from tests.cli.commands import COMMAND, TRAIN, alive, clean_environment, descendants, script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.cold
SLOW = TRAIN.replace("range(4)", "range(10**6)").replace(
    "    optimizer.step()", "    optimizer.step()\n    import time; time.sleep(0.02)\n    STEP"
)
SERVED = ("--sync", "ASP()", "--fabric", "ParameterServer()")
ANNOUNCEMENT = ShardAnnouncement("127.0.0.1:7070").to_json()


class Started:
    """`offbeat run` in a session of its own, as in a terminal of its own."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.said = folder / "said"
        with self.said.open("w") as out:
            self.process = subprocess.Popen(
                [*COMMAND, "run", *map(str, arguments)],
                cwd=folder,
                env=clean_environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def serving(self, *, kept: bool) -> set[int]:
        """Processes that serve, or are to, or else those that look after them."""
        return {pid for pid in descendants(self.process.pid) if _serves(pid, kept=kept)}

    def soon(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline_s, self.said.read_text()
            assert self.process.poll() is None, self.said.read_text()
            time.sleep(0.1)


def _serves(pid: int, *, kept: bool) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return False
    return b"offbeat.cli.shard_main" in command and (b"kept" in command) == kept


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    jobs = []

    def start(text: str, *options: object) -> Started:
        jobs.append(Started(tmp_path, *options, script(tmp_path, text)))
        return jobs[-1]

    yield start
    for job in jobs:
        below = descendants(job.process.pid)
        job.process.kill()
        job.process.wait()
        for pid in alive(below):
            os.kill(pid, signal.SIGKILL)


def _to_group(job: Started) -> None:
    os.killpg(job.process.pid, signal.SIGINT)


def _to_launcher(job: Started) -> None:
    job.process.terminate()


def _killed(job: Started) -> None:
    job.process.kill()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("strike", "code", "says"),
    [(_to_group, 130, "SIGINT: ending 1 shard."), (_to_launcher, 143, "SIGTERM: ending 1 shard."), (_killed, -9, "")],
    ids=["ctrl-c", "SIGTERM", "SIGKILL"],
)
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_everything_ends_within_3_s_while_shards_start(
    started: Callable[..., Started], strike: Callable[[Started], None], code: int, says: str, shards: int
) -> None:
    job = started(TRAIN, "--servers", 6, *SERVED)
    job.soon(lambda: len(job.serving(kept=False)) == shards)
    job.soon(lambda: len(job.serving(kept=True)) >= 2 * shards - 1)
    below, began_s = descendants(job.process.pid), time.monotonic()
    strike(job)
    assert job.process.wait(10) == code
    while alive(below):
        assert time.monotonic() - began_s < 3, alive(below)
        time.sleep(0.02)
    said = job.said.read_text()
    assert says.replace("1 shard.", "2 shards." if shards == 2 else "1 shard.") in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_beside_a_worker_ends_with_the_launcher_that_is_killed(started: Callable[..., Started]) -> None:
    job = started(TRAIN, *SERVED)
    job.soon(lambda: bool(job.serving(kept=True)))
    below, began_s = descendants(job.process.pid), time.monotonic()
    job.process.kill()
    while alive(below):
        assert time.monotonic() - began_s < 3, alive(below)
        time.sleep(0.02)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "servers", [pytest.param((), id="beside"), pytest.param(("--servers", 2), id="shards", marks=pytest.mark.slow)]
)
def test_who_looks_after_a_shard_is_killed_and_the_job_goes_on(
    tmp_path: Path, started: Callable[..., Started], servers: tuple[object, ...]
) -> None:
    text = SLOW.replace(
        "STEP", "open('steps', 'a').write('.')\n    if __import__('pathlib').Path('enough').exists(): break"
    )
    steps = tmp_path / "steps"
    job = started(text, "--run-dir", "out", *servers, *SERVED)
    job.soon(lambda: steps.exists() and steps.stat().st_size > 20)
    keeper, serving = min(job.serving(kept=False)), job.serving(kept=True)
    os.kill(keeper, signal.SIGKILL)
    struck_s = time.monotonic()
    job.soon(
        lambda: (
            "was killed, and the shard with it; it is started again (and 4 more times if need be)."
            in job.said.read_text()
        ),
        3,
    )
    assert time.monotonic() - struck_s < 3
    job.soon(lambda: alive(serving) < serving, 3)  # its shard went with it
    job.soon(lambda: "The parameter server was restarted" in job.said.read_text(), 90)
    done = steps.stat().st_size
    job.soon(lambda: steps.stat().st_size > done + 20)
    (tmp_path / "enough").touch()
    assert job.process.wait(30) == 0, job.said.read_text()


# -- without processes that take seconds -------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each process was told that was started to serve: it answers, and is then quiet."""
    told, popen = list[str](), subprocess.Popen

    def begin(command: list[str], *, pass_fds: tuple[int, ...], **how: Any) -> subprocess.Popen[bytes]:
        told.append("started")
        return popen(["bash", "-c", f"echo '{ANNOUNCEMENT}' >&{pass_fds[0]}; exec sleep 60"], pass_fds=pass_fds, **how)

    monkeypatch.setattr(subprocess, "Popen", begin)
    return told


def ended_pid() -> int:
    process = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(process, 0)
    return process


def look(shards: LocalShards) -> str:
    shards._looked_s = 0.0
    return shards.look()


NOTED = ShardSettings(job="j", port=7070, snapshots="/nowhere/shard-3", restarts=5)


def test_only_who_is_killed_is_started_again(tmp_path: Path, asked: list[str]) -> None:
    said = list[str]()
    shards = LocalShards(tmp_path, {}, said.append)
    RestartNote(tmp_path / f"{os.getpid()}.json").write(NOTED)
    RestartNote(tmp_path / f"{(gone := ended_pid())}.json").write(NOTED)
    RestartNote(tmp_path / f"{gone}.json").remove()
    assert look(shards) == ""
    assert (asked, said) == ([], [])
    RestartNote(tmp_path / f"{gone}.json").write(NOTED)
    assert [look(shards) for _ in range(3)] == ["", "", ""]
    assert asked == ["started"], "once"
    (told,) = said
    assert told == (
        "The process that looks after shard 3 of the parameter server at 127.0.0.1:7070 was killed, and the shard with "
        "it; it is started again (and 4 more times if need be)."
    )
    began_s = time.monotonic()
    shards.end(0.1, 0.3, hurry=lambda: False)
    assert time.monotonic() - began_s < 2


def test_a_shard_that_is_killed_again_and_again_is_started_after_ever_longer_pauses(
    tmp_path: Path, asked: list[str]
) -> None:
    clock, at = VirtualClock(), list[float]()
    shards = LocalShards(tmp_path, {}, lambda text: None, clock)
    for _ in range(4):
        RestartNote(tmp_path / f"{ended_pid()}.json").write(NOTED)
        before = len(asked)
        while len(asked) == before:
            assert look(shards) == ""
            clock.sleep(0.1)
        at.append(clock.now_s())
    pauses = [after - before for before, after in itertools.pairwise(at)]
    assert at[0] < 0.2, "the first time at once"
    for pause, most in zip(pauses, (0.5, 1.0, 2.0), strict=True):
        assert most / 2 <= pause <= most + 0.2
    shards.end(0.1, 0.3, hurry=lambda: False)


def test_a_replacement_that_is_killed_while_it_starts_uses_up_one_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, clock, popen = list[str](), VirtualClock(), subprocess.Popen

    def begin(command: list[str], *, pass_fds: tuple[int, ...], **how: Any) -> subprocess.Popen[bytes]:
        return popen(["bash", "-c", "kill -KILL $$"], pass_fds=pass_fds, **how)

    monkeypatch.setattr(subprocess, "Popen", begin)
    shards = LocalShards(tmp_path, {}, said.append, clock)
    RestartNote(tmp_path / f"{ended_pid()}.json").write(NOTED)
    at, deadline_s = list[float](), time.monotonic() + 10
    while not (why := look(shards)) and time.monotonic() < deadline_s:
        at += [clock.now_s()] * (len(said) - len(at))
        for one in shards._processes:
            one.process.wait()
        clock.sleep(0.1)
    assert [text.rpartition("(")[2] for text in said] == [
        f"and {left} more times if need be)." for left in (4, 3, 2, 1)
    ]
    assert all(after - before > 0.2 for before, after in itertools.pairwise(at)), "with a pause between"
    assert "for the last time: it is not started again." in why
    shards.end(0.1, 0.3, hurry=lambda: False)


def test_a_replacement_that_says_why_it_cannot_serve_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen

    def begin(command: list[str], *, pass_fds: tuple[int, ...], **how: Any) -> subprocess.Popen[bytes]:
        program = f"""echo '{{"error":"its port is taken."}}' >&{pass_fds[0]}"""
        return popen(["bash", "-c", program], pass_fds=pass_fds, **how)

    monkeypatch.setattr(subprocess, "Popen", begin)
    shards = LocalShards(tmp_path, {}, lambda text: None)
    RestartNote(tmp_path / f"{ended_pid()}.json").write(NOTED)
    deadline_s = time.monotonic() + 10
    while not (why := look(shards)):
        assert time.monotonic() < deadline_s
    assert why == "Cannot start a parameter server: its port is taken."
    shards.end(0.1, 0.3, hurry=lambda: False)


def test_a_shard_that_is_not_started_again_ends_the_job(tmp_path: Path, asked: list[str]) -> None:
    shards = LocalShards(tmp_path, {}, lambda text: None)
    RestartNote(tmp_path / f"{ended_pid()}.json").write(
        ShardSettings(job="j", port=7070, snapshots="shard-0", restarts=1)
    )
    assert "was killed, and the shard with it, for the last time: it is not started again." in look(shards)
    assert asked == []


def test_a_shard_that_was_given_up_ends_the_job(tmp_path: Path) -> None:
    note = RestartNote(tmp_path / f"{os.getpid()}.json")
    note.write(NOTED)
    note.give_up("The parameter server at 127.0.0.1:7070 was killed by SIGKILL, for the last time.")
    shards = LocalShards(tmp_path, {}, lambda text: None)
    assert look(shards) == "The parameter server at 127.0.0.1:7070 was killed by SIGKILL, for the last time."


def test_who_ignores_signals_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of several at the same time."""
    popen = subprocess.Popen

    def deaf(command: list[str], *, pass_fds: tuple[int, ...], **how: Any) -> subprocess.Popen[bytes]:
        program = f"trap '' TERM; echo '{ANNOUNCEMENT}' >&{pass_fds[0]}; while true; do sleep 0.1; done"
        return popen(["bash", "-c", program], pass_fds=pass_fds, **how)

    monkeypatch.setattr(subprocess, "Popen", deaf)
    shards = LocalShards(tmp_path, {}, lambda text: None)
    addresses = [shards.start(ShardSettings(job="j"), unless=lambda: False) for _ in range(4)]
    assert addresses == ["127.0.0.1:7070"] * 4
    began_s = time.monotonic()
    shards.end(0.2, 0.2, hurry=lambda: False)
    assert time.monotonic() - began_s < 2
    assert not alive({one.process.pid for one in shards._processes})
