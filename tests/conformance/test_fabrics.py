"""Every fabric, with one to four workers, and proof that the check finds what it looks for."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from offbeat.errors import DisagreementError, NetworkError
from offbeat.fabric import BindContext, BoundSwitch, Elastic, ElasticGroup, ObjectStore, ProcessGroup, Routed, Switch
from offbeat.fabric.in_memory import BoundInMemory, InMemoryGroup, InMemoryPending, InMemoryScattered
from offbeat.fabric.process_group import Works
from offbeat.fabric.staging import CudaCopies, StagedFabric
from offbeat.fabric.switch import SwitchStream
from offbeat.payload import Gather, Payload, Reply, Sum, Total
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.memory_switch import MemorySwitch
from offbeat.testing import check_fabric
from tests.late_copies import LateCopies
from tests.switch.local_switch import served_switch
from tests.workers import run_workers


def check_in_threads(world: int, kind: type[BoundInMemory] = BoundInMemory) -> None:
    group = InMemoryGroup(world)
    with ThreadPoolExecutor(world) as pool:
        for future in [
            pool.submit(check_fabric, kind(group, rank), timeout=timedelta(seconds=2)) for rank in range(world)
        ]:
            future.result()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_in_memory(world: int) -> None:
    check_in_threads(world)


def check_process_group() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=world)
    check_fabric(ProcessGroup().bind(BindContext(rank, world)))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_process_group(world: int) -> None:
    run_workers(world, check_process_group)


def check_elastic(over: Routed | None) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = ElasticGroup(FileStore(os.environ["OFFBEAT_STORE"], world), rank, world)
    check_fabric(Elastic(over).bind(BindContext(rank, world, group=group)))


@pytest.mark.parametrize("over", [None, Routed()])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_elastic(world: int, over: Routed | None) -> None:
    run_workers(world, check_elastic, over)


def check_routed(spec: Routed | ObjectStore) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=world)
    check_fabric(spec.bind(BindContext(rank, world)))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_routed(world: int) -> None:
    run_workers(world, check_routed, Routed())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_routed_in_rounds(world: int) -> None:
    run_workers(world, check_routed, Routed(grouped=True))


@pytest.mark.parametrize("spec", [ObjectStore(), ObjectStore(1), ObjectStore(deterministic=False)], ids=repr)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_object_store(world: int, spec: ObjectStore) -> None:
    run_workers(world, check_routed, spec)


def in_memory(world: int, strategy: Strategy | None = None) -> list[BoundSwitch]:
    group, switch, spec = InMemoryGroup(world), MemorySwitch(), Switch("memory://", values=16)
    return [
        BoundSwitch(BoundInMemory(group, rank), SwitchStream.in_memory(switch, spec, rank, world, strategy))
        for rank in range(world)
    ]


@pytest.mark.parametrize("has_quorum", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_switch_in_memory(world: int, has_quorum: bool) -> None:
    ends = in_memory(world, Strategy(quorum=world) if has_quorum else None)
    with ThreadPoolExecutor(world) as pool:
        for future in [pool.submit(check_fabric, end, timeout=timedelta(seconds=10)) for end in ends]:
            future.result()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_staged(world: int) -> None:
    """Each worker's copies are late in a way of its own."""
    group, late = InMemoryGroup(world), [LateCopies(rank) for rank in range(world)]
    ends = [StagedFabric(BoundInMemory(group, rank), copies) for rank, copies in enumerate(late)]
    with ThreadPoolExecutor(world) as pool:
        for future in [pool.submit(check_fabric, end, timeout=timedelta(seconds=10)) for end in ends]:
            future.result()
    assert all(copies.looks > 20 for copies in late), "some were not there at once"


def test_what_is_on_the_host_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert CudaCopies().take([tensor])[0][0] is tensor
    fabric = StagedFabric(BoundInMemory(InMemoryGroup(1), 0), CudaCopies())
    check_fabric(fabric)


def check_staged_on_gpu(address: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = ElasticGroup(FileStore(os.environ["OFFBEAT_STORE"], world), rank, world)
    fabric = Switch(address).bind(BindContext(rank, world, backend="nccl", group=group))
    tensors = [torch.full((100_000,), float(rank + number), device="cuda") for number in range(8)]
    pendings = [fabric.start(Sum(tensor, torch.ones(2, device="cuda"))) for tensor in tensors]
    for number, (tensor, pending) in enumerate(zip(tensors, pendings, strict=True)):
        assert pending.wait(timedelta(seconds=10))
        reply = pending.result()
        assert isinstance(reply, Total)
        assert reply.tensor.data_ptr() == tensor.data_ptr()
        assert bool((tensor == world * number + sum(range(world))).all())
        assert reply.tail is not None
        assert reply.tail.tolist() == [world, world]
    fabric.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_switch_on_a_gpu() -> None:
    with served_switch() as address:
        run_workers(2, check_staged_on_gpu, address)


def test_a_sum_of_some_says_of_whom_and_its_trailer_is_exact() -> None:
    first, second, third = in_memory(3, Strategy(quorum=2))
    brought = [torch.full((40,), 2.0**rank) for rank in range(3)]
    tails = [torch.tensor([1.0, 3_000_001.0 + rank, 0.1]) for rank in range(3)]
    pending = [end.start(Sum(brought[rank], tails[rank])) for rank, end in ((0, first), (2, third))]
    assert all(one.wait(timedelta(seconds=10)) for one in pending), "the second worker is not waited for"
    late = second.start(Sum(brought[1], tails[1]))
    assert late.wait(timedelta(seconds=10))
    for reply, includes_own in ((pending[0].result(), True), (pending[1].result(), True), (late.result(), False)):
        assert isinstance(reply, Total)
        assert reply.tail is not None
        assert (reply.weight, reply.includes_own) == (2 / 3, includes_own)
        assert reply.tensor.tolist() == [5.0] * 40
        assert reply.tail.tolist() == pytest.approx([2.0, 6_000_004.0, 0.2], rel=1e-7)
    for end in (first, second, third):
        end.close()


def check_switch(address: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = ElasticGroup(FileStore(os.environ["OFFBEAT_STORE"], world), rank, world)
    check_fabric(Switch(address).bind(BindContext(rank, world, group=group)))


@pytest.mark.parametrize("world", [2, 3])
def test_switch(world: int) -> None:
    with served_switch() as address:
        run_workers(world, check_switch, address)


def check_on_gpu() -> None:
    dist.init_process_group("nccl", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=0, world_size=1)
    fabric = ProcessGroup().bind(BindContext(backend="nccl"))
    total = fabric.start(Sum(torch.ones(3, device="cuda")))
    assert total.wait(timedelta(seconds=10))
    reply = total.result()
    assert isinstance(reply, Total)
    assert reply.tensor.tolist() == [1, 1, 1]
    fabric.close()
    dist.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_process_group_on_a_gpu() -> None:
    run_workers(1, check_on_gpu)


class JustInTime:
    """A `dist.Work` that comes to its end while the timeout is being raised."""

    def __init__(self, error: str) -> None:
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def test_an_end_just_when_the_time_is_up_is_no_broken_connection() -> None:
    """Seen once in some hundred thousand waits, on a crowded machine."""
    assert Works([JustInTime("")], lambda: [], 0).wait(timedelta(seconds=1))
    with pytest.raises(NetworkError, match="Connection closed by peer"):
        Works([JustInTime("Connection closed by peer")], lambda: [], 0).wait(timedelta(seconds=1))


def test_an_exchange_that_all_have_read_is_forgotten() -> None:
    group = InMemoryGroup(2)
    first, second = [BoundInMemory(group, rank).start(Sum(torch.ones(2))) for rank in range(2)]
    first.result()
    assert group.slots
    second.result()
    assert not group.slots


def test_workers_that_bring_different_things() -> None:
    group = InMemoryGroup(2)
    ends = [BoundInMemory(group, rank) for rank in range(2)]
    pending = [ends[0].start(Sum(torch.ones(2))), ends[1].start(Gather((torch.ones(2),)))]
    assert all(p.wait(timedelta(seconds=1)) for p in pending)
    with pytest.raises(DisagreementError, match="different operations"):
        pending[0].result()


class HalfSum(BoundInMemory):
    """Loses the last rank's contribution."""

    def start(self, payload: Payload) -> InMemoryPending:
        if isinstance(payload, Sum) and self.rank == self.world - 1:
            payload.tensor.zero_()
        return super().start(payload)


class _Overwrites(InMemoryPending):
    def result(self) -> Reply:
        reply = super().result()
        if not isinstance(reply, Total):
            assert isinstance(self._payload, Gather)
            self._payload.tensors[0].fill_(9)
        return reply


class Overwrites(BoundInMemory):
    """Scribbles over what is gathered."""

    def bring(self, payload: Payload, source: int) -> InMemoryPending:
        arrival = super().bring(payload, source)
        arrival.__class__ = _Overwrites
        return arrival


class Swaps(BoundInMemory):
    """Gives the reply of one flight to another."""

    def start(self, payload: Payload) -> InMemoryPending:
        arrival = super().start(payload)
        if isinstance(payload, Sum) and payload.tensor.shape == (3,) and payload.tail is None:
            payload.tensor.add_(1)
        return arrival


class _LeavesOut(InMemoryPending):
    def result(self) -> Reply:
        reply = super().result()
        return replace(reply, weight=0.5) if isinstance(reply, Total) and reply.tail is not None else reply


class LeavesOut(BoundInMemory):
    """Says of some sums that a worker is not in them."""

    def start(self, payload: Payload) -> InMemoryPending:
        arrival = super().start(payload)
        arrival.__class__ = _LeavesOut
        return arrival


class _InOneRound(InMemoryScattered):
    def result(self) -> Reply:
        reply = super().result()
        self._payload.tensor.fill_(9)
        return reply


class InOneRound(BoundInMemory):
    """Has spoilt what it was given when the first of two rounds is done."""

    def reduce_scatter(self, payload: Sum) -> InMemoryScattered:
        return _InOneRound(self, payload)


class _KeepsItsPart(InMemoryScattered):
    def result(self) -> Reply:
        reply = super().result()
        self._part = self._part + self._fabric.rank
        return reply


class KeepsItsPart(BoundInMemory):
    """Gathers other parts than the sum's."""

    def reduce_scatter(self, payload: Sum) -> InMemoryScattered:
        return _KeepsItsPart(self, payload)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (InOneRound, "a reduce-scatter overwrote"),
        (KeepsItsPart, "in two rounds is wrong"),
        (HalfSum, "is wrong"),
        (Overwrites, "overwrote"),
        (Swaps, "another's sum|spoilt"),
        (LeavesOut, "left workers out"),
    ],
)
def test_the_check_finds(kind: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_in_threads(2, kind)
