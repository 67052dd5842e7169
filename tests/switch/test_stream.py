"""Streaming sums: the reference model, the vectorised switch and the worker's side, on networks that lose packets."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from offbeat.errors import NumericsError
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.chunk_stream import ChunkStream
from offbeat.switch.fixed_point import exponents, quantize, to_sums
from offbeat.switch.job_shape import JobShape
from offbeat.switch.job_state import JobState
from offbeat.switch.packet import HEADER_BYTES, Flag, Packet, PacketKind, Reason, decode
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.stream_exchange import StreamExchange
from offbeat.switch.vector_stream import VectorStream
from tests.switch.network import VALUES, StreamPlay


@pytest.mark.parametrize("block", range(4))
def test_no_sum_is_wrong_and_none_is_stuck(block: int) -> None:
    closed = 0
    for seed in range(75 * block, 75 * (block + 1)):
        play = StreamPlay(seed)
        play.run()
        closed += play.closed
    assert closed > 5


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_no_sum_is_wrong_in_many_more_schedules(block: int) -> None:
    for seed in range(1000 + 2000 * block, 1000 + 2000 * (block + 1)):
        StreamPlay(seed).run()


def job(workers: int = 2, **shape: int) -> JobState:
    state = JobState(JobShape(7, workers, values=VALUES, **{"slots": 4, **shape}), Strategy())
    for worker in range(workers):
        state.admit(worker, 100 + worker)
        state.members[worker].port = worker
    return state


def data(worker: int, chunk: int, *, bitmap: int = 0) -> Packet:
    flags = Flag.FIRST | Flag.PRIME
    return Packet(
        PacketKind.DATA, 7, worker, cookie=100 + worker, chunk=chunk, slot=chunk % 4, bitmap=bitmap, flags=flags
    )


def test_a_chunk_that_comes_twice_is_added_once() -> None:
    state = job()
    assert state.handle(data(0, 0), 0) == []
    assert state.handle(data(0, 0), 0) == []
    assert state.members[0].counts["duplicates"] == 1
    to = [send.port for send in state.handle(data(1, 0), 1)]
    assert to == [0, 1]


def test_who_lost_a_result_gets_it_again_and_nobody_else_does() -> None:
    state = job()
    for worker in (0, 1):
        state.handle(data(worker, 0), worker)
    ((port, packet),) = state.handle(data(1, 0), 1)
    assert (port, packet.kind, packet.contributors) == (1, PacketKind.RESULT, 0b11)


@pytest.mark.parametrize("stream", [ChunkStream, VectorStream])
def test_without_a_worker_all_chunks_are_completed_at_once_wherever_their_slots_are(
    stream: type[ChunkStream | VectorStream],
) -> None:
    state = JobState(JobShape(7, 2, values=VALUES, slots=4), Strategy(), stream=stream)
    for worker in range(2):
        state.admit(worker, worker, chunk=3)
        state.members[worker].port = worker
    for chunk, flags in ((3, Flag.FIRST | Flag.PRIME), (4, Flag.PRIME)):  # in the last slot, and in the first
        state.handle(Packet(PacketKind.DATA, 7, 0, chunk=chunk, slot=chunk % 4, bitmap=3, flags=flags), 0)
    sends = state.evict(1)
    assert [(packet.kind, packet.chunk) for _, packet in sends] == [(PacketKind.RESULT, 3), (PacketKind.RESULT, 4)]


def test_a_slot_is_not_taken_over_while_a_member_lacks_its_result() -> None:
    state = job()
    for worker in (0, 1):
        state.handle(data(worker, 0), worker)
    ((_, held),) = state.handle(data(0, 4, bitmap=4), 0)
    assert (held.reason, held.worker) == (Reason.HELD_UP, 1)
    assert state.handle(data(1, 4, bitmap=1), 1) == []  # it has it now
    assert len(state.handle(data(0, 4, bitmap=4), 0)) == 2


@pytest.mark.parametrize(
    ("packet", "port", "reason"),
    [
        (data(3, 0), 3, Reason.NOT_A_MEMBER),
        (Packet(PacketKind.DATA, 7, 1, cookie=5), 1, Reason.STALE_COOKIE),
        (data(1, 0), 0, Reason.WRONG_PORT),
        (Packet(PacketKind.DATA, 7, 1, cookie=101, chunk=1, slot=3), 1, Reason.MALFORMED),
        (Packet(PacketKind.RESULT, 7, 1, cookie=101), 1, Reason.MALFORMED),
        (Packet(PacketKind.DATA, 7, 1, cookie=101, values=(1,) * 32), 1, Reason.MALFORMED),
    ],
)
def test_what_is_refused_is_told_why(packet: Packet, port: int, reason: Reason) -> None:
    state = job()
    ((to, answer),) = state.handle(packet, port)
    assert (to, answer.kind, answer.reason) == (port, PacketKind.NACK, reason)
    assert answer.reason.text
    assert state.members.refused[reason.name] == 1


def test_a_worker_joins_at_one_port_and_keeps_it() -> None:
    state = JobState(JobShape(7, 1, values=VALUES), Strategy())
    state.admit(0, 100)
    join = Packet(PacketKind.JOIN, 7, 0, cookie=100)
    assert [send.packet.kind for send in state.handle(join, "a")] == [PacketKind.JOIN_OK]
    assert [send.packet.kind for send in state.handle(join, "a")] == [PacketKind.JOIN_OK]
    assert state.handle(join, "b")[0].packet.reason is Reason.WRONG_PORT
    state.admit(0, 200)  # a new incarnation
    assert state.handle(join, "a")[0].packet.reason is Reason.STALE_COOKIE


def exchange(state: JobState, clients: list[StreamClient], spoilt: int | None = None, attempts: int = 99) -> None:
    """Let packets go to and fro until nobody has any.

    Args:
        spoilt: a worker that sends the largest values there are, instead of its own, in the first `attempts`.
    """
    for _ in range(100):
        quiet = True
        for worker, client in enumerate(clients):
            for packet in client.packets(0.0).datagrams():
                quiet = False
                batch = PacketBatch.of([packet], VALUES)
                if (
                    worker == spoilt
                    and batch.header["count"][0]
                    and not batch.header["flags"][0] & Flag.PRIME
                    and batch.header["epoch"][0] < attempts
                ):
                    batch.values[0] = (1 << 31) - 1
                    batch.seal()
                for port, answer in state.handle(decode(batch.datagrams()[0]), worker):
                    assert isinstance(port, int)
                    clients[port].receive(PacketBatch.of([answer], VALUES), 0.0)
        if quiet:
            return


def clients_of(state: JobState) -> list[StreamClient]:
    return [StreamClient(state.shape, worker, 100 + worker, window=2) for worker in state.members]


def test_a_sum_that_does_not_fit_is_flagged_and_summed_again() -> None:
    state = job(slots=8)
    clients = clients_of(state)
    exchanges = [client.begin(np.full(VALUES, 0.75, np.float32)) for client in clients]
    exchange(state, clients, spoilt=1, attempts=2)
    assert [one.attempts.tolist() for one in exchanges] == [[2], [2]]
    assert [one.total.tolist() for one in exchanges] == [[1.5] * VALUES] * 2


def test_a_worker_that_never_fits_ends_the_sum_with_a_sentence() -> None:
    state = job(slots=8)
    clients = clients_of(state)
    for client in clients:
        client.begin(np.ones(VALUES, np.float32))
    with pytest.raises(NumericsError, match="other values than it announces"):
        exchange(state, clients, spoilt=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_cannot_be_summed_is_never_sent(value: float) -> None:
    (client, *_) = clients_of(job())
    with pytest.raises(NumericsError, match="through a switch"):
        client.begin(np.array([1, value], np.float32))
    assert client.is_idle


def test_a_chunk_of_zeros_has_no_payload() -> None:
    state = job(slots=8)
    clients = clients_of(state)
    exchanges = [client.begin(np.zeros(2 * VALUES, np.float32)) for client in clients]
    sizes = []
    for _ in range(2):  # exponents, then chunks
        sent = [client.packets(0.0).datagrams() for client in clients]
        sizes.append({len(one) for some in sent for one in some})
        for worker, some in enumerate(sent):
            for one in some:
                for port, answer in state.handle(decode(one), worker):
                    assert isinstance(port, int)
                    clients[port].receive(PacketBatch.of([answer], VALUES), 0.0)
    assert sizes == [{HEADER_BYTES + 4 * VALUES}, {HEADER_BYTES}]
    assert all(one.is_done and not one.total.any() for one in exchanges)
    assert exchanges[0].own.tolist() == [-127] * 2


def test_an_exchange_copies_no_more_than_the_last_chunk_of_a_vector() -> None:
    vector = np.arange(5 * VALUES + 3, dtype=np.float32)
    exchange = StreamExchange([vector], JobShape(7, 1, values=VALUES, slots=16), 0, 0)
    whole, rest = exchange._brought
    assert np.shares_memory(whole, vector)
    assert whole.shape == (5, VALUES)
    assert rest.tolist() == [[*vector[5 * VALUES :].tolist(), *[0.0] * (VALUES - 3)]]


def test_no_pass_over_a_vector_takes_memory_of_its_size() -> None:
    """What a window of packets is made of, and becomes, stays in a processor's cache."""
    rows = np.ones((256, 2048), np.float32)
    integers, unit = np.empty(rows.shape, np.int32), np.ones(len(rows), np.float32)
    tracemalloc.start()
    try:
        exponents(rows)
        quantize(rows, unit, integers)
        to_sums(integers, unit, rows)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < rows.nbytes / 8
