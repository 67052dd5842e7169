"""Blocks that are pushed before their contribution is announced: nothing comes of them before, and all of them then."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.protocol.training import PullBlock
from offbeat.sync import ASP, BSP, Apply, KSync, RoundRobin
from tests.server.in_process import Together
from tests.server.test_shard import SOON, Worker
from tests.server.test_update_scheduler import ABOUT, made, scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from offbeat.protocol.messages import ToWorker
    from offbeat.server.client.requests import PulledParameters, ServerRequest
    from offbeat.sync import Policy


@pytest.fixture
def team() -> Iterator[Callable[..., tuple[Together, list[Worker]]]]:
    jobs: list[Together] = []

    def make(policy: Policy, world: int, shards: int = 1) -> tuple[Together, list[Worker]]:
        jobs.append(job := Together(policy, world, shards=shards))
        with ThreadPoolExecutor(world) as pool:
            return job, list(pool.map(functools.partial(Worker, shards=shards), job.clients))

    yield make
    for job in jobs:
        job.close()


def early(worker: Worker, gradient: torch.Tensor, job: Together) -> list[int]:
    """Push all blocks but the last of each shard, and wait until they are there; which ones."""
    held_back = set(dict(zip(worker.client.state(0).shards, range(len(worker.blocks)), strict=True)).values())
    blocks = [block for block in worker.blocks if block.index not in held_back]
    for block in blocks:
        worker.client.push_early(0, block.index, gradient[block.offset : block.offset + block.numel].clone())
    deadline_s = time.monotonic() + SOON.total_seconds()
    while arrived(job, worker.client.rank) < len(blocks) and worker.client.state(0).is_in:
        assert time.monotonic() < deadline_s, "they have not come"
        time.sleep(0.001)
    return [block.index for block in blocks]


def arrived(job: Together, rank: int) -> int:
    """Blocks of this worker that are at some shard, and in no update."""
    arrivals = [shard.model_shard(0)._scheduler._arrivals for shard in (job.shard, *job.others)]
    return sum(len(one.blocks) for at in arrivals for (worker, _), one in list(at.items()) if worker == rank)


def bring(worker: Worker, gradient: torch.Tensor, changed: Collection[int] = ()) -> ServerRequest[PulledParameters]:
    parts = [gradient[b.offset : b.offset + b.numel].clone() for b in worker.blocks]
    return worker.client.exchange(0, parts, about=worker.about(1.0), order=range(len(parts)), changed=changed)


def note_what_comes(worker: Worker) -> list[int]:
    """The blocks that come from here on, as they come."""
    came, hear = list[int](), worker.client.hear

    def listen(shard: int, message: ToWorker) -> None:
        if isinstance(message, PullBlock):
            came.append(message.block)
        hear(shard, message)

    worker.client.hear = listen  # type: ignore[method-assign]
    return came


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("policy", [BSP(), ASP()], ids=str)
def test_each_block_is_pushed_once_and_counts_once(
    team: Callable[..., tuple[Together, list[Worker]]], policy: Policy, shards: int
) -> None:
    job, (worker,) = team(policy, 1, shards)
    beginning = worker.values.clone()
    for step in range(1, 4):
        before, gradient = worker.values.clone(), torch.full((100,), float(step))
        assert early(worker, gradient, job)
        assert torch.equal(worker.values, before), "nothing comes of it yet"
        assert all(shard.model_shard(0).version == step - 1 for shard in (job.shard, *job.others))
        assert bring(worker, gradient).wait(SOON)
    ends = [end for end in (*job.ends, *job.other_ends) if end.rank == 0]
    assert sum(end.took["PushBlock"] for end in ends) == 3 * len(worker.blocks)
    velocity, moved = 0.0, 0.0
    for step in range(1, 4):
        velocity = 0.5 * velocity + step
        moved += 0.5 * velocity
    assert torch.allclose(worker.values, beginning - moved)


@pytest.mark.parametrize("shards", [1, 2])
def test_what_has_changed_since_counts_as_it_is_announced(
    team: Callable[..., tuple[Together, list[Worker]]], shards: int
) -> None:
    job, workers = team(BSP(), 2, shards)
    before = workers[0].values.clone()
    first, second = torch.full((100,), 1000.0), torch.ones(100)
    pushed = early(workers[0], first, job)
    requests = [bring(workers[0], second, changed=pushed), bring(workers[1], second)]
    assert all(request.wait(SOON) for request in requests)
    for worker in workers:
        assert torch.allclose(worker.values, before - 0.5)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("policy", [BSP(), ASP()], ids=str)
def test_who_dies_before_it_announces_leaves_nothing_behind(
    team: Callable[..., tuple[Together, list[Worker]]], policy: Policy, shards: int
) -> None:
    job, (left, lost) = team(policy, 2, shards)
    before = left.values.clone()
    assert early(lost, torch.full((100,), 1000.0), job)
    request = bring(left, torch.ones(100)) if policy == BSP() else None
    job.kill(1)
    request = request or bring(left, torch.ones(100))
    assert request.wait(SOON)
    moved = (before - left.values).unique()
    assert len(moved) == 1 or torch.allclose(moved, moved[:1])
    assert float(moved[0]) <= 0.5 + 1e-6
    deadline_s = time.monotonic() + SOON.total_seconds()
    while arrived(job, 1):  # another shard hears of it a little later
        assert time.monotonic() < deadline_s, "something is left"
        time.sleep(0.001)
    look = left.client.look()
    assert look.wait(SOON)
    assert [(one.applied, one.lost) for one in look.value[0].workers] == [(1, 0), (0, 0)], "nobody had heard of it"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("policy", [BSP(), RoundRobin(), RoundRobin(strict=True)], ids=str)
def test_who_asks_something_meanwhile_pushes_again_what_is_forgotten(
    team: Callable[..., tuple[Together, list[Worker]]], policy: Policy, shards: int
) -> None:
    """On a shard that coordinates a worker that asks steps out with all that it has begun; on others it does not."""
    job, (worker,) = team(policy, 1, shards)
    assert bring(worker, torch.zeros(100)).wait(SOON)
    before = worker.values.clone()
    for _ in range(2):
        early(worker, torch.ones(100), job)
        asked = worker.client.ask("the mean", (1.0,))
        assert asked.wait(SOON)
        assert bring(worker, torch.ones(100)).wait(SOON)
        assert bring(worker, torch.zeros(100)).wait(SOON), "and is granted early again from here on"
    assert torch.allclose(worker.values, before - 0.5 - 0.25 - 0.625 - 0.3125)


@pytest.mark.parametrize("policy", [RoundRobin(), KSync(1)], ids=str)
def test_who_waits_for_a_grant_pushes_nothing_before(
    team: Callable[..., tuple[Together, list[Worker]]], policy: Policy
) -> None:
    job, (worker,) = team(policy, 1)
    before = worker.values.clone()
    for block in worker.blocks[:-1]:
        worker.client.push_early(0, block.index, torch.full((block.numel,), 1000.0))
    assert bring(worker, torch.ones(100)).wait(SOON)
    assert job.ends[0].took["PushBlock"] == len(worker.blocks)
    assert torch.allclose(worker.values, before - 0.5), "nothing is left of what was not pushed"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("policy", [RoundRobin(), RoundRobin(strict=True)], ids=str)
def test_whose_turn_has_come_pushes_while_it_computes(
    team: Callable[..., tuple[Together, list[Worker]]], policy: Policy, shards: int
) -> None:
    job, workers = team(policy, 2, shards)
    requests = [bring(worker, torch.zeros(100)) for worker in workers]
    assert all(request.wait(SOON) for request in requests)
    before = workers[1].values.clone()
    for _ in range(3):
        for worker in workers:  # the other computes, and its turn comes behind this one's
            assert early(worker, torch.ones(100), job)
            assert bring(worker, torch.ones(100)).wait(SOON)
    ends = [*job.ends, *job.other_ends]
    assert sum(end.took["PushBlock"] for end in ends) == (1 + 3) * 2 * len(workers[0].blocks)
    velocity, moved = 0.0, 0.0
    for _ in range(3 * 2):
        velocity = 0.5 * velocity + 1.0
        moved += 0.5 * 0.5 * velocity  # each is half of a round
    assert torch.allclose(workers[1].values, before - moved)
    look = workers[0].client.look()
    assert look.wait(SOON)
    assert [(one.applied, one.lost) for one in look.value[0].workers] == [(4, 0), (4, 0)]


@pytest.mark.parametrize("shards", [1, 2])
def test_blocks_come_back_in_the_order_that_each_worker_wants(
    team: Callable[..., tuple[Together, list[Worker]]], shards: int
) -> None:
    job, workers = team(BSP(), 2, shards)
    indices = range(len(workers[0].blocks))
    orders = [[*indices], [*indices[1::2], *indices[::2]]]
    came = [note_what_comes(worker) for worker in workers]
    for worker, order in zip(workers, orders, strict=True):
        worker.client.pull_in_order(0, order)
    for _ in range(2):
        pushed = [early(worker, torch.ones(100), job) for worker in workers]
        requests = [bring(worker, torch.ones(100)) for worker in workers]
        assert all(request.wait(SOON) for request in requests)
        for one, order in zip(came, orders, strict=True):
            assert sorted(one) == [*indices]
            for shard in range(shards):  # but for the last block of each, which is not there when the others are due
                mine = [block for block in pushed[0] if workers[0].client.state(0).shards[block] == shard]
                assert [block for block in one if block in mine] == [block for block in order if block in mine]
            one.clear()


# -- at a shard --------------------------------------------------------------------------------------------------------


def test_a_block_that_comes_again_takes_the_place_of_the_first() -> None:
    one = scheduler(workers=[0])
    one.arrive((0, 0), 0, "old")
    assert not one.expects((0, 0), 0)
    assert one.expects((0, 0), 0, again=True)
    assert one.arrive((0, 0), 0, "new", again=True) == 1, "it is still one block"
    assert not one.expects((0, 0), 0, again=True), "but once"
    one.arrive((0, 0), 1, "last")
    one.apply(Apply(((0, 0),)), ABOUT, {(0, 0): {0}})
    assert [part for action in one.due() for _, part in action.parts] == ["new", "last"]  # type: ignore[union-attr]


def test_no_update_is_made_of_what_is_to_come_again() -> None:
    """Word of the announcement may be quicker than what the worker pushes again."""
    one = scheduler(workers=[0])
    one.arrive((0, 0), 0, "old")
    one.apply(Apply(((0, 0),)), ABOUT, {(0, 0): {0}})
    assert made(one) == []
    one.arrive((0, 0), 0, "new", again=True)
    assert made(one) == [(0, 1, [(0, 0)])]


def test_what_comes_again_may_be_the_first_that_a_shard_has() -> None:
    one = scheduler(workers=[0])
    one.apply(Apply(((0, 0),)), ABOUT, {(0, 0): {0}})
    assert one.arrive((0, 0), 0, "new", again=True) == 1
    assert made(one) == [(0, 1, [(0, 0)])]


def test_who_says_that_a_block_comes_again_and_does_not_bring_it_holds_nobody_up() -> None:
    one = scheduler(workers=[0])
    one.arrive((0, 0), 0, "old")
    one.arrive((0, 0), 1, "last")
    one.apply(Apply(((0, 0),)), ABOUT, {(0, 0): {0}})
    assert made(one) == [(0, 1, [(0, 0)]), (1, 1, [(0, 0)])]


def test_what_was_pushed_of_a_contribution_that_is_dropped_is_forgotten() -> None:
    one = scheduler(workers=[0])
    one.arrive((0, 0), 0, "early")
    one.drop((0, 0), coming=False)
    assert not one._arrivals
    assert one.next(0) == 1
