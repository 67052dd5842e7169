"""The one primitive for every blocking wait.

It knows what is awaited (operation, step, bucket and its layer names) and since when. It polls, so that it can look up
at any time; after the run's one timeout it asks the watch who has not arrived and why, prints one screen, leaves the
same as JSON, and goes on waiting as long as the culprit can still come. While all that is missing is known to be
starting, which takes long on a busy machine, nothing is said for some timeouts more. Dead, departed or disagreeing
workers cannot come: then it raises, naming them.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

from offbeat.errors import ModelError, NetworkError, OffbeatError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.clock import Clock
    from offbeat.payload import Reply
    from offbeat.pending import Pending

T = TypeVar("T")

# Long enough to cost nothing, short enough that Ctrl-C and the timeout are noticed at once.
_POLL = timedelta(milliseconds=200)
_LOOK_S = 0.02  # at what nobody tells of
# Part of the timeout after which to ask, so that the report is out when the timeout has passed.
_LOOK_EARLY = 0.85
# Timeouts after which to report who is known to be starting; until then one looks again soon: it may be stopped.
_STARTING = 4.0
_LOOK_AGAIN_S = 1.0
# How long after a broken connection the watch may need to learn who died.
_OBITUARY_S = 3.0


@dataclass(frozen=True)
class WaitContext:
    """The place and purpose of a wait.

    Args:
        operation: such as "all-reduce".
        step: the engine's count of exchanges, from 0.
        bucket: index of the bucket, -1 if it is none.
        buckets: how many there are.
        label: the layer names the bucket covers.
        model: of several prepared, which one; from 0.
        through_server: whether a server stands between, or the store in which the workers met, so that it comes to its
            end even if another worker never does.
        alone: it is this worker's own, such as starting a process; the others wait for it, and it for none of them.
        starts: `alone`, and it takes as long as a process takes to start.
    """

    operation: str
    step: int = -1
    bucket: int = -1
    buckets: int = 0
    label: str = ""
    model: int = 0
    through_server: bool = False
    alone: bool = False
    starts: bool = False

    @property
    def is_exchange(self) -> bool:
        """Whether it is an exchange of a step, in which one waits, rather than something that one waits for."""
        return self.step >= 0

    def __str__(self) -> str:
        if self.bucket < 0:
            return self.operation
        model = f" of model {self.model + 1}" if self.model else ""
        return f"{self.operation} of bucket {self.bucket + 1}/{self.buckets}{model} ({self.label})"


@runtime_checkable
class TellsTrouble(Protocol):
    """The Protocol of a `Pending` that knows what holds it up between the workers."""

    @property
    def trouble(self) -> str:
        """The trouble that does, in sentences; "" if nothing is known to."""


@runtime_checkable
class TellsOwed(Protocol):
    """The Protocol of a `Pending` that knows which transfer it waits for."""

    @property
    def owed(self) -> str:
        """The transfer, and how far it is; "" if none is missing."""


class StallReport(Protocol):
    """The findings about a stall."""

    @property
    def text(self) -> str:
        """One screen for people."""

    @property
    def fatal(self) -> bool:
        """Whether a culprit can no longer come."""

    @property
    def is_on_its_way(self) -> bool:
        """Whether all that is missing is known to be starting."""

    def to_json(self) -> dict[str, object]:
        """The same for programs."""


class StallWitness(Protocol):
    """The Protocol of a wait's witness: it knows about the other workers while this one waits.

    Attributes:
        exchanges: that are complete, of all models; the same on all workers that wait for each other.
    """

    exchanges: int

    def waiting(self, awaited: WaitContext) -> None:
        """Note that this worker begins to wait."""

    def resumed(self) -> None:
        """Note that this worker computes again."""

    def exchanged(self, stamp: int) -> None:
        """An exchange is complete, after `stamp` batches."""

    def investigate(self, awaited: WaitContext, waited_s: float, server: str) -> StallReport | None:
        """Find out who has not arrived, and why; None if that is not possible.

        Args:
            server: what is wrong with the parameter server or the switch in between; "" if nothing is known to be, or
                it is not waited for.
        """


class NullWitness:
    """The witness of a worker that is alone, or of a run without a watch."""

    exchanges = 0

    def waiting(self, awaited: WaitContext) -> None:
        """Ignore it."""

    def resumed(self) -> None:
        """Ignore it."""

    def exchanged(self, stamp: int) -> None:
        """Ignore it."""

    def investigate(self, awaited: WaitContext, waited_s: float, server: str) -> StallReport | None:
        return None


class BlockingWait:
    """A wait that explains itself.

    Args:
        clock: where time comes from.
        timeout: after this long a stall is reported, and again after each doubling.
        witness: who knows about the other workers.
        tell: called with the text of each report.
        report_path: where the last report is left as JSON; None for nowhere.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        timeout: timedelta,
        witness: StallWitness | None = None,
        tell: Callable[[str], None] = lambda text: None,
        report_path: Path | None = None,
    ) -> None:
        self._clock = clock
        self._report_after_s = _LOOK_EARLY * timeout.total_seconds()
        self._poll = min(_POLL, timeout / 10)
        self.witness = witness or NullWitness()
        self.ask_server: Callable[[], str] = lambda: ""  # what is wrong with the parameter server, in sentences
        self._tell = tell
        self._report_path = report_path
        self.waited_s = 0.0
        self.failure: OffbeatError | None = None  # what a wait ended with; from then on the workers are apart

    def wait(self, pending: Pending, awaited: WaitContext) -> Reply:
        """Block until `pending` is done and return its reply.

        Raises:
            WorkerLostError: if a worker that is needed died, left, or disagrees.
            NetworkError: if a connection broke and nobody knows why.
        """
        try:
            if not self._is_there(pending):
                self._block(pending, awaited)
        except ModelError:  # the answer is no, and the workers are as they were
            raise
        except OffbeatError as error:
            self.failure = error
            raise
        return pending.result()

    def call(self, function: Callable[[], T], awaited: WaitContext) -> T:
        """Wait for a blocking call, which runs on a thread of its own so that this one can look up.

        Raises:
            Exception: what `function` raises; and as `wait`.
        """
        call = ThreadCall(function)
        self.wait(call, awaited)
        return call.outcome.result()

    def _is_there(self, pending: Pending) -> bool:
        """Whether there is nothing to wait for. What has broken already is not: that is explained."""
        try:
            return pending.done() and pending.wait(self._poll)
        except NetworkError:
            return False

    def _block(self, pending: Pending, awaited: WaitContext) -> None:
        began_s = self._clock.now_s()
        self.witness.waiting(awaited)
        next_report_s = self._report_after_s
        try:
            while not pending.wait(self._poll):
                waited_s = self._clock.now_s() - began_s
                if waited_s >= next_report_s:
                    told = self._report(pending, awaited, waited_s)
                    next_report_s = 2 * waited_s if told else waited_s + min(_LOOK_AGAIN_S, self._report_after_s)
        except NetworkError as error:
            self._explain_break(pending, awaited, began_s, error)
        finally:
            self.waited_s += self._clock.now_s() - began_s
            self.witness.resumed()

    def _report(self, pending: Pending, awaited: WaitContext, waited_s: float) -> bool:
        """Whether there was something to report."""
        is_soon = waited_s < _STARTING * self._report_after_s
        if awaited.alone:
            if awaited.starts and is_soon:
                return False
            self._tell(f"{awaited} has taken {waited_s:.1f} s so far.")
            return True
        server, owed = self._trouble_between(pending, awaited), _owed(pending)
        findings = self.witness.investigate(awaited, waited_s, server)
        if findings is None:
            known = f". {server}" if server else f"; no other worker can be asked why.{owed}"
            where = f"{'in' if awaited.is_exchange else 'for'} {awaited}"
            step = f"step {awaited.step}: " if awaited.step >= 0 else ""
            self._tell(f"{step}waiting {waited_s:.1f} s {where}{known}")
            return True
        if findings.is_on_its_way and is_soon:
            return False
        self._leave(findings, owed)
        if findings.fatal and not awaited.through_server:
            raise WorkerLostError(f"{findings.text}{owed}")
        self._tell(f"{findings.text}{owed}")
        return True

    def _explain_break(self, pending: Pending, awaited: WaitContext, began_s: float, error: NetworkError) -> None:
        broke_s = self._clock.now_s()
        while True:
            waited_s = self._clock.now_s() - began_s
            findings = self.witness.investigate(awaited, waited_s, self._trouble_between(pending, awaited))
            if findings is not None and findings.fatal and not awaited.through_server:
                self._leave(findings)
                raise WorkerLostError(findings.text) from error
            if findings is None or self._clock.now_s() - broke_s > _OBITUARY_S:
                known = "" if findings is None else f"\n{findings.text}"
                raise NetworkError(f"step {awaited.step}: {awaited} failed. {error}{known}") from error
            self._clock.sleep(0.1)

    def _trouble_between(self, pending: Pending, awaited: WaitContext) -> str:
        """The trouble that a server or a switch has which stands between the workers."""
        if awaited.through_server:
            return self.ask_server()
        return pending.trouble if isinstance(pending, TellsTrouble) else ""

    def _leave(self, findings: StallReport, owed: str = "") -> None:
        if self._report_path is None:
            return
        try:
            self._report_path.write_text(json.dumps({**findings.to_json(), "owed": owed.strip()}, indent=1))
        except OSError as error:  # a full disk is no reason to end the run
            self._tell(f"Cannot leave this report as {self._report_path}: {error.strerror}.")


def _owed(pending: Pending) -> str:
    """The line of a report on the transfer that is waited for; "" if none is known."""
    owed = pending.owed if isinstance(pending, TellsOwed) else ""
    return f"\n  {owed}" if owed else ""


class PolledPending(ABC):
    """A pending result that is polled. A `Pending`."""

    sent_bytes = 0

    @abstractmethod
    def done(self) -> bool:
        """Whether it is; called often."""

    def wait(self, timeout: timedelta) -> bool:
        """Look until it is done, for so long; whether it is."""
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not self.done():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def result(self) -> Reply:
        """No payloads."""
        return []


class ThreadCall(Generic[T]):
    """A call on a thread of its own, as something to wait for. A `Pending`.

    Attributes:
        outcome: what it returns, or raises.
    """

    sent_bytes = 0

    def __init__(self, function: Callable[[], T], name: str = "offbeat-call") -> None:
        self._function = function
        self.outcome: Future[T] = Future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self.outcome.set_result(self._function())
        except BaseException as error:
            self.outcome.set_exception(error)

    def wait(self, timeout: timedelta) -> bool:
        done, _ = futures.wait([self.outcome], timeout.total_seconds())
        return bool(done)

    def done(self) -> bool:
        return self.outcome.done()

    def result(self) -> Reply:
        return []
