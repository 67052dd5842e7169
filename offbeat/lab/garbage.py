"""Packets that no honest worker sends, made of those that one does; and somebody who sends them to a switch.

    kind           what it is                                                            what has to become of it
    foreign        bytes of any length; another magic, version, or kind of packet        dropped as foreign
    cut, too long  an honest packet, not whole or with more behind it                    dropped as foreign
    other job      an honest packet of a job that there is not                           refused
    other worker   an honest packet in another's name                                    refused
    other cookie   an honest packet of another incarnation                               refused
    other port     an honest packet, word for word, from elsewhere                       refused
    replayed       an honest packet, word for word, from its worker's own port           changes nothing: it was there
    own job        by a member of another job: any field of its packets is anything      changes nothing in this one

Who sends the last is a member, and errs in all that a packet says: kind, count, slot, clock, chunk, attempt, exponents,
flags. None of it may change a sum of the honest job, or stop one of its workers. Not among it is a whole packet that
lies, from the honest worker's own port and with its cookie: whoever can send that can have it summed.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from offbeat.lab.bridged_links import INTERFACE
from offbeat.lab.namespace import inside
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.packet import FROM_WORKERS, MOST_VALUES, VALUES_STEP, Flag, Packet, PacketKind, encode, sealed
from offbeat.switch.packet_batch import HEADER, PacketBatch, join_packet
from offbeat.switch.udp_socket import UdpSocket
from offbeat.wire.credentials import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.protocol.switch_control import SwitchStatus

KINDS = (
    "foreign", "cut", "too long", "other job", "other worker", "other cookie", "other port", "replayed", "own job"
)  # fmt: skip
_FROM_VICTIM = ("foreign", "cut", "too long", "replayed")  # what may come from the honest worker's own port as well
_FIXED = ("magic", "job", "cookie", "checksum")
_FIELDS = [(name, *HEADER.fields[name]) for name in HEADER.names or () if name not in _FIXED]  # type: ignore[index]
_OWN_VALUES, _OWN_SLOTS, _OWN_RING, _OWN_ROWS = 64, 64, 16, 8
_KEPT = 256  # honest packets
_AT_ONCE = 32
_MOST_LONGER = 600  # bytes
_FRAME_BYTES = 42  # of the headers before a datagram
_MOST_FRAMED_BYTES = 1472  # of a datagram in a frame
_ALL_FRAMES, _OUTGOING = 3, 4  # ETH_P_ALL, PACKET_OUTGOING
_PATIENCE_S = 5.0


class Garbage(NamedTuple):
    """One datagram.

    Args:
        kind: of `KINDS`.
        is_from_victim: whether it comes from an honest worker's own port.
    """

    kind: str
    is_from_victim: bool
    datagram: bytes


class GarbageMaker:
    """A maker of garbage out of honest packets.

    Args:
        own: the number of a job, a member and its cookie, which may be wasted; its shape is `own_shape`.
        seed: decides everything.
    """

    def __init__(self, own: tuple[int, int, int], seed: int = 0) -> None:
        self._own, self._chance = own, random.Random(seed)
        self._honest: list[bytes] = []
        self._chunk = 0
        self._made = 0

    @staticmethod
    def own_shape(number: int = 0) -> JobShape:
        """The shape of the job that is wasted; it has a stream and a table."""
        return JobShape(number, 2, _OWN_VALUES, _OWN_SLOTS, _OWN_RING, _OWN_ROWS)

    @property
    def has_seen(self) -> bool:
        """Whether it knows honest packets enough."""
        return len(self._honest) >= _AT_ONCE

    def see(self, datagram: bytes) -> None:
        """Learn of an honest packet."""
        if len(self._honest) < _KEPT:
            self._honest.append(datagram)
        else:
            self._honest[self._chance.randrange(_KEPT)] = datagram

    def next(self) -> Garbage:
        """Make the next one; all kinds take turns."""
        kind = KINDS[self._made % len(KINDS)]
        self._made += 1
        if kind == "own job":
            return Garbage(kind, False, self.of_own_job())
        data = bytearray(self._chance.choice(self._honest))
        is_from_victim = kind == "replayed" or (kind in _FROM_VICTIM and self._chance.random() < 0.5)
        return Garbage(kind, is_from_victim, bytes(self._garbled(kind, data)))

    def _garbled(self, kind: str, data: bytearray) -> bytes | bytearray:
        chance = self._chance
        match kind:
            case "foreign":
                return self._foreign(data)
            case "cut":
                return data[: chance.randrange(len(data))]
            case "too long":
                return data + chance.randbytes(chance.randint(1, _MOST_LONGER))
            case "other job":
                self._put(data, "job", self._another(data, "job"))
            case "other worker":
                self._put(data, "worker", self._another(data, "worker"))
            case "other cookie":
                self._put(data, "cookie", self._another(data, "cookie"))
        return sealed(data)

    def _foreign(self, data: bytearray) -> bytes | bytearray:
        chance = self._chance
        match chance.randrange(4):
            case 0:
                return chance.randbytes(chance.randrange(len(data)))
            case 1:
                self._put(data, "magic", self._another(data, "magic"))
            case 2:
                self._put(data, "flags", data[2] ^ chance.randint(1, 15) << 4)
            case _:
                self._put(data, "kind", chance.choice([kind for kind in range(256) if kind not in FROM_WORKERS]))
        return sealed(data)

    def of_own_job(self) -> bytes:
        """Make a packet of the member's, in which some fields are wrong, or none."""
        chance, (job, worker, cookie) = self._chance, self._own
        kind = chance.choice([PacketKind.DATA, *sorted(FROM_WORKERS - {PacketKind.LEAVE})])
        chunk = self._chunk = (self._chunk + chance.choice([0, 1, 1, 1])) % (1 << 32)
        blocks = chance.choice([0, _OWN_VALUES // VALUES_STEP, chance.randrange(2 * _OWN_VALUES // VALUES_STEP)])
        row = chance.randrange(_OWN_ROWS)
        packet = Packet(
            kind, job, worker, cookie=cookie, clock=chunk // 8, chunk=chunk if kind == PacketKind.DATA else row,
            slot=chunk % _OWN_SLOTS, bitmap=chunk, flags=chance.choice([Flag(0), Flag.PRIME, Flag.FIRST | Flag.PRIME]),
            values=(chance.randrange(-(1 << 31), 1 << 31),) * blocks * VALUES_STEP,
        )  # fmt: skip
        data = bytearray(encode(packet))
        for name, kind_of_number, offset in chance.choices(_FIELDS, k=chance.randrange(4)):
            number = int(np.frombuffer(data, kind_of_number, 1, offset)[0])
            number += chance.choice([-1, 1, chance.randrange(1 << 32)])
            self._put(data, name, number)
        if data[3] == PacketKind.LEAVE:  # nothing could be wasted any more
            data[3] = PacketKind.PROBE
        return sealed(data)

    def _another(self, data: bytearray, name: str) -> int:
        """Another number than a field has."""
        kind_of_number, offset = HEADER.fields[name][:2]  # type: ignore[index]
        bits = 8 * kind_of_number.itemsize
        number = int(np.frombuffer(data, kind_of_number, 1, offset)[0])
        return (number + self._chance.randrange(1, 1 << bits)) % (1 << bits)

    @staticmethod
    def _put(data: bytearray, name: str, number: int) -> None:
        kind_of_number, offset = HEADER.fields[name][:2]  # type: ignore[index]
        size = kind_of_number.itemsize
        data[offset : offset + size] = (number % (1 << 8 * size)).to_bytes(size, "little")


class GarbageTask(msgspec.Struct, frozen=True, tag=True):
    """The task of who sends garbage.

    Args:
        address, token: of the switch's control.
        victim: the network namespace of an honest worker, whose packets are seen and repeated.
        seconds: for how long.
        per_second: datagrams.
    """

    address: str
    token: str
    victim: str
    seconds: float
    per_second: float


class GarbageResult(msgspec.Struct, frozen=True):
    """The datagrams that were sent, by kind, and those that the switch has dropped and refused meanwhile, by reason."""

    sent: dict[str, int]
    refused: dict[str, int]


class GarbageSender:
    """A sender of garbage on a host of its own, which also sees an honest worker's packets, and can send in its name.

    Args:
        task: what to do.

    Raises:
        NetworkError: if the switch cannot be reached.
    """

    def __init__(self, task: GarbageTask) -> None:
        self._task = task
        self._control = ControlClient(task.address, credentials=Token(task.token.encode()))
        shape, joined = self._control.join(f"own-{task.victim}", GarbageMaker.own_shape())
        self._maker = GarbageMaker((shape.number, 0, joined.cookie))
        self._socket = UdpSocket()
        self._switch = np.full(_AT_ONCE, self._socket.connect(self._control.host, joined.port), np.uint64)
        self._port = joined.port
        self._socket.send(join_packet(shape.number, 0, joined.cookie), self._switch[:1])
        self._frames = inside(task.victim, self._listen)
        self._before = _refused(self._control.status())
        self._head = b""  # of an honest frame

    @staticmethod
    def _listen() -> socket.socket:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES))
        sock.bind((INTERFACE, _ALL_FRAMES))
        sock.setblocking(False)
        return sock

    def run(self) -> GarbageResult:
        """Send for so many seconds, as soon as there are honest packets to be seen."""
        end_s = time.monotonic() + _PATIENCE_S
        while not self._maker.has_seen and time.monotonic() < end_s:
            select.select([self._frames], [], [], _PATIENCE_S)
            self._look()
        sent: Counter[str] = Counter()
        began_s = time.monotonic()
        while self._maker.has_seen and (now_s := time.monotonic()) < began_s + self._task.seconds:
            if sent.total() > (now_s - began_s) * self._task.per_second:
                time.sleep(_AT_ONCE / self._task.per_second)
                continue
            self._look()
            made = [self._maker.next() for _ in range(_AT_ONCE)]
            sent.update(one.kind for one in made)
            framed, own = parted(made)
            self._socket.send(PacketBatch.of(own, MOST_VALUES), self._switch[: len(own)])
            for datagram in framed:
                self._frames.send(self._framed(datagram))
        after = _refused(self._control.status())
        return GarbageResult(dict(sent), {why: count for why in after if (count := after[why] - self._before[why])})

    def close(self) -> None:
        """Close the link and the sockets."""
        self._frames.close()
        self._socket.close()
        self._control.close()

    def _look(self) -> None:
        """See some of what the honest worker sends."""
        for _ in range(_AT_ONCE):
            try:
                frame, (_, _, kind, *_) = self._frames.recvfrom(1 << 14)
            except BlockingIOError:
                return
            is_honest = kind == _OUTGOING and frame[23] == socket.IPPROTO_UDP
            if is_honest and struct.unpack_from(">H", frame, 36)[0] == self._port and len(frame) > _FRAME_BYTES:
                self._head = frame[:_FRAME_BYTES]
                self._maker.see(frame[_FRAME_BYTES:])

    def _framed(self, datagram: bytes) -> bytes:
        """The datagram as the honest worker's host would send it."""
        head = bytearray(self._head)
        struct.pack_into(">H", head, 16, 28 + len(datagram))
        struct.pack_into(">H", head, 24, 0)
        total = sum(struct.unpack_from(">10H", head, 14))
        total = (total & 0xFFFF) + (total >> 16)
        struct.pack_into(">H", head, 24, ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF)
        struct.pack_into(">HH", head, 38, 8 + len(datagram), 0)
        return bytes(head) + datagram


def parted(made: Sequence[Garbage]) -> tuple[list[bytes], list[bytes]]:
    """The datagrams that go in an honest worker's name, in frames, and those that go over the sender's own socket."""
    framed: list[bytes] = []
    own: list[bytes] = []
    for one in made:
        fits = one.is_from_victim and len(one.datagram) <= _MOST_FRAMED_BYTES
        (framed if fits else own).append(one.datagram)
    return framed, own


def _refused(status: SwitchStatus) -> Counter[str]:
    """Count what a switch has dropped and refused, of all jobs, by reason; and what it has had before."""
    found = Counter(status.dropped)
    for job in status.jobs:
        found.update(job.refused)
        found["duplicates"] += sum(one.counts.get("duplicates", 0) for one in job.members)
    return found
