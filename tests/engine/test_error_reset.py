"""Error reset, against a simulation of all workers in one process: algorithm 2 of the paper, word for word."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat import BSP, GRBS, Cast, Dense, Elastic, ErrorFeedback, ErrorReset, LocalSGD, OuterSGD, Plan, TopK
from offbeat.codec import OneRoundCodec, Turn
from offbeat.errors import PlanError
from offbeat.layout import arrange_fragments
from tests.resume_check import is_the_same_when_resumed
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.codec import Purpose

WORLD, STEPS, SEED = 3, 9, 11
PLANS = {
    "explicit": Plan(codec=ErrorReset(GRBS(2, 4), step=GRBS(4, 4), every=3, variant="explicit")),
    "block average": Plan(codec=ErrorReset(GRBS(2, 4), step=GRBS(4, 4), every=3)),
    "private": Plan(codec=ErrorReset(TopK(0.5), step=TopK(0.2), every=4, variant="explicit")),
    "partial local SGD": Plan(sync=LocalSGD(3), codec=ErrorReset(GRBS(2, 4))),
    "the same": Plan(codec=ErrorReset(GRBS(2, 4), every=3)),
    "error assimilation": Plan(codec=ErrorReset(GRBS(2, 4), every=1)),
    "late": Plan(sync=LocalSGD(2, after=3), codec=ErrorReset(GRBS(2, 4))),
    "local SGD": Plan(codec=ErrorReset(Dense(), every=3)),
    "synchronous SGD": Plan(codec=ErrorReset(Dense(), step=Dense(), every=3, variant="explicit")),
}


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(rank: int, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [
        (torch.randn(4, 6, generator=generator).double(), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(steps)
    ]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8, nesterov=True)


def flat(net: nn.Module) -> torch.Tensor:
    """The parameters, in the order of the bucket [D]."""
    ((bucket,),) = arrange_fragments(dict(net.named_parameters()), 1, bucket_bytes=25 << 20)
    return torch.cat([net.get_parameter(slot.name).detach().reshape(-1) for slot in bucket.slots])


def put(net: nn.Module, values: torch.Tensor) -> None:
    ((bucket,),) = arrange_fragments(dict(net.named_parameters()), 1, bucket_bytes=25 << 20)
    for slot in bucket.slots:
        parameter = net.get_parameter(slot.name)
        parameter.data.copy_(values[slot.offset : slot.offset + slot.numel].view_as(parameter))


def simulate(plan: Plan, steps: int = STEPS) -> tuple[list[torch.Tensor], torch.Tensor]:
    """All workers in one loop. What each has in the end, and the consensus x - e that all have in common."""
    codec = plan.codec
    assert isinstance(codec, ErrorReset)
    nets = [model() for _ in range(WORLD)]
    optimizers = [optimizer_of(net) for net in nets]
    data = [batches(rank, steps) for rank in range(WORLD)]
    ((bucket,),) = arrange_fragments(dict(nets[0].named_parameters()), 1, bucket_bytes=25 << 20)
    errors = [torch.zeros(bucket.numel, dtype=torch.float64) for _ in nets]

    def sent_of(one: OneRoundCodec, values: torch.Tensor, step: int, rank: int, purpose: Purpose) -> torch.Tensor:
        turn = Turn(bucket, step, rank, WORLD, SEED, purpose)
        out = torch.empty_like(values)
        return one.decode([t.clone() for t in one.encode(values.clone(), turn)], turn, out).clone()

    for step in range(steps):
        before = [flat(net) for net in nets]
        for net, (x, y) in zip(nets, [data[rank][step] for rank in range(WORLD)], strict=True):
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
        policy = plan.local_policy
        assert isinstance(policy, LocalSGD)
        if step < policy.after:
            for ps in zip(*(net.parameters() for net in nets), strict=True):
                mean = torch.stack([p.grad for p in ps if p.grad is not None]).mean(0)
                for p in ps:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step < policy.after:
            continue
        after = [flat(net) for net in nets]
        every = codec.every or policy.every
        is_reset = (step - policy.after + 1) % every == 0
        # p_i with the sign of what is added to x; then (p', r) = PSync(p; C2): x += p', e += r.
        steps_of = [b - a for a, b in zip(before, after, strict=True)]
        if codec.step is not None and codec.variant == "explicit":
            assert isinstance(codec.step, OneRoundCodec)
            sent = [sent_of(codec.step, p, step, rank, "change") for rank, p in enumerate(steps_of)]
            mean = torch.stack(sent).mean(0)
            left = [p - c for p, c in zip(steps_of, sent, strict=True)]
            xs = [b + mean + r for b, r in zip(before, left, strict=True)]
            errors = [e + r for e, r in zip(errors, left, strict=True)]
        else:
            xs = after
            errors = [e + p for e, p in zip(errors, steps_of, strict=True)]
        block = codec.step if codec.variant == "block_average" else None
        if is_reset or block is not None:
            one = codec.reset if is_reset else block
            assert isinstance(one, OneRoundCodec)
            sent = [sent_of(one, e, step, rank, "reset") for rank, e in enumerate(errors)]
            mean = torch.stack(sent).mean(0)
            xs = [x - c + mean for x, c in zip(xs, sent, strict=True)]
            errors = [e - c for e, c in zip(errors, sent, strict=True)]
        for net, x in zip(nets, xs, strict=True):
            put(net, x)
    in_common = [flat(net) - e for net, e in zip(nets, errors, strict=True)]
    for other in in_common[1:]:
        torch.testing.assert_close(other, in_common[0], rtol=1e-12, atol=1e-12)
    return [flat(net) for net in nets], in_common[0]


Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def train(name: str, steps: int = STEPS) -> Result:
    """Own parameters, consensus, the mean that is shown, own parameters behind that, and those once all are settled."""
    net = model()
    with offbeat.init(PLANS[name], seed=SEED) as run:
        replica, optimizer, loader = run.prepare(net, optimizer_of(net), batches(int(os.environ["RANK"]), steps))
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = flat(net)
        anchored = copy.deepcopy(net)
        anchored.load_state_dict({**net.state_dict(), **run._session.models.synchronizers[0].anchors})
        with run.averaged():
            shown = flat(net)
        behind = flat(net)
        run.settle()
        return before, flat(anchored), shown, behind, flat(net)


def train_each() -> dict[str, Result]:
    """One after the other in the same processes, which take longer to start than to train."""
    return {name: train(name) for name in PLANS}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Result]]:
    return run_workers(WORLD, train_each, timeout_s=100)


@pytest.mark.parametrize("name", PLANS)
def test_error_reset(name: str, trained: list[dict[str, Result]]) -> None:
    expected, in_common = simulate(PLANS[name])
    results = [one[name] for one in trained]
    mean = torch.stack(expected).mean(0)
    for (own, consensus, shown, behind, settled), simulated in zip(results, expected, strict=True):
        torch.testing.assert_close(own, simulated, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(consensus, in_common, rtol=1e-10, atol=1e-12)
        assert torch.equal(consensus, results[0][1]), "the consensus has the same bits on all workers"
        torch.testing.assert_close(shown, mean, rtol=1e-10, atol=1e-12)
        assert torch.equal(own, behind), "each has its own again"
        torch.testing.assert_close(settled, mean, rtol=1e-10, atol=1e-12)
        assert torch.equal(settled, results[0][4]), "equal on all, to the bit, after settle"


def test_replicas_part_only_where_something_is_not_sent() -> None:
    assert not torch.equal(*simulate(PLANS["explicit"])[0][:2])
    synchronous, _ = simulate(PLANS["synchronous SGD"])
    torch.testing.assert_close(synchronous[0], synchronous[1], rtol=1e-12, atol=1e-12)


def plain(plan: Plan) -> torch.Tensor:
    net = model()
    with offbeat.init(plan, seed=SEED) as run:
        replica, optimizer, loader = run.prepare(net, optimizer_of(net), batches(int(os.environ["RANK"])))
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
    return flat(net)


@pytest.mark.parametrize(
    ("name", "plan"), [("synchronous SGD", Plan()), ("local SGD", Plan(sync=LocalSGD(3)))], ids=["BSP", "LocalSGD"]
)
def test_two_of_its_special_cases_are_other_plans(name: str, plan: Plan, trained: list[dict[str, Result]]) -> None:
    results = [one[name] for one in trained]
    for (*_, settled), other in zip(results, run_workers(WORLD, plain, plan), strict=True):
        torch.testing.assert_close(settled, other, rtol=1e-12, atol=1e-12)


def long(name: str, steps: int) -> tuple[torch.Tensor, float]:
    """The consensus after many steps, and how far this worker's own parameters are from it."""
    own, consensus, *_ = train(name, steps)
    return consensus, float((own - consensus).norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["explicit", "block average"])
def test_the_consensus_is_the_same_on_all_after_5000_steps(name: str) -> None:
    results = run_workers(WORLD, long, name, 5000, timeout_s=400)
    assert all(torch.equal(consensus, results[0][0]) for consensus, _ in results)
    assert all(0 < apart < 1 for _, apart in results)


def sent_bytes(plan: Plan, steps: int) -> float:
    """The bytes that a worker sends in a step."""
    net = nn.Linear(400, 250)
    with offbeat.init(plan) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(steps):
            replica(torch.ones(1, 400)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return run._session.context.metrics.total_sent_bytes / steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "ratio"),
    [
        (ErrorReset(GRBS(4, 64), step=GRBS(16, 64), every=4, variant="explicit"), 1 / (1 / 16 + 1 / (4 * 4))),
        (ErrorReset(GRBS(4, 64), step=GRBS(16, 64), every=4), 4 / (3 / 16 + 1 / 4)),
        (ErrorReset(GRBS(8, 64), every=4), 32),
    ],
    ids=["explicit", "block average", "partial local SGD"],
)
def test_the_bytes_are_those_of_the_formula(codec: ErrorReset, ratio: float) -> None:
    whole, less = (run_workers(2, sent_bytes, plan, 32)[0] for plan in (Plan(), Plan(codec=codec)))
    assert whole == pytest.approx(4 * 100_250, rel=0.01)
    assert less == pytest.approx(whole / ratio, rel=0.01)


STOPS = [(name, stop) for name in ("explicit", "block average", "partial local SGD", "late") for stop in (3, 4)]


def interrupted() -> list[bool]:
    return [is_the_same_when_resumed(PLANS[name], model, optimizer_of, batches, stop) for name, stop in STOPS]


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    assert run_workers(WORLD, interrupted, timeout_s=100) == [[True] * len(STOPS)] * WORLD


def saved(folder: Path, first: int, last: int) -> tuple[torch.Tensor, list[str]]:
    """Go on from a checkpoint, which one worker has written beside each one's own."""
    told = listen()
    net = model()
    optimizer = optimizer_of(net)
    with offbeat.init(PLANS["explicit"], seed=SEED) as run:
        replica, optimizer = run.prepare(net, optimizer)
        checkpoints = offbeat.Checkpoints(run, folder, model=net, optimizer=optimizer)
        assert checkpoints.load() == bool(first)
        for x, y in batches(run.rank)[first:last]:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save()
        return flat(net), told


@pytest.mark.slow
def test_each_worker_has_a_file_of_its_own_beside_the_checkpoint(tmp_path: Path) -> None:
    whole = run_workers(WORLD, saved, tmp_path / "whole", 0, 7)
    run_workers(WORLD, saved, tmp_path / "parts", 0, 4)
    for (one, told), (other, _) in zip(run_workers(WORLD, saved, tmp_path / "parts", 4, 7), whole, strict=True):
        assert torch.equal(one, other)
        assert told == []


def test_a_worker_without_a_file_begins_with_the_consensus(tmp_path: Path) -> None:
    run_workers(WORLD, saved, tmp_path, 0, 4)
    results = run_workers(WORLD + 1, saved, tmp_path, 4, 4)
    assert not torch.equal(results[0][0], results[3][0])
    assert any("Rank 3 begins with no codec state" in text for text in results[3][1] + results[0][1])


def swapping() -> tuple[torch.Tensor, torch.Tensor]:
    """Local steps, and then, with the same codec, none: what was not sent is averaged in."""
    net = model()
    with offbeat.init(PLANS["partial local SGD"], seed=SEED) as run:
        replica, optimizer = run.prepare(net, optimizer_of(net))
        for step, (x, y) in enumerate(batches(run.rank)):
            if step == 4:
                run.swap(sync=LocalSGD(2))
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        one = run._session.models.synchronizers[0]
        consensus = torch.cat([tensor.reshape(-1) for tensor in one.anchors.values()])
        run.settle()
    return consensus, flat(net)


def test_another_policy_goes_on_from_the_same_consensus() -> None:
    results = run_workers(WORLD, swapping)
    for consensus, settled in results:
        assert torch.equal(consensus, results[0][0])
        assert torch.equal(settled, results[0][1])


def overflowing() -> tuple[float, list[str]]:
    told = listen()
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    plan = Plan(codec=ErrorReset(GRBS(2), step=GRBS(2), every=2, variant="explicit"), nonfinite="skip")
    with offbeat.init(plan) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=10.0))
        for _ in range(2):
            replica(torch.tensor([[3e38 if run.rank == 1 else 1.0]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
    return float(net.weight), told


def test_a_change_that_overflows_is_left_out() -> None:
    (first, _), (second, told) = run_workers(2, overflowing)
    assert first == second == -20.0
    assert any("it is left out" in text for text in told)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plan(sync=LocalSGD(8), codec=ErrorReset(every=8)), "both say how often is averaged"),
        (lambda: Plan(sync=LocalSGD(8), codec=ErrorReset(step=GRBS(64), every=8)), "both say how often"),
        (lambda: Plan(codec=ErrorReset()), "nothing says how often the error is reset. Use every=8"),
        (lambda: ErrorReset(step=GRBS(64)), "never reset the error: say how often"),
        (lambda: ErrorReset(every=0), "a whole number from 1"),
        (lambda: ErrorReset(TopK(0.01), every=8), "each worker would send others. Use variant='explicit'"),
        (lambda: ErrorReset(ErrorFeedback(), every=8), "is kept already"),
        (lambda: ErrorReset(variant="other"), "choose 'block_average' or 'explicit'"),  # type: ignore[arg-type]
        (lambda: Plan(sync=LocalSGD(8, delay=1), codec=ErrorReset()), "Use LocalSGD(8)"),
        (lambda: Plan(sync=LocalSGD(8, outer=OuterSGD()), codec=ErrorReset()), "Use LocalSGD(8)"),
        (
            lambda: Plan(codec=ErrorReset(every=8), scheduling=offbeat.Prophet()),
            "exchange what their optimizers have changed",
        ),
        (
            lambda: Plan(codec=ErrorReset(every=8), fabric=offbeat.ParameterServer()),
            "here the server's optimizer steps",
        ),
    ],
)
def test_what_cannot_be_reset_is_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(PlanError) as error:
        make()
    assert says in str(error.value)


def test_a_plan_with_it_is_read_back() -> None:
    for plan in (*PLANS.values(), Plan(codec=ErrorReset(Cast(), every=2), fabric=Elastic())):
        assert Plan.from_toml(plan.to_toml()) == plan
    assert PLANS["the same"].sync == BSP()
