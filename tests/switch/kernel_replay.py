"""Replay what happened to the reference model to the kernel's switch, over loopback in a network of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from offbeat.switch.job_state import JobState, Send
from offbeat.switch.kernel.kernel_switch import KernelSwitch
from offbeat.switch.packet import HEADER_BYTES, Packet, PacketKind, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.protocol.switch_control import Strategy
    from offbeat.switch.members import Port

T = TypeVar("T")

HOST = "127.0.0.1"
_CLONE_NEWNET = 0x40000000
_PATIENCE_S = 2.0


def why_not() -> str:
    """Why this machine cannot load the program; "" if it can."""
    if os.geteuid() != 0:
        return "loading a kernel program needs root"
    if shutil.which("clang") is None:
        return "clang is not installed"
    try:
        ctypes.CDLL("libbpf.so.1")
    except OSError:
        return "libbpf is not installed"
    return ""


def in_a_network_of_its_own(function: Callable[[], T]) -> T:
    """Call a function in a new network namespace with nothing but loopback."""
    results: list[T] = []
    errors: list[BaseException] = []

    def visit() -> None:
        try:
            assert ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=visit)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class NotedState(JobState):
    """The reference model, which notes what happens to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start = (self.clocks.strategy, self.clocks.low, self.table.exponent)
        self.events: list[tuple[str, tuple[Any, ...], list[Send]]] = []

    def admit(self, worker: int, cookie: int, *, chunk: int = 0) -> None:
        super().admit(worker, cookie, chunk=chunk)
        self.events.append(("admit", (worker, cookie, chunk), []))

    def evict(self, worker: int) -> list[Send]:
        sends = super().evict(worker)
        self.events.append(("evict", (worker,), sends))
        return sends

    def set_strategy(self, strategy: Strategy) -> list[Send] | None:
        sends = super().set_strategy(strategy)
        self.events.append(("set_strategy", (strategy, sends is not None), sends or []))
        return sends

    def allow(self, worker: int, until: int) -> list[Send]:
        sends = super().allow(worker, until)
        self.events.append(("allow", (worker, until), sends))
        return sends

    def close(self, clock: int, least: int) -> list[Send]:
        unsettled = self.stream.unsettled(least)
        sends = super().close(clock, least)
        self.events.append(("close", (clock, least, unsettled), sends))
        return sends

    def handle(self, packet: Packet, port: Port, now_s: float = 0.0) -> list[Send]:
        sends = super().handle(packet, port, now_s)
        self.events.append(("packet", (packet, port), sends))
        return sends


class KernelReplay:
    """A kernel's switch, and a socket for each worker. Use it in a network of its own.

    Args:
        workers: how many sockets.
        at_xdp: whether it sums at the XDP hook.
    """

    def __init__(self, workers: int = 4, *, at_xdp: bool = False) -> None:
        self.switch = KernelSwitch(HOST, ["lo"], at_xdp=at_xdp)
        self.sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(workers)]
        for sock in self.sockets:
            sock.bind((HOST, 0))
            sock.connect((HOST, self.switch.port))
            sock.settimeout(_PATIENCE_S)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.switch.close()

    def replay(self, state: NotedState, what: str) -> int:
        """Let the same happen to a job of the kernel's switch, which has to answer the same; how many packets came."""
        shape, plane = state.shape, self.switch.plane
        strategy, clock, exponent = state.start
        plane.create_job(shape, strategy, clock=clock, exponent=exponent)
        packets = 0
        for number, (kind, details, sends) in enumerate(state.events):
            match kind, details:
                case "admit", (worker, cookie, chunk):
                    plane.admit(shape.number, worker, cookie, chunk=chunk)
                    self.sockets[worker].send(encode(Packet(PacketKind.JOIN, shape.number, worker, cookie=cookie)))
                    assert decode(self.sockets[worker].recv(9000)).kind == PacketKind.JOIN_OK
                case "evict", (worker,):
                    plane.evict(shape.number, worker)
                case "set_strategy", (strategy, is_set):
                    assert (plane.set_strategy(shape.number, strategy) is not None) == is_set, f"{what}, {number}"
                case "allow", (worker, until):
                    plane.allow(shape.number, worker, until)
                case "close", (clock, least, unsettled):
                    assert plane.unsettled(shape.number, least) == unsettled, f"{what}, {number}"
                    assert plane.close(shape.number, clock, least) == unsettled.get(clock, 0), f"{what}, {number}"
                case "packet", (packet, port):
                    packets += 1
                    self.sockets[port].send(encode(packet))
            self._check(sends, f"{what}, event {number}: {kind} {details}")
        brought = {worker: one.brought for worker, one in plane.stats(shape.number, 0.0).members.items()}
        assert brought == {worker: state.members[worker].brought for worker in state.members}, what
        for sock in self.sockets:
            sock.setblocking(False)
            with np.testing.assert_raises(BlockingIOError):  # nothing else has come
                sock.recv(9000)
            sock.settimeout(_PATIENCE_S)
        plane.destroy_job(shape.number)
        return packets

    def _check(self, sends: list[Send], what: str) -> None:
        expected = defaultdict(list)
        for port, packet in sends:
            expected[port].append(packet)
        for port, packets in expected.items():
            assert isinstance(port, int)
            for packet in packets:
                try:
                    got = self.sockets[port].recv(HEADER_BYTES + 9000)
                except TimeoutError:
                    raise AssertionError(f"{what}: no answer at {port}, expected {packet}") from None
                assert got == encode(packet), f"{what}: {decode(got)} at {port}, expected {packet}"
