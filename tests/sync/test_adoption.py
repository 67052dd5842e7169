"""What one policy leaves behind and another finds: nobody pays for a lead that was allowed before."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from offbeat.sync import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Hybrid,
    Joined,
    KSync,
    LocalSGD,
    Policy,
    Release,
    RoundRobin,
    State,
    StepsLocally,
    adoption,
)
from offbeat.sync.policy import own_steps
from offbeat.sync.state import changed, observe
from offbeat.sync.transition import take_over
from tests.sync.simulated_link import Server

SLOW_S, FAST_S, WORLD = 20.0, 0.4, 3
POLICIES: list[Policy] = [
    BSP(),
    ASP(),
    SSP(bound=0),
    SSP(bound=3),
    DSSP(low=1, high=4),
    KSync(k=2),
    KSync(k=2, late="carry"),
    LocalSGD(every=4),
    RoundRobin(warmup=2),
    RoundRobin(strict=True, warmup=2),
    Hybrid(BSP(), SSP(bound=1), groups=2),
    Hybrid(ASP(), ASP(), groups=2),
]


def one_is_slow(worker: int, step: int) -> float:
    return SLOW_S if worker == 2 else FAST_S * (1 + worker / 10)


def released_s(server: Server, worker: int, since: int) -> list[float]:
    """When a worker was released, from log entry `since` on."""
    return [event.at_s for event, actions in server.log[since:] if Release(worker) in actions]


@pytest.mark.parametrize("new", POLICIES, ids=str)
@pytest.mark.parametrize("old", POLICIES, ids=str)
def test_nobody_waits_longer_than_the_bounds_say(old: Policy, new: Policy) -> None:
    server = Server(old, one_is_slow, WORLD).run(300 if old.bound is None else 60)
    lead = max(m.pace for m in server.state.members.values()) - server.state.low
    assert lead <= old.bound + 1 if old.bound is not None else True
    since, begun_s = len(server.log), server.now_s
    server.swap(new)
    server.run(len(server.applied_s) + (300 if new.bound is None else 60))
    steps = (old.bound or 0) + 2  # of the slow worker, that a fast one may have to wait for
    for worker in (0, 1):
        times_s = released_s(server, worker, since)
        assert times_s, "it goes on"
        assert times_s[0] - begun_s <= steps * (SLOW_S + 1)


def test_without_levelling_the_fast_would_wait_for_hundreds_of_steps() -> None:
    """So that the test above can fail."""
    server = Server(ASP(), one_is_slow, WORLD).run(300)
    assert max(m.pace for m in server.state.members.values()) - server.state.low > 100
    assert adoption(ASP(), BSP(), 0.0).level
    bounded = [old for old in POLICIES if old.bound is not None]
    alike = [(old, new) for old in bounded for new in POLICIES if own_steps(old) == own_steps(new)]
    assert not any(adoption(old, new, 0.0).level for old, new in alike)
    assert adoption(BSP(), LocalSGD(every=4), 0.0).level, "a step is not what it was"


@pytest.mark.parametrize(("old", "new", "more"), [(BSP(), LocalSGD(every=4), 4.0), (LocalSGD(every=4), ASP(), 0.25)])
def test_a_contribution_weighs_the_steps_that_are_in_it(old: Policy, new: Policy, more: float) -> None:
    """Of workers that are there, and of those that are away for a while."""
    state = observe(State(), Joined(0, 0.0))
    state = changed(state, members={0: changed(state.members[0], weight=32.0)}, away={1: 8.0})
    after, _ = take_over(old, new, state, adoption(old, new, 1.0))
    assert (after.members[0].weight, after.away) == (32.0 * more, {1: 8.0 * more})


@dataclass(frozen=True)
class Sometimes(ASP):
    """A policy of somebody else, with a field of that name for something else."""

    every: int = 5


def test_a_field_called_every_is_no_step_of_the_workers_own() -> None:
    assert own_steps(Sometimes()) == 0
    assert not isinstance(Sometimes(), StepsLocally)
    assert isinstance(LocalSGD(every=4), StepsLocally)
    assert adoption(Sometimes(), ASP(), 1.0) == adoption(ASP(), ASP(), 1.0)
