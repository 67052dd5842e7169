"""The switch in the kernel: loaded for real, and held against the reference model packet by packet."""

from __future__ import annotations

import functools
import random
import socket
import subprocess
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import pytest

from offbeat.errors import NetworkError
from offbeat.protocol.switch_control import JoinSwitchJob, Strategy, SwitchJobJoined
from offbeat.switch.client_thread import ClientThread
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.kernel.kernel_switch import KernelSwitch
from offbeat.switch.packet import Flag, Packet, PacketKind, decode, encode
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.udp_socket import UdpSocket
from tests.switch.kernel_replay import KernelReplay, NotedState, in_a_network_of_its_own, why_not
from tests.switch.killed_switch import KilledSwitch
from tests.switch.network import StreamPlay
from tests.switch.served import served_switch
from tests.switch.test_table import TablePlay

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

if TYPE_CHECKING:
    from numpy.typing import NDArray


def replayed(play: type[StreamPlay] | type[TablePlay], seeds: range) -> int:
    def all_of_them() -> int:
        kernel = KernelReplay()
        packets = 0
        try:
            for seed in seeds:
                one = play(seed, NotedState)
                one.run()
                assert isinstance(one.state, NotedState)
                packets += kernel.replay(one.state, f"seed {seed}")
        finally:
            kernel.close()
        return packets

    return in_a_network_of_its_own(all_of_them)


@pytest.mark.parametrize("play", [StreamPlay, TablePlay])
def test_it_answers_every_packet_as_the_model_does(play: type[StreamPlay] | type[TablePlay]) -> None:
    assert replayed(play, range(100)) > 3600


@pytest.mark.slow
@pytest.mark.parametrize("play", [StreamPlay, TablePlay])
@pytest.mark.parametrize("block", range(4))
def test_it_does_so_in_many_more_schedules(play: type[StreamPlay] | type[TablePlay], block: int) -> None:
    assert replayed(play, range(1000 + 500 * block, 1500 + 500 * block))


_TIMEOUT = timedelta(seconds=30)


def sums_of(address: str, vectors: list[list[NDArray[np.float32]]]) -> list[list[bytes]]:
    """Sum vectors of some workers, a thread each, all under way at once; the totals that each has."""
    all_are_in = threading.Barrier(len(vectors))
    totals: list[list[bytes]] = [[] for _ in vectors]

    def work(rank: int) -> None:
        control = ControlClient(address, rank=rank)
        world = len(vectors)
        joined = control.ask(
            lambda number: JoinSwitchJob(
                request=number, job="sums", worker=rank, workers=world, values=256, slots=256, ring=64
            )
        )
        assert isinstance(joined, SwitchJobJoined)
        sock = UdpSocket()
        client = StreamClient(JobShape(joined.number, world, 256, 256), rank, joined.cookie)
        thread = ClientThread(client, sock, sock.connect(control.host, joined.port))
        all_are_in.wait(10)
        under_way = [thread.do(functools.partial(client.begin, vector)) for vector in vectors[rank]]
        for exchange in under_way:
            assert thread.wait(functools.partial(getattr, exchange, "is_done"), _TIMEOUT), thread.trouble
            totals[rank].append(exchange.total.tobytes())
        all_are_in.wait(30)
        thread.close()
        control.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(vectors))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return totals


def test_sums_are_right_and_the_same_for_all_workers() -> None:
    numbers = np.random.default_rng(0)
    # Integers of 20 bits are exact as fixed point: the sums are known.
    vectors = [[numbers.integers(-(1 << 20), 1 << 20, 50_000).astype(np.float32) for _ in range(8)] for _ in range(3)]

    def summed() -> list[list[bytes]]:
        with served_switch(interfaces=["lo"]) as address:
            return sums_of(address, vectors)

    totals = in_a_network_of_its_own(summed)
    expected = [np.sum([mine[i] for mine in vectors], axis=0, dtype=np.float32).tobytes() for i in range(8)]
    assert totals == [expected] * 3


def shout(port: int, is_over: threading.Event) -> None:
    """Send what is no packet, cut, too long, of another job, forged, or mutated, until it is over."""
    chance = random.Random(0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        while not is_over.is_set():
            packet = Packet(
                chance.choice(list(PacketKind)), chance.randrange(1 << 16), chance.randrange(256),
                cookie=chance.randrange(1 << 32), clock=chance.randrange(1 << 32), chunk=chance.randrange(1 << 32),
                slot=chance.randrange(1 << 16), bitmap=chance.randrange(1 << 32), exponent=chance.randrange(-128, 128),
                flags=Flag(chance.randrange(16)),
                values=(chance.randrange(-(1 << 31), 1 << 31),) * 16 * chance.randrange(3),
            )  # fmt: skip
            data = bytearray(encode(packet))
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            size = chance.choice([len(data), len(data), chance.randrange(len(data) + 1)])
            sock.sendto(bytes(data[:size]) + bytes(chance.choice([0, 0, 0, 5000])), ("127.0.0.1", port))


def test_garbage_stops_no_honest_worker() -> None:
    numbers = np.random.default_rng(1)
    vectors = [[numbers.integers(-(1 << 20), 1 << 20, 20_000).astype(np.float32) for _ in range(8)] for _ in range(2)]

    def summed() -> tuple[list[list[bytes]], dict[str, int]]:
        with served_switch(interfaces=["lo"]) as address:
            is_over = threading.Event()
            control = ControlClient(address, rank=9)
            lone = control.ask(
                lambda number: JoinSwitchJob(
                    request=number, job="lone", worker=9, workers=10, values=16, slots=4, ring=4
                )
            )
            assert isinstance(lone, SwitchJobJoined)
            strangers = [threading.Thread(target=shout, args=(lone.port, is_over)) for _ in range(2)]
            for one in strangers:
                one.start()
            try:
                totals = sums_of(address, vectors)
            finally:
                is_over.set()
                for one in strangers:
                    one.join()
            dropped = control.status().dropped
            control.close()
            return totals, dropped

    totals, dropped = in_a_network_of_its_own(summed)
    expected = [np.sum([mine[i] for mine in vectors], axis=0, dtype=np.float32).tobytes() for i in range(8)]
    assert totals == [expected] * 2
    assert dropped["foreign"] > 50
    assert dropped["unknown job"] > 20


def test_who_says_good_bye_is_not_waited_for_any_more() -> None:
    def play() -> list[tuple[PacketKind, int]]:
        kernel, number = KernelReplay(2), 7
        try:
            kernel.switch.plane.create_job(JobShape(number, 2, values=16, slots=4, ring=4), Strategy())
            for worker, sock in enumerate(kernel.sockets):
                kernel.switch.plane.admit(number, worker, 100 + worker)
                sock.send(encode(Packet(PacketKind.JOIN, number, worker, cookie=100 + worker)))
                assert decode(sock.recv(9000)).kind == PacketKind.JOIN_OK
            first, second = kernel.sockets
            first.send(encode(Packet(PacketKind.DATA, number, 0, cookie=100, flags=Flag.FIRST | Flag.PRIME)))
            for cookie in (5, 101):  # the first is forged
                second.send(encode(Packet(PacketKind.LEAVE, number, 1, cookie=cookie)))
                kernel.switch.receive()
            refused, gone, told = decode(second.recv(9000)), decode(second.recv(9000)), decode(first.recv(9000))
            assert list(kernel.switch.plane.stats(number, 0.0).members) == [0]
            return [(one.kind, one.bitmap) for one in (refused, gone, told)]
        finally:
            kernel.close()

    told = in_a_network_of_its_own(play)
    assert told == [(PacketKind.NACK, 0), (PacketKind.LEAVE_OK, 0), (PacketKind.RESULT, 1)]


def test_fragments_of_others_go_their_way() -> None:
    def play() -> tuple[int, int]:
        subprocess.run(["ip", "link", "set", "lo", "mtu", "1500"], check=True)
        kernel = KernelReplay(1)
        try:
            with (
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as service,
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
            ):
                service.bind(("127.0.0.1", 0))
                service.settimeout(2)
                other.sendto(bytes(6000), service.getsockname())
                received = len(service.recv(9000))
            kernel.sockets[0].send(bytes(6000))
            return received, kernel.switch.plane.dropped["fragments"]
        finally:
            kernel.close()

    assert in_a_network_of_its_own(play) == (6000, 1)


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(NetworkError, match=r"at 'port7': there is no such interface; there are lo"):
        in_a_network_of_its_own(lambda: KernelSwitch("127.0.0.1", ["lo", "port7"]))


def filters() -> str:
    """What sees the packets that come in by loopback."""
    shown = subprocess.run(["tc", "filter", "show", "dev", "lo", "ingress"], check=True, capture_output=True, text=True)
    return shown.stdout


def test_the_next_program_takes_the_place_of_one_that_was_killed() -> None:
    vectors = [[np.full(3000, float(rank + 1), np.float32)] for rank in range(2)]
    expected = [[np.full(3000, 3.0, np.float32).tobytes()]] * 2

    def sums() -> None:
        with KilledSwitch(["lo"]) as switch:
            assert sums_of(switch.address, vectors) == expected
            switch.kill()
            assert filters().count("direct-action") == 1, "it was not left behind"
            switch.start()
            assert filters().count("direct-action") == 1
            assert sums_of(switch.address, vectors) == expected

    in_a_network_of_its_own(sums)
