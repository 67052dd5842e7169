"""Bad links are as bad as they were told to be, in each direction by itself, and can be mended."""

from __future__ import annotations

import functools
import itertools
import socket
import statistics
import threading
import time
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import NetworkError
from offbeat.lab import goodput
from offbeat.lab.emulator import Direction, Law
from offbeat.lab.namespace import inside
from offbeat.lab.network import Network
from offbeat.topology import Topology
from tests.lab.permissions import needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FRAMES = 20_000


def played(law: Law, *, gap_s: float = 0.001) -> tuple[Direction, list[tuple[float, int, bytes]]]:
    """Frames that come one by one, and (when, number, frame) of those that passed."""
    direction, passed = Direction("up", law=law), []
    for number in range(FRAMES):
        direction.take(bytes(14) + number.to_bytes(4, "big") + bytes(82), number * gap_s)
    while direction.waiting:
        due_s, number, frame = direction.waiting[0]
        assert direction.due(due_s) == frame
        passed.append((due_s, number - 1, frame))
    return direction, passed


def test_a_good_link_passes_everything_at_once() -> None:
    direction, passed = played(Law())
    assert [(due_s, number) for due_s, number, _ in passed] == [(n * 0.001, n) for n in range(FRAMES)]
    assert direction.counts.came == FRAMES


def test_delay_and_jitter_keep_the_order() -> None:
    _, passed = played(Law(delay_s=0.05, jitter_s=0.02))
    waits_s = [due_s - number * 0.001 for due_s, number, _ in passed]
    assert [number for _, number, _ in passed] == list(range(FRAMES))
    assert min(waits_s) > 0.05 - 1e-9
    assert 0.055 < statistics.fmean(waits_s) < 0.0701


def test_losses_are_as_many_as_the_law_says_and_the_same_each_time() -> None:
    direction, passed = played(Law(loss=0.1))
    assert len(passed) + direction.counts.lost == FRAMES
    assert direction.counts.lost == pytest.approx(0.1 * FRAMES, rel=0.1)
    assert passed == played(Law(loss=0.1))[1]


def test_who_is_held_back_is_overtaken() -> None:
    direction, passed = played(Law(delay_s=0.005, reorder=0.05))
    order = [number for _, number, _ in passed]
    assert sorted(order) == list(range(FRAMES))
    late = sum(following < number for number, following in itertools.pairwise(order))
    assert late == pytest.approx(0.05 * FRAMES, rel=0.2)
    assert direction.counts.overtaken == pytest.approx(0.05 * FRAMES, rel=0.1)


def test_damage_is_one_bit_behind_the_addresses() -> None:
    direction, passed = played(Law(corrupt=0.02))
    damaged = 0
    for _, number, frame in passed:
        was = bytes(14) + number.to_bytes(4, "big") + bytes(82)
        flipped = sum((one ^ other).bit_count() for one, other in zip(was, frame, strict=True))
        assert flipped <= 1
        assert was[:14] == frame[:14]
        damaged += flipped
    assert damaged == direction.counts.damaged == pytest.approx(0.02 * FRAMES, rel=0.2)


def test_nothing_passes_a_blocked_direction() -> None:
    direction, passed = played(Law(blocked=True))
    assert (direction.counts.blocked, passed) == (FRAMES, [])


# -- on real links -----------------------------------------------------------------------------------------------


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    topology = Topology.star(["a", "b"], rate_mbps=20)
    with Network(topology, emulated=["a"], directory=tmp_path) as net:
        yield net


class Echo:
    """A datagram socket on host b that says back what it is told; asked from host a."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._socket = inside(net.namespace("b"), functools.partial(socket.socket, socket.AF_INET, socket.SOCK_DGRAM))
        self._socket.bind((net.address("b"), 7000))
        self._asker = inside(net.namespace("a"), functools.partial(socket.socket, socket.AF_INET, socket.SOCK_DGRAM))
        self._asker.settimeout(0.5)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            text, address = self._socket.recvfrom(2048)
            self.heard = text
            if not text:
                return
            self._socket.sendto(text, address)

    def ask_s(self, text: bytes = b"hello") -> float:
        """Seconds until the answer.

        Raises:
            TimeoutError: if none comes.
        """
        began_s = time.perf_counter()
        self._asker.sendto(text, (self._net.address("b"), 7000))
        while self._asker.recv(2048) != text:
            pass
        return time.perf_counter() - began_s

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
            inside(self._net.namespace("b"), self._stop)
        self._thread.join(5)
        self._socket.close()
        self._asker.close()

    def _stop(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.sendto(b"", (self._net.address("b"), 7000))


@pytest.fixture
def echo(net: Network) -> Iterator[Echo]:
    echo = Echo(net)
    yield echo
    echo.close()


def _send_all(sender: socket.socket, data: bytes) -> None:
    sender.sendall(data)
    sender.shutdown(socket.SHUT_WR)


class TestOnRealLinks:
    pytestmark = needs_root

    def test_an_emulated_link_carries_its_rate(self, net: Network) -> None:
        for _ in range(5):
            measured = goodput.measure(net, seconds=1.0)
            if min(measured.values()) > 17:
                break
        assert all(17 <= stream <= 19.6 for stream in measured.values()), measured

    def test_delay_is_that_of_both_directions(self, net: Network, echo: Echo) -> None:
        assert min(echo.ask_s() for _ in range(20)) < 0.02
        net.worsen("a", up=Law(delay_s=0.04), down=Law(delay_s=0.03))
        assert 0.07 <= min(echo.ask_s(b"%d" % number) for number in range(5)) < 0.1
        net.worsen("a", up=Law(), down=Law())
        assert min(echo.ask_s() for _ in range(20)) < 0.02

    def test_a_partition_may_be_one_way(self, net: Network, echo: Echo) -> None:
        echo.ask_s()
        net.worsen("a", down=Law(blocked=True))
        with pytest.raises(TimeoutError):
            echo.ask_s(b"into the void")
        assert echo.heard == b"into the void", "the other way is open"
        up, down = net.worsen("a", down=Law())
        assert (up.blocked, down.blocked > 0) == (0, True)
        echo.ask_s(b"again")

    def test_tcp_gets_through_loss_and_damage(self, net: Network) -> None:
        net.worsen("a", up=Law(loss=0.02, corrupt=0.02, reorder=0.02, delay_s=0.002))
        data = bytes(range(256)) * 2000
        listener = inside(net.namespace("b"), functools.partial(socket.create_server, (net.address("b"), 7001)))
        dial = functools.partial(socket.create_connection, (net.address("b"), 7001), timeout=10)
        with listener, inside(net.namespace("a"), dial) as sender, listener.accept()[0] as receiver:
            thread = threading.Thread(target=_send_all, args=(sender, data))
            thread.start()
            heard = b""
            while piece := receiver.recv(1 << 16):
                heard += piece
            thread.join()
        assert heard == data, "what TCP's checksum does not catch would be ours to find"
        up, _ = net.worsen("a")
        assert min(up.lost, up.damaged, up.overtaken) > 0

    def test_an_emulator_that_is_gone_is_said_to_be(self, net: Network) -> None:
        net._bridged._emulators["a"].close()
        with pytest.raises(NetworkError, match="its emulator is gone"):
            net.worsen("a", up=Law())
