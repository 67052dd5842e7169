"""The same plan, the same workers: the same parameters after each step, or the first step that differs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

import offbeat
from offbeat.audit import AuditResult, compare, verify
from offbeat.errors import HistoryError
from offbeat.sync import ASP, BSP, LocalSGD, Policy, RoundRobin
from tests.audit.recorded_runs import Recorded
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path


def train(
    folder: Path, steps: int, *, seed: int = 0, sync: Policy | None = None, state: Any = None, slip: int | None = None
) -> Any:
    """Train so many steps, from the beginning or from a checkpoint; a checkpoint.

    Args:
        slip: a step in which a gradient is off by a little.
    """
    torch.manual_seed(seed)
    run = offbeat.init(offbeat.Plan(sync=sync or BSP()), history=folder)
    linear = torch.nn.Linear(8, 2)
    model, optimizer = run.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9))
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run.load_state_dict(state["run"])
    while run.step < steps:
        generator = torch.Generator().manual_seed(100 * run.step + run.rank)
        loss = functional.mse_loss(model(torch.randn(4, 8, generator=generator)), torch.ones(4, 2))
        loss.backward()
        if run.step - 1 == slip:
            assert linear.weight.grad is not None
            linear.weight.grad[0, 0] += 1e-4
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()}
    run.close()
    return state


def against(first: Path, second: Path) -> AuditResult:
    result = verify(first)
    compare(first, second, result)
    return result


def test_the_same_again(tmp_path: Path) -> None:
    train(tmp_path / "a", 9)
    train(tmp_path / "b", 9)
    result = against(tmp_path / "a", tmp_path / "b")
    assert result.holds
    assert result.checked == {2, 3, 5}
    assert result.steps_against == 9


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    train(tmp_path / "a", 9)
    state = train(tmp_path / "b", 4)
    train(tmp_path / "b", 9, state=state)
    assert len(list((tmp_path / "b").iterdir())) == 2
    result = against(tmp_path / "a", tmp_path / "b")
    assert result.holds
    assert result.steps_against == 9
    del state["optimizer"]["state"]
    state["optimizer"]["state"] = {}  # without momentum it takes another course
    train(tmp_path / "c", 9, state=state)
    (broken,) = against(tmp_path / "a", tmp_path / "c").violations
    assert broken.law == 5
    assert broken.what.startswith("After step 4 rank 0 has other parameters")


def test_the_first_step_that_differs_is_named(tmp_path: Path) -> None:
    train(tmp_path / "a", 9)
    train(tmp_path / "b", 9, slip=5)
    result = against(tmp_path / "a", tmp_path / "b")
    (broken,) = result.violations
    assert broken.what.startswith("After step 5 rank 0 has other parameters")
    assert result.steps_against == 5


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "a", 4)
    train(tmp_path / "b", 4, sync=LocalSGD(every=2))
    with pytest.raises(HistoryError, match=r"their plans differ \(kind = \"BSP\""):
        against(tmp_path / "a", tmp_path / "b")
    state = train(tmp_path / "c", 4)
    train(tmp_path / "later", 6, state=state)
    with pytest.raises(HistoryError, match="they have no step in common"):
        against(tmp_path / "a", tmp_path / "later")


@pytest.mark.parametrize(("policy", "law"), [(BSP(), {5}), (RoundRobin(strict=True), {5}), (ASP(), set())], ids=repr)
def test_with_a_server_too(tmp_path: Path, policy: Policy, law: set[int]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Recorded(policy, tmp_path / name, leaves={})
    result = against(tmp_path / "a", tmp_path / "b")
    assert result.holds, result.violations
    assert result.checked - {1, 2, 3} == law
    assert bool(result.notes) == (not law)
    assert result.steps_against == 8 or not law


def test_other_workers_are_another_course(tmp_path: Path) -> None:
    for name, leaves in (("a", {}), ("b", {2: 5})):
        (tmp_path / name).mkdir()
        Recorded(BSP(), tmp_path / name, leaves=leaves)
    more, fewer = "rank 0, 1, 2", "rank 0, 1"
    for one, other, who in (("a", "b", f"{more}; there {fewer}"), ("b", "a", f"{fewer}; there {more}")):
        result = against(tmp_path / one, tmp_path / other)
        assert result.holds, result.violations
        assert result.steps_against == 5
        assert f"From step 5 on other workers take part ({who})" in result.notes[0]


def both(folder: Path) -> None:
    os.environ["OFFBEAT_HISTORY"] = str(folder)  # as `offbeat run --history` and torchrun's users do
    with offbeat.init(offbeat.Plan(sync=LocalSGD(every=2))) as run:
        torch.manual_seed(0)
        linear = torch.nn.Linear(8, 2)
        model, optimizer = run.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
        for step in range(8):
            generator = torch.Generator().manual_seed(100 * step + run.rank)
            model(torch.randn(4, 8, generator=generator)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_replicas_are_compared_where_they_are_equal(tmp_path: Path) -> None:
    """Without a server, too; with local steps after each average."""
    run_workers(2, both, tmp_path)
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert result.compared == 2 * 4
