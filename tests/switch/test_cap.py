"""A cap bounds the part that one worker has in a sum, whatever it sends."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from offbeat.errors import NetworkError, NumericsError, PlanError
from offbeat.fabric import Switch
from offbeat.plan import Plan
from offbeat.protocol.group_progress import GroupProgress
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.cap import Brought, Cap
from offbeat.switch.chunk_stream import ChunkStream
from offbeat.switch.job_shape import JobShape
from offbeat.switch.job_state import JobState
from offbeat.switch.packet import Flag, Packet, PacketKind, decode, encode
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.vector_stream import VectorStream
from offbeat.sync import SSP, KSync

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

VALUES, WORKERS, CAP = 16, 3, 0.4


def job(stream: type[ChunkStream | VectorStream] = ChunkStream, cap: float = CAP) -> JobState:
    return JobState(JobShape(7, WORKERS, values=VALUES, slots=64, most=cap), Strategy(), stream=stream)


def summed(
    state: JobState, vectors: list[NDArray[np.float32]], lie: Callable[[PacketBatch], None] = lambda batch: None
) -> NDArray[np.float32]:
    """The sum that worker 0 gets at a switch while the last worker changes each of its packets by `lie`."""
    clients, shape = [], state.shape
    for worker in range(len(vectors)):
        state.admit(worker, 100 + worker)
        state.members[worker].port = worker
        clients.append(StreamClient(shape, worker, 100 + worker, window=8))
    exchanges = [client.begin(vector) for client, vector in zip(clients, vectors, strict=True)]
    now_s = 0.0
    while not exchanges[0].is_done:
        now_s += 1.0  # what is lost is sent again
        for worker, client in enumerate(clients):
            for data in client.packets(now_s).datagrams():
                batch = PacketBatch.of([data], VALUES)
                if worker == len(clients) - 1:
                    lie(batch)
                    batch.seal()
                for port, answer in state.handle(decode(batch.datagrams()[0]), worker):
                    assert isinstance(port, int)
                    clients[port].receive(PacketBatch.of([answer], VALUES), now_s)
        assert now_s < 1000, "it is stuck"
    return exchanges[0].total


def random_vectors(size: int = 5 * VALUES) -> list[NDArray[np.float32]]:
    """Vectors of which a tenth of the elements is above the cap."""
    numbers = np.random.default_rng(0)
    return [numbers.normal(scale=CAP / 1.645, size=size).astype(np.float32) for _ in range(WORKERS)]


@pytest.mark.parametrize("stream", [ChunkStream, VectorStream])
def test_each_workers_elements_are_clamped_and_counted(stream: type[ChunkStream | VectorStream]) -> None:
    vectors = random_vectors()
    state = job(stream)
    total = summed(state, vectors)
    clamped = [np.clip(vector, -CAP, CAP) for vector in vectors]
    assert total == pytest.approx(np.sum(clamped, axis=0), abs=1e-7)
    cap = state.shape.cap
    assert cap is not None
    for worker, (vector, here) in enumerate(zip(vectors, clamped, strict=True)):
        brought = state.members[worker].brought
        assert (brought.elements, brought.clamped) == (len(vector), int((np.abs(vector) > CAP).sum()))
        assert cap.root_mean_square(brought) == pytest.approx(float(np.sqrt((here**2).mean())), rel=1e-3)


def test_without_a_cap_nothing_is_clamped_or_counted() -> None:
    vectors = random_vectors()
    state = job(cap=0.0)
    total = summed(state, vectors)
    assert total == pytest.approx(np.sum(vectors, axis=0), abs=1e-6)
    assert state.members[0].brought == Brought()


def is_prime(batch: PacketBatch) -> bool:
    return bool(batch.header["flags"][0] & Flag.PRIME)


def the_most(batch: PacketBatch) -> None:
    """The largest integers there are, and the largest exponents."""
    batch.values[0] = 253 if is_prime(batch) else (1 << 31) - 1


def the_least(batch: PacketBatch) -> None:
    if not is_prime(batch):
        batch.values[0] = -(1 << 31)


def huge_exponents(batch: PacketBatch) -> None:
    batch.values[0] = (1 << 31) - 1


BOUNDED = [the_most, the_least, huge_exponents]


@pytest.mark.parametrize("stream", [ChunkStream, VectorStream])
@pytest.mark.parametrize("lie", BOUNDED)
def test_a_liar_moves_no_element_further_than_the_cap(
    lie: Callable[[PacketBatch], None], stream: type[ChunkStream | VectorStream]
) -> None:
    vectors = random_vectors()
    without = summed(job(), [*vectors[:-1], np.zeros_like(vectors[0])])
    total = summed(job(stream), vectors, lie)
    assert np.abs(total - without).max() <= CAP + 1e-7
    assert np.abs(total - without).max() > 0.9 * CAP
    with np.errstate(over="ignore"), contextlib.suppress(NumericsError):
        unbounded = summed(job(stream, cap=0.0), vectors, lie)
        assert np.abs(unbounded - without).max() > 5 * CAP, "without a cap it lies for nothing"


def small_exponent(batch: PacketBatch) -> None:
    """Integers by an exponent for which the limit is large: the others read them by the one that was agreed upon."""
    if not is_prime(batch):
        batch.header["exponent"], batch.values[0] = -60, (1 << 30) - 1


def values_as_exponents(batch: PacketBatch) -> None:
    if is_prime(batch) and not batch.header["flags"][0] & Flag.FIRST:
        batch.header["flags"] &= ~np.uint8(Flag.PRIME)
        batch.values[0] = 1 << 30


def exponents_as_values(batch: PacketBatch) -> None:
    batch.header["flags"] |= np.uint8(Flag.PRIME)


LOUD = [small_exponent, values_as_exponents, exponents_as_values]


@pytest.mark.parametrize("stream", [ChunkStream, VectorStream])
@pytest.mark.parametrize("lie", LOUD)
def test_what_cannot_be_clamped_ends_the_sum_with_a_sentence(
    lie: Callable[[PacketBatch], None], stream: type[ChunkStream | VectorStream]
) -> None:
    with pytest.raises(NumericsError, match="sends other values than it announces"):
        summed(job(stream), random_vectors(20 * VALUES), lie)


def hostile(seed: int, model: type[JobState] = JobState) -> JobState:
    """A job whose workers send anything, which `VectorStream` answers as the model does."""
    chance = random.Random(seed)
    shape = JobShape(7, WORKERS, values=VALUES, slots=4, most=chance.choice([CAP, 1e6, 2.0**-70, 2.0**100]))
    strategy, cap = Strategy(quorum=chance.choice([None, 1, 2])), shape.cap
    assert cap is not None
    state, vector = model(shape, strategy), JobState(shape, strategy, stream=VectorStream)
    for worker in range(WORKERS):
        for one in (state, vector):
            one.admit(worker, 100 + worker)
            one.members[worker].port = worker
    integers = (0, 1, -1, (1 << 31) - 1, -(1 << 31))
    for _ in range(300):
        worker, chunk, lead = (
            chance.randrange(WORKERS),
            chance.randrange(8),
            chance.choice([-33, -32, -12, -1, 0, 1, 8, 9]),
        )
        values = [chance.choice([*integers, chance.randrange(-(1 << 31), 1 << 31)]) for _ in range(VALUES)]
        packet = Packet(
            PacketKind.DATA, 7, worker, cookie=100 + worker, clock=chunk // 4, chunk=chunk, slot=chunk % 4,
            epoch=chance.choice([0, 0, 0, 1, 3, 9, 70, 65535]), bitmap=chance.randrange(10),
            exponent=chance.choice([max(-128, min(127, cap.exponent + lead)), chance.randrange(-128, 128)]),
            flags=Flag(chance.choice([0, 0, 0, 2, 3, 3, 8, 1])), values=tuple(values) if chance.random() < 0.8 else (),
        )  # fmt: skip
        sends = [(port, encode(answer)) for port, answer in state.handle(packet, worker)]
        assert sends == [(port, encode(answer)) for port, answer in vector.handle(packet, worker)], f"seed {seed}"
    for worker in range(WORKERS):
        assert state.members[worker].brought == vector.members[worker].brought, f"seed {seed}"
    return state


def test_planes_agree_about_whatever_is_sent() -> None:
    assert any(hostile(seed).members[0].brought.clamped for seed in range(20))


def test_limits_are_the_cap_by_each_exponent() -> None:
    cap = Cap(0.4, 2)
    assert cap.exponent == -1
    for exponent in range(-90, 127):
        limit = int(cap.limits[exponent % 256])
        exact = 0.4 * 2.0 ** (31 - 2 - exponent)
        assert limit == min(int(exact), (1 << 31) - 1)


def test_a_sum_that_only_some_have_is_not_given_to_others() -> None:
    shape = JobShape(1, 2, values=VALUES, slots=8, most=CAP)
    client = StreamClient(shape, 0, 5, window=4, keeps=True)
    client.begin(np.ones(VALUES, np.float32))
    with pytest.raises(NetworkError, match="with a cap they cannot give it"):
        client.begin_again(shape, 6, {0: GroupProgress(0), 1: GroupProgress(1)})


@pytest.mark.parametrize("cap", [0, -1.0, float("nan"), float("inf"), True, "1", 1e-30, 1e38])
def test_what_is_no_cap_is_refused(cap: float) -> None:
    with pytest.raises(PlanError, match=r"Cannot clamp .* at `plan\.fabric\.cap`\."):
        Switch("127.0.0.1:1", cap=cap)


@pytest.mark.parametrize("sync", [KSync(2), SSP(2)])
def test_policies_whose_sums_are_of_more_than_gradients_are_refused(sync: KSync | SSP) -> None:
    with pytest.raises(PlanError, match=r"Cannot clamp gradients to 1 with .* at `plan\.fabric\.cap`\."):
        Plan(sync=sync, fabric=Switch("127.0.0.1:1", cap=1.0))
    plan = Plan(fabric=Switch("127.0.0.1:1", cap=1.0))
    assert Plan.from_toml(plan.to_toml()) == plan
    with pytest.raises(PlanError, match="Cannot clamp"):
        plan.swapped(Plan(sync=sync, fabric=Switch("127.0.0.1:1")).to_toml().split("[codec]")[0])
