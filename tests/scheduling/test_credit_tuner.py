"""Slice and credit are searched on the timeline: alike on all workers, and for nothing worse."""

from __future__ import annotations

import importlib.util
import random

import optuna
import pytest

import offbeat
from offbeat.errors import PlanError
from offbeat.plan import Plan
from offbeat.scheduling import BackwardProfile, Credit, GradientTimes, play
from offbeat.testing import check_scheduler
from offbeat.testing.scheduler import random_profile


def many_small() -> BackwardProfile:
    """Gradients whose exchanges are short, where each keeps the link for 2 ms at least."""
    gradients = tuple(
        GradientTimes(f"g{i}", 1_000_000 if i % 10 == 0 else 250, 4, "float32", 0.005 * (50 - i), 0.002)
        for i in range(50)
    )
    return BackwardProfile(gradients, 0.25, 0.002, 1e8, 0.002)


def step_s(credit: Credit, profile: BackwardProfile) -> float:
    return play(profile, credit.schedule(profile)).step_s


def test_it_keeps_the_promises() -> None:
    check_scheduler(Credit(trials=4), profiles=10)


def test_it_finds_what_is_faster_and_the_same_each_time() -> None:
    profile = many_small()
    poor = Credit(slice_bytes=10_000, credit_bytes=20_000)
    tuned = Credit(slice_bytes=10_000, credit_bytes=20_000, trials=15)
    assert step_s(tuned, profile) < 0.7 * step_s(poor, profile)
    random.seed(5)
    first = tuned.schedule(profile)
    random.seed(6)
    assert tuned.schedule(profile) == first


def test_it_finds_nothing_worse() -> None:
    for seed in range(5):
        profile = random_profile(random.Random(seed))
        assert step_s(Credit(trials=2), profile) <= step_s(Credit(), profile)


def test_it_leaves_what_the_library_tells_as_it_was() -> None:
    before = optuna.logging.get_verbosity()
    Credit(trials=2).schedule(many_small())
    assert optuna.logging.get_verbosity() == before


def test_a_plan_names_it() -> None:
    plan = Plan.from_toml('scheduling = { kind = "Credit", trials = 15 }')
    assert plan.scheduling == offbeat.Credit(trials=15)


def test_without_the_library_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"optuna is not installed.*pip install 'offbeat\[tune\]'"):
        Credit(trials=15)
    assert Credit().trials == 0, "without trials nothing is needed"
    with pytest.raises(PlanError, match="whole number from 1"):
        Credit(trials=-1)
