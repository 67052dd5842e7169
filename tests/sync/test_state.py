"""What events and actions mean, whatever the policy."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import pytest

from offbeat.sync import (
    BSP,
    Adopted,
    Apply,
    Drop,
    Evict,
    Grant,
    InvalidDecision,
    Joined,
    Left,
    Pulled,
    Pushed,
    Ready,
    Release,
    State,
    on,
)
from offbeat.sync.state import enact, observe

if TYPE_CHECKING:
    from offbeat.sync import Action, Event


def after(*told: Event | Action, state: State | None = None) -> State:
    """The state after events and actions."""

    def step(state: State, one: Event | Action) -> State:
        acts = isinstance(one, Apply | Drop | Evict | Grant | Release)
        return enact(state, one) if acts else observe(state, one)  # type: ignore[arg-type]

    return reduce(step, told, state or State())


def one_step(worker: int, clock: int, at_s: float = 0.0) -> list[Event | Action]:
    """All that happens to a worker in one step; half a second to compute, a tenth to pull."""
    push = (worker, clock)
    ready, pushed = Ready(worker, clock, at_s + 0.5), Pushed(worker, clock, at_s + 0.6)
    return [ready, Grant(worker), Apply((push,)), Release(worker), pushed, Pulled(worker, at_s + 0.6)]


def test_the_way_through_a_step() -> None:
    state, phases = State(), []
    for one in [
        Joined(0, 0.0),
        Ready(0, 0, 1.0),
        Grant(0),
        Pushed(0, 0, 2.0),
        Apply(((0, 0),)),
        Release(0),
        Pulled(0, 3.0),
    ]:
        state = after(one, state=state)  # type: ignore[arg-type]
        phases.append(state.members[0].phase)
    assert phases == ["computing", "held", "pushing", "pushed", "pushed", "pulling", "computing"]
    assert (state.members[0].step, state.members[0].clock, state.version, state.pending) == (1, 1, 1, {})


def test_a_worker_that_comes_back_never_uses_a_number_twice() -> None:
    state = after(Joined(0, 0.0), Joined(1, 0.0), *one_step(0, 0), *one_step(0, 1), Ready(0, 2, 3.0), Left(0, 4.0))
    assert state.members.keys() == {1}
    state = after(Joined(0, 5.0), state=state)
    back = state.members[0]
    assert (back.step, back.clock) == (3, 3), "2 was announced, and lost"
    assert (back.pace, back.brought) == (0, 0), "it is not ahead of worker 1 for that"
    state = after(Left(0, 6.0), Left(1, 6.0), Joined(7, 7.0), state=state)
    assert state.members[7].step == 3, "nobody begins again at 0 when all were gone"


def test_what_arrived_outlives_its_worker() -> None:
    state = after(Joined(0, 0.0), Joined(1, 0.0), Ready(0, 0, 1.0), Grant(0), Pushed(0, 0, 2.0), Left(0, 3.0))
    assert state.orphans == ((0, 0),)
    state = after(Joined(0, 4.0), Left(0, 5.0), Joined(0, 6.0), state=state)
    assert state.orphans == ((0, 0),), "coming back and going again does not lose it"
    after(Apply(((0, 0),)), state=state)  # the worker computes and may push nothing; this was pushed before
    state = after(Joined(0, 0.0), Ready(0, 0, 1.0), Grant(0), Left(0, 3.0))
    assert state.pending == {}, "what had not arrived is lost"


def test_who_joins_twice_has_been_restarted() -> None:
    state = after(Joined(0, 0.0), Ready(0, 0, 1.0), Joined(0, 2.0))
    assert state.members[0].phase == "computing"
    assert state.pending == {}


def test_a_dropped_contribution_counts_at_once_and_its_arrival_changes_nothing() -> None:
    state = after(Joined(0, 0.0), Ready(0, 0, 1.0), Grant(0), Drop(((0, 0),)), Release(0))
    assert state.members[0].clock == 1
    state = after(Pulled(0, 2.0), Pushed(0, 0, 3.0), Ready(0, 1, 4.0), Pushed(0, 0, 5.0), state=state)
    assert (state.members[0].clock, state.members[0].arrived) == (1, False)


def test_a_late_arrival_does_not_shorten_the_time_to_compute() -> None:
    state = after(Joined(0, 0.0), *one_step(0, 0), *one_step(0, 1, 1.0))
    state = after(Ready(0, 2, 3.0), Grant(0), Apply(((0, 2),)), Release(0), Pulled(0, 3.5), state=state)
    state = after(Pushed(0, 2, 9.9), Ready(0, 3, 10.0), state=state)
    assert state.members[0].computing_s == pytest.approx(1.4 + 0.1 * (6.5 - 1.4)), "from Pulled to Ready"


def test_turns_are_measured_from_release_to_pulled_and_forgotten_with_the_policy() -> None:
    state = after(Joined(0, 0.0), *one_step(0, 0), *one_step(0, 1, 1.0))
    assert state.members[0].turn_s == pytest.approx(0.1)
    state = after(Ready(0, 2, 3.0), Grant(0), Apply(((0, 2),)), Pushed(0, 2, 3.2), state=state)
    state = after(Release(0), Pulled(0, 3.5), state=state)
    assert state.members[0].turn_s == pytest.approx(0.1 + 0.1 * (0.3 - 0.1)), "the wait before Release is no transfer"
    assert after(Adopted(4.0), state=state).members[0].turn_s is None


def test_what_is_said_about_strangers_changes_nothing() -> None:
    state = after(Joined(0, 0.0))
    for event in (Ready(1, 0, 1.0), Pushed(1, 0, 1.0), Pulled(1, 1.0), Left(1, 1.0)):
        assert observe(state, event).members == state.members
        assert observe(state, event).pending == {}


def test_levelling_forgets_who_is_ahead() -> None:
    state = after(Joined(0, 0.0), Joined(1, 0.0))
    for clock in range(100):
        for one in one_step(0, clock, float(clock)):
            state = after(one, state=state)
    state = after(Ready(0, 100, 200.0), Ready(1, 0, 200.0), state=state)
    _, actions = on(BSP(), state, Adopted(201.0))
    assert Release(1) in actions
    assert Release(0) not in actions, "it would wait for a hundred steps"
    assert Apply(((1, 0),), rate=0.5) in actions, "half of a round's samples, half the rate"
    level, actions = on(BSP(), state, Adopted(201.0, level=True))
    assert actions[2:] == (Apply(((0, 100), (1, 0))), Release(0), Release(1))
    assert {member.pace for member in level.members.values()} == {1}


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (Grant(0), "has nothing to push"),
        (Release(0), "is not held"),
        (Release(1), "still pending"),
        (Apply(()), "nothing in it"),
        (Apply(((1, 0),)), "may not push"),
        (Apply(((1, 7),)), "is not pending"),
        (Drop(((0, 0),)), "is not pending"),
        (Evict(5), "is no member"),
    ],
    ids=str,
)
def test_what_is_not_possible_is_refused_with_the_story(action: Action, why: str) -> None:
    state = after(Joined(0, 0.0), Joined(1, 0.0), Ready(1, 0, 1.0))
    with pytest.raises(InvalidDecision, match=why) as caught:
        enact(state, action)
    assert "worker 1: held" in str(caught.value)


def test_shares_of_a_round_add_up() -> None:
    state = after(Joined(0, 0.0), Joined(1, 0.0), Joined(2, 0.0), Ready(0, 0, 1.0, 96), Ready(1, 0, 1.0, 32))
    assert state.weight == 192, "who has not contributed yet counts as the others do"
    assert state.share((0, 0)) == 0.5
    state = after(Ready(2, 0, 1.0, 64), state=state)
    assert state.share((0, 0)) + state.share((1, 0)) + state.share((2, 0)) == pytest.approx(1)
    assert after(Joined(0, 0.0), Ready(0, 0, 1.0, 0)).share((0, 0)) == 0, "no samples, no step"


def test_bsp_waits_for_what_another_policy_has_applied_but_not_received() -> None:
    state = after(Joined(0, 0.0), Joined(1, 0.0), Ready(0, 0, 1.0), Ready(1, 0, 1.0), Grant(0), Grant(1))
    state = after(Apply(((0, 0),), in_order=False), Apply(((1, 0),), in_order=False), state=state)
    state, actions = on(BSP(), state, Adopted(2.0))
    assert actions == (), "neither contribution has arrived"
    state, actions = on(BSP(), state, Pushed(0, 0, 3.0))
    assert actions == (Release(1),)
    state, actions = on(BSP(), state, Pushed(1, 0, 4.0))
    assert actions == (Release(0),)
