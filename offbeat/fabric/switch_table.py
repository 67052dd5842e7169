"""One model's table at a switch, to which each worker adds its changes when it likes, and which it reads."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from offbeat.errors import NetworkError, NumericsError
from offbeat.payload import Total
from offbeat.protocol.switch_control import (
    GetSwitchPlan,
    MeetAtSwitch,
    SetSwitchStrategy,
    SwitchPlan,
    SwitchReturn,
    SwitchStrategySet,
)
from offbeat.switch.client_thread import ClientThread, client_thread_of, socket_to
from offbeat.switch.clocks import Windows, first_windows
from offbeat.switch.packet import is_newer
from offbeat.switch.strategy import watched
from offbeat.switch.table_client import EPOCHS, too_far

_SOON = timedelta(seconds=1)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from offbeat.errors import OffbeatError
    from offbeat.fabric.switch_session import OtherWorkers, SwitchSession
    from offbeat.payload import Reply
    from offbeat.protocol.switch_control import Strategy, SwitchJobJoined, SwitchJobStatus
    from offbeat.switch.control_client import ControlClient
    from offbeat.switch.job_shape import JobShape
    from offbeat.switch.table_client import StepGrant, TableClient

T = TypeVar("T")
_LOOK = timedelta(milliseconds=200)  # while other workers are waited for
_LONG_S = 1.0  # of a wait, which may be for somebody who is lost


class SwitchTable:
    """One worker's end of the table. Collective: all join it at the same place in their programs.

    Args:
        client: its packets.
        strategy: of the policy that it begins with.
        session: of this worker at the switch.
        job: the table's name there.

    Attributes:
        has_left: whether the others go on without this worker.

    Raises:
        PlanError: if the switch has no room.
        NetworkError: if it is lost for good.
    """

    def __init__(self, client: TableClient, strategy: Strategy, session: SwitchSession, job: str) -> None:
        self._client, self._session, self.job = client, session, job
        self._thread: ClientThread | None = None
        self.has_left = False
        self._epoch = 0  # of the policy that this worker's plan has
        self._set_epoch = 0  # of the last one that it has set
        self._is_restored = True  # whether the table has all that this worker had added, and all others know
        self.while_waiting: Callable[[], None] = lambda: None  # called now and then in waits, on the thread that waits
        self.while_held_up: Callable[[], None] = lambda: None  # likewise, in those that take long
        windows = first_windows(watched(strategy, client.shape.ring), client.shape.ring, client.clock)
        self._known = _KnownPolicy(strategy, "", windows)
        session.join(self)

    @property
    def size(self) -> int:
        """Values that it has room for."""
        return self._client.shape.rows * self._client.shape.values

    @property
    def spent_s(self) -> Mapping[str, float]:
        """Seconds spent to push, to wait until the next step may begin (clock), to pull, and to rest; and to
        bring back to a switch that was started again what was added (restore, confirm).
        """
        return {str(phase): seconds for phase, seconds in self._client.spent_s.items()}

    @property
    def grant(self) -> StepGrant | None:
        """The grounds on which this worker went on behind its last step."""
        return self._client.grant

    @property
    def resent(self) -> int:
        """Packets that were sent again."""
        return self._client.resent

    def push(self, change: NDArray[np.float32]) -> TablePending:
        """Begin to finish a step: add `change` [D], wait until the next one may begin, and read the table.

        Returns:
            The exchange; its reply is the table, [D] float32, the sum of all that was ever added.
        """
        self._do(lambda: self._client.push(change))
        return TablePending(self, change.size)

    def rest(self) -> None:
        """Make no step from now on, and hold nobody up."""
        self._do(self._client.rest)

    @property
    def clock(self) -> int:
        """The last step that this worker has finished, or says it has."""
        return self._client.clock

    def halt(self) -> int:
        """Stay where it is, now that all rest; the last step that this worker says it has finished."""
        return self._do(self._client.halt)

    def resume(self, clock: int, size: int) -> TablePending:
        """Begin to go on behind `clock`, the largest where one has halted, with the table's first `size` values."""
        self._do(lambda: self._client.resume(clock))
        return TablePending(self, size)

    def settle(self) -> None:
        """Note that all have read the same table, and that nobody has pushed since."""
        self._do(self._client.settle)

    def _do(self, act: Callable[[], T]) -> T:
        assert self._thread is not None
        return self._thread.do(act)

    def wait(self, timeout: timedelta) -> bool:
        """Wait until what was begun is done; whether it is. Raises as `ClientThread.wait`."""
        assert self._thread is not None
        return self._thread.wait(self.is_done, timeout)

    @property
    def trouble(self) -> str:
        """The trouble that keeps this worker from going on, in a sentence; "" if none is known."""
        return "" if self._thread is None else self._thread.trouble

    def is_done(self) -> bool:
        """Whether nothing is under way."""
        return self._client.phase == "computing"

    def values(self, size: int) -> NDArray[np.float32]:
        """[size] the table as it was read last.

        Raises:
            NumericsError: if a value has grown beyond what its integers can say.
        """
        if self._client.is_saturated:
            raise NumericsError(too_far(self._client.exponent))
        return self._client.values(size)

    def leave(self) -> None:
        """Have the others go on without this worker, and what it has added; again does nothing."""
        if not self.has_left:
            self.has_left = True
            self._say_it_has_left()

    def close(self) -> None:
        """Leave a table that is over for all."""
        self._session.remove(self)
        self.leave()

    def _say_it_has_left(self) -> None:
        assert self._thread is not None
        self._thread.close()
        self._session.leave(self.job)

    # -- a job of its session ------------------------------------------------------------------------------------

    def pause(self) -> None:
        assert self._thread is not None
        self._thread.pause()

    def join_again(self, control: ControlClient, others: OtherWorkers) -> None:
        """Take part, with all that this worker has added so far, once all others do.

        Raises:
            PlanError: if the switch has no room.
            NetworkError: if it is lost.
            NumericsError: if what was added is more than integers can say.
        """
        client, members, known = self._client, others.members, self._known

        def evict_lost() -> None:
            others.evict_lost(control, self.job, members)

        again = SwitchReturn(
            members=members,
            cookie=None if self._thread is None else client.cookie,
            clock=None if self.has_left else client.added_by,
            settled=client.settled,
            windows=known.windows,
            plan=known.plan,
        )
        shape, joined = control.join(
            self.job, client.shape, known.strategy, exponent=client.exponent, again=again, while_waiting=evict_lost
        )

        if self._thread is not None and (shape.number, joined.cookie) == (client.shape.number, client.cookie):
            self._thread.resume()
            if self._is_restored:
                return
        else:
            self._begin_again(control, shape, joined)
        assert self._thread is not None
        while not self._thread.wait(lambda: client.is_restored, _LOOK):
            evict_lost()
            if control.is_lost:
                raise NetworkError("The switch is lost.")
        control.ask(lambda number: MeetAtSwitch(number, self.job), evict_lost)
        self._is_restored = True
        if self.has_left:
            self._say_it_has_left()
        else:
            self._thread.do(client.go_on)

    def _begin_again(self, control: ControlClient, shape: JobShape, joined: SwitchJobJoined) -> None:
        """Begin to bring back all that this worker has added."""
        client = self._client

        def begin_again() -> None:
            self._is_restored = False
            client.begin_again(shape, joined.cookie, joined.clock, joined.settled, has_left=self.has_left)

        if self._thread is None or self.has_left:
            begin_again()
            self._thread = client_thread_of(client, control, joined, self._session.timeout)
        else:
            self._thread.do(begin_again)
            self._thread.go_on(*socket_to(control, joined))

    def fail(self, error: OffbeatError) -> None:
        assert self._thread is not None
        self._thread.fail(error)

    # -- its policy ------------------------------------------------------------------------------------------------

    def set_strategy(self, strategy: Strategy, plan: str, reason: str = "") -> bool:
        """Have another policy hold for all workers from a clock on that nobody can have been granted yet.

        Args:
            plan: of which it is the policy, as TOML.
            reason: of the controller that wants it; "" if a person does.

        Returns:
            Whether it will; not while the change before is not in effect for all: try again.

        Raises:
            PlanError: if the switch cannot carry it out.
            NetworkError: if it is gone.
        """
        told = self._session.ask(lambda number: SetSwitchStrategy(number, self.job, strategy, plan, reason))
        if not isinstance(told, SwitchStrategySet) or not told.is_set:
            return False
        self._set_epoch = told.epoch
        self._know(strategy, plan, told)
        return True

    def _know(self, strategy: Strategy, plan: str, told: SwitchStrategySet | SwitchPlan) -> None:
        ring = self._client.shape.ring
        window = watched(strategy, ring).window_in(ring)
        self._known = _KnownPolicy(strategy, plan, Windows(told.window_old, window, told.effective, told.epoch))

    @property
    def is_half_full(self) -> bool:
        """Whether a value has come half as far as the table's integers reach."""
        return self._client.is_half_full

    @property
    def is_changing(self) -> bool:
        """Whether a change of the policy has been set that does not hold for this worker yet."""
        later = ((epoch - self._epoch) % EPOCHS for epoch in (self._set_epoch, self._client.windows.epoch))
        return any(0 < changes < EPOCHS // 2 for changes in later)

    def status(self) -> SwitchJobStatus | None:
        """Ask what the switch knows of all workers' clocks; None if the table is gone, or the switch is away.

        Raises:
            NetworkError: if it does not answer at once.
        """
        control = self._session.control
        try:
            return next(iter(control.status(self.job, _SOON).jobs), None)
        except NetworkError:
            if control.is_lost:
                return None
            raise

    def new_plan(self) -> SwitchPlan | None:
        """The plan that has come to hold for this worker since the last call, as control tells it; None for none.

        Raises:
            NetworkError: if the switch is gone.
        """
        windows = self._client.windows
        if windows.epoch == self._epoch or is_newer(windows.effective, self._client.clock):
            return None
        told = self._session.ask(lambda number: GetSwitchPlan(number, self.job))
        assert isinstance(told, SwitchPlan)
        # Else it is yet another one, which does not hold here yet.
        if told.epoch == self._epoch or is_newer(told.effective, self._client.clock):
            return None
        self._epoch = told.epoch
        self._know(told.strategy, told.plan, told)
        return told


class _KnownPolicy(NamedTuple):
    """The latest policy that this worker knows of, which it tells a switch that was started again."""

    strategy: Strategy
    plan: str
    windows: Windows


class TablePending:
    """A step's end under way: push, wait, pull. A `Pending`.

    Args:
        table: where.
        size: values that are exchanged.
    """

    def __init__(self, table: SwitchTable, size: int) -> None:
        self._table, self._size, self._began_s = table, size, time.monotonic()
        self.sent_bytes = 4 * size

    def wait(self, timeout: timedelta) -> bool:
        self._table.while_waiting()
        if time.monotonic() - self._began_s > _LONG_S:
            self._table.while_held_up()
        return self._table.wait(timeout)

    def done(self) -> bool:
        return self._table.is_done()

    @property
    def trouble(self) -> str:
        return self._table.trouble

    def result(self) -> Reply:
        return Total(torch.from_numpy(self._table.values(self._size)))
