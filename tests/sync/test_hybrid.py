"""One policy within groups, another between them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import PlanError
from offbeat.sync import (
    ASP,
    BSP,
    SSP,
    Apply,
    Deadline,
    Drop,
    Evict,
    Grant,
    Hybrid,
    Joined,
    KSync,
    Left,
    LocalSGD,
    Pulled,
    Pushed,
    Ready,
    Release,
    Remember,
    RoundRobin,
    State,
    Wake,
    on,
)
from tests.sync.simulated_link import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.sync import Action, Event, Policy


def even(seed: int = 0) -> Callable[[int, int], float]:
    rng = random.Random(seed)
    return lambda worker, step: rng.lognormvariate(0.0, 0.05)


class Table:
    """Workers of a policy, and a hand that moves them."""

    def __init__(self, policy: Policy, ranks: Sequence[int]) -> None:
        self.policy, self.state = policy, State()
        for rank in ranks:
            self.tell(Joined(rank, 0.0))

    def tell(self, event: Event) -> list[Action]:
        self.state, actions = on(self.policy, self.state, event)
        return [action for action in actions if not isinstance(action, Remember | Wake)]

    def ready(self, rank: int, at_s: float = 1.0) -> list[Action]:
        return self.tell(Ready(rank, self.state.members[rank].step, at_s, 32.0))


def test_a_group_in_step_contributes_as_one() -> None:
    table = Table(Hybrid(BSP(), SSP(bound=0), groups=2), range(4))
    assert table.ready(0) == [Grant(0)], "it may push at once, though its group is not complete"
    bundle = Apply(((0, 0), (1, 0)), rate=0.5, in_order=False)
    assert table.ready(1) == [Grant(1), bundle], "half a round; with a bound of 0 the group waits for the other"
    assert table.ready(3) == [Grant(3)]
    assert table.ready(2) == [Grant(2), Apply(((2, 0), (3, 0)), rate=0.5, in_order=False)]


def test_the_whole_round_at_once_is_bsp_to_the_bit() -> None:
    table = Table(Hybrid(BSP(), BSP(), groups=3), range(7))
    for rank in range(6):
        assert table.ready(rank) == [Grant(rank)]
    everybody = tuple((rank, 0) for rank in range(7))
    assert table.ready(6) == [Grant(6), Apply(everybody, rate=1.0), *map(Release, range(7))]


def test_a_gated_policy_between_groups_holds_back_pushes() -> None:
    policy = Hybrid(BSP(), RoundRobin(warmup=2), groups=3)
    table = Table(policy, range(6))
    assert [table.ready(rank) for rank in (3, 0, 1)] == [[], [], []]
    turn = [Grant(0), Grant(1), Grant(2), Apply(((0, 0), (1, 0), (2, 0)), rate=0.5)]
    assert table.ready(2) == [*turn, Release(0), Release(1), Release(2)]
    server = Server(policy, even(), 6, 0.1, 4).run(400)
    holders: set[int] = set()
    for event, actions in server.log:
        if isinstance(event, Pushed):
            holders.discard(event.worker)
        holders |= {action.worker for action in actions if isinstance(action, Grant)}
        assert len({worker // 3 for worker in holders}) <= 1, "the turn of one group at a time"


@pytest.mark.slow
def test_turns_of_groups_keep_gradients_young() -> None:
    """The reason for groups: twelve workers that take turns bring gradients that are 11 updates old."""
    server = Server(Hybrid(BSP(), RoundRobin(), groups=4), even(), 12, 0.02, 4).run(600)
    assert max(server.staleness) == 2
    assert max(Server(RoundRobin(), even(), 12, 0.02, 4).run(600).staleness) >= 11


def test_a_slow_group_is_waited_for_within_the_bound_only() -> None:
    def compute_s(worker: int, step: int) -> float:
        return 3.0 if worker >= 2 else 1.0

    server = Server(Hybrid(BSP(), SSP(bound=2), groups=2), compute_s, 4).run(100)
    assert server.state.members[0].step - server.state.members[2].step in (2, 3)
    assert Server(Hybrid(BSP(), ASP(), groups=2), compute_s, 4).run(100).now_s < 0.6 * server.now_s


def test_a_late_group_is_dropped_before_it_pushes() -> None:
    table = Table(Hybrid(BSP(), KSync(k=1), groups=2), range(4))
    table.ready(0)
    table.ready(1)
    assert table.ready(2) == []
    assert table.ready(3) == [Drop(((2, 0), (3, 0))), Release(2), Release(3)]


def test_what_workers_bring_while_their_group_is_on_the_link_joins_its_next_contribution() -> None:
    table = Table(Hybrid(ASP(), RoundRobin(warmup=1), groups=4), range(8))
    assert table.ready(0) == [Grant(0), Apply(((0, 0),), rate=0.125), Release(0)]
    assert table.ready(1, 2.0) == []
    assert table.ready(2, 2.0) == []
    assert table.ready(4, 2.0) == []
    turn = table.tell(Pushed(0, 0, 3.0))
    assert turn == [Grant(4), Apply(((4, 0),), rate=0.125), Release(4)], "the other group's turn"
    assert table.tell(Pulled(0, 3.0)) == []
    turn = table.tell(Pushed(4, 0, 4.0))
    assert turn == [Grant(1), Grant(2), Apply(((1, 0), (2, 0)), rate=0.25), Release(1), Release(2)]


def test_who_joins_a_group_that_waits_is_waited_for() -> None:
    """The bound holds between any two workers, also if one joined after its group had contributed."""
    table = Table(Hybrid(BSP(), SSP(bound=0), groups=2), [0, 2])
    assert table.ready(0) == [Grant(0), Apply(((0, 0),), rate=0.5, in_order=False)]
    table.tell(Joined(1, 2.0))
    assert table.ready(2, 3.0)[:1] == [Grant(2)]
    assert table.tell(Pushed(0, 0, 4.0)) == []
    assert table.tell(Pushed(2, 0, 4.0)) == []
    assert [a for a in table.ready(1, 5.0) if isinstance(a, Release)] == [Release(1)], "all others are there"
    assert table.tell(Pushed(1, 0, 6.0)) == [Release(0), Release(2)]


def test_a_group_that_has_stepped_out_still_counts() -> None:
    """What the others contribute meanwhile weighs no more than before."""
    server = Server(Hybrid(BSP(), ASP(), groups=2), even(), 4, 0.01, 2).run(40)
    before = len(server.log)
    for rank in (2, 3):
        server._lose(rank)
        server._tell(Left(rank, server.now_s, returns=True))
    server.run(80)
    rates = [a.rate for _, actions in server.log[before + 2 :] for a in actions if isinstance(a, Apply)]
    assert len(rates) > 10
    assert set(rates) == {0.5}


def test_only_the_worker_that_hangs_is_evicted() -> None:
    server = Server(Hybrid(BSP(), RoundRobin(warmup=2), groups=3), even(), 6, 0.05, 4).run(120)
    server.hung.add(4)
    server.run(300)
    assert [a.worker for _, actions in server.log for a in actions if isinstance(a, Evict)] == [4]
    assert set(server.grants[-20:]) == {0, 1, 2, 3, 5}


@pytest.mark.parametrize("within", [RoundRobin(warmup=0), Hybrid(BSP(), RoundRobin(warmup=0), groups=1)], ids=str)
def test_who_waits_for_the_policy_between_groups_is_not_late(within: Policy) -> None:
    """Turns within groups have leases; the other group's step takes longer than any of them."""
    table = Table(Hybrid(within, BSP(), groups=2), range(4))
    assert table.ready(0) == [Grant(0)], "its turn in its group; the update waits for the other group"
    assert table.tell(Pushed(0, 0, 2.0)) == []
    assert table.ready(1, 3.0) == [Grant(1)]
    assert table.tell(Pushed(1, 0, 4.0)) == []
    for at_s in (70.0, 140.0, 210.0):
        assert table.tell(Deadline(at_s)) == []
    assert table.state.wake_s is None, "and nobody asks again and again"
    assert table.ready(2, 220.0)[-2:] == [Release(0), Release(2)]
    assert table.ready(3, 221.0) == []
    late = [a for a in table.tell(Deadline(290.0)) if isinstance(a, Evict)]
    assert late == [Evict(2)], "the update is made, and only this one's part in it is missing"


def test_who_waits_for_the_contribution_of_another_group_is_not_late() -> None:
    """With two slots a pull waits for the turn before it."""
    table = Table(Hybrid(RoundRobin(warmup=0), RoundRobin(warmup=0, slots=2), groups=2), range(4))
    assert table.ready(0)[-1] == Release(0)
    assert table.ready(2, 2.0)[-1] == Release(2)
    table.tell(Pushed(2, 0, 3.0))
    assert table.ready(3, 3.0) == []
    evicted_s = {a.worker: s for s in range(4, 121) for a in table.tell(Deadline(s)) if isinstance(a, Evict)}
    assert evicted_s == {0: 61}, "and the other one is given a minute of its own from then on"


def test_who_is_in_which_group() -> None:
    assert [Hybrid(BSP(), ASP(), groups=4).group_of(rank) for rank in (0, 3, 4, 11)] == [0, 0, 1, 2]
    named = Hybrid(BSP(), ASP(), groups=((0, 3), (1, 2)))
    assert [named.group_of(rank) for rank in (0, 1, 2, 3)] == [0, 1, 1, 0]
    assert named.group_of(7) != named.group_of(8), "who joined later is a group of its own"
    assert named.group_of(7) not in (0, 1)


def test_what_is_promised() -> None:
    assert Hybrid(BSP(), SSP(bound=3), groups=2).bound == 3
    assert Hybrid(LocalSGD(every=8), BSP(), groups=2).bound == 0
    assert Hybrid(SSP(bound=1), SSP(bound=3), groups=2).bound is None
    assert Hybrid(BSP(), KSync(k=1), groups=2).drops
    assert Hybrid(BSP(), RoundRobin(), groups=2).gated
    assert Hybrid(LocalSGD(every=8), BSP(), groups=2).contributes(7) == "change"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Hybrid(BSP(), LocalSGD(every=2), groups=2), "LocalSGD between groups.*at `plan.sync.outer`"),
        (lambda: Hybrid("BSP", BSP(), groups=2), "no policy|as a policy.*at `plan.sync.inner`"),  # type: ignore[arg-type]
        (lambda: Hybrid(BSP(), BSP(), groups=0), "at `plan.sync.groups`"),
        (lambda: Hybrid(BSP(), BSP(), groups=()), "at `plan.sync.groups`"),
        (lambda: Hybrid(BSP(), BSP(), groups=((0, 1), ())), "at least one rank.*at `plan.sync.groups`"),
        (lambda: Hybrid(BSP(), BSP(), groups=((0, 1), (1, 2))), "each rank once.*at `plan.sync.groups`"),
        (lambda: Hybrid(BSP(), BSP(), groups=((0, -1),)), "counting from 0.*at `plan.sync.groups`"),
        (lambda: Hybrid(BSP(), BSP(), groups=[[0, 1]]), "tuple of tuples.*at `plan.sync.groups`"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused_with_the_path(make: Callable[[], Policy], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()
