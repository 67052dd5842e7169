"""One record per step: compute, communication, waiting, bytes, samples.

    |<------------- compute ------------->|<- waiting ->|
    loader, forward, backward, optimizer    fence          next step ...
                        |<---- communication --->|

Compute is what the worker did by itself before the fence, so a straggler stays visible: it computes longest and waits
least. What it waited there, for the others' data or answers, is waiting, too. Communication runs from the first bucket
issued to the last one done; what is not hidden behind compute is waiting. Samples are those that a prepared loader gave
out; without one, the batch sizes of forward passes that train.

Records are encoded and written by a background thread; a step pays for appending to a deque.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from offbeat.engine.resource_usage import ResourceSampler

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.clock import Clock
    from offbeat.diagnosis.wait import BlockingWait

_log = logging.getLogger("offbeat")
_FLUSH_S = 0.2
_MOST_QUEUED = 1 << 16  # records that wait for room on a full disk
_MOST_TOGETHER = 1 << 10  # in one write
_SAMPLED_EACH = 5  # flush: about once a second
_MOST_RECENT = 64  # steps whose times are kept for those who want them
_MOST_EVENTS = 4  # that are kept for those who look
_MOST_OWN = 256  # of these that are kept one by one until they are told


class MetricsFile:
    """A JSON-lines file that all workers share; whole lines in one write, so they never mix.

    Where the disk is full it keeps what is recorded in memory until there is room; the oldest go if that is too much.

    Args:
        path: the file; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._records: deque[dict[str, Any]] = deque()
        self._lines: deque[bytes] = deque()  # that are not written yet
        self._why = ""  # nothing can be written at present
        self._dropped = 0  # lines
        self._is_torn = False  # what was written last ends in the middle of a line
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._stop = threading.Event()
        self._encoder = msgspec.json.Encoder()
        self.sample: Callable[[], dict[str, Any] | None] | None = None  # a record about once a second, if it has one
        self._thread = threading.Thread(target=self._run, name="offbeat-metrics", daemon=True)
        if path is not None:
            self._thread.start()

    def append(self, record: dict[str, Any]) -> None:
        """Queue one record; returns at once."""
        if self._fd >= 0:
            self._records.append(record)

    def close(self) -> None:
        """Write what is queued and close; a second call does nothing."""
        if self._fd < 0:
            return
        self._stop.set()
        self._thread.join()
        if self._lines:
            missing = self._dropped + len(self._lines)
            _log.warning("The last metrics are not in %s: %s. %d records are missing.", self._path, self._why, missing)
        os.close(self._fd)
        self._fd = -1

    def _run(self) -> None:
        flushes = 0
        while not self._stop.wait(_FLUSH_S):
            flushes += 1
            if self.sample is not None and flushes % _SAMPLED_EACH == 0 and (record := self.sample()) is not None:
                self.append(record)
            self._flush()
        self._flush()

    def _flush(self) -> None:
        self._lines += [self._encoder.encode(self._records.popleft()) for _ in range(len(self._records))]
        while len(self._lines) > _MOST_QUEUED:
            self._lines.popleft()
            self._dropped += 1
        try:
            while self._lines:
                self._write()
        except OSError as error:  # a full disk is no reason to end the run
            if not self._why:
                _log.warning(
                    "Cannot write metrics to %s at present: %s. Training continues; up to %d records are kept "
                    "in memory.",
                    self._path,
                    error.strerror,
                    _MOST_QUEUED,
                )
            self._why = error.strerror or str(error)
            return
        if self._why:
            missing = f"{self._dropped} records are" if self._dropped else "nothing is"
            _log.warning("Metrics are written to %s again; %s missing.", self._path, missing)
            self._why, self._dropped = "", 0

    def _write(self) -> None:
        """Many lines at once; where the disk has room for some of them only, the others are left.

        Raises:
            OSError: if it has room for none.
        """
        data = b"\n" * self._is_torn + b"".join(line + b"\n" for line in islice(self._lines, _MOST_TOGETHER))
        written = data[: os.write(self._fd, data)]
        for _ in range(written.count(b"\n") - self._is_torn):
            self._lines.popleft()
        self._is_torn = not written.endswith(b"\n")


class HiddenExchange(NamedTuple):
    """The exchange of an earlier step, which a step has hidden behind what it computes.

    Args:
        step: the earlier one.
        waits: when the forward pass waited for which block of it: began and ended, in clock seconds, and its index.
        backward: when the backward of the step at hand began and ended, in clock seconds.
        between: of each block whose sum is made in two rounds, when the first was done and the second issued.
    """

    step: int
    waits: Sequence[tuple[float, float, int]]
    backward: tuple[float, float]
    between: Sequence[tuple[float, float]] = ()


class StepMetrics:
    """Measures one model's steps.

    Args:
        rank: this worker's.
        clock: where time comes from.
        file: where records go.

    Attributes:
        total_samples, total_own_s, total_sent_bytes: of all steps.
        resources: what this process uses; a record about once a second from the first prepared model on.
        values: what the script logged last, by name.
        events: the last ones: when, in seconds since 1970, and what.
    """

    def __init__(self, rank: int, clock: Clock, file: MetricsFile, waiter: BlockingWait) -> None:
        self._rank = rank
        self._clock = clock
        self._file = file
        self._waiter = waiter
        self.sent_bytes = 0
        self.samples = 0
        self.last_samples = 0  # of the step before
        self.loader_counts = False  # a prepared loader counts the samples; else forward passes do
        self._offset_s = clock.unix_s() - clock.now_s()
        self._step_began_s = clock.now_s()
        self._fence_began_s = self._step_began_s
        self._waited_before_s = self._waited_at_step_s = waiter.waited_s
        self.total_samples, self.total_own_s, self.total_sent_bytes = 0, 0.0, 0
        self.resources = ResourceSampler(clock.now_s, lambda: self.total_sent_bytes)
        self.values: dict[str, float] = {}
        self.events: deque[tuple[float, str]] = deque(maxlen=_MOST_EVENTS)
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_MOST_RECENT)
        self._own: list[float] = []  # of steps since they were taken
        self._own_taken_s = 0.0  # of the present step

    def now_s(self) -> float:
        return self._clock.now_s()

    def start_anew(self) -> None:
        """The first step begins now; what was before is no part of it."""
        self._step_began_s, self._waited_at_step_s = self._clock.now_s(), self._waiter.waited_s
        self.sent_bytes = self.samples = 0
        self._own, self._own_taken_s = [], 0.0

    def forward(self, inputs: Any) -> None:
        """A forward pass that trains begins; its samples count if no prepared loader counts them."""
        if not self.loader_counts:
            self.samples += samples_in(inputs)

    def compute_done(self) -> None:
        """The worker's own part of the step is done."""
        self._fence_began_s = self._clock.now_s()
        self._waited_before_s = self._waiter.waited_s

    @property
    def own_s(self) -> float:
        """Seconds that the present step took this worker by itself, until `compute_done`, without what it waited."""
        return self._fence_began_s - self._step_began_s - (self._waited_before_s - self._waited_at_step_s)

    def exchange_done(
        self,
        step: int,
        spans: Sequence[tuple[float, float]],
        weight: float,
        staleness: int = 0,
        *,
        model: int = 0,
        dropped: bool = False,
        barrier_s: float | None = None,
        resent: int = 0,
        lead: int | None = None,
        hidden: HiddenExchange | None = None,
    ) -> None:
        """All exchanges of the step are done.

        Args:
            spans: when each bucket was issued and done, in clock seconds.
            weight: this worker's in the step.
            staleness: updates between the parameters it was computed on and its own.
            model: which of several prepared, from 0.
            dropped: what was brought is not in the parameters.
            barrier_s, resent, lead: as of an `ExchangeResult`.
            hidden: the `spans` are those of an earlier step's exchange.
        """
        now_s, began_s = self._clock.now_s(), self._step_began_s
        early_s = self._waited_before_s - self._waited_at_step_s
        own_s = self.own_s
        first_s = min((issued for issued, _ in spans), default=now_s)
        last_s = max((done for _, done in spans), default=now_s)
        record = {
            "kind": "step",
            "rank": self._rank,
            "step": step,
            "time_s": began_s + self._offset_s,
            "step_s": now_s - began_s,
            "compute_s": own_s,
            "communication_s": last_s - first_s,
            "wait_s": self._waiter.waited_s - self._waited_at_step_s,
            "early_wait_s": early_s,
            "bytes_sent": self.sent_bytes,
            "samples": self.samples,
            "weight": weight,
            "staleness": staleness,
            "buckets": [[issued - began_s, done - began_s] for issued, done in spans],
        }
        if barrier_s is not None:
            record |= {"barrier_s": barrier_s, "resent": resent, "lead": lead}
        if hidden is not None:
            record["buckets_of"] = hidden.step
            record["waits"] = [[began - began_s, ended - began_s, index] for began, ended, index in hidden.waits]
            record["backward"] = [at_s - began_s for at_s in hidden.backward]
            if hidden.between:
                record["between"] = [[done - began_s, issued - began_s] for done, issued in hidden.between]
        self._file.append(record | {"dropped": True} if dropped else record)
        self._remember(model, self.samples, own_s, self._waiter.waited_s - self._waited_before_s)
        self._remember_own(model, own_s)
        self.last_samples = self.samples
        self.total_samples += self.samples
        self.total_own_s += max(0.0, own_s)
        self.total_sent_bytes += self.sent_bytes
        self.sent_bytes = self.samples = 0
        self._step_began_s, self._waited_at_step_s = now_s, self._waiter.waited_s

    def take_recent(self) -> list[tuple[int, float, float]]:
        """The steps since the last call, at most 64: samples, seconds computed, seconds waited in the fence."""
        taken = list(self._recent)
        self._recent.clear()
        return taken

    def take_own(self) -> list[float]:
        """Seconds that each step since the last call took this worker by itself; of the present one those until now."""
        waited_s = self._waiter.waited_s - self._waited_at_step_s
        present_s = max(0.0, self._clock.now_s() - self._step_began_s - waited_s)
        taken = [*self._own, max(0.0, present_s - self._own_taken_s)]
        self._own, self._own_taken_s = [], present_s
        return taken

    def event(self, what: str, text: str, step: int = -1, *, plan: str = "") -> None:
        """Record an event worth showing to people; `plan` is the one that holds from then on, if that is what it is."""
        self.events.append((self._clock.unix_s(), text))
        record = {"kind": "event", **self._stamp(step), "what": what, "text": text}
        self._file.append(record | {"plan": plan} if plan else record)

    def laid_out(self, step: int, buckets: Sequence[Mapping[str, Any]]) -> None:
        """Record where gradients lie from this step on: index, size_bytes and parameters of each bucket."""
        self._file.append({"kind": "layout", **self._stamp(step), "buckets": buckets})

    def log(self, step: int, values: dict[str, float]) -> None:
        """Values of the user's, such as the loss."""
        self.values = {**self.values, **values}  # exchanged whole: others look at it
        self._file.append({"kind": "log", **self._stamp(step), "values": values})

    def give_up(self) -> None:
        """The samples since the last step are computed by others."""
        self.samples = 0

    def begin(self, **about: Any) -> None:
        """The first record: what runs where."""
        self._file.append({"kind": "start", **self._stamp(0), **about})
        self._file.sample = self._resources_used

    def end(self, step: int, error: str | None, *, left: bool = False) -> None:
        """The last record; `left` if this worker was asked to leave, and did in order."""
        self._file.sample = None
        record = {"kind": "end", **self._stamp(step), "steps": step, "error": error}
        self._file.append(record | {"left": True} if left else record)

    def _resources_used(self) -> dict[str, Any] | None:
        used = self.resources.sample()
        if used is None:
            return None
        return {"kind": "resources", "rank": self._rank, "time_s": self._clock.unix_s(), **vars(used)}

    def _remember(self, model: int, samples: int, compute_s: float, wait_s: float) -> None:
        if model and self._recent:  # its part of the first model's step
            before = self._recent.pop()
            samples, compute_s, wait_s = before[0] + samples, before[1] + compute_s, before[2] + wait_s
        self._recent.append((samples, max(0.0, compute_s), max(0.0, wait_s)))

    def _remember_own(self, model: int, own_s: float) -> None:
        rest_s, self._own_taken_s = max(0.0, own_s - self._own_taken_s), 0.0
        if model and self._own:
            self._own[-1] += rest_s
        else:
            self._own.append(rest_s)
        if len(self._own) > _MOST_OWN:
            self._own[:2] = [self._own[0] + self._own[1]]

    def _stamp(self, step: int) -> dict[str, Any]:
        return {"rank": self._rank, "step": step, "time_s": self._clock.unix_s()}


def samples_in(batch: Any) -> int:
    """The batch size: the first dimension of the first tensor in it; 0 if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif isinstance(batch, (str, bytes)) or not isinstance(batch, Sequence):
        return 0
    return next((n for n in map(samples_in, batch) if n), 0)
