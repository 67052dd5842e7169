"""The thread of a worker that keeps its stream, or its table, going while the worker computes."""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from offbeat.errors import NetworkError, OffbeatError
from offbeat.switch.packet import Reason
from offbeat.switch.packet_batch import PacketBatch, join_packet
from offbeat.switch.udp_socket import UdpSocket

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from numpy.typing import NDArray

    from offbeat.protocol.switch_control import SwitchJobJoined
    from offbeat.switch.control_client import ControlClient
    from offbeat.switch.job_shape import JobShape

T = TypeVar("T")
_log = logging.getLogger("offbeat")
_AT_ONCE = 256
# Between two looks when much is under way: no less than is worth a sleep, and twice as long as it takes to look.
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.005
_LONGEST_S = 0.1  # between two looks, when nothing is under way
_FORGOTTEN_S = 1.0  # without a refusal, behind which the last one is


def socket_to(control: ControlClient, joined: SwitchJobJoined) -> tuple[UdpSocket, int]:
    """A socket to where a job's packets go, and that address."""
    sock = UdpSocket()
    return sock, sock.connect(control.host, joined.port)


def client_thread_of(
    client: PacketClient, control: ControlClient, joined: SwitchJobJoined, patience: timedelta
) -> ClientThread:
    """The thread that keeps a worker's end of a job going, over a socket of its own.

    Args:
        patience: for which to dial; a switch that was started again may not be dialled yet when it answers packets.
    """
    return ClientThread(client, *socket_to(control, joined), 2 * patience.total_seconds())


class PacketSocket(Protocol):
    """The Protocol of what carries packets: a `UdpSocket`, or the port of a `MemorySwitch`."""

    def fileno(self) -> int: ...

    def send(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64] | None = None) -> None: ...

    def recv(self, batch: PacketBatch) -> tuple[PacketBatch, NDArray[np.uint64]]: ...

    def close(self) -> None: ...


class PacketClient(Protocol):
    """The Protocol of a worker's end of a job, without I/O: `StreamClient`, `TableClient`."""

    shape: JobShape
    worker: int
    cookie: int
    window: int
    has_joined: bool
    refusal: Reason | None
    damaged: int

    @property
    def rto_s(self) -> float: ...

    @property
    def pause_s(self) -> float: ...

    @property
    def trouble(self) -> str: ...

    def packets(self, now_s: float) -> PacketBatch: ...

    def receive(self, batch: PacketBatch, now_s: float) -> None: ...

    def wake_s(self) -> float: ...


class ClientThread:
    """Send and receive for a worker's end of a job. Others use that under the lock (`do`), or only look at it.

    Args:
        client: whose packets these are.
        sock: that carries them; closed with the thread.
        switch: its address, as `udp_socket.address_of`.
        patience_s: for how long a switch that does not know the job is taken for one that was just started again.
    """

    def __init__(self, client: PacketClient, sock: PacketSocket, switch: int, patience_s: float = 0.0) -> None:
        self._client, self._socket, self._patience_s = client, sock, patience_s
        self._switch = np.full(2 * client.window, switch, np.uint64)
        self._is_paused = False
        self._replaced: list[PacketSocket] = []  # to be closed by the thread, which may be using them
        self._refused_s = self._refused_since_s = -math.inf  # the last time, and the first of a series
        self._batch = PacketBatch(_AT_ONCE, client.shape.values)
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_closed = False
        self._took_s = 0.0  # to take in what came last, and answer it
        self._error: OffbeatError | None = None
        self._thread = threading.Thread(target=self._run, name="offbeat-switch", daemon=True)
        self._thread.start()

    def do(self, act: Callable[[], T]) -> T:
        """Let `act` have the client for itself, then look at what is to be sent."""
        with self._changed:
            found = act()
            self._wake_up()
        return found

    def wait(self, is_done: Callable[[], bool], timeout: timedelta) -> bool:
        """Wait until something is so that packets change; whether it is.

        Raises:
            NetworkError: if the switch will not go on with this worker.
            NumericsError: if a sum did not fit again and again.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        with self._changed:
            while not is_done():
                if self._error is not None:
                    raise self._error
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    @property
    def trouble(self) -> str:
        """A sentence for reports about what keeps it from going on; "" if nothing is known to."""
        return self._client.trouble if self._client.has_joined else "The switch has not answered yet."

    def pause(self) -> None:
        """Send nothing, and take nothing in, until `go_on`."""
        with self._changed:
            self._is_paused = True

    def resume(self) -> None:
        """Go on with the same switch, which has forgotten nothing."""
        with self._changed:
            self._is_paused, self._refused_s = False, -math.inf
            self._wake_up()

    def go_on(self, sock: PacketSocket, switch: int) -> None:
        """Go on with another switch, over a socket of its own; see the constructor."""
        with self._changed:
            if self._is_closed:
                sock.close()
                return
            self._replaced.append(self._socket)
            self._socket, self._switch[:] = sock, switch
            self._is_paused, self._refused_s = False, -math.inf
            self._wake_up()

    def fail(self, error: OffbeatError) -> None:
        """Have whoever waits learn that it is of no use."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; what is under way is given up."""
        with self._changed:
            if self._is_closed:
                return
            self._wake_up()
            self._is_closed = True
        self._thread.join()
        for sock in (self._socket, *self._replaced):
            sock.close()
        os.close(self._wake)
        if damaged := self._client.damaged:
            _log.warning(
                "%d packets from the switch arrived damaged at rank %d. They counted as lost and were sent again; "
                "`offbeat switch ctl` shows how many arrived damaged at the switch.",
                damaged, self._client.worker,
            )  # fmt: skip

    def _wake_up(self) -> None:
        if not self._is_closed:
            os.eventfd_write(self._wake, 1)

    # -- on the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll, sock = self._poll(), self._socket
        try:
            while not self._is_closed:
                if sock is not self._socket:
                    poll, sock = self._poll(), self._socket
                wait_s = self._turn(sock)
                if any(descriptor == self._wake for descriptor, _ in poll.poll(max(0.0, wait_s) * 1000)):
                    os.eventfd_read(self._wake)
                elif (pause_s := self._client.pause_s) > _LEAST_PAUSE_S:
                    time.sleep(min(_LONGEST_PAUSE_S, max(pause_s, 2 * self._took_s)))
        except OffbeatError as error:
            self.fail(error)

    def _poll(self) -> select.poll:
        poll = select.poll()
        with self._changed:
            poll.register(self._socket.fileno(), select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            while self._replaced:
                self._replaced.pop().close()
        return poll

    def _turn(self, sock: PacketSocket) -> float:
        """Take in what is here, and send what is due; for how many seconds nothing is due then."""
        client = self._client
        received, _ = sock.recv(self._batch)
        now_s = time.monotonic()
        with self._changed:
            if self._is_paused or sock is not self._socket:
                return _LONGEST_S
            if len(received):
                client.receive(received, now_s)
                self._changed.notify_all()
            self._check_refusal(now_s)
            is_in, number = client.has_joined, client.shape.number
            due = client.packets(now_s) if is_in else join_packet(number, client.worker, client.cookie)
            wake_s = client.wake_s()
        if len(due):
            sock.send(due, self._switch[: len(due)])
        self._took_s = time.monotonic() - now_s
        return min(_LONGEST_S, wake_s - now_s) if client.has_joined else client.rto_s

    def _check_refusal(self, now_s: float) -> None:
        """Give up if the switch refuses this worker again and again; one packet may have been damaged on its way."""
        client = self._client
        reason, client.refusal = client.refusal, None
        if reason is None:
            return
        if now_s - self._refused_s > max(_FORGOTTEN_S, 4 * client.rto_s):
            self._refused_since_s = now_s
        self._refused_s = now_s
        patience_s = self._patience_s if reason is Reason.UNKNOWN_JOB else client.rto_s / 2
        if now_s - self._refused_since_s >= patience_s:
            raise NetworkError(f"The switch refuses this worker: {reason.text}.")
