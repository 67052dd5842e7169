"""One worker's place at a switch: its link to control, and the jobs that it takes part in, also after a restart.

A link ends when the switch stands still, or the worker does: then the worker dials again and goes on where it was. A
switch that is killed and started again knows nothing. Its workers notice that the link has ended, on a thread of
their own, whatever they are doing; they dial again, and have each of their jobs joined again (`RejoinsSwitch`). There
they wait for each other: for all that are not known to be gone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import NetworkError, OffbeatError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from offbeat.fabric.elastic_group import ElasticGroup
    from offbeat.protocol.switch_control import FromSwitch, ToSwitch
    from offbeat.switch.control_client import ControlClient

_log = logging.getLogger("offbeat")
_OVER = 64  # jobs; others are behind by one for each model at most


class RejoinsSwitch(Protocol):
    """A job at a switch, as its session sees it: `SwitchStream`, `SwitchTable`."""

    @property
    def job(self) -> str: ...

    def pause(self) -> None:
        """Expect nothing of the switch any more."""

    def join_again(self, control: ControlClient, others: OtherWorkers) -> None:
        """Take part in the job again, once all others do.

        Raises:
            OffbeatError: if that cannot be.
        """

    def fail(self, error: OffbeatError) -> None:
        """Have whoever waits learn that it is of no use."""


class OtherWorkers:
    """The workers that have to come to a switch that was started again, and those that are lost meanwhile.

    Args:
        rank: this one's.
        group: all of them; None if there are no others.
    """

    def __init__(self, rank: int, group: ElasticGroup | None) -> None:
        self._rank, self._group = rank, group

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are not known to be gone, this one's among them."""
        if self._group is None:
            return (self._rank,)
        gone = self._gone()
        return tuple(rank for rank in self._group.members if rank == self._rank or rank not in gone)

    def evict_lost(self, control: ControlClient, job: str, members: tuple[int, ...]) -> None:
        """Have a job wait no longer for those of its members that are gone."""
        if self._group is not None:
            here, gone = self._group.members, self._gone()
            for rank in members:
                if rank != self._rank and (rank in gone or rank not in here):
                    control.evict(job, rank, gone.get(rank, "the other workers have gone on without it"))

    def _gone(self) -> dict[int, str]:
        assert self._group is not None
        return {} if self._group.gone is None else dict(self._group.gone())


class SwitchSession:
    """The link, and the jobs.

    Args:
        dial: reaches the switch's control; its argument is to be called when that is lost.
        others: who has to come again.
        timeout: for which control is dialled.

    Raises:
        NetworkError, PeerError: as `dial`.
    """

    def __init__(
        self, dial: Callable[[Callable[[], None]], ControlClient], others: OtherWorkers, timeout: timedelta
    ) -> None:
        self._dial, self.others, self.timeout = dial, others, timeout
        self._jobs: list[RejoinsSwitch] = []
        self._over: deque[str] = deque(maxlen=_OVER)  # jobs that are over for all, though others may not know it yet
        self._state = threading.Condition()
        self._is_away = self._is_closed = False  # whether there is a thread that brings all back
        self._error: OffbeatError | None = None
        self.control = dial(self._lost)

    def add(self, job: RejoinsSwitch) -> None:
        """Have a job that is joined already joined again if need be."""
        self._jobs.append(job)

    def join(self, job: RejoinsSwitch) -> None:
        """Join a job once all others do, and again if need be. Raises as `RejoinsSwitch.join_again`."""
        while True:
            control = self.wait()
            try:
                job.join_again(control, self.others)
            except NetworkError:
                if not control.is_lost:
                    raise
            with self._state:
                if not self._is_away and not control.is_lost:
                    self._jobs.append(job)
                    return

    def remove(self, job: RejoinsSwitch) -> None:
        """Forget a job that is over for all; if it is joined again, nobody waits for this worker there."""
        self._over.append(job.job)
        if job in self._jobs:
            self._jobs.remove(job)

    def ask(self, request: Callable[[int], ToSwitch]) -> FromSwitch:
        """Ask control something, of the next switch if this one is lost; see `ControlClient.ask`."""
        while True:
            control = self.wait()
            try:
                return control.ask(request)
            except NetworkError:
                if not control.is_lost:
                    raise

    def wait(self) -> ControlClient:
        """Wait until all jobs are joined; returns the link.

        Raises:
            NetworkError: if they cannot be, or this worker has left.
        """
        with self._state:
            while self._is_away or self.control.is_lost:
                if self._error is not None:
                    raise self._error
                if self._is_closed:
                    raise NetworkError("This worker has left the switch.")
                self._state.wait(self.timeout.total_seconds())
            return self.control

    def evict(self, job: str, worker: int, why: str) -> None:
        """Have a job go on without a worker; if the switch is lost, who joins again says who is there."""
        self.control.evict(job, worker, why)

    def leave(self, job: str) -> None:
        """Have a job go on without this worker, which is done with it."""
        self.control.leave(job)

    def close(self) -> None:
        """Leave the switch; again does nothing."""
        with self._state:
            self._is_closed = True
            self._state.notify_all()
        self.control.close()

    # -- behind a loss -------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        with self._state:
            if self._is_away or self._is_closed:
                return
            self._is_away = True
        threading.Thread(target=self._come_back, name="offbeat-switch-again", daemon=True).start()

    def _come_back(self) -> None:
        _log.warning("The switch is lost; this worker dials it again.")
        try:
            while not self._is_closed and not self._is_back():
                self._join_again()
        except OffbeatError as error:
            self._fail(
                NetworkError(
                    f"The switch is lost, and the job cannot go on at it: {error} Start it again with `offbeat switch "
                    "serve`, at the same address, and the job from its last checkpoint."
                )
            )
        finally:
            if self._is_closed:
                self.control.close()

    def _is_back(self) -> bool:
        with self._state:
            if self.control.is_lost:
                return False
            self._is_away = False
            self._state.notify_all()
        _log.warning("The switch is back, and all go on.")
        return True

    def _join_again(self) -> None:
        jobs = list(self._jobs)
        for job in jobs:
            job.pause()
        self.control.close()
        self.control = self._dial(self._lost)
        if self._is_closed:
            return
        for name in list(self._over):
            self.control.leave(name)
        try:
            for job in jobs:
                job.join_again(self.control, self.others)
        except NetworkError:
            if not self.control.is_lost:  # else once more
                raise

    def _fail(self, error: OffbeatError) -> None:
        with self._state:
            self._error = error
            self._state.notify_all()
        if not self._is_closed:
            for job in self._jobs:
                job.fail(error)
