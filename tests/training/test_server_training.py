"""Training through a parameter server, in real processes."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.engine.exchange_result import ExchangeResult
from offbeat.errors import DisagreementError, ModelError, NetworkError, NumericsError, PeerError, PlanError
from offbeat.fabric import ParameterServer
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, Policy, RoundRobin
from tests.parity import jobs
from tests.parity.jobs import Job, both
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

SERVER = ParameterServer(block_bytes=4096)
LR = 0.1


# -- the same as DistributedDataParallel, where the policy is ----------------------------------------------------------

EXACT = {
    "mlp-sgd": Job(jobs.MLP, jobs.vectors, steps=20),
    "transformer-adamw": Job(jobs.Transformer, jobs.sentences, jobs.adamw, steps=12),
    "accumulate": Job(jobs.MLP, jobs.vectors, steps=10, accumulate=3),
}


def exact(name: str) -> Any:
    job = EXACT[name]
    return both(Job(**{**vars(job), "plan": offbeat.Plan(fabric=SERVER)}))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_bsp_on_a_server_has_the_bits_of_ddp(name: str) -> None:
    for ddp, served in run_workers(2, exact, name):
        for key, tensor in ddp["state"].items():
            assert torch.equal(served["state"][key], tensor), key


# -- whatever the policy: every contribution counts once ---------------------------------------------------------------


def emitted(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(1000 * rank + step))


def results_of(run: offbeat.Run) -> list[ExchangeResult]:
    """What the exchanges of the first model find out from here on."""
    synchronizer, found = run._session.models.synchronizers[0], list[ExchangeResult]()
    after_step = synchronizer.after_step

    def keep() -> ExchangeResult | None:
        if (result := after_step()) is not None:
            found.append(result)
        return result

    synchronizer.after_step = keep  # type: ignore[method-assign]
    return found


def push_known_gradients(policy: Policy, steps: int) -> tuple[torch.Tensor, int]:
    """Plain SGD adds up, so the final parameters tell whether each gradient was applied exactly once."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(3000, 1, bias=False)
    nn.init.zeros_(model.weight)
    worst = 0
    with offbeat.init(offbeat.Plan(sync=policy, fabric=SERVER)) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        _, optimizer = run.prepare(model, optimizer)
        found = results_of(run)
        for step in range(steps):
            (model.weight * emitted(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            worst = max(worst, found[-1].staleness)
            time.sleep(0.002 * rank)
        run.settle()
        return model.weight.detach().clone().flatten(), worst


def push_within_join() -> torch.Tensor:
    rank = int(os.environ["RANK"])
    model = nn.Linear(3000, 1, bias=False)
    nn.init.zeros_(model.weight)
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        with (
            pytest.raises(PlanError, match="Cannot join with divide_by_initial_world_size where workers go on"),
            replica.join(divide_by_initial_world_size=True),
        ):
            pass
        with replica.join():
            for step in range(3 + 2 * rank):
                (model.weight * emitted(rank, step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach().clone().flatten()


def test_join_waits_for_all_at_a_server() -> None:
    first, second = run_workers(2, push_within_join)
    assert torch.equal(first, second)
    both = torch.stack([emitted(rank, step) for rank in range(2) for step in range(3)]).sum(0) / 2
    alone = torch.stack([emitted(1, step) for step in (3, 4)]).sum(0)
    torch.testing.assert_close(first, -LR * (both + alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "policy",
    [
        ASP(),
        SSP(2),
        DSSP(1, 3),
        KSync(2, late="carry"),
        KSync(1, "carry", 0.05),
        RoundRobin(),
        Hybrid(BSP(), ASP(), groups=2),
    ],
    ids=repr,
)
def test_every_contribution_counts_once(policy: Policy) -> None:
    world, steps = 4 if isinstance(policy, Hybrid) else 3, 25
    results = run_workers(world, push_known_gradients, policy, steps)
    everything = torch.stack([emitted(rank, step) for rank in range(world) for step in range(steps)])
    if not isinstance(policy, KSync):
        expected = -LR * everything.sum(0) / world
        torch.testing.assert_close(results[0][0], expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(weight, results[0][0]) for weight, _ in results), "equal on all after settle"
    if isinstance(policy, ASP):
        assert max(worst for _, worst in results) > 0, "nobody waited"


# -- what the user's loop may do ---------------------------------------------------------------------------------------


def various() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    unused = nn.Parameter(torch.ones(2))
    first.register_parameter("unused", unused)
    with offbeat.init(offbeat.Plan(fabric=SERVER, sync=BSP())) as run:
        one = torch.optim.SGD(first.parameters(), lr=1.0, weight_decay=0.1)
        two = torch.optim.AdamW([{"params": [second.weight], "lr": 0.01}, {"params": [second.bias], "lr": 0.0}])
        schedule = torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.0)  # from the second step on nothing moves
        net, one = run.prepare(first, one)
        head, two = run.prepare(second, two)
        bias = second.bias.detach().clone()
        moved = []
        for _ in range(3):
            before = first.weight.detach().clone()
            F.cross_entropy(head(net(torch.randn(3, 4))), torch.tensor([0, 1, 1])).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            one.step()
            assert first.weight.grad is not None, "gradients can be looked at after the step"
            two.step()
            one.zero_grad()
            two.zero_grad()
            schedule.step()
            moved.append(not torch.equal(before, first.weight))
        mean = run.mean(float(rank), weight=rank + 1)
        return {
            "moved": moved,
            "unused": unused.detach().clone(),
            "bias": torch.equal(bias, second.bias),
            "weight": second.weight.detach().clone(),
            "mean": mean,
        }


def test_two_models_groups_schedules_and_unused_parameters() -> None:
    first, second = run_workers(2, various)
    assert first["moved"] == second["moved"] == [True, False, False]
    assert torch.equal(first["unused"], torch.ones(2)), "no gradient, so no weight decay either"
    assert first["bias"], "a group of its own, with a learning rate of its own"
    assert torch.equal(first["weight"], second["weight"])
    assert first["mean"] == second["mean"] == pytest.approx(2 / 3)


def two_models_of_one_batch() -> list[float]:
    rank = int(os.environ["RANK"])
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        one, step_one = run.prepare(first, torch.optim.SGD(first.parameters(), lr=1.0))
        two, step_two, loader = run.prepare(
            second, torch.optim.SGD(second.parameters(), lr=1.0), [torch.ones(3 - 2 * rank, 1)] * 2
        )
        before = [float(net.weight.detach()) for net in (first, second)]
        for x in loader:
            for net, optimizer in ((one, step_one), (two, step_two)):
                (net(x) * (1 - rank)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [was - float(net.weight.detach()) for was, net in zip(before, (first, second), strict=True)]


def test_each_model_counts_the_samples_of_the_batch() -> None:
    """Rank 0 has three samples with gradient 1, rank 1 one with gradient 0."""
    for moved in run_workers(2, two_models_of_one_batch):
        assert moved == pytest.approx([2 * 3 / 4, 2 * 3 / 4])


def refused() -> list[str]:
    said = []
    model = nn.Linear(2, 2)
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        for optimizer in (torch.optim.LBFGS(model.parameters()), Mine(model.parameters(), lr=0.1)):
            with pytest.raises(ModelError) as caught:
                run.prepare(model, optimizer)
            run._hooks._names.clear()
            said.append(str(caught.value))
    return said


class Mine(torch.optim.SGD):
    """An optimizer of the user's."""


def test_an_optimizer_that_a_server_cannot_hold_is_refused() -> None:
    for said in run_workers(2, refused):
        assert said[0].startswith("Cannot hold LBFGS at a parameter server")
        assert said[1].startswith("Cannot hold Mine at a parameter server")
        assert "ProcessGroup()" in said[0]


# -- faults ------------------------------------------------------------------------------------------------------------


# Of rank 1, where rank 0 has SGD(lr=0.1, momentum=0.9) over weight and bias; and the first difference.
OTHERS: list[tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], str]] = [
    (lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.9), "rank 1 has 'RMSprop', rank 0 has 'SGD'"),
    (
        lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9),
        "rank 1 has 'group 0: lr=0.2', rank 0 has 'group 0: lr=0.1'",
    ),
    (
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5),
        "rank 1 has 'group 0: momentum=0.5', rank 0 has 'group 0: momentum=0.9'",
    ),
    (
        lambda ps: torch.optim.SGD([*reversed(ps)], lr=0.1, momentum=0.9),
        "rank 1 has 'group 0 holds bias', rank 0 has 'group 0 holds weight'",
    ),
    (
        lambda ps: torch.optim.SGD([{"params": [p]} for p in ps], lr=0.1, momentum=0.9),
        "rank 1 has 'group 1: dampening=0', rank 0 has 'group 0 holds bias'",
    ),
]


def with_other_optimizers() -> tuple[list[str], float]:
    """What each is refused with; then all are the same, and rank 1 alone has another learning rate later."""
    said = []
    with offbeat.init(offbeat.Plan(sync=ASP(), fabric=SERVER)) as run:
        models = [nn.Linear(3, 2) for _ in OTHERS]  # all at once: parameters are known by their ids
        for model, (make, _) in zip(models, OTHERS, strict=True):
            ours = [*model.parameters()]
            with pytest.raises(DisagreementError) as caught:
                run.prepare(model, make(ours) if run.rank else torch.optim.SGD(ours, lr=0.1, momentum=0.9))
            said.append(str(caught.value))
        model = nn.Linear(3, 2)
        nn.init.zeros_(model.weight)
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.param_groups[0]["lr"] = 0.1 + 0.2 * run.rank
        model.weight.sum().backward()
        optimizer.step()
        run.settle()
        return said, float(model.weight[0, 0])


def test_workers_begin_with_the_same_optimizer() -> None:
    for said, moved in run_workers(2, with_other_optimizers):
        for (_, difference), text in zip(OTHERS, said, strict=True):
            assert text.startswith("The optimizer differs between workers: rank 1 against rank 0. First difference: ")
            assert f"{difference}. Build the same optimizer on every worker" in text
        assert moved == pytest.approx(-0.5 * (0.1 + 0.3)), "each contribution goes with its own learning rate"


def with_a_rate_that_is_none() -> tuple[str, list[float]]:
    model = nn.Linear(3, 2)
    with offbeat.init(offbeat.Plan(sync=BSP(), fabric=SERVER)) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(5):
            if (run.rank, step) == (1, 2):
                optimizer.param_groups[0]["lr"] = float("nan")
            model.weight.sum().backward()
            try:
                optimizer.step()
            except PeerError as error:
                return str(error), []
            optimizer.zero_grad()
        return "", model.weight.flatten().tolist()


def test_who_brings_what_cannot_be_is_told_and_does_not_come_back() -> None:
    (fine, moved), (said, _) = run_workers(2, with_a_rate_that_is_none)
    assert said == "Cannot continue in group 0 of SGD, as rank 1 has it: lr=nan is not finite."
    assert not fine
    assert all(map(math.isfinite, moved))


def with_fault(policy: Policy, victim: int, number: int, at: int) -> tuple[int, float, float]:
    """Train; at step `at` the victim gets a signal. Returns steps, the longest step, and the mean at the end."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(8, 1)
    longest = 0.0
    with offbeat.init(offbeat.Plan(sync=policy, fabric=SERVER)) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica, optimizer = run.prepare(model, optimizer)
        for step in range(40):
            if step == at and rank == victim:
                os.kill(os.getpid(), number)
            began_s = time.monotonic()
            replica(torch.randn(4, 8)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            longest = max(longest, time.monotonic() - began_s)
        return run.step, longest, run.mean(1.0)


WHO_GOES_ON = [
    pytest.param(policy, number, id=f"{type(policy).__name__}-{number.name}", marks=[pytest.mark.slow] if slow else [])
    for number, policy, slow in (
        (signal.SIGKILL, BSP(), False),
        (signal.SIGKILL, RoundRobin(), False),
        (signal.SIGKILL, ASP(), True),
        (signal.SIGKILL, LocalSGD(4, after=8), False),
        (signal.SIGSTOP, BSP(), True),
        (signal.SIGSTOP, RoundRobin(), False),
        (signal.SIGSTOP, ASP(), True),
        (signal.SIGSTOP, LocalSGD(4, after=8), True),
    )
]


@pytest.mark.parametrize(("policy", "number"), WHO_GOES_ON)
def test_the_others_go_on(policy: Policy, number: signal.Signals) -> None:
    """Also when it is rank 0, which started the server."""
    victim = 0 if number == signal.SIGKILL else 1
    results = run_workers(3, with_fault, policy, victim, number, 10, faulty=victim)
    for rank, result in enumerate(results):
        if rank != victim:
            steps, longest, mean = result
            assert (steps, mean) == (40, 1.0)
            # A process that is gone has hung up; one that is stopped has to be silent for the timeout of 5 s.
            assert longest < (1.5 if number == signal.SIGKILL else 8)
            if number == signal.SIGKILL and policy == BSP():
                assert longest > 0.5, "it was waited for"


def overflows(choice: str) -> tuple[str, float, list[str]]:
    """Rank 1's second gradient does not fit fp16."""
    told = listen()
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    plan = offbeat.Plan(codec=offbeat.Cast("fp16"), fabric=SERVER, nonfinite=choice)  # type: ignore[arg-type]
    try:
        with offbeat.init(plan) as run:
            replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
            for step in range(3):
                x = 100_000.0 if (run.rank, step) == (1, 1) else 1.0
                replica(torch.tensor([[x]])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            run.settle()
    except NumericsError as error:
        return str(error), 0.0, told
    return "", net.weight.item(), told


@pytest.mark.slow
def test_what_does_not_fit_the_codec_does_not_reach_the_parameters() -> None:
    (_, first, _), (_, second, told) = run_workers(2, overflows, "skip")
    assert first == second == -3.0
    skips = [text for text in told if "NaN" in text]  # a busy machine may have stalls to tell of, too
    assert skips == ["step 1: the gradient of weight holds NaN or Inf on this worker; it is left out."]
    error, _, _ = run_workers(2, overflows, "raise")[1]
    assert error.startswith("step 1: the gradient of weight holds NaN or Inf on this worker. Lower the learning rate")


def server_dies() -> tuple[str, str, float]:
    from offbeat.server.launch import ShardSettings, start_shard

    rank = int(os.environ["RANK"])
    settings = ShardSettings(job="j", token="t" * 32, timeout_s=2.0)
    shared = os.environ["OFFBEAT_STORE"] + ".server"
    process = None
    if rank == 0:
        process, address = start_shard(settings)
        with open(shared + ".new", "w") as file:
            file.write(address)
        os.rename(shared + ".new", shared)
    while not os.path.exists(shared):
        time.sleep(0.05)
    with open(shared) as file:
        os.environ.update(OFFBEAT_SERVERS=file.read(), OFFBEAT_JOB="j", OFFBEAT_TOKEN="t" * 32)
    from datetime import timedelta

    run = offbeat.init(offbeat.Plan(sync=ASP(), fabric=SERVER), timeout=timedelta(seconds=2))
    model = nn.Linear(8, 1)
    replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    began_s = 0.0
    try:
        for step in range(400):
            if step == 10 and process is not None:
                process.kill()
                process.wait()
            replica(torch.randn(4, 8)).pow(2).mean().backward()
            began_s = time.monotonic()
            optimizer.step()
            optimizer.zero_grad()
    except (NetworkError, DisagreementError) as error:
        return type(error).__name__, str(error), time.monotonic() - began_s
    return "none", "", 0.0


@pytest.mark.slow
def test_a_server_that_dies_ends_the_workers_with_a_sentence() -> None:
    for kind, said, waited_s in run_workers(2, server_dies):
        assert kind == "NetworkError", said
        assert "the exchange with the server (ASP())" in said
        assert waited_s < 8
