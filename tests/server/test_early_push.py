"""Blocks that are pushed before their contribution is announced: nothing comes of them before, and all of them then."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.sync import ASP, BSP, Apply, KSync, RoundRobin
from tests.server.in_process import Together
from tests.server.test_shard import SOON, Worker
from tests.server.test_update_scheduler import ABOUT, made, scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

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
    return worker.client.exchange(0, parts, about=worker.about(1.0), changed=changed)


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
def test_who_asks_something_meanwhile_pushes_again_what_is_forgotten(
    team: Callable[..., tuple[Together, list[Worker]]], shards: int
) -> None:
    """On a shard that coordinates a worker that asks steps out with all that it has begun; on others it does not."""
    job, (worker,) = team(BSP(), 1, shards)
    before = worker.values.clone()
    for _ in range(2):
        early(worker, torch.ones(100), job)
        asked = worker.client.ask("the mean", (1.0,))
        assert asked.wait(SOON)
        assert bring(worker, torch.ones(100)).wait(SOON)
    assert torch.allclose(worker.values, before - 0.5 - 0.75)


@pytest.mark.parametrize("policy", [RoundRobin(), KSync(1)], ids=str)
def test_who_waits_for_a_grant_pushes_nothing_before(
    team: Callable[..., tuple[Together, list[Worker]]], policy: Policy
) -> None:
    job, (worker,) = team(policy, 1)
    for block in worker.blocks[:-1]:
        worker.client.push_early(0, block.index, torch.ones(block.numel))
    assert bring(worker, torch.ones(100)).wait(SOON)
    assert job.ends[0].took["PushBlock"] == len(worker.blocks)


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


def test_what_was_pushed_of_a_contribution_that_is_dropped_is_forgotten() -> None:
    one = scheduler(workers=[0])
    one.arrive((0, 0), 0, "early")
    one.drop((0, 0), coming=False)
    assert not one._arrivals
    assert one.next(0) == 1
