"""A bad link, packet by packet: what `tc` cannot do where the kernel has no netem. A program by itself.

    emulator.py PORT TAP            (in the switch's namespace)

PORT is the switch's end of a host's cable, which is not plugged into the switch; TAP is made here, and is plugged in
instead. Every frame between the two passes this program, which lets it wait, get lost, be overtaken, or be damaged.
Nothing is decided about a direction that has no law.

    standard input      a line per change: {"number": 1, "up": {...}, "down": {...}}; the keys of a direction are the
                        fields of `Law`, and "up" is from the host
    standard output     "ready" at first, then for each line {"number": 1, "up": {...}, "down": {...}}: what became of
                        the frames so far (`Counts`)

It ends with its input. One frame costs some 15 microseconds, so it is for links of up to 100 Mbit/s.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_ETH_P_ALL = 0x0003
_PACKET_OUTGOING = 4
_MOST_BYTES = 1 << 16
_AT_ONCE = 64  # frames of one direction, before the other has its turn
_BUFFER_BYTES = 8 << 20
_ETHERNET_BYTES = 14
_QUEUE_S = 0.1


@dataclass(frozen=True)
class Law:
    """The law of one direction: what happens to its frames.

    Args:
        delay_s: each waits so long ...
        jitter_s: ... and up to so much longer, each by its own chance; they keep their order.
        loss: part of them that is lost.
        reorder: part of them that waits for `delay_s` and `jitter_s` once more, so that others overtake it.
        corrupt: part of them in which one bit behind the addresses is flipped.
        blocked: nothing passes.
        rate_bytes_per_s: that pass, one frame behind the other; those that would wait longer than `_QUEUE_S` are lost.
            0 for all at once.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    blocked: bool = False
    rate_bytes_per_s: float = 0.0


@dataclass
class Counts:
    """Frames that came, and what became of them; what is in none of the others has passed as it was."""

    came: int = 0
    lost: int = 0
    blocked: int = 0
    overtaken: int = 0
    damaged: int = 0


@dataclass
class Direction:
    """One direction: its law, and the frames that wait."""

    name: str
    seed: int = 0
    law: Law = Law()
    counts: Counts = field(default_factory=Counts)
    waiting: list[tuple[float, int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.name} {self.seed}")
        self._last_s = self._free_s = 0.0

    def take(self, frame: bytes, now_s: float) -> None:
        """A frame has come."""
        law, counts, chance, came_s = self.law, self.counts, self._chance, now_s
        counts.came += 1
        if law.blocked:
            counts.blocked += 1
            return
        if law.loss and chance.random() < law.loss:
            counts.lost += 1
            return
        if law.corrupt and chance.random() < law.corrupt and len(frame) > _ETHERNET_BYTES:
            counts.damaged += 1
            at = chance.randrange(8 * _ETHERNET_BYTES, 8 * len(frame))
            damaged = bytearray(frame)
            damaged[at // 8] ^= 1 << at % 8
            frame = bytes(damaged)
        if law.rate_bytes_per_s:
            now_s = max(now_s, self._free_s)
            if now_s - came_s > _QUEUE_S:
                counts.lost += 1
                return
            self._free_s = now_s = now_s + len(frame) / law.rate_bytes_per_s
        due_s = now_s + law.delay_s + (law.jitter_s * chance.random() if law.jitter_s else 0.0)
        if law.reorder and chance.random() < law.reorder:
            counts.overtaken += 1
            due_s += law.delay_s + law.jitter_s
        else:
            due_s = self._last_s = max(due_s, self._last_s)
        heapq.heappush(self.waiting, (due_s, counts.came, frame))

    def due(self, now_s: float) -> bytes | None:
        """The next frame whose time has come."""
        if self.waiting and self.waiting[0][0] <= now_s:
            return heapq.heappop(self.waiting)[2]
        return None


class Emulator:
    """Frames between the cable and the switch.

    Args:
        port: interface that is the end of the cable.
        tap: name of the interface that is made and to be plugged into the switch.
    """

    def __init__(self, port: str, tap: str) -> None:
        self._cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._cable.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._cable.bind((port, _ETH_P_ALL))
        self._cable.setblocking(False)
        self._tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(self._tap, _TUNSETIFF, struct.pack("16sH22s", tap.encode(), _IFF_TAP | _IFF_NO_PI, b""))
        self.up, self.down = Direction(f"{port} up"), Direction(f"{port} down")

    def run(self) -> None:
        """Run until standard input ends."""
        with selectors.DefaultSelector() as selector:
            for source in (self._cable.fileno(), self._tap, sys.stdin.fileno()):
                selector.register(source, selectors.EVENT_READ)
            _say("ready")
            text = b""
            while True:
                ready = {key.fd for key, _ in selector.select(self._patience_s())}
                if sys.stdin.fileno() in ready:
                    more = os.read(sys.stdin.fileno(), 4096)
                    if not more:
                        return
                    *lines, text = (text + more).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))
                if self._cable.fileno() in ready:
                    self._take_from_cable()
                if self._tap in ready:
                    self._take_from_tap()
                self._let_pass()

    def _patience_s(self) -> float | None:
        due_s = [one.waiting[0][0] for one in (self.up, self.down) if one.waiting]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _obey(self, change: dict[str, Any]) -> None:
        for one, name in ((self.up, "up"), (self.down, "down")):
            if name in change:
                one.law = Law(**change[name])
        _say(json.dumps({"number": change["number"], "up": asdict(self.up.counts), "down": asdict(self.down.counts)}))

    def _take_from_cable(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame, about = self._cable.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            if about[2] != _PACKET_OUTGOING:  # what this program sends is heard as well
                self.up.take(frame, time.monotonic())

    def _take_from_tap(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(self._tap, _MOST_BYTES)
            except BlockingIOError:
                return
            self.down.take(frame, time.monotonic())

    def _let_pass(self) -> None:
        now_s = time.monotonic()
        while (frame := self.up.due(now_s)) is not None:
            _send(lambda one=frame: os.write(self._tap, one))
        while (frame := self.down.due(now_s)) is not None:
            _send(lambda one=frame: self._cable.send(one))


def _send(write: Any) -> None:
    """Write a frame; a queue that is full loses it, as a switch's does, and so does a cable that is not plugged in."""
    try:
        write()
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.EIO, errno.ENETDOWN):
            raise


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Emulator(sys.argv[1], sys.argv[2]).run()
