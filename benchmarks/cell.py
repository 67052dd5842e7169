"""One cell of the fault matrix: a job, what strikes it, and what became of it.

Three workers train `benchmarks/workloads/marked.py` with a parameter server that keeps snapshots and is looked after,
as under `offbeat run --servers`; they are forked from a process that has torch loaded, so that a cell takes seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.audit import AuditResult, contributions, verify
from offbeat.exit_codes import how_it_ended
from offbeat.fault_spec import Fault, read_fired, unfired
from offbeat.server.launch import RESTARTS, ShardSettings, start_shard
from offbeat.testing.faults import environment

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

    from benchmarks.workloads.marked import Held
    from offbeat.audit import ContributionFate
    from offbeat.plan import Plan

WORKERS = 3
TIMEOUT_S = 2.0
DEADLINE_S = 150.0  # most of it is starting, on a machine that does much else
_ENDING_S = 8.0
_SNAPSHOT_EVERY = 5
_FAULTY = Path(__file__).resolve().parent.parent / "offbeat/testing/run_with_faults.py"
_JOB = Path(__file__).resolve().parent / "workloads/marked.py"
_context = mp.get_context("forkserver")
_PRELOADED = ["torch", "sklearn.datasets", "torch.utils.data", "offbeat.run.run", "offbeat.engine.server_session"]


def preload() -> None:
    """Have workers come from a process that has loaded what they need.

    A process has one such server for all that it starts, so this is for a program to call, not for an import.
    """
    _context.set_forkserver_preload(_PRELOADED)


@dataclass(frozen=True)
class Line:
    """Something that somebody said, and when."""

    time_s: float
    who: str
    text: str


@dataclass
class Story:
    """What a cell's processes did.

    Args:
        codes: how each worker ended; None if it did not.
        held: what those hold that came to the end, by rank.
        known: what became of each contribution to the server, as the job's history has it.
        verdict: of its audit.
    """

    faults: Sequence[Fault]
    folder: Path
    lines: list[Line] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    known: list[ContributionFate] = field(default_factory=list)
    verdict: AuditResult = field(default_factory=AuditResult)
    took_s: float = 0.0

    @property
    def log(self) -> Path:
        return log_of(self.folder)

    @property
    def history(self) -> Path:
        """Where its processes record what happens."""
        return self.folder / "history"

    @property
    def fired_s(self) -> float | None:
        """When the last fault struck, since 1970; None if one did not."""
        return None if unfired(self.faults, self.log) else read_fired(self.log)[-1].time_s

    def said_after(self, when_s: float) -> list[Line]:
        """What was said from then on."""
        return sorted((line for line in self.lines if line.time_s >= when_s), key=lambda line: line.time_s)

    @property
    def ends(self) -> list[str]:
        return ["goes on" if code is None else how_it_ended(code) for code in self.codes]


def log_of(folder: Path) -> Path:
    """Where faults are written down before they strike."""
    return folder / "faults.log"


def run(plan: Plan, faults: Sequence[Fault], folder: Path, *, shards: int = 1, arguments: Sequence[str] = ()) -> Story:
    """Run a job with faults, in an empty folder.

    Args:
        shards: of the server; 0 for none.
        arguments: of the workload.
    """
    story = Story(faults, folder)
    began_s = time.monotonic()
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "plan.toml").write_text(plan.to_toml())
    servers, found = _start_shards(story, shards) if shards else ([], {})
    workers: list[ForkServerProcess] = []
    try:
        together = {
            "WORLD_SIZE": str(WORKERS),
            "LOCAL_WORLD_SIZE": str(WORKERS),
            "OFFBEAT_STORE": str(folder / "store"),
            "OFFBEAT_OUTLIVES": str(folder / "outlives"),
            "OFFBEAT_PLAN": plan.to_toml(),
            "OFFBEAT_RUN_DIR": str(run_dir),
            "OFFBEAT_TIMEOUT_S": str(TIMEOUT_S),
            "OFFBEAT_HISTORY": str(story.history),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **found,
            **environment(faults, story.log),
        }
        for rank in range(WORKERS):
            mine, theirs = _context.Pipe(duplex=False)
            own = {**together, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            worker = _context.Process(target=_work, args=(theirs, own, list(arguments)), daemon=True)
            worker.start()
            theirs.close()
            _listen(story, f"worker {rank}", mine)
            workers.append(worker)
        for worker in workers:
            worker.join(max(0.0, began_s + DEADLINE_S - time.monotonic()))
        story.codes = [worker.exitcode for worker in workers]
        _let_end(servers)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for server in servers:
            server.kill()
            server.wait()
    story.took_s = time.monotonic() - began_s
    _read(story)
    return story


def _read(story: Story) -> None:
    from benchmarks.workloads.marked import Held

    for path in story.folder.glob("held*.json"):
        held = msgspec.json.decode(path.read_bytes(), type=Held)
        story.held[held.rank] = held
    if story.held:
        story.known, story.verdict = contributions(story.history), verify(story.history)


def _start_shards(story: Story, count: int) -> tuple[list[subprocess.Popen[bytes]], dict[str, str]]:
    job, token = secrets.token_hex(4), secrets.token_hex(32)
    addresses: list[str] = []
    servers: list[subprocess.Popen[bytes]] = []
    for number in range(count):
        settings = ShardSettings(
            job=job,
            token=token,
            coordinator=addresses[0] if addresses else "",
            timeout_s=TIMEOUT_S,
            snapshots=str(story.folder / "server" / f"shard-{number}"),
            every=_SNAPSHOT_EVERY,
            history=str(story.history),
            is_fresh=True,
            restarts=RESTARTS,
        )
        mine, theirs = _context.Pipe(duplex=False)
        # A pipe, not a file: a shard that cannot write to files shall be heard all the same.
        with os.fdopen(os.dup(theirs.fileno()), "wb") as output:
            server, address = start_shard(settings, output=output)
        theirs.close()
        _listen(story, f"shard {number}", mine)
        servers.append(server)
        addresses.append(address)
    return servers, {"OFFBEAT_SERVERS": ",".join(addresses), "OFFBEAT_JOB": job, "OFFBEAT_TOKEN": token}


def _listen(story: Story, who: str, connection: Connection) -> None:
    """Note each line with its time, on a thread that ends with whoever speaks."""

    def listen() -> None:
        with contextlib.suppress(OSError), os.fdopen(os.dup(connection.fileno()), errors="replace") as stream:
            connection.close()
            for text in stream:
                story.lines.append(Line(time.time(), who, text.rstrip()))

    threading.Thread(target=listen, daemon=True).start()


def _let_end(servers: Sequence[subprocess.Popen[bytes]]) -> None:
    """A server ends with its last worker; if that is lost, once it is missed."""
    deadline_s = time.monotonic() + _ENDING_S
    while any(server.poll() is None for server in servers) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _work(output: Connection, own: dict[str, str], arguments: list[str]) -> None:
    """Be a worker as `offbeat run` starts it."""
    from offbeat.cli import worker_main

    ours = [name for name in os.environ if name.startswith("OFFBEAT_")]
    for name in ours:
        del os.environ[name]
    os.environ.update(own)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    sys.argv = ["worker", str(_FAULTY), str(_JOB), *arguments]
    worker_main.main()
