"""Law 5: a run that goes on from a checkpoint is the one that was never stopped, bit for bit, with any number of
workers.

From three workers on the order in which numbers are added depends on where they lie in a bucket, so that what the first
backward has learnt of the order of gradients belongs to a checkpoint as well.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from tests.resume_check import is_the_same_when_resumed
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.fabric import FabricSpec
    from offbeat.scheduling import Scheduler


class OutOfOrder(nn.Module):
    """Registers its layers in another order than it uses them in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(24, 3)
        self.second = nn.Linear(40, 24)
        self.first = nn.Linear(16, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        answer: torch.Tensor = self.last(hidden)
        return answer


def out_of_order() -> nn.Module:
    torch.manual_seed(3)
    return OutOfOrder()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def batches(rank: int) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(5, 16, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(12)
    ]


def goes_on(plan: str) -> bool:
    plans = {
        "all-reduce": offbeat.Plan(bucket_bytes=2048),
        "elastic": offbeat.Plan(bucket_bytes=2048, fabric=offbeat.Elastic()),
        "local": offbeat.Plan(bucket_bytes=2048, sync=offbeat.LocalSGD(3)),
    }
    return is_the_same_when_resumed(plans[plan], out_of_order, sgd, batches, 4)


def goes_on_ahead(scheduling: Scheduler, fabric: FabricSpec) -> bool:
    """The whole run goes by the schedule that the other one has in its checkpoint, as it was learnt before that."""
    plan = offbeat.Plan(bucket_bytes=2048, scheduling=scheduling, fabric=fabric)
    return is_the_same_when_resumed(plan, out_of_order, sgd, batches, 10, begun=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "scheduling", "fabric"),
    [
        (2, offbeat.Priority(1000), offbeat.ProcessGroup()),
        (3, offbeat.Priority(1000), offbeat.ProcessGroup()),
        (3, offbeat.ReduceScatterGather(1000), offbeat.ProcessGroup()),
        (3, offbeat.ReduceScatterGather(1000), offbeat.Elastic()),
    ],
)
def test_a_run_that_hides_steps_behind_the_next_one(world: int, scheduling: Scheduler, fabric: FabricSpec) -> None:
    """Of sums in two rounds those are, too, in which the steps behind the checkpoint are a barrier."""
    assert run_workers(world, goes_on_ahead, scheduling, fabric) == [True] * world


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (3, "all-reduce"),
        (4, "all-reduce"),
        (3, "elastic"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((4, "elastic"), (3, "local"), (4, "local"))),
    ],
)
def test_gradients_that_arrive_out_of_order(world: int, plan: str) -> None:
    assert run_workers(world, goes_on, plan) == [True] * world


def rewound() -> tuple[bool, int]:
    """Whether a run that loads what it had before its first step, and trains again, comes to the same; its version."""
    net = out_of_order()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    with offbeat.init(offbeat.Plan(bucket_bytes=2048)) as run:
        replica, optimizer = run.prepare(net, optimizer)
        start = copy.deepcopy([net.state_dict(), run.state_dict()])
        came_to = []
        for _ in range(2):
            net.load_state_dict(start[0])
            run.load_state_dict(start[1])
            for x, y in batches(run.rank)[:4]:
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            came_to.append([tensor.clone() for tensor in net.state_dict().values()])
        return all(map(torch.equal, *came_to)), run.state_dict()["models"][0]["layout"]["version"]


def test_a_run_that_is_rewound_learns_the_order_again() -> None:
    assert run_workers(3, rewound) == [(True, 1)] * 3


def step_on(state: Any, bucket_bytes: int) -> tuple[Any, list[list[str]]]:
    """Go on from a state, or from none; the state after three steps, and what lies in which bucket then."""
    with offbeat.init(offbeat.Plan(bucket_bytes=bucket_bytes)) as run:
        net = out_of_order()
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3))
        if state is not None:
            run.load_state_dict(state)
        for x, y in batches(run.rank)[:3]:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        layout = run._session.models.synchronizers[0].layout
        return run.state_dict(), [[slot.name for slot in bucket.slots] for bucket in layout.buckets]


ARRIVE = ["last.bias", "last.weight", "second.bias", "second.weight", "first.bias", "first.weight"]


def test_the_order_carries_over_to_other_workers_and_other_buckets() -> None:
    state, _ = run_workers(3, step_on, None, 2048)[0]
    assert state["models"][0]["layout"]["order"] == ARRIVE
    for _, buckets in run_workers(2, step_on, state, 1 << 20):
        assert buckets == [ARRIVE]


def test_a_checkpoint_of_before_the_order_was_kept_is_gone_on_from() -> None:
    state, _ = run_workers(2, step_on, None, 2048)[0]
    del state["models"][0]["layout"]
    for after, buckets in run_workers(2, step_on, state, 2048):
        assert after["models"][0]["step"] == 6
        assert [name for bucket in buckets for name in bucket] == ARRIVE, "it is learnt again"


def test_the_order_of_other_parameters_is_learnt_again() -> None:
    """As where some of the model is frozen since."""
    state, _ = step_on(None, 2048)
    state["models"][0]["layout"]["order"].remove("last.bias")
    assert step_on(state, 2048)[0]["models"][0]["layout"]["order"] == ARRIVE
