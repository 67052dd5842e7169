"""The packets between workers and a switch: one UDP datagram each, a header of 36 bytes and up to 2048 int32.

    offset size  field         what it says
    0      2     magic         `MAGIC`; anything else is foreign traffic
    2      1     flags         the version in the upper four bits; below them `Flag`
    3      1     kind          `PacketKind`
    4      2     job           one number per incarnation of a job
    6      1     worker        who sends it; in answers, to whom
    7      1     count         int32 of payload, divided by 16
    8      4     cookie        of the sender's incarnation; contributors 32 to 63 (RESULT); allowed until (GRANT)
    12     4     clock         the number of an exchange (streaming) or of a step (table)
    16     4     chunk         the sequence number of a chunk (streaming), or the row (table)
    20     2     slot          where the chunk is summed: `chunk` modulo the job's slots
    22     2     epoch         of the policy; the attempt at a sum (DATA, RESULT, and the NACK of one)
    24     4     bitmap        contributors 0 to 31 (RESULT); effective clock (GRANT); clock of the READ (ROW); first
                               chunk that the sender lacks (DATA)
    28     1     exponent      of the payload
    29     1     0
    30     1     window_old    steps before the effective clock (GRANT); the kind that was refused (NACK)
    31     1     window_new    steps from the effective clock on (GRANT); `Reason` (NACK)
    32     4     checksum      of all the rest, header and payload; see `checksum`

All numbers are little-endian, payloads, too: byte order costs next to nothing in a switch, and hosts are. Numbers of 32
bits wrap around, and are compared by their signed difference (`is_newer`).
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np

from offbeat.errors import PeerError
from offbeat.switch import checksum

MAGIC = 0x0FFB
VERSION = 2
HEADER_BYTES = 36
HEADERS_BYTES = 20 + 8 + HEADER_BYTES  # of IP, UDP and ours: what a frame carries beside the payload
VALUES_STEP = 16  # a payload is a multiple of so many int32
MOST_VALUES = 2048
MOST_WORKERS = 64
ZERO_EXPONENT = -127  # of a chunk of zeros
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = 4 * checksum.AT
_LAYOUT = struct.Struct("<HBBHBBIIIHHIbxBBI")
_HALF, _WHOLE = 1 << 31, 1 << 32


class PacketKind(enum.IntEnum):
    """The kinds of packets."""

    JOIN = 1
    JOIN_OK = 2
    DATA = 3
    RESULT = 4
    INC = 5
    INC_OK = 6
    READ = 7
    ROW = 8
    CLOCK = 9
    GRANT = 10
    LEAVE = 11
    LEAVE_OK = 12
    PROBE = 13
    PROBE_OK = 14
    NACK = 15


FROM_WORKERS = frozenset(
    {
        PacketKind.JOIN,
        PacketKind.DATA,
        PacketKind.INC,
        PacketKind.READ,
        PacketKind.CLOCK,
        PacketKind.LEAVE,
        PacketKind.PROBE,
    }
)


class Flag(enum.IntFlag):
    """The flags of a packet."""

    FIRST = 1  # the first chunk of an exchange, which settles who contributes to it
    PRIME = 2  # a chunk of exponents, of which the largest counts, and not the sum
    PARTIAL = 4  # not all of the job's workers contributed
    SATURATED = 8  # a value did not fit; the chunk is summed again, with a larger exponent


NO_FLAGS = Flag(0)


class Reason(enum.IntEnum):
    """The reasons for which packets are refused."""

    UNKNOWN_JOB = 1
    NOT_A_MEMBER = 2
    STALE_COOKIE = 3
    WRONG_PORT = 4
    MALFORMED = 5
    SUPERSEDED = 6  # the chunk's slot serves a later one
    AHEAD_OF_RING = 7  # further ahead than the ring of clocks reaches
    WRONG_CLOCK = 8
    HELD_UP = 9  # another worker still lacks the result that the slot keeps; `worker` says which

    @property
    def text(self) -> str:
        """The reason in words, for people."""
        return _TEXTS[self]


_TEXTS = {
    Reason.UNKNOWN_JOB: "the switch knows no such job (it was restarted, or the job has ended)",
    Reason.NOT_A_MEMBER: "the worker is no member of the job",
    Reason.STALE_COOKIE: "the worker's cookie is that of an earlier incarnation",
    Reason.WRONG_PORT: "the worker is known at another port",
    Reason.MALFORMED: "the packet does not fit the job",
    Reason.SUPERSEDED: "the chunk's slot serves a later chunk",
    Reason.AHEAD_OF_RING: "the clock is further ahead than the switch keeps track of",
    Reason.WRONG_CLOCK: "the update is of a step that is not the worker's next one",
    Reason.HELD_UP: "another worker still lacks the result in the chunk's slot",
}


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet; see the table above.

    Args:
        values: int32 of payload.
    """

    kind: PacketKind
    job: int
    worker: int
    cookie: int = 0
    clock: int = 0
    chunk: int = 0
    slot: int = 0
    epoch: int = 0
    bitmap: int = 0
    exponent: int = 0
    window_old: int = 0
    window_new: int = 0
    flags: Flag = NO_FLAGS
    values: tuple[int, ...] = ()

    @property
    def contributors(self) -> int:
        """Bit w is set if worker w is in the sum of a RESULT."""
        return self.bitmap | self.cookie << 32

    @property
    def reason(self) -> Reason:
        """The reason of a NACK."""
        return Reason(self.window_new)


def encode(packet: Packet) -> bytes:
    """The datagram of a packet.

    >>> decode(encode(Packet(PacketKind.CLOCK, job=7, worker=2, clock=5))).clock
    5
    """
    return sealed(packed(packet))


def sealed(datagram: bytes | bytearray) -> bytes:
    """A whole datagram with the checksum of what else it says."""
    data = bytearray(datagram)
    _CHECKSUM.pack_into(data, _CHECKSUM_AT, _checksum(data))
    return bytes(data)


def packed(packet: Packet) -> bytes:
    """The datagram of a packet, but for its checksum."""
    assert len(packet.values) % VALUES_STEP == 0, "payloads are multiples of 16 int32"
    header = _LAYOUT.pack(
        MAGIC, VERSION << 4 | packet.flags, packet.kind, packet.job, packet.worker,
        len(packet.values) // VALUES_STEP, packet.cookie, packet.clock, packet.chunk, packet.slot, packet.epoch,
        packet.bitmap, packet.exponent, packet.window_old, packet.window_new, 0,
    )  # fmt: skip
    return header + struct.pack(f"<{len(packet.values)}i", *packet.values)


def decode(data: bytes | memoryview) -> Packet:
    """Read a datagram.

    Raises:
        PeerError: if it is none of ours, or cut short, or longer than it says, or damaged.
    """
    packet = unpacked(data)
    said, found = _CHECKSUM.unpack_from(data, _CHECKSUM_AT)[0], _checksum(data)
    if said != found:
        raise PeerError(f"it was damaged on its way: its checksum is {said:#010x}, that of its bytes is {found:#010x}")
    return packet


def unpacked(data: bytes | memoryview) -> Packet:
    """Read a datagram whose checksum was looked at; raises as `decode`."""
    if len(data) < HEADER_BYTES:
        raise PeerError(f"it has {len(data)} bytes, a header has {HEADER_BYTES}")
    (magic, flags, kind, job, worker, count, cookie, clock, chunk, slot, epoch, bitmap, exponent, old, new,
     _) = _LAYOUT.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise PeerError(f"it begins with {magic:#06x}, packets of this protocol with {MAGIC:#06x}")
    if flags >> 4 != VERSION:
        raise PeerError(f"it is of version {flags >> 4}, this is version {VERSION}")
    if not PacketKind.JOIN <= kind <= PacketKind.NACK:
        raise PeerError(f"it is of kind {kind}, which there is not")
    values = count * VALUES_STEP
    if values > MOST_VALUES or len(data) != HEADER_BYTES + 4 * values:
        raise PeerError(f"it has {len(data)} bytes, and says it has {HEADER_BYTES + 4 * values}")
    return Packet(
        PacketKind(kind), job, worker, cookie, clock, chunk, slot, epoch, bitmap, exponent, old, new,
        Flag(flags & 15), struct.unpack_from(f"<{values}i", data, HEADER_BYTES),
    )  # fmt: skip


def _checksum(data: bytes | bytearray | memoryview) -> int:
    return int(checksum.checksums(np.frombuffer(data, "<u4")[None])[0])


def is_newer(number: int, other: int) -> bool:
    """Whether a number of 32 bits comes behind another, also where they have wrapped around.

    >>> is_newer(3, 2), is_newer(2, 2), is_newer(1, 0xFFFFFFFF)
    (True, False, True)
    """
    return 0 < (number - other) % _WHOLE < _HALF


def distance(number: int, other: int) -> int:
    """The distance by which a number of 32 bits lies behind another; below 0 if it lies before it.

    >>> distance(1, 0xFFFFFFFF), distance(4, 9)
    (2, -5)
    """
    return (number - other + _HALF) % _WHOLE - _HALF


def wrapped(number: int) -> int:
    """A number as it stands in 32 bits."""
    return number % _WHOLE
