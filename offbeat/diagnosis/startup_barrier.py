"""The startup barrier: who is there before the workers can ask each other, by a roll in the store and from the kernel.

A worker that imports torch on a busy machine says nothing for many seconds. Whether it does that, was stopped or is
dead, the kernel knows of the processes that `offbeat run` has started here.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from offbeat.diagnosis.process_state import ProcessSample, glance
from offbeat.diagnosis.wait import NullWitness, PolledPending
from offbeat.safe_read import UnreadableError, read_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch._C._distributed_c10d import Store

    from offbeat.diagnosis.wait import StallReport, WaitContext

_pids = msgspec.json.Decoder(dict[int, Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]]).decode
# Of a core: who has used less since the last look does not start, but waits for something.
_IDLE = 0.02
_LEAST_STARTUP, _STARTUP_TIMEOUTS = timedelta(seconds=60), 12
_SAYS = {
    "running": "is still starting",
    "idle": "runs, and uses no processor",
    "paused": "is paused (SIGSTOP)",
    "dead": "has ended",
}


def startup_limit(timeout: timedelta) -> timedelta:
    """The time that processes may take to start and to meet for the first time, on a busy machine too.

    >>> startup_limit(timedelta(seconds=30))
    datetime.timedelta(seconds=360)
    """
    return max(_LEAST_STARTUP, _STARTUP_TIMEOUTS * timeout)


def look_at(rank: int, workers: Path | None) -> ProcessSample | None:
    """Sample the process of a worker; None if it is none of those started on this machine, named in `workers`."""
    try:
        pids = {} if workers is None else read_file(workers, _pids)
    except (OSError, UnreadableError):  # by torchrun, or it is just being written
        return None
    return glance(pids[rank]) if rank in pids else None


class StartupBarrier(PolledPending, NullWitness):
    """The wait for all workers to start; also the witness of this wait, and of others until there is a sentinel."""

    def __init__(self, store: Store, rank: int, world: int, workers: Path | None = None) -> None:
        self._store, self._rank, self._workers = store, rank, workers
        self._others = self._missing = [other for other in range(world) if other != rank]
        self._looked_s, self._cpu_s = time.monotonic(), dict[int, float]()
        self._look()
        store.set(f"here-{rank}", socket.gethostname())

    def done(self) -> bool:
        self._missing = [other for other in self._missing if not self._store.check([f"here-{other}"])]
        return not self._missing

    def investigate(self, awaited: WaitContext, waited_s: float, server: str) -> StallReport | None:
        states = self._look()
        if self._missing:
            return MissingWorkers(self._rank, waited_s, {rank: states.get(rank, "") for rank in self._missing})
        if len(states) < len(self._others):
            return None
        # Who is there may wait for this worker, and uses no processor then.
        states = {rank: "running" if state == "idle" else state for rank, state in states.items()}
        return MissingWorkers(self._rank, waited_s, states, str(awaited))

    def _look(self) -> dict[int, str]:
        """Read what the others have done since the last look, as far as it is known, in the words of `_SAYS`."""
        now_s = time.monotonic()
        least_s, self._looked_s = _IDLE * (now_s - self._looked_s), now_s
        states = {}
        for rank in self._others:
            if (seen := look_at(rank, self._workers)) is not None:
                rests = seen.cpu_s - self._cpu_s.get(rank, 0.0) < least_s
                states[rank] = "idle" if rests and seen.state == "running" else seen.state
                self._cpu_s[rank] = seen.cpu_s
        return states


@dataclass(frozen=True)
class MissingWorkers:
    """The workers that have not called `offbeat.init()`, or are not through with it.

    Args:
        states: what is known of each of them: what `_SAYS` has, or "".
        place: where this worker waits; "" if it is for them to come there at all.
    """

    rank: int
    waited_s: float
    states: dict[int, str]
    place: str = ""

    @property
    def fatal(self) -> bool:
        return "dead" in self.states.values()

    @property
    def is_on_its_way(self) -> bool:
        return all(state == "running" for state in self.states.values())

    @property
    def text(self) -> str:
        ranks = ", ".join(map(str, self.states))
        waits = f"in {self.place}: not through with offbeat.init()"
        if not self.place:
            waits = "for the others to call offbeat.init(): not here yet"
        known = " ".join(f"Rank {rank} {_SAYS[state]}." for rank, state in self.states.items() if state)
        if not all(self.states.values()):
            known = f"{known} They may still load, have died, or never reach that line.".lstrip()
        return f"rank {self.rank} has waited {self.waited_s:.1f} s {waits}: rank {ranks}. {known}"

    def to_json(self) -> dict[str, Any]:
        culprits = [
            {"rank": rank, "reason": state or "absent", "text": f"{_SAYS.get(state, 'has not arrived')}."}
            for rank, state in self.states.items()
        ]
        place = self.place or "offbeat.init()"
        told = {"rank": self.rank, "place": place, "waited_s": self.waited_s, "culprits": culprits}
        return {**told, "fatal": self.fatal}
