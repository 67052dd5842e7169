"""The calls of a process group's workers: what each has called, and what is to be said of one that does not end.

While all goes well nothing is said. A worker that has waited for a call for longer than a moment leaves a word in the
group's store (`CallBoard`), in the place of its last one: the number of the call, and what it is. So each sees who has
called something else, and who has not come to it; that is logged, and a difference fails the call on all that see it.

How long a call takes counts from when those before it have ended.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from offbeat.errors import DisagreementError, NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

_log = logging.getLogger("offbeat")

_LOOK_S = 0.25
_SAY_S = 2.0  # a call that has taken so long is told to the others
_REPORT_S = 10.0  # and to people


@dataclass(eq=False)
class Call:
    """One call that is under way.

    Args:
        number: from 0 on, the same on all workers.
        what: it is, in words that are equal on all.
    """

    number: int
    what: str
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    first_s: float | None = None
    looked_s: float = 0.0
    is_said: bool = False
    is_reported: bool = False
    is_stall_reported: bool = False
    _is_ending: bool = False

    def succeed(self, value: Any) -> None:
        """End it, if it has not ended."""
        if self._ends():
            self.future.set_result(value)
            self.ended.set()

    def fail(self, error: Exception) -> None:
        """End it with an error, if it has not ended; as one of torch's, which scripts expect."""
        if self._ends():
            self.error = error if isinstance(error, RuntimeError) else dist.DistBackendError(str(error))
            self.error.__cause__ = None if error is self.error else error
            self.future.set_exception(self.error)
            self.ended.set()

    def _ends(self) -> bool:
        with self.lock:
            is_first, self._is_ending = not self._is_ending, True
            return is_first


class CallWork(dist.Work):
    """A call as torch has it.

    Args:
        call: it.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        # An exception that is set from Python is, for C++, a result; one that is raised in a callback is an error.
        self._future = call.future.then(lambda done: done.value())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it has ended.

        Raises:
            RuntimeError: that it ended with, such as torch's DistBackendError.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        if not self._call.ended.wait(limit_s if limit_s > 0 else None):
            raise dist.DistBackendError(f"Cannot end {self._call.what} in {limit_s:g} s.")
        if self._call.error is not None:
            raise self._call.error
        return True

    def is_completed(self) -> bool:
        return self._call.ended.is_set()

    def is_success(self) -> bool:
        return self._call.ended.is_set() and self._call.error is None

    def exception(self) -> Any:
        return self._call.error

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def result(self) -> Any:
        self.wait()
        return self._call.future.value()


class CallBoard:
    """The calls of one worker in one group, and a thread that looks after those that take long.

    Args:
        store: of the group.
        ranks: of its members, by place, as people know them.
        place: of this worker.
        timeout: of a call.
        lost: says of places who is lost, and why.
        stalled: says who stands still, and why.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        place: int,
        timeout: timedelta,
        lost: Callable[[], Mapping[int, str]],
        stalled: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._store, self._ranks, self._place = store, ranks, place
        self._timeout_s, self._lost, self._stalled = timeout.total_seconds(), lost, stalled
        self._begun, self._process = 0, os.getpid()
        self._calls: deque[Call] = deque()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that has the links."""
        return os.getpid() != self._process

    def check_process(self, what: str) -> None:
        """See that a call is made by the process that has the links.

        Raises:
            DistBackendError: if not.
        """
        if self.is_forked:
            raise dist.DistBackendError(
                f"Cannot call {what} in process {os.getpid()}: it was forked from {self._process}, which has the group "
                "and its links. Begin a group in the new process, or call it in the old one."
            )

    def begin(self, what: str) -> Call:
        """Note a call; raises as `check_process`."""
        self.check_process(what)
        with self._lock:
            call = Call(self._begun, what)
            self._begun += 1
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="offbeat-c10d", daemon=True)
                self._thread.start()
        return call

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        with self._lock:
            return any(not call.ended.is_set() for call in self._calls)

    def lose(self, reason: str) -> None:
        """Fail what is under way: a member is lost."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.fail(NetworkError(f"Cannot end {call.what}: {reason}"))

    def set_timeout(self, timeout: timedelta) -> None:
        """Have calls take so long at most."""
        self._timeout_s = timeout.total_seconds()

    def close(self, reason: str) -> None:
        """Fail what is under way, and look after nothing any more."""
        self._is_closed.set()
        self.lose(reason)

    def join(self, limit_s: float) -> None:
        """Wait for the thread, once this was closed."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def _look(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            with self._lock:
                while self._calls and self._calls[0].ended.is_set():
                    self._calls.popleft()
                call = next((one for one in self._calls if not one.ended.is_set()), None)
            if call is not None:
                self._look_after(call, time.monotonic())

    def _look_after(self, call: Call, now_s: float) -> None:
        call.first_s = now_s if call.first_s is None else call.first_s
        waited_s = now_s - call.first_s
        if lost := self._lost():
            self.lose("; ".join(lost.values()))
            return
        stalled = self._stalled()
        if stalled and not call.is_stall_reported:
            call.is_stall_reported = True
            _log.warning("Waiting for %.0f s in %s: %s.", waited_s, call.what, "; ".join(stalled))
        # The store is asked ever more rarely: a call may well take an hour while one of the workers evaluates.
        if waited_s < min(_SAY_S, self._timeout_s / 2) or now_s - call.looked_s < waited_s / 8:
            return
        call.looked_s = now_s
        said = self._said(call)
        unlike = {rank: what for rank, what in said.items() if what not in ("", call.what)}
        if unlike:
            told = "; ".join(f"rank {rank} has called {what}" for rank, what in unlike.items())
            call.fail(
                DisagreementError(
                    f"Cannot end {call.what}, which rank {self._ranks[self._place]} has called as number "
                    f"{call.number} of its group: {told}. All workers have to call the same, in the same order."
                )
            )
            return
        missing = [rank for rank, what in said.items() if not what]
        reason = (
            f"rank {', '.join(map(str, missing))} has not called it, or does not wait for it"
            if missing
            else "all have called it"
        )
        reason = "; ".join((reason, *stalled))
        if waited_s > self._timeout_s:
            call.fail(NetworkError(f"Cannot end {call.what} within the timeout of {self._timeout_s:g} s: {reason}."))
        elif waited_s > _REPORT_S and not call.is_reported:
            call.is_reported = True
            _log.warning("Waiting for %.0f s in %s: %s.", waited_s, call.what, reason)

    def _said(self, call: Call) -> dict[int, str]:
        """The word of each member on the call of this number, by rank; "" of those that have not come to it.

        Who is further has called the same: else it would not have come to an end there.
        """
        keys = {rank: f"call/{place}" for place, rank in enumerate(self._ranks)}
        said = dict.fromkeys(keys, "")
        try:
            if not call.is_said:
                self._store.set(keys[self._ranks[self._place]], f"{call.number} {call.what}")
                call.is_said = True
            for rank, key in keys.items():
                number, _, what = (self._store.get(key).decode() if self._store.check([key]) else "").partition(" ")
                if number.isdecimal() and int(number) >= call.number:
                    said[rank] = what if int(number) == call.number else call.what
        except (RuntimeError, dist.DistError):  # who kept the store is gone
            said[self._ranks[self._place]] = call.what
        return said
