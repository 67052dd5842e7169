"""Controllers in rows without a server, in virtual time: they decide there what they decide in processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from offbeat.control import ByProgress, WaitThreshold
from offbeat.plan import Plan
from offbeat.sim import allreduce
from offbeat.sim.compute_time import ComputeTimes
from offbeat.sim.links import GOODPUT, Links
from offbeat.sim.message_sizes import BucketSize
from offbeat.straggler_model import jitter
from offbeat.sync import BSP, LocalSGD
from tests.sim.scenarios import played, world

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.control import Controller
    from offbeat.sim.result import SimResult

WORLD, COMPUTE_S = 8, 0.1


class Steps(ComputeTimes):
    """So many seconds, by the number of the step."""

    def __init__(self, rank: int, slow: Callable[[int, int], float]) -> None:
        self._rank, self._slow, self._step = rank, slow, 0

    def next_s(self, samples: int | None = None) -> tuple[float, float]:
        self._step += 1
        return COMPUTE_S * self._slow(self._rank, self._step), 0.0


def play(controller: Controller, slow: Callable[[int, int], float], steps: int = 400) -> SimResult:
    """BSP at first.

    Args:
        slow: by how much a rank's step takes longer than usual.
    """
    return allreduce.play(
        [Steps(rank, slow) for rank in range(WORLD)],
        Links(worker=(125e6,) * WORLD, servers=125e6, shards=1, queue_s=0.0),
        buckets=[BucketSize(250_000.0, 1.0)],
        policy=BSP(),
        steps=steps,
        batch=32,
        controller=controller,
    )


def even(rank: int, step: int) -> float:
    return jitter(0.05, rank, step)


def late_for_a_while(rank: int, step: int) -> float:
    """Rank 3 takes three times as long in steps 100 to 199."""
    return even(rank, step) * (3.0 if rank == 3 and 100 <= step < 200 else 1.0)


def late_now_and_then(rank: int, step: int) -> float:
    """In each step another takes twice as long: in eight steps all have computed equally long."""
    return 2.0 if step % WORLD == rank else 1.0


def test_a_schedule_swaps_where_an_exchange_lets_it() -> None:
    found = play(ByProgress((BSP(), LocalSGD(8), BSP()), at=(0.25, 0.5), steps=400), even, steps=400)
    assert [(sync, reason) for _, sync, reason in found.swaps] == [
        (LocalSGD(8), "100 of 400 steps are done"),
        (BSP(), "200 of 400 steps are done"),
    ]
    begun_s = [at_s for at_s, _, _ in found.swaps]
    ends_s = [sum(found.step_s[0][:count]) for count in range(401)]
    # Asked behind step 100, called out in the next exchange; behind 101 + 8 * 13 steps there is one again.
    assert begun_s == pytest.approx([ends_s[101], ends_s[205]])


def test_the_row_of_a_scenario_is_as_fast_as_the_parts_it_is_made_of() -> None:
    """Over slow links: of the twenty steps that count the first ten send, and then one."""
    scenario, ring_s = world(rate_mbps=10), 2 * 7 / 8 * 1.0 / GOODPUT
    plan = Plan(controller=ByProgress((BSP(), LocalSGD(10)), at=(0.725,), steps=40))
    bsp, local = played(Plan(), scenario).seconds_per_step, played(Plan(sync=LocalSGD(10)), scenario).seconds_per_step
    assert bsp > local + 0.8 * ring_s
    assert played(plan, scenario).seconds_per_step == pytest.approx((bsp + local) / 2, abs=0.02)


def test_who_is_late_for_long_makes_the_policy_looser_until_it_is_not() -> None:
    found = play(WaitThreshold(loose=LocalSGD(8)), late_for_a_while)
    (loose_s, loose, reason), (tight_s, tight, back) = found.swaps
    assert (loose, tight) == (LocalSGD(8), BSP())
    assert "% of the last 2 s were spent waiting for others, above 30%" in reason
    assert "% of the last 4 s would have been spent waiting for others, below 15%" in back
    late_s, even_s = sum(found.step_s[3][:100]), sum(found.step_s[3][:200])
    assert late_s < loose_s < late_s + 3
    assert even_s < tight_s < even_s + 5


def test_what_evens_out_in_steps_of_the_own_is_known_to_be_waited_for_in_every_step() -> None:
    found = play(WaitThreshold(loose=LocalSGD(8)), late_now_and_then)
    assert [sync for _, sync, _ in found.swaps] == [LocalSGD(8)], "it would be as before, so it does not go back"
    waited = [sum(waits) for waits in found.waited_s]
    assert max(waited) < 0.2 * max(sum(step_s) for step_s in found.step_s)


def test_where_nobody_is_late_nothing_is_swapped() -> None:
    assert play(WaitThreshold(loose=LocalSGD(8)), even).swaps == []
