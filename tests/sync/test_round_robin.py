"""Turns on the link: against the model of the link, and rule by rule."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.errors import PlanError
from offbeat.sync import (
    ASP,
    BSP,
    Action,
    Adopted,
    Apply,
    Deadline,
    Event,
    Evict,
    Grant,
    Joined,
    Left,
    Member,
    Policy,
    Pulled,
    Pushed,
    PushEnding,
    Ready,
    Release,
    Remember,
    RoundRobin,
    State,
    Wake,
    on,
)
from offbeat.sync.round_robin import Rotation
from tests.sync.simulated_link import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCKS = 16
STRICT = RoundRobin(strict=True)


def jitter(compute_s: float = 1.0, sigma: float = 0.05, seed: int = 0) -> Callable[[int, int], float]:
    rng = random.Random(seed)
    return lambda worker, step: compute_s * rng.lognormvariate(0.0, sigma)


def one_slow(seed: int = 0) -> Callable[[int, int], float]:
    """Worker 3 takes twice as long."""
    even = jitter(seed=seed)
    return lambda worker, step: even(worker, step) * (2.0 if worker == 3 else 1.0)


def seconds_per_round(policy: Policy, world: int, copy_s: float) -> float:
    server = Server(policy, jitter(), world, copy_s, BLOCKS).run(50 * world)
    return world * server.seconds_per_contribution(25 * world)


def rotations(server: Server) -> Iterator[Rotation]:
    for _, actions in server.log:
        yield from (action.memory for action in actions if isinstance(action, Remember))


# -- against the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("world", [4, 8])
def test_a_round_takes_what_the_model_says(world: int, load: float) -> None:
    """C = 1 s to compute, d = load / N to copy; a turn is one block longer."""
    turn_s = load / world * (1 + 1 / BLOCKS)
    bsp_s, r2sp_s = 1 + world * turn_s, max(1 + turn_s, world * turn_s)
    measured_s, baseline_s = (
        seconds_per_round(RoundRobin(), world, load / world),
        seconds_per_round(BSP(), world, load / world),
    )
    assert measured_s == pytest.approx(r2sp_s, rel=0.06)
    assert baseline_s == pytest.approx(bsp_s, rel=0.06)
    assert baseline_s / measured_s > {0.5: 1.3, 1.0: 1.5, 2.0: 1.4}[load]


def test_against_asp_where_the_link_is_the_bottleneck_and_times_are_even() -> None:
    assert seconds_per_round(ASP(), 8, 1 / 8) / seconds_per_round(RoundRobin(), 8, 1 / 8) > 1.05


def test_one_slow_worker_does_not_hold_up_all() -> None:
    """Strict order collapses, to the slow worker's pace; passing it over is worth a third, within the promised age."""
    rates, ages = {}, {}
    policies: dict[str, Policy] = {
        "strict": STRICT,
        "default": RoundRobin(),
        "loose": RoundRobin(lead=20),
        "asp": ASP(),
    }
    for name, policy in policies.items():
        server = Server(policy, one_slow(), 8, 1 / 8, BLOCKS).run(50 * 8)
        rates[name] = 1 / server.seconds_per_contribution(25 * 8) / 8
        ages[name] = max(server.staleness)
    assert rates["strict"] == pytest.approx(0.47, abs=0.02)
    assert rates["default"] > 1.3 * rates["strict"]
    assert rates["loose"] > rates["asp"] > rates["default"]
    assert ages["strict"] == 7
    assert ages["default"] == 7 + 3
    assert ages["loose"] < ages["asp"] + 2 < 20


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.3, 1.0])
@pytest.mark.parametrize("lead", [0, 2])
def test_no_gradient_is_older_than_promised(lead: int, sigma: float) -> None:
    server = Server(RoundRobin(lead=lead, warmup=2), jitter(sigma=sigma), 5, 0.1, 4).run(1000)
    assert max(server.staleness) == 4 + lead


# -- order -----------------------------------------------------------------------------------------------------------


def test_strict_order_is_one_permutation_whatever_the_timing() -> None:
    for seed in range(5):
        policy = RoundRobin(strict=True, warmup=3, compute_lease_s=1000.0)
        server = Server(policy, jitter(sigma=1.0, seed=seed), 5, 0.1, 4).run(300)
        assert server.grants == [turn % 5 for turn in range(len(server.grants))]
        assert server.staleness == [0, 1, 2, 3, *[4] * (len(server.staleness) - 4)]


def test_what_is_forgotten_does_not_change_a_strict_order() -> None:
    state = State()
    for worker in (2, 0, 1):
        state, _ = on(STRICT, state, Joined(worker, 0.0))
    grants = []
    for turn in range(9):
        worker, at_s = turn % 3, float(turn)
        state = State(state.members, state.pending, state.version, state.now_s)
        state, actions = on(STRICT, state, Ready(worker, turn // 3, at_s))
        grants += [action.worker for action in actions if isinstance(action, Grant)]
        state, _ = on(STRICT, state, Pulled(worker, at_s + 0.5))
    assert grants == [0, 1, 2] * 3


def test_a_turn_is_everything_at_once_in_order() -> None:
    state, _ = on(STRICT, State(), Joined(0, 0.0))
    _, (remember, *turn) = on(STRICT, state, Ready(0, 0, 1.0))
    assert isinstance(remember, Remember)
    assert list(map(str, turn)) == [
        "Grant(worker=0)",
        "Apply(pushes=((0, 0),), rate=1.0, in_order=True)",
        "Release(worker=0)",
    ]


def most_at_once(server: Server, end: type[PushEnding | Pushed | Pulled]) -> int:
    """From `Grant` to `end`, how many at most."""
    holders: set[int] = set()
    most = 0
    for event, actions in server.log:
        if isinstance(event, end):
            holders.discard(event.worker)
        holders |= {action.worker for action in actions if isinstance(action, Grant)}
        most = max(most, len(holders))
    return most


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_more_push_at_the_same_time_than_slots(slots: int) -> None:
    server = Server(RoundRobin(slots=slots, warmup=2), jitter(sigma=0.5), 6, 0.5, 4).run(200)
    assert most_at_once(server, PushEnding) == slots
    assert slots < most_at_once(server, Pulled) <= 2 * slots, "the next pushes while one still pulls"


@pytest.mark.parametrize(("policy", "slots"), [(RoundRobin(warmup=2), 2), (RoundRobin(strict=True, warmup=2), 1)])
def test_there_are_as_many_slots_as_hosts_with_shards_but_one_in_strict_order(policy: RoundRobin, slots: int) -> None:
    server = Server(policy, jitter(sigma=0.5), 6, 0.5, 4, state=State(hosts=2)).run(200)
    assert most_at_once(server, PushEnding) == slots


def test_the_moment_between_two_turns_is_hidden() -> None:
    """It takes a word to the next worker, and its first bytes; eight times in a round, which is 0.16 s here."""
    for load in (1.0, 2.0):
        near = Server(RoundRobin(), jitter(), 8, load / 8, 32).run(400).seconds_per_contribution(200)
        far = Server(RoundRobin(), jitter(), 8, load / 8, 32, latency_s=0.02).run(400).seconds_per_contribution(200)
        assert 8 * (far - near) < 0.05


@pytest.mark.parametrize("policy", [RoundRobin(strict=True, warmup=2), RoundRobin(half_duplex=True, warmup=2)])
def test_in_strict_order_and_on_half_duplex_links_nobody_pushes_while_another_pulls(policy: RoundRobin) -> None:
    server = Server(policy, jitter(sigma=0.5), 6, 0.5, 4).run(200)
    assert most_at_once(server, Pulled) == 1


def test_while_warming_up_turns_follow_in_order_without_a_gap() -> None:
    server = Server(RoundRobin(warmup=1000, compute_lease_s=1000.0), jitter(sigma=1.0), 4, 0.1, 4).run(200)
    assert server.grants == [turn % 4 for turn in range(len(server.grants))]
    assert {rotation.gap_s for rotation in rotations(server)} == {None}


# -- spacing ---------------------------------------------------------------------------------------------------------


def test_the_gap_follows_all_workers_slowly_and_is_never_shorter_than_a_transfer() -> None:
    speed = {"factor": 1.0}
    even = jitter()
    server = Server(RoundRobin(), lambda worker, step: even(worker, step) * speed["factor"], 4, 0.1, 4).run(100)
    before_s = [r.gap_s for r in rotations(server)][-1]
    assert before_s == pytest.approx((1.0 + 0.125) / 1.2 / 4, rel=0.1), "a round takes 83 % of a cycle"
    speed["factor"] = 3.0
    gaps_s = [r.gap_s for r in rotations(server.run(500))]
    known_s = [gap_s for gap_s in gaps_s if gap_s is not None]
    assert known_s[-1] == pytest.approx((3.0 + 0.125) / 1.2 / 4, rel=0.1)
    changes = [later / earlier for earlier, later in itertools.pairwise(known_s)]
    assert max(changes) <= 1.1 + 1e-9
    speed["factor"] = 0.01
    assert [r.gap_s for r in rotations(server.run(1500))][-1] == pytest.approx(0.1, rel=0.05), "the transfer"


def test_a_worker_with_a_bad_link_does_not_space_the_turns_of_the_others() -> None:
    quick = Member(steps_here=20, since_s=9.9, computing_s=0.1, push_s=0.1, turn_s=0.2)
    slow = Member(steps_here=20, since_s=9.9, computing_s=0.1, push_s=1.0, turn_s=1.1)
    memory = Rotation(order=(0, 1, 2, 3), gap_s=0.1, next_open_s=10.0, free_since_s=9.0, turns=3)
    state = State({0: quick, 1: quick, 2: quick, 3: slow}, now_s=9.0, memory=memory)
    after, _ = on(RoundRobin(), state, Ready(0, 0, 10.0))
    assert (after.memory.turns, after.memory.gap_s) == (4, pytest.approx(0.1))


def test_a_change_of_members_changes_the_gap_at_once() -> None:
    server = Server(RoundRobin(warmup=3), jitter(), 4, 0.1, 4).run(100)
    before_s = server.state.memory.gap_s
    server.leave(2)
    assert server.state.memory.gap_s == pytest.approx(before_s * 4 / 3, rel=0.1)


def test_lateness_shorter_than_a_gap_is_caught_up() -> None:
    members = dict.fromkeys((0, 1), Member(steps_here=20, computing_s=2.0, turn_s=0.1))
    for late_s, next_s in ((0.5, 11.0), (1.5, 12.5)):
        memory = Rotation(order=(0, 1), gap_s=1.0, next_open_s=10.0, free_since_s=9.0, turns=4)
        after, _ = on(RoundRobin(), State(members, now_s=9.0, memory=memory), Ready(0, 0, 10.0 + late_s))
        assert after.memory.next_open_s == next_s


def test_it_wakes_only_when_needed() -> None:
    server = Server(RoundRobin(), jitter(), 8, 1 / 8, BLOCKS).run(50 * 8)
    woken = sum(isinstance(event, Deadline) for event, _ in server.log)
    assert woken < 0.25 * len(server.grants), "workers are ready just after their turn has come"


# -- passing ---------------------------------------------------------------------------------------------------------


class Table:
    """Three workers of a rotation with a gap of 1 s, and a hand that moves them."""

    def __init__(self, policy: RoundRobin) -> None:
        self.policy, self.state = policy, State()
        for worker in range(3):
            self.tell(Joined(worker, 0.0))
        self.state = State(self.state.members, memory=Rotation(order=(0, 1, 2), gap_s=1.0, next_open_s=1.0, turns=3))

    def tell(self, event: object) -> list[int]:
        """Who was granted a turn."""
        self.state, actions = on(self.policy, self.state, event)  # type: ignore[arg-type]
        return [action.worker for action in actions if isinstance(action, Grant)]

    def ready(self, worker: int, at_s: float) -> list[int]:
        return self.tell(Ready(worker, self.state.members[worker].step, at_s))


def test_who_is_passed_over_is_served_first_once_it_is_ready() -> None:
    table = Table(RoundRobin())
    assert table.ready(2, 1.1) == []
    assert table.state.wake_s == 1.6, "half a gap after the slot was open"
    assert table.tell(Deadline(1.6)) == [2]
    assert table.state.memory.owed == {0, 1}
    assert table.tell(Pulled(2, 1.7)) == []
    assert table.ready(1, 1.8) == []
    assert table.ready(0, 1.9) == []
    assert table.state.wake_s == 2.0, "the next turn; the lateness of the last one is caught up"
    assert table.tell(Deadline(2.0)) == [0]
    assert table.tell(Pulled(0, 2.1)) == []
    assert table.tell(Deadline(3.0)) == [1]
    assert table.state.memory.order == (2, 0, 1)
    assert table.state.memory.owed == set()


def test_nobody_passes_in_strict_order_or_beyond_the_lead() -> None:
    table = Table(RoundRobin(strict=True))
    assert table.ready(2, 1.1) == []
    assert table.tell(Deadline(3.0)) == []
    assert table.ready(1, 3.1) == []
    assert table.ready(0, 3.2) == [0]
    table = Table(RoundRobin(lead=0))
    assert table.ready(2, 1.1) == []
    assert table.tell(Deadline(1.6)) == [2]
    assert table.tell(Pulled(2, 1.7)) == []
    assert table.ready(2, 1.8) == []
    assert table.tell(Deadline(5.0)) == [], "two owed turns and another update would make a gradient 3 updates old"
    assert table.ready(1, 5.1) == [1]


# -- who hangs, leaves and joins -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [RoundRobin(warmup=3), RoundRobin(strict=True, warmup=3)], ids=str)
def test_a_worker_that_hangs_is_evicted_within_its_lease(policy: RoundRobin) -> None:
    server = Server(policy, jitter(), 4, 0.1, 4).run(100)
    server.hung.add(1)
    server.run(200)
    ((evicted_s, worker),) = [(e.at_s, a.worker) for e, actions in server.log for a in actions if isinstance(a, Evict)]
    began_s = [event.at_s for event, _ in server.log if isinstance(event, Pulled) and event.worker == 1][-1]
    assert worker == 1
    assert evicted_s - began_s == pytest.approx(5.0, abs=0.5), "which is more than 4 cycles"
    assert set(server.grants[-30:]) == {0, 2, 3}


def test_a_turn_that_never_ends_is_ended() -> None:
    state = State()
    for worker in range(3):
        state, _ = on(STRICT, state, Joined(worker, 0.0))
    state, _ = on(STRICT, state, Ready(0, 0, 1.0))
    state, actions = on(STRICT, state, Ready(1, 0, 1.5))
    assert not any(isinstance(action, Grant) for action in actions)
    assert state.wake_s == 60.0, "its first turn; nobody knows how long one takes"
    state, actions = on(STRICT, state, Deadline(60.0))
    assert [a.worker for a in actions if isinstance(a, Evict)] == [2], "who has computed for a minute"
    assert state.wake_s == 120.0, "others may have waited for it"
    state, actions = on(STRICT, state, Deadline(120.0))
    assert [type(a).__name__ for a in actions if not isinstance(a, Remember)] == ["Evict", "Grant", "Apply", "Release"]
    state, _ = on(STRICT, state, Joined(0, 121.0))
    assert state.memory.order == (1, 0), "it may come back"


def test_who_waits_for_the_turn_before_it_is_not_late() -> None:
    """Updates are made in order: a pull waits for a turn that began earlier and whose contribution is not there."""
    policy = RoundRobin(slots=2, warmup=0)
    pushing = Member(step=1, granted_s=0.0, released_s=0.0, turn_s=10.0, push_s=5.0)
    pulling = Member(step=1, clock=1, granted_s=0.1, released_s=0.1, turn_s=0.1, push_s=0.05)
    waiting = Member(ready_s=0.5)
    state = State({0: pushing, 1: pulling, 2: waiting}, {(2, 0): 1.0}, now_s=30.0)
    assert not any(isinstance(action, Evict) for action in policy.decide(state)), "though its own turns take 0.1 s"
    assert policy.decide(replace(state, now_s=40.0))[-1] == Evict(0)
    arrived = {**state.members, 0: replace(pushing, clock=1)}
    assert policy.decide(replace(state, members=arrived))[-1] == Evict(1), "now it is"


def test_a_worker_that_is_alone_is_never_evicted() -> None:
    state, _ = on(STRICT, State(), Joined(0, 0.0))
    assert state.wake_s is None
    state, _ = on(STRICT, state, Ready(0, 0, 1.0))
    assert state.wake_s is None


def test_newcomers_are_put_far_from_each_other() -> None:
    server = Server(RoundRobin(warmup=3), jitter(), 6, 0.05, 4).run(100)
    old = server.state.memory.order
    server.join(10)
    assert server.state.memory.order == (*old, 10), "at the end, if there is no other"
    server.join(11)
    assert server.state.memory.order == (*old[:3], 11, *old[3:], 10)
    server.leave(10)
    server.leave(11)
    assert server.state.memory.order == old


def test_the_order_at_the_beginning_is_by_rank() -> None:
    state = State()
    for worker in (3, 1, 0, 2):
        state, _ = on(STRICT, state, Joined(worker, 0.0))
    assert state.memory.order == (0, 1, 2, 3)
    state, _ = on(STRICT, state, Left(1, 0.5))
    assert state.memory.order == (0, 2, 3)


# -- words -----------------------------------------------------------------------------------------------------------


def test_it_explains_who_paces_the_round() -> None:
    policy = RoundRobin(warmup=3)
    assert policy.explain(State()) == ""
    slow = Server(policy, one_slow(), 8, 0.01, 4).run(200).state
    assert policy.explain(slow).startswith("Worker 3 paces the round: its cycle takes 1.98 s (1.96 s computing, ")
    assert "1.9 times the median of 1.02 s" in policy.explain(slow)
    linked = Server(policy, jitter(), 8, 0.5, 4).run(200).state
    assert policy.explain(linked).startswith("The link paces the round: the turns of all 8 take 4 s, the longest cycle")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 0),
        ("slots", 1.5),
        ("gap_factor", -0.1),
        ("gap_factor", float("nan")),
        ("grace", -1),
        ("lead", -1),
        ("warmup", None),
        ("turn_lease_s", 0),
        ("compute_lease_s", -5.0),
    ],
)
def test_nonsense_is_refused_with_the_path(name: str, value: object) -> None:
    with pytest.raises(PlanError, match=f"at `plan.sync.{name}`"):
        RoundRobin(**{name: value})  # type: ignore[arg-type]


def test_released_workers_are_those_granted() -> None:
    server = Server(RoundRobin(warmup=2), jitter(sigma=1.0), 4, 0.1, 4).run(100)
    released = [a.worker for _, actions in server.log for a in actions if isinstance(a, Release)]
    assert released == server.grants


def strict_rates(*, early: bool, samples: int) -> list[tuple[int, float]]:
    """Whose contribution was applied at which rate; worker 1 leaves, and worker 2's second batch is another.

    Args:
        early: whether both happen before worker 0's second turn, or behind it.
        samples: in that batch.
    """
    applied: list[tuple[int, float]] = []
    state = State()

    def tell(event: Event) -> None:
        nonlocal state
        state, actions = on(STRICT, state, event)
        applied.extend((a.pushes[0][0], a.rate) for a in actions if isinstance(a, Apply))

    def turn(worker: int) -> None:
        tell(Pushed(worker, state.members[worker].clock, 1.0))
        tell(Pulled(worker, 1.0))

    for worker in range(3):
        tell(Joined(worker, 0.0))
    for worker in range(3):
        tell(Ready(worker, 0, 1.0, weight=4))
        turn(worker)
    meanwhile: list[Event] = [Left(1, 1.0), Ready(2, 1, 1.0, weight=samples)]
    for event in meanwhile if early else ():
        tell(event)
    tell(Ready(0, 1, 1.0, weight=4))
    for event in () if early else meanwhile:
        tell(event)
    turn(0)
    turn(2)
    tell(Ready(0, 2, 1.0, weight=4))
    return applied


def test_in_strict_order_nothing_depends_on_when_it_happens_between_two_turns() -> None:
    assert strict_rates(early=True, samples=2) == strict_rates(early=False, samples=2)
    assert strict_rates(early=True, samples=2)[3:] == [(0, 4 / 12), (2, 2 / 6), (0, 4 / 6)]


# -- who pushes while it computes ------------------------------------------------------------------------------------


def told(policy: Policy, state: State, *events: Event) -> tuple[State, list[list[Action]]]:
    """The state after these events, and what is decided after each of them."""
    said: list[list[Action]] = []
    for event in events:
        state, actions = on(policy, state, event)
        said.append([action for action in actions if not isinstance(action, Remember)])
    return state, said


def one_turn_each(policy: Policy, *, pushes_early: bool = True) -> State:
    """Worker 0 computes its second contribution; worker 1's turn has just begun."""
    state, _ = told(policy, State(), Joined(0, 0.0), Joined(1, 0.0), Ready(0, 0, 1.0), Ready(1, 0, 1.0))
    state, _ = told(policy, state, Pushed(0, 0, 1.5), Pulled(0, 2.0, pushes_early))
    return state


@pytest.mark.parametrize("policy", [RoundRobin(), STRICT], ids=["", "strict"])
def test_who_pushes_early_is_granted_when_the_next_turn_is_its_own(policy: Policy) -> None:
    state, said = told(policy, one_turn_each(policy), Pushed(1, 0, 3.0), Pulled(1, 3.5, pushes_early=True))
    assert [Grant(0)] in said
    assert Grant(1) not in [*itertools.chain.from_iterable(said)], "it is the other's turn"
    assert state.members[0].phase == "computing"
    state, said = told(policy, state, Ready(0, 1, 4.0))
    assert said == [[Apply(((0, 1),), rate=0.5), Release(0)]], "it may push already"
    assert state.members[0].granted_s == 4.0, "what was pushed before took no time of the turn"
    state, said = told(policy, state, Pushed(0, 1, 4.1), Pulled(0, 4.2, pushes_early=True))
    assert [Grant(1)] in said
    assert state.members[0].computing_s is None
    state, _ = told(policy, state, Ready(1, 1, 5.0), Pushed(1, 1, 5.1), Pulled(1, 5.2), Ready(0, 2, 6.0))
    assert state.members[0].computing_s == pytest.approx(6.0 - 4.2), "of all the time that it computed"


@pytest.mark.parametrize("policy", [RoundRobin(), STRICT], ids=["", "strict"])
def test_nobody_else_is_granted_before_it_is_ready(policy: Policy) -> None:
    state = one_turn_each(policy, pushes_early=False)
    _, said = told(policy, state, Pushed(1, 0, 3.0), Pulled(1, 3.5))
    assert not any(isinstance(action, Grant) for action in itertools.chain.from_iterable(said))


def spaced(now_s: float, **changes: Any) -> State:
    """Two workers that compute, long after the warm-up; the turn of worker 0 may begin at 5 s."""
    rotation = Rotation((0, 1), gap_s=4.0, next_open_s=5.0, free_since_s=0.0, turns=40)
    one = Member(step=20, clock=20, steps_here=20, computing_s=8.0, turn_s=1.0, push_s=0.5, pushes_early=True)
    return State({0: replace(one, **changes), 1: one}, now_s=now_s, memory=rotation)


def test_it_is_granted_when_turns_are_open() -> None:
    assert Wake(5.0) in RoundRobin().decide(spaced(4.0))
    assert Grant(0) not in RoundRobin().decide(spaced(4.0))
    assert Grant(0) in RoundRobin().decide(spaced(5.0))
    begun = spaced(5.0, granted_s=4.9)
    assert not any(isinstance(action, Grant) for action in RoundRobin().decide(begun)), "one at a time"
    assert Grant(1) in RoundRobin(slots=2).decide(begun)


def test_who_is_ready_meanwhile_goes_ahead_as_without() -> None:
    """The one passed over keeps what it was granted, and is served first."""
    policy, state = RoundRobin(), spaced(5.0, granted_s=4.9)
    state, said = told(policy, state, Ready(1, 20, 5.5), Deadline(7.1))
    assert [action for action in said[1] if not isinstance(action, Wake)] == [
        Grant(1),
        Apply(((1, 20),), rate=0.5),
        Release(1),
    ]
    state, said = told(policy, state, Pushed(1, 20, 7.2), Pulled(1, 7.3, pushes_early=True))
    assert Grant(1) not in [*itertools.chain.from_iterable(said)]
    _, said = told(policy, state, Ready(0, 20, 7.4), Deadline(9.5))
    assert [Apply(((0, 20),), rate=0.5), Release(0)] in [
        [action for action in actions if not isinstance(action, Wake)] for actions in said
    ]


def test_another_policy_takes_what_was_granted_as_it_is() -> None:
    state, _ = told(RoundRobin(), one_turn_each(RoundRobin()), Pushed(1, 0, 3.0), Pulled(1, 3.5, pushes_early=True))
    _, said = told(BSP(), state, Adopted(3.6), Ready(0, 1, 4.0), Ready(1, 1, 4.0))
    assert said == [[], [], [Grant(1), Apply(((0, 1), (1, 1))), Release(0), Release(1)]]
