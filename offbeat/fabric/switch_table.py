"""One model's table at a switch, to which each worker adds its changes when it likes, and which it reads."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.errors import NumericsError
from offbeat.payload import Total
from offbeat.protocol.switch_control import GetSwitchPlan, SetSwitchStrategy, SwitchPlan, SwitchStrategySet
from offbeat.switch.packet import is_newer
from offbeat.switch.table_client import EPOCHS, too_far

_SOON = timedelta(seconds=1)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from offbeat.payload import Reply
    from offbeat.protocol.switch_control import Strategy, SwitchJobStatus
    from offbeat.switch.client_thread import ClientThread
    from offbeat.switch.control_client import ControlClient
    from offbeat.switch.table_client import StepGrant, TableClient


class SwitchTable:
    """One worker's end of the table.

    Args:
        client, thread: its packets, and what keeps them going.
        control: of the switch.
        job: the table's name there.
    """

    def __init__(self, client: TableClient, thread: ClientThread, control: ControlClient, job: str) -> None:
        self._client, self._thread, self._control, self._job = client, thread, control, job
        self._has_left = False
        self._epoch = 0  # of the policy that this worker's plan has
        self._set_epoch = 0  # of the last one that it has set
        self.while_waiting: Callable[[], None] = lambda: None  # called now and then in waits, on the thread that waits

    @property
    def size(self) -> int:
        """Values that it has room for."""
        return self._client.shape.rows * self._client.shape.values

    @property
    def spent_s(self) -> Mapping[str, float]:
        """Seconds spent to push, to wait until the next step may begin (clock), to pull, and to rest."""
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
        self._thread.do(lambda: self._client.push(change))
        return TablePending(self, change.size)

    def rest(self) -> None:
        """Make no step from now on, and hold nobody up."""
        self._thread.do(self._client.rest)

    @property
    def clock(self) -> int:
        """The last step that this worker has finished, or says it has while it rests."""
        return self._client.clock

    def resume(self, clock: int, size: int) -> TablePending:
        """Begin to go on behind `clock`, the largest of those that rest, with the table's first `size` values."""
        self._thread.do(lambda: self._client.resume(clock))
        return TablePending(self, size)

    def wait(self, timeout: timedelta) -> bool:
        """Wait until what was begun is done; whether it is. Raises as `ClientThread.wait`."""
        return self._thread.wait(self.is_done, timeout)

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
        """Have the others go on without this worker; again does nothing."""
        if not self._has_left:
            self._has_left = True
            self._thread.close()
            self._control.evict(self._job, self._client.worker, "it is done")

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
        told = self._control.ask(lambda number: SetSwitchStrategy(number, self._job, strategy, plan, reason))
        if not isinstance(told, SwitchStrategySet) or not told.is_set:
            return False
        self._set_epoch = told.epoch
        return True

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
        """Ask what the switch knows of all workers' clocks; None if the table is gone.

        Raises:
            NetworkError: if the switch is, or does not answer at once.
        """
        return next(iter(self._control.status(self._job, _SOON).jobs), None)

    def new_plan(self) -> tuple[str, str]:
        """The plan whose policy has come to hold for this worker since the last call, as TOML, and the reason of the
        controller that wanted it; "" for none.

        Raises:
            NetworkError: if the switch is gone.
        """
        windows = self._client.windows
        if windows.epoch == self._epoch or is_newer(windows.effective, self._client.clock):
            return "", ""
        told = self._control.ask(lambda number: GetSwitchPlan(number, self._job))
        assert isinstance(told, SwitchPlan)
        if is_newer(told.effective, self._client.clock):  # yet another one, which does not hold here yet
            return "", ""
        self._epoch = told.epoch
        return told.plan, told.reason


class TablePending:
    """A step's end under way: push, wait, pull. A `Pending`.

    Args:
        table: where.
        size: values that are exchanged.
    """

    def __init__(self, table: SwitchTable, size: int) -> None:
        self._table, self._size = table, size
        self.sent_bytes = 4 * size

    def wait(self, timeout: timedelta) -> bool:
        self._table.while_waiting()
        return self._table.wait(timeout)

    def done(self) -> bool:
        return self._table.is_done()

    def result(self) -> Reply:
        return Total(torch.from_numpy(self._table.values(self._size)))
