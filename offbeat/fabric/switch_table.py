"""One model's table at a switch, to which each worker adds its changes when it likes, and which it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.errors import NumericsError
from offbeat.payload import Total

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    import numpy as np
    from numpy.typing import NDArray

    from offbeat.payload import Reply
    from offbeat.switch.client_thread import ClientThread
    from offbeat.switch.table_client import TableClient


class SwitchTable:
    """One worker's end of the table.

    Args:
        client, thread: its packets, and what keeps them going.
        leave: has the switch go on without this worker.
    """

    def __init__(self, client: TableClient, thread: ClientThread, leave: Callable[[], None]) -> None:
        self._client, self._thread, self._leave = client, thread, leave
        self._has_left = False

    @property
    def size(self) -> int:
        """Values that it has room for."""
        return self._client.shape.rows * self._client.shape.values

    @property
    def spent_s(self) -> Mapping[str, float]:
        """Seconds spent to push, to wait until the next step may begin (clock), to pull, and to rest."""
        return {str(phase): seconds for phase, seconds in self._client.spent_s.items()}

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
            raise NumericsError(
                "Cannot go on with the table at the switch: a parameter has moved further than its integers reach "
                f"(2^{self._client.exponent}). Lower the learning rate, or use BSP() or ParameterServer() - at "
                "`plan.sync`."
            )
        return self._client.values(size)

    def leave(self) -> None:
        """Have the others go on without this worker; again does nothing."""
        if not self._has_left:
            self._has_left = True
            self._thread.close()
            self._leave()


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
        return self._table.wait(timeout)

    def done(self) -> bool:
        return self._table.is_done()

    def result(self) -> Reply:
        return Total(torch.from_numpy(self._table.values(self._size)))
