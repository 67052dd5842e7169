"""Frames as nobody sends them, at a port of the kernel's switch: cut short, other protocols, lengths that lie."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from offbeat.protocol.switch_control import Strategy
from offbeat.switch.job_shape import JobShape
from offbeat.switch.kernel.kernel_switch import KernelSwitch
from offbeat.switch.packet import VERSION, Flag, Packet, PacketKind, decode, encode, sealed
from tests.switch.kernel_replay import in_a_network_of_its_own, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

SWITCH, WORKER = "10.9.0.254", "10.9.0.1"
_TO, _FROM = bytes([2, 0, 0, 0, 0, 254]), bytes([2, 0, 0, 0, 0, 1])
_HEADERS = 14 + 20 + 8
_UDP_SEGMENT = 103
JOB = 7


class SwitchPort:
    """A switch with one port, and the other end of that port's link."""

    def __init__(self, *, at_xdp: bool) -> None:
        for command in (
            "link add port0 type veth peer name end0", f"addr add {SWITCH}/24 dev port0", "link set port0 up",
            "link set end0 up",
        ):  # fmt: skip
            subprocess.run(["ip", *command.split()], check=True)
        self.switch = KernelSwitch(SWITCH, ["port0"], at_xdp=at_xdp)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        self._socket.bind(("end0", 0))
        self._socket.settimeout(2)
        self.chunk = 0  # the next of the stream
        self.switch.plane.create_job(JobShape(JOB, 1, values=16, slots=4, ring=4), Strategy())
        self.switch.plane.admit(JOB, 0, 100)
        self.send(self.frame(self.packet(PacketKind.JOIN)))
        assert self.answer().kind == PacketKind.JOIN_OK

    def close(self) -> None:
        self._socket.close()
        self.switch.close()

    def packet(self, kind: PacketKind, *, job: int = JOB) -> bytes:
        return encode(Packet(kind, job, 0, cookie=100))

    def data(self) -> bytes:
        """A chunk of values, whose sum comes back at once."""
        return encode(
            Packet(
                PacketKind.DATA, JOB, 0, cookie=100, clock=self.chunk, chunk=self.chunk, slot=self.chunk % 4,
                bitmap=self.chunk, flags=Flag.FIRST | Flag.PRIME, values=tuple(range(self.chunk, self.chunk + 16)),
            )
        )  # fmt: skip

    def frame(
        self, data: bytes, *, kind: int = 0x0800, version: int = 4, options: bytes = b"", fragment: int = 0x4000,
        protocol: int = 17, to: str = SWITCH, ip_bytes: int = 0, udp_bytes: int = 0, tag: bytes = b"",
    ) -> bytes:  # fmt: skip
        """A frame with `data`; lengths that are 0 are the true ones."""
        udp_bytes = udp_bytes or 8 + len(data)
        words = 5 + len(options) // 4
        ip = struct.pack(
            ">BBHHHBBH4s4s", version << 4 | words, 0, ip_bytes or 4 * words + 8 + len(data), 1, fragment, 64, protocol,
            0, socket.inet_aton(WORKER), socket.inet_aton(to),
        ) + options  # fmt: skip
        ip = ip[:10] + struct.pack(">H", ~sum_of(ip) & 0xFFFF) + ip[12:]
        udp = struct.pack(">HHHH", 4000, self.switch.port, udp_bytes & 0xFFFF, 0)
        return _TO + _FROM + tag + struct.pack(">H", kind) + ip + udp + data

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def answer(self) -> Packet:
        """What comes next from the switch's own UDP port."""
        while True:
            frame = self._socket.recv(9000)
            is_from_switch = frame[6:12] == _TO and frame[12:14] == b"\x08\x00" and frame[23] == 17
            if is_from_switch and frame[34:36] == struct.pack(">H", self.switch.port):
                assert sum_of(frame[14:34]) == 0xFFFF, "the checksum of its IP header"
                (size,) = struct.unpack(">H", frame[38:40])
                return decode(frame[_HEADERS : _HEADERS - 8 + size])

    def is_alive(self) -> bool:
        """Whether a chunk is summed, and nothing else has been answered before."""
        self.send(self.frame(self.data()))
        told = self.answer()
        values = tuple(range(self.chunk, self.chunk + 16))
        is_right = (told.kind, told.chunk, told.values) == (PacketKind.RESULT, self.chunk, values)
        self.chunk += 1
        return is_right

    @property
    def counted(self) -> dict[str, int]:
        """Packets that were dropped, by why, and those of the job's worker."""
        dropped = {why: count for why, count in self.switch.plane.dropped.items() if count}
        counts = self.switch.plane.stats(JOB, 0.0).members[0].counts
        return dropped | {"of the worker": sum(counts.values())}


def sum_of(header: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(header) // 2}H", header))
    return (total & 0xFFFF) + (total >> 16)


@contextlib.contextmanager
def opened(*, at_xdp: bool) -> Iterator[SwitchPort]:
    port = SwitchPort(at_xdp=at_xdp)
    try:
        yield port
    finally:
        port.close()


def odd_frames(port: SwitchPort) -> Iterator[tuple[str, bytes, str]]:
    """What is odd, the frame, and as what it is counted; "" for what goes its way."""
    good = port.data()
    yield "IP options", port.frame(good, options=bytes([1, 1, 1, 0])), ""
    yield "IPv6 by its type", port.frame(good, kind=0x86DD), ""
    yield "version 6 in IPv4", port.frame(good, version=6), ""
    yield "ARP", port.frame(good, kind=0x0806), ""
    yield "TCP", port.frame(good, protocol=6), ""
    yield "another address", port.frame(good, to="10.9.0.77"), ""
    yield "a VLAN's tag", port.frame(good, tag=struct.pack(">HH", 0x8100, 5)), ""
    yield "a later fragment", port.frame(good, fragment=0x0001), ""
    yield "a first fragment", port.frame(good, fragment=0x2000), "fragments"
    yield "UDP shorter than its header", port.frame(good, udp_bytes=4), "foreign"
    yield "UDP without ours", port.frame(good, udp_bytes=8 + 16), "foreign"
    yield "UDP longer than the frame", port.frame(good, udp_bytes=8 + len(good) + 64), "foreign"
    yield "UDP as long as can be", port.frame(good, udp_bytes=0xFFFF), "foreign"
    yield "IP shorter than UDP", port.frame(good, ip_bytes=28 + len(good) - 4), "foreign"
    yield "both longer than the frame", port.frame(good, ip_bytes=128 + len(good), udp_bytes=108 + len(good)), "foreign"
    yield "a count of more", port.frame(good[:7] + b"\x02" + good[8:]), "foreign"
    yield "a count of none", port.frame(good[:7] + b"\x00" + good[8:]), "foreign"
    yield "a count of all", port.frame(good[:7] + b"\xff" + good[8:]), "foreign"
    yield "another version", port.frame(good[:2] + bytes([VERSION + 1 << 4 | 15]) + good[3:]), "foreign"
    yield "an answer", port.frame(good[:3] + bytes([PacketKind.RESULT]) + good[4:]), "foreign"
    yield "no such kind", port.frame(good[:3] + b"\xff" + good[4:]), "foreign"
    yield "another value", port.frame(good[:-1] + b"\x01"), "damaged"


@pytest.mark.parametrize("at_xdp", [False, True])
def test_odd_frames_change_nothing(at_xdp: bool) -> None:
    def play() -> None:
        with opened(at_xdp=at_xdp) as port:
            for what, frame, counted_as in odd_frames(port):
                before = port.counted
                port.send(frame)
                assert port.is_alive(), f"behind {what}"
                expected = before | {"of the worker": before["of the worker"] + 1}
                if counted_as:
                    expected[counted_as] = before.get(counted_as, 0) + 1
                assert port.counted == expected, what

    in_a_network_of_its_own(play)


@pytest.mark.parametrize("at_xdp", [False, True])
def test_frames_that_are_cut_anywhere_change_nothing(at_xdp: bool) -> None:
    def play() -> None:
        with opened(at_xdp=at_xdp) as port:
            whole = port.frame(port.data())
            for size in range(14, len(whole)):
                port.send(whole[:size])
            before = port.counted["of the worker"]
            assert port.is_alive()
            assert port.counted["of the worker"] == before + 1
            assert port.counted["foreign"] == len(whole) - _HEADERS, "those of which the headers are there"
            port.send(port.frame(port.data()) + bytes(18))  # as Ethernet pads short frames
            assert port.answer().kind == PacketKind.RESULT

    in_a_network_of_its_own(play)


@pytest.mark.parametrize("at_xdp", [False, True])
def test_random_changes_anywhere_in_frames_change_no_other_job(at_xdp: bool) -> None:
    def play() -> None:
        chance = random.Random(0)
        with opened(at_xdp=at_xdp) as port:
            port.switch.plane.create_job(JobShape(JOB + 1, 2, values=16, slots=4, ring=4, rows=3), Strategy("table"))
            for worker in (0, 1):
                port.switch.plane.admit(JOB + 1, worker, 100)
            port.send(port.frame(port.packet(PacketKind.JOIN, job=JOB + 1)))
            assert port.answer().kind == PacketKind.JOIN_OK
            kinds = (PacketKind.DATA, PacketKind.INC, PacketKind.READ, PacketKind.CLOCK, PacketKind.PROBE)
            for number in range(4000):
                packet = Packet(
                    chance.choice(kinds), JOB + 1, chance.randrange(2), cookie=100, clock=chance.randrange(4),
                    chunk=chance.randrange(4), slot=chance.randrange(4), values=(7,) * 16 * chance.randrange(2),
                )  # fmt: skip
                frame = bytearray(port.frame(encode(packet)))
                for _ in range(chance.randrange(1, 4)):
                    at = chance.randrange(12, _HEADERS + 8)  # not the job's number alone, or cookies
                    frame[at if at not in range(_HEADERS + 4, _HEADERS + 6) else 14] = chance.randrange(256)
                frame[_HEADERS:] = sealed(frame[_HEADERS:])
                port.send(bytes(frame[: chance.randrange(14, len(frame) + 1)] if chance.random() < 0.2 else frame))
                if number % 100 == 99:
                    port.send(port.frame(port.data()))
                    while (told := port.answer()).job != JOB:
                        pass
                    assert told.values == tuple(range(port.chunk, port.chunk + 16))
                    port.chunk += 1
            assert port.counted["foreign"] > 100

    in_a_network_of_its_own(play)


def test_several_packets_in_one_are_counted_as_such() -> None:
    def play() -> dict[str, int]:
        switch = KernelSwitch("127.0.0.1", ["lo"])
        try:
            switch.plane.create_job(JobShape(JOB, 1, values=16, slots=4, ring=4), Strategy())
            switch.plane.admit(JOB, 0, 100)
            one = encode(Packet(PacketKind.JOIN, JOB, 0, cookie=100))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect(("127.0.0.1", switch.port))
                sock.settimeout(2)
                sock.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, len(one))
                sock.send(one * 3)
                sock.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, 0)
                sock.send(one)
                assert decode(sock.recv(9000)).kind == PacketKind.JOIN_OK
                return switch.plane.dropped
        finally:
            switch.close()

    assert in_a_network_of_its_own(play) == {
        "foreign": 0, "unknown job": 0, "refused": 0, "fragments": 0, "bundles": 1, "damaged": 0
    }  # fmt: skip
