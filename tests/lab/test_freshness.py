"""A replay sees whether forward passes read parameters with all steps in them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

import offbeat
from offbeat.engine.cross_iteration import CrossIterationReducer
from offbeat.errors import NumericsError
from offbeat.lab.replay import ReplayModel
from offbeat.model_profiles import TimedLayer
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Iterable


class NeverWaits(CrossIterationReducer):
    """Lets each forward pass, and whatever else uses a parameter, read what is there."""

    def _before_module(self, names: tuple[str, ...]) -> None:
        del names

    def _expect(self, names: Iterable[str]) -> None:
        del names


def replayed(waits: bool) -> str:
    """What a replay with steps hidden behind the next one says; "" if nothing is wrong."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    layers = [TimedLayer(f"layer{i}", ((64, 8), (8,)), 0.0005, 0.001) for i in range(4)]
    model = ReplayModel(layers, rank=rank, compute_factor=1.0)
    model.check_freshness(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if not waits:
        CrossIterationReducer._before_module = NeverWaits._before_module  # type: ignore[method-assign, assignment]
        CrossIterationReducer._expect = NeverWaits._expect  # type: ignore[method-assign, assignment]
    with offbeat.init(offbeat.Plan(scheduling=offbeat.Priority(slice_bytes=1024))) as run:
        replica, optimizer = run.prepare(model, optimizer)
        for step in range(14):
            model.set_step(step)
            try:
                replica(torch.zeros(1, requires_grad=True)).sum().backward()
            except NumericsError as error:
                run.synchronize()
                return str(error)
            optimizer.step()
            optimizer.zero_grad()
    return ""


def test_all_wait_for_what_they_read() -> None:
    assert run_workers(2, replayed, True) == ["", ""]


def test_who_never_waits_is_found_out() -> None:
    for said in run_workers(2, replayed, False):
        assert "does not wait for its sums" in said


def test_the_first_step_has_nothing_to_look_at() -> None:
    layers = [TimedLayer("only", ((4,),), 0.0, 0.0)]
    model = ReplayModel(layers, rank=0, compute_factor=1.0)
    model.check_freshness(1)
    model.set_step(0)
    model(torch.zeros(1))
    model.set_step(1)
    with pytest.raises(NumericsError, match="in step 1 the forward pass read only"):
        model(torch.zeros(1))
