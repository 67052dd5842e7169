"""Every codec where it is used: real workers, several buckets, checkpoints, and workers with less data."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat import (
    GRBS,
    QSGD,
    Elastic,
    ErrorFeedback,
    ErrorReset,
    FixedPoint,
    LocalSGD,
    Plan,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)
from offbeat.engine.communicator import Communicator
from tests.resume_check import is_the_same_when_resumed
from tests.workers import run_workers

if TYPE_CHECKING:
    from offbeat.codec import Codec

WORLD, STEPS = 3, 8
CODECS: list[Codec] = [
    QSGD(8),
    QSGD(4, is_random=False),
    Sign(),
    Sign(vote=True),
    TopK(0.2),
    RandomK(0.3),
    RandomK(0.3, "private", is_unbiased=True),
    GRBS(4, 4),
    PowerSGD(2),
    FixedPoint(8),
    FixedPoint(32),
    ErrorFeedback(TopK(0.1)),
    ErrorFeedback(GRBS(8, 4)),
    ErrorFeedback(PowerSGD(1)),
    ErrorFeedback(Sign()),
]
BUCKET_BYTES = 64  # several buckets


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(STEPS)
    ]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def train(plan: Plan, batches_less: int = 0) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The parameters in the end, and the losses; the last worker may have fewer batches."""
    net, rank, losses = model(), int(os.environ["RANK"]), []
    data = batches(rank)[: STEPS - batches_less * (rank == WORLD - 1)]
    with offbeat.init(plan, seed=3) as run:
        replica, optimizer, loader = run.prepare(net, optimizer_of(net), data)
        for x, y in loader:
            loss = F.cross_entropy(replica(x), y)
            losses.append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
    return dict(net.state_dict()), losses


def train_each(plans: list[Plan]) -> list[dict[str, torch.Tensor]]:
    """One after the other in the same processes, which take longer to start than to train."""
    return [train(plan)[0] for plan in plans]


@pytest.mark.slow
def test_replicas_stay_equal_and_learn() -> None:
    plans = [Plan(codec=codec, bucket_bytes=BUCKET_BYTES) for codec in CODECS]
    elastic: list[Codec] = [QSGD(8), FixedPoint(8), GRBS(4, 4)]
    plans += [Plan(codec=codec, bucket_bytes=BUCKET_BYTES, fabric=Elastic()) for codec in elastic]
    wrapped: list[Codec] = [ErrorFeedback(GRBS(4, 4)), ErrorFeedback(PowerSGD(2)), TopK(0.2)]
    plans += [Plan(sync=LocalSGD(2), codec=codec, bucket_bytes=BUCKET_BYTES) for codec in wrapped]
    start = dict(model().state_dict())
    for plan, *states in zip(plans, *run_workers(WORLD, train_each, plans, timeout_s=100), strict=True):
        for state in states:
            for name, tensor in state.items():
                assert torch.equal(tensor, states[0][name]), (plan, name)
                assert bool(torch.isfinite(tensor).all()), (plan, name)
        assert all(not torch.equal(states[0][name], start[name]) for name in start if "weight" in name), plan


@pytest.mark.slow
@pytest.mark.parametrize("codec", [ErrorFeedback(GRBS(4, 4)), ErrorFeedback(TopK(0.2)), QSGD(8)], ids=repr)
def test_a_worker_that_has_less_data_contributes_nothing_then(codec: Any) -> None:
    results = run_workers(WORLD, train, Plan(codec=codec, bucket_bytes=BUCKET_BYTES), 3)
    for state, _ in results:
        assert all(torch.equal(tensor, results[0][0][name]) for name, tensor in state.items())
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


def interrupted(codecs: list[Any], stop: int) -> list[bool]:
    plans = [Plan(codec=codec, bucket_bytes=BUCKET_BYTES) for codec in codecs]
    return [is_the_same_when_resumed(plan, model, optimizer_of, batches, stop, begun=1) for plan in plans]


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    codecs = [GRBS(4, 4), QSGD(4), ErrorFeedback(GRBS(8, 4)), ErrorFeedback(PowerSGD(2)), ErrorFeedback(Sign())]
    assert run_workers(WORLD, interrupted, codecs, 4, timeout_s=100) == [[True] * len(codecs)] * WORLD


def order() -> list[str]:
    """What is begun and waited for in the second of two steps of a codec of two rounds, over several buckets."""
    told: list[str] = []
    start, wait = Communicator.start, Communicator.wait_for_bucket

    def starting(self: Communicator, payload: Any) -> Any:
        told.append("start")
        return start(self, payload)

    def waiting(self: Communicator, pending: Any, bucket: Any) -> Any:
        told.append(f"wait {bucket.index}")
        return wait(self, pending, bucket)

    net = model()
    with offbeat.init(Plan(codec=PowerSGD(1), bucket_bytes=BUCKET_BYTES)) as run:
        replica, optimizer = run.prepare(net, optimizer_of(net))
        for step, (x, y) in enumerate(batches(run.rank)[:2]):
            if step == 1:
                Communicator.start, Communicator.wait_for_bucket = starting, waiting  # type: ignore[method-assign]
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        Communicator.start, Communicator.wait_for_bucket = start, wait  # type: ignore[method-assign]
        buckets = len(run._session.models.synchronizers[0].layout.buckets)
        assert buckets > 2
        return [str(buckets), *told]


def test_later_rounds_of_all_buckets_are_on_their_way_together() -> None:
    (count, *told), *others = run_workers(2, order)
    buckets = int(count)
    assert all(other == [count, *told] for other in others)
    second_waits = [index for index, one in enumerate(told) if one.startswith("wait")][buckets:]
    assert second_waits, "there is a second round"
    assert "start" not in told[second_waits[0] :], "all second rounds are begun before one is waited for"


def come(codec: Any) -> tuple[dict[int, float], dict[int, int]]:
    """Two train, and a third joins: from then on it has to send the same blocks as they do.

    Returns:
        A sum over what all have in common behind each step, and how many workers there were then.
    """
    net = model()
    sums, members_at = {}, {}
    with offbeat.init(Plan(codec=codec, bucket_bytes=BUCKET_BYTES, fabric=Elastic())) as run:
        replica, optimizer = run.prepare(net, optimizer_of(net))
        group = run._session.context.group
        assert group is not None
        since = 0
        while since < 8:
            x, y = batches(run.rank)[run.step % STEPS]
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            in_common = run._session.models.synchronizers[0].history_values
            sums[run.step] = sum(float(tensor.detach().double().sum()) for tensor in in_common.values())
            members_at[run.step] = len(group.members)
            since += len(group.members) == 3
    return sums, members_at


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [ErrorFeedback(GRBS(4, 4)), ErrorFeedback(TopK(0.2)), ErrorReset(GRBS(2, 4), step=GRBS(4, 4), every=3)],
    ids=repr,
)
def test_who_joins_sends_what_the_others_send(codec: Any) -> None:
    (first, members), *others = run_workers(2, come, codec, newcomers=1, timeout_s=100)
    together = [step for step, count in members.items() if count == 3 and all(step in sums for sums, _ in others)]
    assert len(together) >= 6
    for sums, _ in others:
        assert [sums[step] for step in together] == [first[step] for step in together]
