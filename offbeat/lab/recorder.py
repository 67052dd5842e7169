"""The measurements of a worker, as JSON lines in a file of its own.

A worker program makes one `Recorder`, calls `step()` after every training step, `metric()` after every evaluation and
`finish()` at the end. The lab tells it through the environment how many steps count; outside of the lab it keeps quiet
and the program trains all the same.

Bytes are those that really left: the transmit counters of the host's interfaces, headers and acknowledgements included,
and what it forwards for others where hosts do. On the loopback interface, which all workers share, they are what the
kernel counted on this process's TCP sockets.
"""

from __future__ import annotations

import os
import socket
import stat
import statistics
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import PlanError
from offbeat.lab import command_lines
from offbeat.scenario import Replay, RowSwap
from offbeat.straggler_model import StragglerLaw

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO

RESULT = "OFFBEAT_LAB_RESULT"
WORK = "OFFBEAT_LAB_WORK"
SNAPSHOT = "OFFBEAT_LAB_SNAPSHOT"
INTERFACES = "OFFBEAT_LAB_INTERFACES"
"""The variable with the interfaces by which anything leaves a host."""
_TCP_INFO_BYTES_SENT = slice(200, 208)
"""Where `tcpi_bytes_sent` stands in `struct tcp_info` (Linux 4.19 and later)."""


class Work(msgspec.Struct, frozen=True):
    """The lab's request to a worker program. `compute_factor` is by how much this host is slower than the reference."""

    system: str = "offbeat"
    steps: int = 20
    warmup_steps: int = 5
    compute_factor: float = 1.0
    bucket_bytes: int | None = None
    data: str | None = None
    tolerance: float | None = None
    """Largest absolute error of a summed standard-normal gradient element; None: the system is lossy by design."""
    replay: Replay | None = None
    straggle: StragglerLaw | None = None
    save_every: int | None = None
    """Steps between two snapshots, for `offbeat.lab.peer_checkpoint`; None: it keeps none."""
    swaps: tuple[RowSwap, ...] = ()
    """The policies that this worker has hold by `offbeat swap`; nothing for all but the first."""

    @classmethod
    def from_environment(cls) -> Work:
        """The work the lab set in the environment, or the default outside of the lab."""
        return msgspec.json.decode(os.environ.get(WORK, "{}"), type=cls)


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Training began at `time_s`, or went on there, after `done` steps, when the worker had been started again."""

    done: int
    time_s: float
    compute_s: float


class MeasuredStep(msgspec.Struct, frozen=True, tag="step"):
    """One measured step: its time, what of it was not computation, its samples, when it ended, and its loss, if known.

    Moments here and in the other lines are of the clock that all processes of a machine share. After a restart the same
    step may come again.
    """

    step: int
    step_s: float
    wait_s: float
    samples: int = 0
    end_s: float = 0.0
    loss: float | None = None


class Metric(msgspec.Struct, frozen=True, tag="metric"):
    """One evaluation, after `time_s` seconds of training (warm-up included, evaluations not)."""

    step: int
    time_s: float
    value: float


class RunTotals(msgspec.Struct, frozen=True, tag="end"):
    """The worker's totals over the measured steps; `digest` is that of the last gradient, or of the parameters:
    equal on all replicas.

    `span_s` is when those steps began and ended. Where a worker was started again, `bytes_sent` is what it sent since.
    """

    bytes_sent: int
    samples: int
    gradient_bytes: int
    compute_s: float
    digest: str
    gradient_error: float | None = None
    span_s: tuple[float, float] = (0.0, 0.0)


class Note(msgspec.Struct, frozen=True, tag="note"):
    """A note that a reader of the result must know."""

    text: str


Line = Begun | MeasuredStep | Metric | RunTotals | Note


class Recorder:
    """Measures one worker.

    Args:
        compute_s: what a step would take without any communication.
        gradient_bytes: of one step.
        work: what the lab asked for; None to look it up.
        done: steps that were taken already, by this worker before it was started again.
    """

    def __init__(self, *, compute_s: float, gradient_bytes: int, work: Work | None = None, done: int = 0) -> None:
        self.work = work or Work.from_environment()
        self._compute_s = compute_s
        self._gradient_bytes = gradient_bytes
        self._file: FileIO | None = None
        earlier = _earlier()
        if path := os.environ.get(RESULT):
            # Unbuffered: who is killed has said what it did.
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - closed by finish()
        self._done = done
        self._samples = 0
        self._sent_bytes = 0
        self._paused_s = 0.0
        self._swaps = list(self.work.swaps)  # that are to come
        self._swapping: subprocess.Popen[bytes] | None = None
        self._span_s = [0.0, 0.0]
        self._start_s = self._mark_s = time.perf_counter()
        if earlier:
            self._go_on(earlier)
        self._write(Begun(done, self._mark_s, compute_s))

    def step(self, samples: int, loss: float | None = None) -> None:
        """A step with `samples` samples, whose mean loss was `loss`, ended now; the next one starts now."""
        now_s = time.perf_counter()
        index = self._done - self.work.warmup_steps
        self._done += 1
        if 0 <= index < self.work.steps:
            step_s = now_s - self._mark_s
            wait_s = max(0.0, step_s - self._compute_s)
            self._write(MeasuredStep(index, round(step_s, 6), round(wait_s, 6), samples, round(now_s, 6), loss))
            self._samples += samples
        if index + 1 == 0:
            self._sent_bytes = -sent_bytes()
            self._span_s[0] = self._span_s[0] or now_s
        elif index + 1 == self.work.steps:
            self._sent_bytes += sent_bytes()
            self._span_s[1] = now_s
        self._swap()
        # What this method itself did belongs to no step.
        self._resume(now_s)

    @property
    def moment(self) -> tuple[int, float]:
        """Steps and seconds of training so far, for a `metric` that is measured later."""
        return self._done, round(self._mark_s - self._start_s - self._paused_s, 6)

    def waited(self) -> None:
        """Count what was waited for since the last step, such as in `run.settle()`, as training, too."""
        self._mark_s = time.perf_counter()

    def metric(self, value: float, moment: tuple[int, float] | None = None) -> None:
        """An evaluation gave `value`.

        Args:
            moment: of the model that was evaluated; None for now. Then its time counts for no step.
        """
        step, time_s = moment or self.moment
        self._write(Metric(step, time_s, value))
        if moment is None:
            self._resume(self._mark_s)

    def note(self, text: str) -> None:
        """Write what a reader of the result must know, such as that other data was used."""
        self._write(Note(text))

    def finish(self, *, digest: str, gradient_error: float | None = None) -> None:
        """All steps are done: write the totals.

        Raises:
            PlanError: if a policy was not swapped, which the row is about; `offbeat swap` has said why.
        """
        begin_s, end_s = self._span_s
        totals = self._sent_bytes, self._samples, self._gradient_bytes, self._compute_s
        try:
            self._swap(is_last=True)
            self._write(RunTotals(*totals, digest, gradient_error, (begin_s, end_s)))
        finally:
            if self._file is not None:
                self._file.close()

    def _swap(self, *, is_last: bool = False) -> None:
        """Have the next policy swapped when it is due, and the one before is: as somebody at a terminal would do it."""
        if self._swapping is not None and (is_last or self._swapping.poll() is not None):
            if self._swapping.wait() != 0:
                raise PlanError("Cannot measure a row whose policy was not swapped; `offbeat swap` has said why.")
            self._swapping = None
        if self._swaps and is_last:
            raise PlanError(
                f"Cannot measure a row in which there was no time left to swap to {self._swaps[0].policy}: swap "
                "earlier, or make more steps (row.swap.step, run.steps)."
            )
        if self._swaps and self._swapping is None and self._done >= self._swaps[0].step:
            policy = self._swaps.pop(0).policy
            folder = os.environ["OFFBEAT_RUN_DIR"]
            self._swapping = subprocess.Popen(command_lines.module("offbeat", "swap", policy, "--job", folder))

    def _go_on(self, earlier: list[Line]) -> None:
        """Resume after a restart: what was measured before counts, but for steps that are done again."""
        measured = {
            line.step: line for line in reversed(earlier) if isinstance(line, MeasuredStep)
        }  # as it was done first
        saved = self._done - self.work.warmup_steps
        self._start_s = next((line.time_s for line in earlier if isinstance(line, Begun)), self._start_s)
        self._samples = sum(line.samples for line in measured.values() if line.step < saved)
        if measured:
            first = measured[min(measured)]
            self._span_s[0] = first.end_s - first.step_s
        elif saved >= 0:
            self._span_s[0] = self._mark_s
        if saved >= 0:
            self._sent_bytes = -sent_bytes()

    def _resume(self, since_s: float) -> None:
        self._mark_s = time.perf_counter()
        self._paused_s += self._mark_s - since_s

    def _write(self, line: Line) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")


def begun() -> Begun | None:
    """The first beginning of this worker, if it was started again since."""
    return next((line for line in _earlier() if isinstance(line, Begun)), None)


def _earlier() -> list[Line]:
    path = os.environ.get(RESULT)
    return [] if path is None else read(Path(path))


def alone_s(step: Callable[[], object], tries: int = 15) -> float:
    """Median seconds of a step that communicates with nobody; all workers measure at the same time, as they train."""
    times = []
    for _ in range(tries):
        began_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def read(path: Path) -> list[Line]:
    """The lines a worker wrote; a file that is not there has none."""
    with suppress(FileNotFoundError):
        return msgspec.json.Decoder(Line).decode_lines(path.read_bytes())
    return []


def sent_bytes() -> int:
    """Bytes this worker has sent so far, by the counters of the kernel."""
    interfaces = os.environ.get(INTERFACES, os.environ.get("GLOO_SOCKET_IFNAME", "lo")).split(",")
    if interfaces == ["lo"]:
        return _sent_by_sockets()
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() in interfaces:
            total += int(counters.split()[8])
    return total


def _sent_by_sockets() -> int:
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        # Descriptors come and go while we look.
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as handle:
                info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += int.from_bytes(info[_TCP_INFO_BYTES_SENT], "little")
    return total
