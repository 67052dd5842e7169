"""The switch in the kernel: loaded for real, and held against the reference model packet by packet."""

from __future__ import annotations

import contextlib
import socket
import subprocess

import numpy as np
import pytest

from offbeat.errors import NetworkError, NumericsError, PlanError
from offbeat.fabric import Switch
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.kernel.kernel_switch import KernelSwitch
from offbeat.switch.packet import Flag, Packet, PacketKind, decode, encode
from tests.switch import test_cap
from tests.switch.kernel_replay import KernelReplay, NotedState, in_a_network_of_its_own, why_not
from tests.switch.killed_switch import KilledSwitch
from tests.switch.local_switch import served_switch
from tests.switch.network import StreamPlay
from tests.switch.sums import integers, right_sums, sums_of
from tests.switch.test_table import TablePlay

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def replayed(play: type[StreamPlay] | type[TablePlay], seeds: range, *, at_xdp: bool = False) -> int:
    def all_of_them() -> int:
        kernel = KernelReplay(at_xdp=at_xdp)
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


PLAYS = [(StreamPlay, False), (StreamPlay, True), (TablePlay, False)]  # tables are not looked at by XDP


@pytest.mark.parametrize(("play", "at_xdp"), PLAYS)
def test_it_answers_every_packet_as_the_model_does(play: type[StreamPlay] | type[TablePlay], at_xdp: bool) -> None:
    assert replayed(play, range(40), at_xdp=at_xdp) > 1400


@pytest.mark.parametrize("at_xdp", [False, True])
def test_it_clamps_what_a_liar_sends_as_the_model_does(at_xdp: bool) -> None:
    def all_of_them() -> int:
        kernel = KernelReplay(at_xdp=at_xdp)
        packets = 0
        try:
            for lie in [*test_cap.BOUNDED, *test_cap.LOUD]:
                state = NotedState(test_cap.job().shape, Strategy())
                with contextlib.suppress(NumericsError):
                    test_cap.summed(state, test_cap.random_vectors(20 * test_cap.VALUES), lie)
                packets += kernel.replay(state, lie.__name__)
            for seed in range(10):
                hostile = test_cap.hostile(seed, NotedState)
                assert isinstance(hostile, NotedState)
                packets += kernel.replay(hostile, f"seed {seed}")
        finally:
            kernel.close()
        return packets

    assert in_a_network_of_its_own(all_of_them) > 3300


@pytest.mark.slow
@pytest.mark.parametrize(("play", "at_xdp"), PLAYS)
@pytest.mark.parametrize("block", range(2))
def test_it_does_so_in_many_more_schedules(play: type[StreamPlay] | type[TablePlay], at_xdp: bool, block: int) -> None:
    assert replayed(play, range(1000 + 500 * block, 1500 + 500 * block), at_xdp=at_xdp)


@pytest.mark.parametrize("at_xdp", [False, True])
@pytest.mark.parametrize("values", [256, 2048])  # 2,048 come in several pieces of memory
def test_sums_are_right_and_the_same_for_all_workers(values: int, at_xdp: bool) -> None:
    vectors = integers(3, 8, 50_000)

    def summed() -> list[list[bytes]]:
        with served_switch(interfaces=["lo"], at_xdp=at_xdp) as address:
            return sums_of(address, vectors, values=values)

    assert in_a_network_of_its_own(summed) == right_sums(vectors)


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


def test_without_a_worker_all_chunks_are_completed_at_once_wherever_their_slots_are() -> None:
    def play() -> int:
        kernel = KernelReplay(2)
        try:
            state = NotedState(JobShape(7, 2, values=16, slots=4, ring=4), Strategy())
            for worker in range(2):
                state.admit(worker, worker, chunk=3)
                state.members[worker].port = worker
            for chunk, flags in ((3, Flag.FIRST | Flag.PRIME), (4, Flag.PRIME)):  # in the last slot, and in the first
                state.handle(Packet(PacketKind.DATA, 7, 0, chunk=chunk, slot=chunk % 4, bitmap=3, flags=flags), 0)
            assert len(state.evict(1)) == 2
            return kernel.replay(state, "an eviction")
        finally:
            kernel.close()

    assert in_a_network_of_its_own(play) == 2


def test_an_update_is_added_once_though_its_worker_goes_on_while_a_repetition_is_looked_at() -> None:
    def play() -> list[int]:
        kernel, number = KernelReplay(1), 7
        (sock,), plane = kernel.sockets, kernel.switch.plane
        try:
            plane.create_job(JobShape(number, 1, values=16, slots=4, ring=8, rows=1), Strategy("table", window=4))
            plane.admit(number, 0, 100)
            sock.send(encode(Packet(PacketKind.JOIN, number, 0, cookie=100)))
            sock.recv(9000)
            kept = plane._state[0]
            for clock in (1, 2, 1):
                if clock == 1:  # as one sees it who has looked before the second came
                    plane._state[0] = kept
                sock.send(encode(Packet(PacketKind.INC, number, 0, cookie=100, clock=clock, values=(1,) * 16)))
                while decode(sock.recv(9000)).kind != PacketKind.INC_OK:
                    pass
            return [int(value) for value in plane._rows[0]["values"][:16]]
        finally:
            kernel.close()

    assert in_a_network_of_its_own(play) == [2] * 16


def test_a_job_gets_as_many_slots_as_there_are_if_it_can_do_with_fewer() -> None:
    wanted, least = Switch().slots_for_late, Switch().slots

    def play() -> list[int]:
        with served_switch(interfaces=["lo"]) as address:
            first, second = ControlClient(address, rank=0), ControlClient(address, rank=1)
            try:
                shape = JobShape(0, 2, slots=wanted)
                with pytest.raises(PlanError, match="this switch has 4096 for all jobs"):
                    first.join("job", shape)
                shapes = [one.join("job", shape, least_slots=least)[0] for one in (first, second)]
                return [one.slots for one in shapes]
            finally:
                first.close()
                second.close()

    assert in_a_network_of_its_own(play) == [4096, 4096]


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


def test_sums_are_made_before_tc() -> None:
    def play() -> tuple[dict[int, int], list[PacketKind]]:
        kernel, number = KernelReplay(2, at_xdp=True), 7
        try:
            kernel.switch.plane.create_job(JobShape(number, 2, values=16, slots=4, ring=4), Strategy())
            for worker, sock in enumerate(kernel.sockets):
                kernel.switch.plane.admit(number, worker, 100 + worker)
                sock.send(encode(Packet(PacketKind.JOIN, number, worker, cookie=100 + worker)))
                assert decode(sock.recv(9000)).kind == PacketKind.JOIN_OK
            subprocess.run(["tc", "qdisc", "del", "dev", "lo", "clsact"], check=True)  # nothing is left but XDP
            for worker, sock in enumerate(kernel.sockets):
                values = (worker - 9,) * 16
                data = Packet(
                    PacketKind.DATA, number, worker, cookie=100 + worker, flags=Flag.FIRST | Flag.PRIME, values=values
                )
                sock.send(encode(data))
            stats = kernel.switch.plane.stats(number, 0.0)
            counted = {worker: one.counts.get("DATA", 0) for worker, one in stats.members.items()}
            subprocess.run(["tc", "qdisc", "add", "dev", "lo", "clsact"], check=True)
            kernel.switch._program.attach("take_packet", ["lo"])
            kernel.sockets[0].send(encode(Packet(PacketKind.PROBE, number, 0, cookie=100)))
            kernel.sockets[1].send(encode(data))  # again: the sum is there
            told = [decode(sock.recv(9000)) for sock in kernel.sockets]
            assert told[1].values == (-8,) * 16, "the larger of both"
            return counted, [one.kind for one in told]
        finally:
            kernel.close()

    counted, kinds = in_a_network_of_its_own(play)
    assert counted == {0: 1, 1: 0}, "the one that completes the sum goes on to tc, to be answered and counted there"
    assert kinds == [PacketKind.PROBE_OK, PacketKind.RESULT]


def test_a_table_has_the_room_that_it_is_given() -> None:
    def play() -> list[str]:
        said = []
        for mib in (1, 80):
            switch = KernelSwitch("127.0.0.1", ["lo"], table_mib=mib)
            try:
                # 10,000 rows of 2,048 values, which is what a row has where frames are large.
                switch.plane.create_job(JobShape(1, 1, values=16, slots=4, ring=4, rows=10_000), Strategy("table"))
                for key in (0, 5000, 9999):
                    switch.plane._rows[key] = np.ones((), switch.plane._rows[key].dtype)
                switch.plane.destroy_job(1)
                switch.plane.create_job(JobShape(2, 1, values=16, slots=4, ring=4, rows=10_000), Strategy("table"))
                assert not any(switch.plane._rows[key]["values"].any() for key in (0, 5000, 9999))
                said.append("")
            except PlanError as error:
                said.append(str(error))
            finally:
                switch.close()
        return said

    said = in_a_network_of_its_own(play)
    assert said == [
        "Cannot make room for a table of 10,000 rows: all jobs' tables together would take 79 MiB, and this switch has "
        "1. Start it with --table-mib 79.",
        "",
    ]


def test_another_program_at_the_xdp_hook_is_left_alone() -> None:
    def play() -> None:
        kernel = KernelReplay(1, at_xdp=True)
        try:
            with pytest.raises(NetworkError, match=r"at 'lo' by XDP: Device or resource busy\. .* --target ebpf"):
                KernelSwitch("127.0.0.1", ["lo"], at_xdp=True)
            kernel.switch.plane.create_job(JobShape(7, 1, values=16, slots=4, ring=4), Strategy())
            kernel.switch.plane.admit(7, 0, 100)
            kernel.sockets[0].send(encode(Packet(PacketKind.JOIN, 7, 0, cookie=100)))
            assert decode(kernel.sockets[0].recv(9000)).kind == PacketKind.JOIN_OK
        finally:
            kernel.close()
        KernelReplay(1, at_xdp=True).close()  # nothing of it is left there

    in_a_network_of_its_own(play)


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
