"""An optimizer that was not prepared steps a prepared model: it is refused where replicas would come apart."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.errors import DisagreementError, ModelError
from offbeat.sync import LocalSGD
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

State = dict[str, torch.Tensor]
STEPS = 12  # in each phase; with a scheduler the later ones of the first are hidden behind the next


def two_layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, phase: int, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(100 * phase + int(os.environ["RANK"]))
    for _ in range(steps):
        x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


class Around(torch.optim.Optimizer):
    """An optimizer around another one, whose groups it shares."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def joined(*jobs: Callable[[], Any]) -> list[Any]:
    path = f"file://{os.environ['OFFBEAT_STORE']}"
    dist.init_process_group("gloo", init_method=path, rank=int(os.environ["RANK"]), world_size=2)
    try:
        return [job() for job in jobs]
    finally:
        dist.destroy_process_group()


def refusal(plan: offbeat.Plan) -> tuple[str, str]:
    """What the first step of another optimizer raises, and what preparing it raises; "" for nothing."""
    model, said = two_layers(), []
    with offbeat.init(plan) as run:
        replica, optimizer = run.prepare(model, sgd(model))
        train(replica, optimizer, 0, 3)
        other = adam(model)
        for attempt in (lambda: train(replica, other, 1, 1), lambda: run.prepare(replica, other)):
            try:
                attempt()
                said.append("")
            except ModelError as error:
                said.append(str(error))
        run.settle()
    first, second = said
    return first, second


def refusals() -> list[Any]:
    return joined(
        lambda: refusal(offbeat.Plan(sync=LocalSGD(4))),
        lambda: refusal(offbeat.Plan(sync=LocalSGD(2, delay=1))),
        lambda: refusal(offbeat.Plan(codec=offbeat.ErrorReset(offbeat.GRBS(2), every=2))),
        lambda: refusal(offbeat.Plan(fabric=offbeat.ParameterServer())),
    )


def test_it_is_refused_at_its_first_step_where_gradients_are_not_all_that_counts() -> None:
    for *local, server in run_workers(2, refusals):
        for first, second in local:
            assert first.startswith(
                "Cannot step a prepared model with another optimizer (Adam) than the SGD that was prepared with it: "
            )
            assert "call model, optimizer = run.prepare(model, optimizer) again" in first
            assert second == ""
        first, second = server
        assert "the server holds the parameters, and steps them with a copy of it. Keep the prepared one" in first
        assert second.startswith("Cannot replace the SGD of this model with another optimizer: the server steps")


# -- two phases, each with an optimizer of its own -----------------------------------------------------------------


def two_phases(system: str, plan: offbeat.Plan | None = None) -> tuple[State, list[str]]:
    """What is trained by DDP, or by offbeat with a second optimizer that is prepared or is not; what is said."""
    told, model = listen(), two_layers()
    if system == "ddp":
        replica: Any = nn.parallel.DistributedDataParallel(model)
        train(replica, sgd(model), 0)
        train(replica, adam(model), 1)
        return model.state_dict(), list(told)
    with offbeat.init(plan) as run:
        replica, optimizer = run.prepare(model, sgd(model))
        train(replica, optimizer, 0)
        second = adam(model)
        if system == "prepared":
            same, prepared = run.prepare(replica, second)
            assert same is replica
            assert prepared is second
        train(replica, second, 1)
        run.settle()
        assert run.step == 2 * STEPS
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}, list(told)


def each_plan() -> list[Any]:
    ahead = offbeat.Plan(scheduling=offbeat.Prophet())
    return joined(
        lambda: two_phases("ddp"),
        lambda: two_phases("prepared"),
        lambda: two_phases("made anew"),
        lambda: two_phases("prepared", ahead),
        lambda: two_phases("made anew", ahead),
        lambda: two_phases("prepared", offbeat.Plan(sync=LocalSGD(1))),
        lambda: two_phases("prepared", offbeat.Plan(sync=LocalSGD(4))),
    )


def test_a_second_phase_has_the_bits_of_ddp() -> None:
    results = run_workers(2, each_plan)
    for (expected, _), *ours, every_step, local in results:
        for (state, told), is_prepared in zip(ours, (True, False, True, False), strict=True):
            assert_equal(state, expected)
            warned = [text for text in told if "is stepped by another optimizer (Adam)" in text]
            assert len(warned) == (0 if is_prepared else 1), told
        assert_equal(local[0], results[0][-1][0])
        assert all(torch.isfinite(tensor).all() for tensor in every_step[0].values())
        assert_equal(every_step[0], results[0][-2][0])


def assert_equal(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


# -- what may step -------------------------------------------------------------------------------------------------


def allowed() -> list[Any]:
    local = offbeat.Plan(sync=LocalSGD(2))

    def around_the_prepared() -> list[str]:
        told, model = listen(), two_layers()
        with offbeat.init(local) as run:
            replica, optimizer = run.prepare(model, sgd(model))
            train(replica, Around(optimizer), 0, 4)
            assert run.step == 4
        return told

    def within_the_prepared() -> list[str]:
        told, model = listen(), two_layers()
        with offbeat.init(local) as run:
            replica, optimizer = run.prepare(model, Around(sgd(model)))
            train(replica, optimizer, 0, 4)
            assert run.step == 4
        return told

    def of_others() -> list[str]:
        """A model of this worker's own, a scheduler and a scaler."""
        told, model, own = listen(), two_layers(), two_layers()
        with offbeat.init(local) as run:
            replica, optimizer = run.prepare(model, sgd(model))
            scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu")
            for step in range(3):
                train(own, adam(own), step, 1)
                scaler.scale(replica(torch.ones(2, 6)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
            assert run.step == 3
        return told

    return joined(around_the_prepared, within_the_prepared, of_others)


def test_wrappers_schedulers_and_optimizers_of_other_models_step() -> None:
    for told in run_workers(2, allowed):
        assert told == [[], [], []]


def in_backward() -> str:
    model = two_layers()
    with offbeat.init() as run:
        replica, _ = run.prepare(model, sgd(model))
        for parameter in model.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
        with pytest.raises(ModelError) as caught:
            replica(torch.ones(2, 6)).sum().backward()
        dist.barrier()
        return str(caught.value)


def differing() -> str:
    model = two_layers()
    with offbeat.init() as run:
        replica, _ = run.prepare(model, sgd(model))
        with pytest.raises(DisagreementError) as caught:
            run.prepare(replica, adam(model) if run.rank else torch.optim.AdamW(model.parameters()))
        return str(caught.value)


def refused_together() -> list[Any]:
    return joined(differing, in_backward)


def test_steps_within_backward_and_different_optimizers_are_refused() -> None:
    for different, within in run_workers(2, refused_together):
        assert "The optimizer differs between workers" in different
        assert "Cannot step a prepared model with SGD within backward" in within
