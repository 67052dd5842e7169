"""A schedule out of a checkpoint is the one that was written, or refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from offbeat.engine.schedule_state import checked_schedule, schedule_state
from offbeat.errors import ModelError
from offbeat.scheduling import Credit, Prophet, ReduceScatterGather, Scheduler
from offbeat.testing.scheduler import random_profile


def written(scheduler: Scheduler, seed: int = 3) -> tuple[dict[str, Any], dict[str, int], Any]:
    profile = random_profile(random.Random(seed))
    schedule = scheduler.schedule(profile)
    sizes = {one.name: one.numel for one in profile.gradients}
    return json.loads(json.dumps(schedule_state(list(sizes), schedule))), sizes, schedule


@pytest.mark.parametrize("scheduler", [Credit(50_000, 200_000), Prophet(), ReduceScatterGather(50_000)], ids=repr)
@pytest.mark.parametrize("seed", range(10))
def test_it_comes_back_as_it_was(scheduler: Scheduler, seed: int) -> None:
    saved, sizes, schedule = written(scheduler, seed)
    assert checked_schedule(saved, sizes) == (list(sizes), schedule)


def test_one_of_before_there_were_two_rounds_has_one() -> None:
    saved, sizes, schedule = written(Prophet())
    del saved["gathers"]
    assert checked_schedule(saved, sizes) == (list(sizes), schedule)


def test_of_other_parameters_it_is_left() -> None:
    saved, sizes, _ = written(ReduceScatterGather(50_000))
    assert checked_schedule(saved, {**sizes, "more": 3}) is None
    assert checked_schedule(None, sizes) is None


def gathers_one_twice(saved: dict[str, Any]) -> None:
    saved["gathers"][0] = saved["gathers"][1]


def gathers_what_is_not_there(saved: dict[str, Any]) -> None:
    saved["gathers"][0] = len(saved["blocks"])


def gathers_too_soon(saved: dict[str, Any]) -> None:
    saved["after"][-1] = 0


def lacks_an_order(saved: dict[str, Any]) -> None:
    saved["after"].pop()


def waits_for_what_is_behind(saved: dict[str, Any]) -> None:
    saved["after"][0] = 1


def lacks_gathers(saved: dict[str, Any]) -> None:
    saved["gathers"] = []


@pytest.mark.parametrize(
    "damage",
    [
        gathers_one_twice,
        gathers_what_is_not_there,
        gathers_too_soon,
        lacks_an_order,
        waits_for_what_is_behind,
        lacks_gathers,
    ],
)
def test_what_is_damaged_is_refused(damage: Any) -> None:
    saved, sizes, _ = written(ReduceScatterGather(50_000))
    assert len(saved["gathers"]) > 2
    damage(saved)
    with pytest.raises(ModelError, match="Cannot go by the schedule of this checkpoint"):
        checked_schedule(saved, sizes)
