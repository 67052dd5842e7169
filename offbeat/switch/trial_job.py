"""A job of one worker at a switch, to see what comes back; it is gone when the trial ends, and disturbs no other."""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import NetworkError
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.packet import PacketKind
from offbeat.switch.packet_batch import PacketBatch, join_packet
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.udp_socket import UdpSocket

if TYPE_CHECKING:
    from datetime import timedelta

    from numpy.typing import NDArray

    from offbeat.wire.credentials import Credentials

_SLOTS, _RING = 256, 4
_RTO_S = 0.02
_JOINS_S = 0.1  # between two attempts to join
_LATE_S = 0.05  # for answers that are still under way
_MTU_DISCOVER, _NEVER_IN_FRAGMENTS, _MTU = 10, 2, 14  # IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU
_EXACT = 1 << 20  # integers below it are summed exactly


@dataclass(frozen=True)
class LossCount:
    """The fate of packets on their way to the switch and of its answers on their way back.

    Args:
        sent, counted, answered: packets that were sent, that the switch has counted, and answers that came.
        overflowed: answers that this machine had received and had no room for, of those that did not come.
        seconds: that all of it took.
        is_right: whether the sum is here, and is right.
    """

    sent: int
    counted: int
    answered: int
    overflowed: int
    seconds: float
    is_right: bool


class TrialJob:
    """A job at a switch of which this process is the only worker, for as long as the `with` block lasts.

    Args:
        address: "host:port" of the switch's control.
        credentials: as for workers.
        values: int32 in a packet.
        patience: for how long to dial, and to wait for answers.
        window: packets under way.

    Raises:
        NetworkError: if the switch cannot be reached.
        PeerError: if it refuses this machine.
        PlanError: if it refuses the job; says why.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None,
        values: int,
        *,
        patience: timedelta,
        window: int = 64,
    ) -> None:
        self._patience_s = patience.total_seconds()
        self._name = f"doctor-{secrets.token_hex(4)}"
        self._socket = UdpSocket()
        try:
            self.control = ControlClient(address, credentials=credentials, timeout=patience, patience=patience)
        except BaseException:
            self._socket.close()
            raise
        try:
            shape, joined = self.control.join(self._name, JobShape(0, 1, values, _SLOTS, _RING))
            self.port = joined.port
            self._switch = np.full(_SLOTS, self._socket.connect(self.control.host, joined.port), np.uint64)
            with self._own() as sock:  # what does not fit a frame is to be refused, not cut to pieces
                sock.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _NEVER_IN_FRAGMENTS)
        except BaseException:
            self.close()
            raise
        self.client = StreamClient(shape, 0, joined.cookie, window=window, rto_s=_RTO_S)
        self._batch = PacketBatch(_SLOTS, values)
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)
        self._answered = 0

    @property
    def frame_bytes(self) -> int:
        """The most that a frame on the way to the switch carries, in bytes, as far as this machine knows (MTU)."""
        with self._own() as sock:
            return sock.getsockopt(socket.IPPROTO_IP, _MTU)

    @property
    def buffer_bytes(self) -> tuple[int, int]:
        """The socket's buffers for receiving and for sending, in bytes, as the kernel has granted them."""
        with self._own() as sock:  # which doubles what it grants, for its own bookkeeping
            return tuple(sock.getsockopt(socket.SOL_SOCKET, one) // 2 for one in (socket.SO_RCVBUF, socket.SO_SNDBUF))  # type: ignore[return-value]

    @staticmethod
    def damaged() -> int:
        """Datagrams that have come to this machine with a wrong checksum, for whatever socket, since it started."""
        for line in Path("/proc/thread-self/net/snmp").read_text().splitlines():
            name, _, counts = line.partition(": ")
            if name == "Udp" and counts[0].isdigit():
                return int(counts.split()[6])  # InCsumErrors
        return 0

    def join(self) -> bool:
        """Have the switch learn where this worker's packets come from; whether it has answered.

        Raises:
            NetworkError: if it refuses the worker, or this machine does not send the packet.
        """
        client = self.client
        packet = join_packet(client.shape.number, 0, client.cookie)
        end_s = time.monotonic() + self._patience_s
        while not client.has_joined and time.monotonic() < end_s:
            self._socket.send(packet, self._switch[:1])
            self._receive(time.monotonic() + _JOINS_S)
        return client.has_joined

    def is_summed(self, chunks: int) -> bool:
        """Sum so many chunks; whether the sum comes back within the patience, and is right.

        Raises:
            NetworkError: if the switch refuses a packet for good, or this machine does not send it.
        """
        values = self._values(chunks)
        exchange = self.client.begin(values)
        end_s = time.monotonic() + self._patience_s
        while not exchange.is_done and time.monotonic() < end_s:
            self._turn(end_s)
        return exchange.is_done and bool(np.array_equal(exchange.total, values))

    def round_trips_s(self, packets: int) -> list[float]:
        """Seconds that each of some packets and its answer took; those that were sent together or again are left out.

        For a job whose window is 1, so that one is under way at a time.

        Raises:
            NetworkError: as `is_summed`.
        """
        client = self.client
        client.begin(self._values(packets))
        found = []
        end_s = time.monotonic() + self._patience_s
        while not client.is_idle and time.monotonic() < end_s:
            sent, resent, began_s = client.sent, client.resent, time.monotonic()
            if self._turn(end_s) and (client.sent - sent, client.resent - resent) == (1, 0):
                found.append(time.monotonic() - began_s)
        return found

    def loss(self, packets: int) -> LossCount:
        """Sum chunks in that many packets or more, and see what became of them.

        Raises:
            NetworkError: as `is_summed`.
        """
        client = self.client
        sent, answered, counted, dropped = client.sent, self._answered, self._counted(), self._socket.dropped
        overflowed, began_s = self._overflowed(), time.monotonic()
        is_right = self.is_summed(packets)
        seconds = time.monotonic() - began_s
        end_s = time.monotonic() + _LATE_S
        while time.monotonic() < end_s:
            self._receive(end_s)
        return LossCount(
            sent=client.sent - sent - (self._socket.dropped - dropped),
            counted=self._counted() - counted,
            answered=self._answered - answered,
            overflowed=self._overflowed() - overflowed,
            seconds=seconds,
            is_right=is_right,
        )

    def close(self) -> None:
        """End the job; again does nothing."""
        self._socket.close()
        self.control.close()

    def __enter__(self) -> TrialJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- packets -------------------------------------------------------------------------------------------------

    def _values(self, chunks: int) -> NDArray[np.float32]:
        numbers = np.random.default_rng(chunks)
        return numbers.integers(-_EXACT, _EXACT, chunks * self.client.shape.values).astype(np.float32)

    def _turn(self, end_s: float) -> bool:
        """Send what is due, and take in what comes until more is; whether anything came."""
        due = self.client.packets(time.monotonic())
        if len(due):
            self._socket.send(due, self._switch[: len(due)])
        return self._receive(min(end_s, self.client.wake_s()))

    def _receive(self, until_s: float) -> bool:
        """Wait until something comes, and take it in; whether it has."""
        if not self._poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
            return False
        received, _ = self._socket.recv(self._batch)
        ours = received.are_ours(self.client.shape.number, from_workers=False)
        self._answered += int((ours & (received.header["kind"] != PacketKind.JOIN_OK)).sum())
        self.client.receive(received, time.monotonic())
        if self.client.refusal is not None:
            raise NetworkError(f"the switch refuses a packet: {self.client.refusal.text}")
        return len(received) > 0

    # -- what is known of them -----------------------------------------------------------------------------------

    def _counted(self) -> int:
        """The packets of this job that have reached the switch."""
        job = next((job for job in self.control.status().jobs if job.job == self._name), None)
        return job.members[0].counts.get(PacketKind.DATA.name, 0) if job is not None and job.members else 0

    def _overflowed(self) -> int:
        """The datagrams that came in and found the socket's buffer full."""
        inode = str(os.fstat(self._socket.fileno()).st_ino)
        for line in Path("/proc/thread-self/net/udp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] == inode:
                return int(fields[-1])
        return 0

    def _own(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._socket.fileno()))
