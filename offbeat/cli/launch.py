"""Local worker processes: started together, ended together.

Each worker is the leader of a session of its own, so that ending it ends what it started. Its output comes through a
pipe, line by line, with the rank in front. When one ends badly, the others get a moment to say what they saw, and are
then ended; the first to go, if it was not itself a victim of another's loss, is named with its traceback and gives the
exit code. Where a parameter server keeps the job together, the others go on without it, and the job ends well if one
of them does and offbeat refused nothing that another did.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import Console

from offbeat.cli.job_address import VALIDATOR_TOKEN
from offbeat.cli.shards import LocalShards
from offbeat.cli.threads import share_of_cores, workers_here
from offbeat.cli.worker_main import REFUSED, VICTIM
from offbeat.exit_codes import LEFT, UNPREPARED, how_it_ended
from offbeat.report.records import OF_JOB, EventRecord, append
from offbeat.safe_write import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from offbeat.cli.join_target import JoinTarget
    from offbeat.cli.nodes import NodeGroup

_TERM_GRACE_S = 1.5  # from SIGTERM to SIGKILL; everything is over within 3 s
_SHARD_HURRY_S = 0.4  # for shards to end because their workers have
_SHARD_ALONE_S = 2.0  # the same, where the job has ended well and nobody is in a hurry
_SHARD_GRACE_S = 0.6  # from SIGTERM to SIGKILL
_OBITUARY_S = 2.0  # for the others to say what they saw when one is lost
_TAIL_LINES = 60
_LOOK_S = 0.5  # between two looks whether the job that is joined goes on
_MOST_LINE_BYTES = 1 << 20  # a longer line is broken


@dataclass(frozen=True)
class LaunchSpec:
    """The description of what to start.

    Args:
        servers: shards of a parameter server to start beside the workers.
        timeout_s: waits longer than this are explained.
        run_dir: absolute folder for metrics.
        joining: the job that they join, if it trains already, or that they validate for.
        nodes: the other machines of a job on several, which this one has met.
        history: folder for histories; None for none, or that of the environment.
        hash_every: steps between two digests of the parameters.
        store: the file in which the workers meet; None for one that ends with them.
        check_freshness: whether parameters that are read too early are looked for.
        parts: fields of a plan, as TOML, that replace those of a plan that the script gives.
    """

    script: Path
    arguments: tuple[str, ...]
    workers: int
    plan: str
    servers: int
    timeout_s: float
    run_dir: Path
    joining: JoinTarget | None = None
    nodes: NodeGroup | None = None
    history: Path | None = None
    hash_every: int = 1
    store: Path | None = None
    check_freshness: bool = False
    parts: str = ""


class Worker:
    """One worker process and the last lines it wrote."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.ended_s: float | None = None

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def describe_end(self) -> str:
        return "goes on" if self.code is None else how_it_ended(self.code)

    def signal(self, number: int) -> None:
        """Send a signal to the worker and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Launch:
    """A job's local workers.

    Args:
        job: what to start.
        console: where output goes.
        tick: called about ten times a second while the workers run.
    """

    def __init__(
        self, job: LaunchSpec, console: Console | None = None, tick: Callable[[], None] = lambda: None
    ) -> None:
        self._job = job
        self._tick = tick
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._interrupted: int | None = None
        self._is_ending = False
        self._survival_file = Path()  # exists once the job goes on without a worker that is lost
        self._ended = Path()  # exists once all are done with whom the job began that is joined
        self._looked_s = 0.0
        self._failed_elsewhere_s: float | None = None
        self._keeps_store = False
        self._reported: set[int] = set()
        self._refusals = Path()  # a file by each worker that offbeat has refused something
        self._refused: dict[str, list[int]] = {}  # what was refused, and to which ranks
        self.exit_codes: dict[int, int] = {}  # by rank, of the workers that were not ended from here
        self._fate = ""  # what the job ends of here, for the other machines
        self._shards: LocalShards

    def run(self) -> int:
        """Start the workers, wait for all, and return the job's exit code."""
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        # What looks after a shard may still write there when all is over.
        with tempfile.TemporaryDirectory(prefix="offbeat-", ignore_cleanup_errors=True) as private:
            self._survival_file, self._ended = Path(private) / "outlives", Path(private) / "ended"
            notes, self._refusals = Path(private) / "shards", Path(private) / "refusals"
            notes.mkdir()
            self._refusals.mkdir()
            # By which what is below this process ends with it, and is known to it.
            below = {"OFFBEAT_LAUNCHER_PID": str(os.getpid()), "OFFBEAT_SHARDS": str(notes)}
            self._shards = LocalShards(notes, below, self._warn)
            nodes = self._job.nodes
            try:
                self._start(Path(private), below)
                if nodes is not None:
                    nodes.watch()
                return self._watch()
            finally:
                self._end_all()
                if nodes is not None:
                    nodes.leave("" if self._survival_file.exists() else self._fate)
                self._drain()
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = number

    def _start(self, private: Path, below: dict[str, str]) -> None:
        """Start all there is, unless a signal comes first."""
        found = self._start_shards()
        if self._interrupted is not None:
            return
        env = {**os.environ, **self._common_environment(private), **below, **found}
        env.pop("OFFBEAT_VALIDATOR_TOKEN", None)  # no worker is to know it
        first = 0
        if self._job.joining is not None:
            env |= self._job.joining.environment
            first = self._job.joining.first_rank
        if self._job.nodes is not None:
            first = self._job.nodes.first_rank
        for local_rank in range(self._job.workers):
            rank = first + local_rank
            command = [
                sys.executable,
                "-u",
                "-m",
                "offbeat.cli.worker_main",
                str(self._job.script),
                *self._job.arguments,
            ]
            process = subprocess.Popen(
                command,
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            worker = Worker(rank, process)
            self._workers.append(worker)
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, (worker, bytearray()))
        pids = {worker.rank: worker.process.pid for worker in self._workers}
        (private / "workers.json").write_text(json.dumps(pids))

    def _common_environment(self, private: Path) -> dict[str, str]:
        job = self._job
        env = {
            "LOCAL_WORLD_SIZE": str(job.workers),
            "OFFBEAT_OUTLIVES": str(self._survival_file),
            "OFFBEAT_WORKERS": str(private / "workers.json"),
            "OFFBEAT_ENDED": str(self._ended),
            "OFFBEAT_REFUSALS": str(self._refusals),
            "OFFBEAT_PLAN": job.plan,
            "OFFBEAT_TIMEOUT_S": str(job.timeout_s),
            "OFFBEAT_RUN_DIR": str(job.run_dir),
        }
        env |= self._on_this_machine(private) if job.nodes is None else job.nodes.environment
        if job.history is not None:
            env |= {"OFFBEAT_HISTORY": str(job.history), "OFFBEAT_HASH_EVERY": str(job.hash_every)}
        if job.parts:
            env["OFFBEAT_PLAN_PARTS"] = job.parts
        if job.check_freshness:
            env["OFFBEAT_CHECK_FRESHNESS"] = "1"
        share, said = share_of_cores(job.workers, 0 if job.joining is None else len(workers_here()))
        if said:
            self._console.print(said, style="dim", markup=False)
        return env | share

    def _on_this_machine(self, private: Path) -> dict[str, str]:
        """The variables by which workers meet that need no other machine to begin."""
        is_elsewhere = self._job.joining is not None and self._job.joining.reaches_machines
        return {
            "WORLD_SIZE": str(self._job.workers),
            # The workers meet through a file: torch's TCPStore would listen on every interface.
            "OFFBEAT_STORE": str(self._job.store or private / "store"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        } | ({} if is_elsewhere else {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")})

    def _start_shards(self) -> dict[str, str]:
        """Start the shards; how the workers find them."""
        if not self._job.servers:
            return {}
        from offbeat.server.launch import RESTARTS, ShardSettings

        # Who has a token has it for all that the workers reach, such as a switch.
        job, token = secrets.token_hex(8), os.environ.get("OFFBEAT_TOKEN") or secrets.token_hex(32)
        validator_token = os.environ.get("OFFBEAT_VALIDATOR_TOKEN", "")
        if not validator_token:  # the plan may be the script's
            validator_token = secrets.token_hex(32)
            write_whole(self._job.run_dir / VALIDATOR_TOKEN, validator_token.encode(), mode=0o600)
        addresses: list[str] = []
        for number in range(self._job.servers):
            settings = ShardSettings(
                job=job,
                token=token,
                validator_token=validator_token,
                coordinator=addresses[0] if addresses else "",
                timeout_s=self._job.timeout_s,
                snapshots=str(self._job.run_dir / "server" / f"shard-{number}"),
                is_fresh=True,
                restarts=RESTARTS,
                history=str(self._job.history or os.environ.get("OFFBEAT_HISTORY", "")),
            )
            address = self._shards.start(settings, unless=self._was_interrupted)
            if address is None:
                break
            addresses.append(address)
        return {"OFFBEAT_SERVERS": ",".join(addresses), "OFFBEAT_JOB": job, "OFFBEAT_TOKEN": token}

    def _watch(self) -> int:
        while True:
            self._read(timeout_s=0.1)
            self._tick()
            self._look_for_end()
            if self._interrupted is not None:
                name = signal.Signals(self._interrupted).name
                alive = sum(worker.code is None for worker in self._workers)
                count, what = (alive, "worker") if self._workers else (len(self._shards), "shard")
                text = f"{name}: ending {count} {what}{'s' if count != 1 else ''}."
                self._warn(text)
                self._record("interrupted", text)
                self._fate = f"{name} on {socket.gethostname()}."
                return 128 + self._interrupted
            if not self._is_over() and (why := self._shards.look()):
                self._console.print(f"{why} The job cannot continue without it.", style="bold red", markup=False)
                return VICTIM
            now_s = time.monotonic()
            for worker in self._workers:
                if worker.ended_s is None and worker.code is not None:
                    worker.ended_s = now_s
                    self._tell_refusal(worker)
                    if worker.code:  # it may not have come to say so itself, also where it was not killed
                        what = "killed" if worker.code < 0 else "exited"
                        self._record(what, f"Rank {worker.rank} {worker.describe_end()}.", worker.rank)
            failed = [w for w in self._workers if w.code not in (None, 0, UNPREPARED)]
            all_ended = self._is_over()
            lives_on = self._survival_file.exists()
            keeps_store = all_ended and (lives_on or not failed) and self._is_needed_elsewhere()
            if failed and lives_on and (not all_ended or keeps_store or len(failed) < len(self._workers)):
                self._tell_lost(failed)
                failed = []
            if keeps_store:
                continue
            if not lives_on and (why := self._why_over_elsewhere()):
                self._console.print(f"\nThe job has ended on {why}", style="bold red", markup=False)
                return VICTIM
            if failed and (all_ended or now_s - min(w.ended_s or now_s for w in failed) > _OBITUARY_S):
                return self._report_loss(failed)
            if all_ended:
                refused = [w for w in self._workers if w.code == REFUSED]
                if refused:
                    return self._report_loss(refused)
                return UNPREPARED if any(w.code == UNPREPARED for w in self._workers) else 0

    def _record(self, what: str, text: str, rank: int = OF_JOB) -> None:
        """Keep what the workers cannot say for the report."""
        event = EventRecord(rank=rank, step=-1, time_s=time.time(), what=what, text=text)
        append(self._job.run_dir / "metrics.jsonl", event)

    def _is_over(self) -> bool:
        return all(w.code is not None for w in self._workers)

    def _is_needed_elsewhere(self) -> bool:
        """Whether the workers of other machines train on, and need the store that this process keeps."""
        nodes = self._job.nodes
        if nodes is None or not nodes.is_needed:
            return False
        if not self._keeps_store:
            self._keeps_store = True
            self._warn(f"The workers of this machine have ended. Keeping the store until node {nodes.waits_for} ends.")
        return True

    def _why_over_elsewhere(self) -> str:
        """The reason why the job has ended on another machine, once the workers here had time to say what they saw."""
        if self._job.nodes is None or not self._job.nodes.failure:
            return ""
        now_s = time.monotonic()
        self._failed_elsewhere_s = self._failed_elsewhere_s or now_s
        return self._job.nodes.failure if now_s - self._failed_elsewhere_s > _OBITUARY_S else ""

    def _look_for_end(self) -> None:
        """Let the workers know once the job has ended that they are to join: they would dial its server for long."""
        now_s = time.monotonic()
        if self._job.joining is None or now_s - self._looked_s < _LOOK_S or self._ended.exists():
            return
        self._looked_s = now_s
        if self._job.joining.has_ended():
            self._ended.touch()

    def _tell_refusal(self, worker: Worker) -> None:
        """Say what offbeat refused, unless another worker had the same answer."""
        if worker.code != REFUSED or not (left := self._refusals / str(worker.rank)).is_file():
            return
        text = left.read_text("utf-8")
        worker.tail.extend(f"offbeat: {text}".splitlines())
        self._refused.setdefault(text, []).append(worker.rank)
        if len(self._refused[text]) == 1:
            self._read(timeout_s=0.0)  # what it wrote before
            self._console.print(f"[{worker.rank}] offbeat: {text}", markup=False)

    def _tell_lost(self, failed: list[Worker]) -> None:
        for worker in failed:
            if worker.rank not in self._reported:
                self._reported.add(worker.rank)
                style = "yellow" if worker.code == LEFT else "bold red"
                self._console.print(f"rank {worker.rank} {worker.describe_end()}; the others continue.", style=style)

    def _report_loss(self, failed: list[Worker]) -> int:
        """Say who was lost, and how."""
        self._end_all()
        self._drain()
        culprits = [w for w in failed if w.code != VICTIM] or failed
        first = min(culprits, key=lambda w: (w.ended_s or 0.0, w.rank))
        host = socket.gethostname()
        left = [w for w in self._workers if w.code in (0, UNPREPARED)]
        self._fate = f"rank {first.rank} on {host} {first.describe_end()}."
        if first.code == VICTIM and left:
            ranks = ", ".join(str(w.rank) for w in left)
            self._console.print(
                f"\nrank {ranks} on {host} ended with exit code {left[0].code} while the others still needed it.",
                style="bold red",
            )
            return VICTIM
        if any(len(ranks) == len(self._workers) for ranks in self._refused.values()):  # the last that was said
            every = "Each worker" if len(self._workers) > 1 else f"rank {first.rank}"
            self._console.print(f"\n{every} on {host} {first.describe_end()}.", style="bold red")
            return REFUSED
        self._console.print(f"\n{self._fate}", style="bold red")
        for line in _traceback_of(first.tail):
            self._console.print(f"  {line}", markup=False)
        code = first.code or 1
        return 128 - code if code < 0 else code

    def _end_all(self) -> None:
        for worker in self._workers:
            if worker.code is not None and not self._is_ending:
                self.exit_codes[worker.rank] = worker.code
        self._is_ending = True
        alive = [w for w in self._workers if w.code is None]
        for worker in alive:
            worker.signal(signal.SIGTERM)
            worker.signal(signal.SIGCONT)  # a stopped process would not see the SIGTERM
        deadline_s = time.monotonic() + _TERM_GRACE_S
        while any(w.code is None for w in alive) and time.monotonic() < deadline_s:
            self._read(timeout_s=0.05)
        for worker in self._workers:
            worker.signal(signal.SIGKILL)
            worker.process.wait()
        well = any(w.code == 0 for w in self._workers) and self._interrupted is None
        self._shards.end(_SHARD_ALONE_S if well else _SHARD_HURRY_S, _SHARD_GRACE_S, hurry=self._was_interrupted)

    @property
    def has_said_why(self) -> bool:
        """Whether it has said what offbeat refused."""
        return bool(self._refused)

    def _was_interrupted(self) -> bool:
        return self._interrupted is not None

    def _warn(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False)

    def _read(self, timeout_s: float) -> None:
        if not self._selector.get_map():  # all have closed theirs
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            worker, partial = key.data
            stream = key.fileobj
            assert not isinstance(stream, int)
            self._take(stream, worker, partial)  # type: ignore[arg-type]

    def _take(self, stream: IO[bytes], worker: Worker, partial: bytearray) -> bool:
        """Read once; whether there may be more."""
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        partial += data
        *lines, rest = bytes(partial).split(b"\n")
        partial[:] = rest
        if not data:
            self._selector.unregister(stream)
        if partial and (not data or len(partial) > _MOST_LINE_BYTES):
            lines.append(bytes(partial))
            partial.clear()
        self._say(worker, lines)
        return bool(data)

    def _say(self, worker: Worker, raw: list[bytes]) -> None:
        lines = [line.decode(errors="replace").rstrip("\r") for line in raw]
        worker.tail.extend(lines)
        if lines:  # all at once: a script that prints much waits for us
            self._console.print("\n".join(f"[{worker.rank}] {line}" for line in lines), markup=False)

    def _drain(self) -> None:
        """Say what the workers, which have ended, wrote last."""
        for key in list((self._selector.get_map() or {}).values()):
            worker, partial = key.data
            while self._take(key.fileobj, worker, partial):  # type: ignore[arg-type]
                pass
            if partial:  # there is no end of file where a process that the worker started has its output open still
                self._say(worker, [bytes(partial)])
        for worker in self._workers:
            assert worker.process.stdout is not None
            worker.process.stdout.close()
        self._selector.close()


def _traceback_of(tail: collections.deque[str]) -> list[str]:
    """The last traceback in the last lines, or the last lines."""
    lines = list(tail)
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return lines[starts[-1] :] if starts else lines[-20:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
