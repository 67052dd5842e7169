"""Who steps by itself, when it contributes, and how the mean change is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.errors import PlanError
from offbeat.fabric import Elastic, ParameterServer, ProcessGroup, Switch
from offbeat.plan import Plan
from offbeat.sync import BSP, Joined, LocalSGD, OuterSGD, Ready, State, on
from offbeat.sync.outer_sgd import apply_change_
from offbeat.sync.policy import own_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fabric import FabricSpec
    from offbeat.sync import Action, Policy


def test_it_contributes_gradients_at_the_beginning_and_then_every_change() -> None:
    policy = LocalSGD(every=3, after=2)
    kinds = [policy.contributes(step) for step in range(10)]
    assert kinds == ["gradient", "gradient", None, None, "change", None, None, "change", None, None]
    assert [LocalSGD(every=1).contributes(step) for step in range(3)] == ["change"] * 3


def test_fragments_take_turns_at_equal_distances() -> None:
    policy = LocalSGD(every=6, after=1, fragments=3)
    due = [(step, policy.fragment(step)) for step in range(16) if policy.contributes(step) == "change"]
    assert due == [(2, 0), (4, 1), (6, 2), (8, 0), (10, 1), (12, 2), (14, 0)]
    assert [policy.step_of(number) for number in range(5)] == [0, 1, 3, 5, 7]
    assert (policy.interval, own_steps(policy)) == (2, 2)


def test_what_is_delayed_is_of_a_loss_class_of_its_own() -> None:
    assert LocalSGD(8).loss_class == LocalSGD(8, after=3, outer=OuterSGD()).loss_class == "local"
    assert LocalSGD(8, delay=1).loss_class == LocalSGD(8, fragments=4).loss_class == "delayed"


@pytest.mark.parametrize(
    ("every", "fragments", "ways_out"), [(8, 3, ("fragments=2", "every=9")), (2, 5, ("fragments=2", "every=5"))]
)
def test_fragments_that_do_not_divide_the_steps_are_refused(every: int, fragments: int, ways_out: tuple[str]) -> None:
    with pytest.raises(PlanError, match=r"at `plan.sync.fragments`") as caught:
        LocalSGD(every, fragments=fragments)
    for way_out in ways_out:
        assert way_out in str(caught.value)
        changed = {way_out.partition("=")[0]: int(way_out.partition("=")[2])}
        LocalSGD(changed.get("every", every), fragments=changed.get("fragments", fragments))


@pytest.mark.parametrize("policy", [LocalSGD(8, delay=1), LocalSGD(8, fragments=2)])
@pytest.mark.parametrize("fabric", [ParameterServer(), Switch("10.0.0.1:7070")], ids=["server", "switch"])
def test_where_the_workers_do_not_keep_the_averages_they_are_not_delayed(policy: LocalSGD, fabric: FabricSpec) -> None:
    with pytest.raises(PlanError, match=r"Use ProcessGroup\(\) or Elastic\(\).*at `plan.sync.(delay|fragments)`"):
        Plan(sync=policy, fabric=fabric)
    for other in (ProcessGroup(), Elastic()):
        plan = Plan(sync=policy, fabric=other)
        assert Plan.from_toml(plan.to_toml()) == plan
        with pytest.raises(PlanError, match="kept by the workers themselves"):
            plan.swapped("[fabric]\nkind = 'ParameterServer'")


def test_what_is_contributed_is_waited_for_as_in_bsp() -> None:
    events = (Joined(0, 0.0), Joined(1, 0.0), Ready(1, 0, 1.0), Ready(0, 0, 2.0))

    def decided(policy: Policy) -> list[tuple[Action, ...]]:
        state, all_actions = State(), []
        for event in events:
            state, actions = on(policy, state, event)
            all_actions.append(actions)
        return all_actions

    assert decided(LocalSGD(every=4)) == decided(BSP())
    assert LocalSGD(every=4).replicated


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_steps_are_those_of_torch(nesterov: bool) -> None:
    """With the mean change in the gradient's place."""
    outer = OuterSGD(lr=0.7, momentum=0.9, nesterov=nesterov)
    anchor, momentum, expected = torch.ones(3), torch.zeros(3), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=nesterov)
    for mean in torch.randn(4, 3, generator=torch.Generator().manual_seed(0)):
        apply_change_(anchor, mean, outer=outer, momentum=momentum)
        expected.grad = mean
        optimizer.step()
        assert torch.allclose(anchor, expected.detach())


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: LocalSGD(every=0), "plan.sync.every"),
        (lambda: LocalSGD(every=1.5), "plan.sync.every"),  # type: ignore[arg-type]
        (lambda: LocalSGD(every=2, after=-1), "plan.sync.after"),
        (lambda: LocalSGD(every=2, outer="SGD"), "plan.sync.outer"),  # type: ignore[arg-type]
        (lambda: OuterSGD(lr=0.0), "plan.sync.outer.lr"),
        (lambda: OuterSGD(momentum=1.0), "plan.sync.outer.momentum"),
        (lambda: OuterSGD(momentum=0.0), "plan.sync.outer.nesterov"),
    ],
)
def test_nonsense_is_refused_with_the_path(make: Callable[[], object], path: str) -> None:
    with pytest.raises(PlanError, match=f"at `{path}`"):
        make()
