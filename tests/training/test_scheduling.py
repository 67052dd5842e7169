"""Steps that are hidden behind the next one, in loops that do more than step."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.errors import PlanError
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from offbeat.codec import Codec
    from offbeat.fabric import FabricSpec
    from offbeat.plan import Nonfinite
    from offbeat.scheduling import Scheduler

STEPS = 14  # of which seven are learnt from


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(16, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def is_ahead(run: offbeat.Run) -> bool:
    return run._session.models.synchronizers[0]._gradients.is_ahead  # type: ignore[attr-defined, no-any-return]


IN_TWO_ROUNDS = offbeat.ReduceScatterGather(bucket_bytes=400)


def plan(fabric: str, scheduling: Scheduler | None = offbeat.Priority(slice_bytes=400)) -> offbeat.Plan:  # noqa: B008
    made = offbeat.ProcessGroup() if fabric == "group" else offbeat.Elastic()
    return offbeat.Plan(fabric=made, scheduling=scheduling)


def asked_between(fabric: str, scheduling: Scheduler | None) -> list[float]:
    """The parameters of a loop that asks all others behind each step, and once leaves out a backward."""
    net = network()
    with offbeat.init(plan(fabric, scheduling)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(3 * STEPS):
            loss = replica(torch.randn(5, 16, generator=generator)).square().mean()
            if step % 10 != 9:
                loss.backward()
            optimizer.step()
            if step % 4 == 3:
                optimizer.step()  # with the same gradient
            optimizer.zero_grad()
            assert run.mean(step) == step
        assert scheduling is None or is_ahead(run)
        return [float(p.double().sum()) for p in net.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["group", "elastic"])
def test_questions_between_steps_and_steps_without_backward(fabric: str) -> None:
    waited = run_workers(2, asked_between, fabric, None)
    assert waited[0] == waited[1]
    assert waited == run_workers(2, asked_between, fabric, offbeat.Priority(slice_bytes=400))
    assert waited == run_workers(2, asked_between, fabric, IN_TWO_ROUNDS)


def trained(fabric: str, codec: Codec) -> tuple[list[torch.Tensor], bool, int]:
    """The weights after some steps in two rounds, whether each has landed behind the next one, and rounds of a step."""
    net = network()
    with offbeat.init(dataclasses.replace(plan(fabric, IN_TWO_ROUNDS), codec=codec)) as run:
        replica, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(run.rank)
        for _ in range(2 * STEPS):
            x, y = torch.randn(5, 16, generator=generator), torch.randint(0, 3, (5,), generator=generator)
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        (state,) = run.state_dict()["models"]
        return list(net.state_dict().values()), is_ahead(run), len(state["schedule"]["after"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fabric", "codec"), [("group", offbeat.Dense()), ("elastic", offbeat.Dense()), ("group", offbeat.Cast("bf16"))]
)
def test_three_workers_have_the_same_bits_by_sums_in_two_rounds(fabric: str, codec: Codec) -> None:
    first, *others = run_workers(3, trained, fabric, codec)
    weights, hides, operations = first
    assert hides
    assert operations > 4
    assert operations % 2 == 0
    for other in others:
        assert all(map(torch.equal, weights, other[0]))
        assert other[1:] == (hides, operations)


@pytest.mark.parametrize("fabric", [offbeat.Switch(), offbeat.ParameterServer()])
def test_what_cannot_reduce_and_gather_apart_is_refused_with_the_plan(fabric: FabricSpec) -> None:
    with pytest.raises(PlanError, match=r"use ProcessGroup.. or Elastic"):
        offbeat.Plan(fabric=fabric, scheduling=offbeat.ReduceScatterGather())
    with pytest.raises(PlanError, match="a block holds at least one byte"):
        offbeat.ReduceScatterGather(bucket_bytes=0)


def at_barrier(nonfinite: Nonfinite, codec: Codec, hides: bool) -> tuple[list[torch.Tensor], bool, list[str]]:
    """The parameters of a loop in which a worker once has NaN, if that is skipped; was it ahead? What did it say?"""
    said, net = listen(), network()
    made = plan("group", IN_TWO_ROUNDS if hides else None)
    with offbeat.init(dataclasses.replace(made, nonfinite=nonfinite, codec=codec)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(2 * STEPS):
            loss = replica(torch.randn(5, 16, generator=generator)).square().mean()
            breaks = nonfinite == "skip" and step == STEPS and run.rank == 1
            (loss * torch.nan if breaks else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(net.state_dict().values()), hides and is_ahead(run), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nonfinite", "codec", "why"),
    [
        ("skip", offbeat.Dense(), "with nonfinite='skip' no parameter is stepped before"),
        ("raise", offbeat.Dense(), "with nonfinite='raise' no parameter is stepped before"),
        ("pass", offbeat.ErrorFeedback(offbeat.Cast("bf16")), "a gradient that is cut has no residual"),
    ],
    ids=["skip", "raise", "residual"],
)
def test_a_plan_that_takes_whole_steps_stays_at_the_barrier_and_says_so_once(
    nonfinite: Nonfinite, codec: Codec, why: str
) -> None:
    usual, hidden = (run_workers(2, at_barrier, nonfinite, codec, hides) for hides in (False, True))
    for (mine, was_ahead, _), (theirs, _, _) in zip(hidden, usual, strict=True):
        assert not was_ahead
        assert all(map(torch.equal, mine, theirs))
        assert all(map(torch.equal, mine, hidden[0][0]))
    assert sum("the step is skipped" in text for text in hidden[0][2]) == (nonfinite == "skip")
    said = [text for text in hidden[0][2] if "wait for the gradients after backward" in text]
    assert len(said) == 1, said
    assert why in said[0]


def rewound() -> tuple[bool, bool, bool]:
    """Whether a run that is set back to its beginning comes to the same again, and whether it was ahead both times."""
    net = network()
    with offbeat.init(plan("group")) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3))
        start = copy.deepcopy([net.state_dict(), run.state_dict()])
        came_to, were_ahead = [], []
        for _ in range(2):
            net.load_state_dict(start[0])
            run.load_state_dict(start[1])
            generator = torch.Generator().manual_seed(run.rank)
            for _ in range(STEPS):
                x, y = torch.randn(5, 16, generator=generator), torch.randint(0, 3, (5,), generator=generator)
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            came_to.append([tensor.clone() for tensor in net.state_dict().values()])
            were_ahead.append(is_ahead(run))
        return all(map(torch.equal, *came_to)), were_ahead[0], were_ahead[1]


def test_a_run_that_is_rewound_learns_again() -> None:
    assert run_workers(2, rewound) == [(True, True, True)] * 2


class Hidden(nn.Module):
    """A model in whose answer nobody finds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def forward(self, x_BD: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inside(x_BD))


class Own(torch.optim.AdamW):
    """Nobody knows whether it steps each parameter by itself."""


def stays(how: str) -> tuple[bool, list[int], list[str]]:
    """Whether a job is ahead in the end, when it has held votes, and what was said of its schedule."""
    told: list[str] = []
    net = Hidden() if how == "hidden" else network()
    with offbeat.init(plan("group")) as run:
        run._session.context.metrics.event = lambda what, text, step, **rest: told.append(text)  # type: ignore[method-assign]
        held, hold_vote = list[int](), run._session.plans.hold_vote

        def count() -> None:
            held.append(run.step)
            hold_vote()

        run._session.plans.hold_vote = count  # type: ignore[method-assign]
        replica, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(run.rank)
        for _ in range(3 * STEPS):
            x, y = torch.randn(5, 16, generator=generator), torch.randint(0, 3, (5,), generator=generator)
            answer = replica(x)
            F.cross_entropy(answer.logits if how == "hidden" else answer, y).backward()
            if how == "clips":
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if how == "looks":
                assert next(net.parameters()).grad.norm() >= 0  # type: ignore[union-attr]
            optimizer.zero_grad()
        return is_ahead(run), held, [text for text in told if "wait for the gradients after backward" in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("hidden", "no backward was seen to begin"),
        ("clips", "gradients are used in each step"),
        ("looks", "gradients are used in each step"),
    ],
)
def test_who_cannot_be_ahead_goes_back_to_the_barrier_and_says_why_once(how: str, why: str) -> None:
    for hides, held, told in run_workers(2, stays, how):
        assert not hides
        assert bool(held) == (how != "hidden")
        assert all(later - sooner > 1 for sooner, later in itertools.pairwise(held)), "the same vote was held twice"
        (text,) = told
        assert why in text


def resumed(how: str) -> tuple[bool, bool, list[str]]:
    """Whether a job is ahead before its state is taken, and after another has gone on with it; what that one said."""
    states: list[Any] = []
    told: list[str] = []
    were_ahead = []
    for kind in (torch.optim.AdamW, Own if how == "own" else torch.optim.AdamW):
        net = network()
        with offbeat.init(plan("group")) as run:
            replica, optimizer = run.prepare(net, kind(net.parameters(), lr=0.01))
            if states:
                run._session.context.metrics.event = lambda what, text, step, **rest: told.append(text)  # type: ignore[method-assign]
                net.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
                run.load_state_dict(states[2])
            for _ in range(2 * STEPS):
                F.cross_entropy(replica(torch.ones(5, 16)), torch.zeros(5, dtype=torch.long)).backward()
                if how == "clips":
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            were_ahead.append(is_ahead(run))
            states = [copy.deepcopy(one.state_dict()) for one in (net, optimizer, run)]
    return were_ahead[0], were_ahead[1], [text for text in told if "wait for the gradients after backward" in text]


def test_who_is_back_at_the_barrier_stays_there_when_it_is_resumed() -> None:
    assert run_workers(2, resumed, "clips") == [(False, False, [])] * 2


@pytest.mark.slow
def test_a_schedule_from_a_checkpoint_is_gone_by_if_the_optimizer_allows_that() -> None:
    for before, after, told in run_workers(2, resumed, "own"):
        assert before
        assert not after
        assert "Own is not known to step each parameter by itself" in told[0]
