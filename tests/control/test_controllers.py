"""Controllers as what they are: pure rules over what was measured."""

from __future__ import annotations

import dataclasses
from copy import copy

import pytest

from offbeat.control import AdaptQuorum, ByProgress, Keep, Metrics, Pace, Reading, Swap, WaitThreshold
from offbeat.errors import PlanError
from offbeat.fabric import Elastic, FabricSpec, ParameterServer, ProcessGroup, Switch
from offbeat.plan import Plan
from offbeat.sync import ASP, BSP, SSP, KSync, LocalSGD, Policy
from offbeat.testing import check_controller

SERVER = ParameterServer()


@pytest.mark.parametrize(
    "controller",
    [
        WaitThreshold(),
        WaitThreshold(explore=True),
        WaitThreshold(tight=SSP(2), loose=LocalSGD(8), above=0.5, below=0.1, window_s=1.0, least_s=1.0),
        ByProgress((BSP(), SSP(4), ASP()), at=(0.25, 0.9), steps=50),
        AdaptQuorum(3, 4),
        AdaptQuorum(1, 4, too_late=0.8),
    ],
    ids=repr,
)
def test_ours_keep_the_rules(controller: WaitThreshold | ByProgress | AdaptQuorum) -> None:
    asked = check_controller(controller)
    assert asked["swaps"] >= 1
    assert asked["decisions"] > 1000


class Flapping:
    """Swaps whenever it is asked."""

    policies, looks_back_s = (BSP(), ASP()), 1.0

    def decide(self, metrics: Metrics) -> Keep | Swap:
        return Swap(ASP() if metrics.sync == BSP() else BSP(), "for a change")


class Remembering(Flapping):
    """Counts how often it was asked."""

    count = 0

    def decide(self, metrics: Metrics) -> Keep | Swap:
        self.count += 1
        return Swap(ASP(), "this was the third time") if self.count % 3 == 0 and metrics.sync == BSP() else Keep()


class Elsewhere(Flapping):
    """Goes to a policy that nobody has agreed to."""

    def decide(self, metrics: Metrics) -> Keep | Swap:
        return Swap(SSP(9), "it is said to be good") if metrics.sync != SSP(9) else Keep()


class ToItself(Flapping):
    """Swaps for what decides already."""

    def decide(self, metrics: Metrics) -> Keep | Swap:
        return Swap(copy(metrics.sync), "it is good")


@pytest.mark.parametrize(
    ("rogue", "says"),
    [
        (Flapping(), "flaps"),
        (Remembering(), "it knows more than the metrics"),
        (Elsewhere(), "is none of its policies"),
        (ToItself(), "decides already"),
    ],
)
def test_what_breaks_the_rules_is_found(rogue: Flapping, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_controller(rogue)


def told(sync: BSP | ASP | SSP, waited: float, *, since_s: float = 0.0, swaps: tuple[float, ...] = ()) -> Metrics:
    """Four workers over twenty seconds: three wait for that part of the time, and one is at work."""
    readings = [
        Reading(at_s, {w: int(at_s) for w in range(4)}, {w: waited * at_s * (w > 0) for w in range(4)})
        for at_s in (0.0, *[10 + number / 4 for number in range(41)])
    ]
    return Metrics(sync, tuple(readings), since_s, swaps)


def test_it_goes_to_the_looser_policy_above_the_threshold_and_says_why() -> None:
    controller = WaitThreshold(above=0.5, below=0.2)
    assert controller.decide(told(BSP(), 0.6)) == Keep()  # 45 % of all
    assert controller.decide(told(BSP(), 0.8)) == Swap(
        ASP(), "60% of the last 2 s were spent waiting for others, above 50%"
    )


def test_it_never_goes_back_below_zero() -> None:
    assert WaitThreshold(above=0.5, below=0.0).decide(told(ASP(), 0.0)) == Keep()


def test_it_goes_back_when_nobody_would_be_late() -> None:
    controller = WaitThreshold(above=0.5, below=0.2)
    assert controller.decide(told(ASP(), 0.5)) == Keep()
    assert isinstance(controller.decide(told(ASP(), 0.1)), Swap)
    assert controller.decide(told(ASP(), 0.1, since_s=17.0)) == Keep(), "not for less than 4 s"
    assert controller.decide(told(ASP(), 0.1, since_s=15.0, swaps=(1.0, 6.0, 15.0))) == Keep(), "it turned back before"
    assert isinstance(controller.decide(told(ASP(), 0.1, since_s=11.0, swaps=(1.0, 6.0, 11.0))), Swap)


def test_what_is_not_known_may_be_explored() -> None:
    """20 s are over: `tight` has decided for all of them, or since."""
    asked = WaitThreshold(explore=True)

    def decide(sync: BSP | ASP, since_s: float, **per_s: float) -> Keep | Swap:
        policies: dict[str, Policy] = {"bsp": BSP(), "asp": ASP()}
        paces = {policies[name]: Pace(20.0, value) for name, value in per_s.items()}
        return asked.decide(dataclasses.replace(told(sync, 0.0, since_s=since_s), paces=paces))

    assert WaitThreshold().decide(told(BSP(), 0.0)) == Keep()
    assert decide(BSP(), 0.0) == Keep(), "not before there is something to compare with"
    assert decide(BSP(), 13.0, bsp=10.0) == Keep(), "not before 8 s are over"
    assert decide(BSP(), 0.0, bsp=10.0) == Swap(
        ASP(), "each worker had 10 samples/s at best, and what it has under ASP() is not known"
    )
    assert decide(ASP(), 12.0, bsp=10.0) == Keep(), "it is still not known"
    assert decide(ASP(), 12.0, bsp=10.0, asp=12.0) == Keep(), "it costs too much to go back"
    assert isinstance(decide(ASP(), 12.0, bsp=10.0, asp=11.0), Swap)
    assert decide(BSP(), 0.0, bsp=10.0, asp=11.0) == Keep()


def test_a_schedule_may_end_as_it_began() -> None:
    controller = ByProgress((BSP(), ASP(), BSP()), at=(0.5, 0.75), steps=24)
    assert controller.decide(told(BSP(), 0.0)) == Keep(), "20 of 24"
    assert controller.decide(told(ASP(), 0.0)) == Swap(BSP(), "20 of 24 steps are done")


def test_a_part_is_over_with_its_last_step() -> None:
    for steps, decision in ((40, Swap(ASP(), "20 of 40 steps are done")), (41, Keep())):
        assert ByProgress((BSP(), ASP()), at=(0.5,), steps=steps).decide(told(BSP(), 0.0)) == decision


def test_what_a_person_has_chosen_it_leaves_alone() -> None:
    for controller in (WaitThreshold(), ByProgress((BSP(), ASP()), at=(0.5,), steps=10)):
        assert controller.decide(told(SSP(3), 0.9)) == Keep()


def test_who_has_only_waited_says_nothing_about_how_even_workers_are() -> None:
    stuck = [
        Reading(at_s, {0: 5, 1: 5}, {0: 0.0, 1: at_s})
        for at_s in (0.0, 4.0)  # worker 0 has stopped, and 1 waits for it
    ]
    assert Metrics(ASP(), tuple(stuck)).imbalance(4.0) is None
    assert Metrics(ASP(), tuple(stuck)).waiting(4.0) == 0.5
    assert Metrics(ASP(), tuple(stuck)).waiting(5.0) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: WaitThreshold(above=1.0), "plan.controller.above"),
        (lambda: WaitThreshold(above=0.3, below=0.3), "plan.controller.below"),
        (lambda: WaitThreshold(loose=BSP()), "plan.controller.loose"),
        (lambda: WaitThreshold(window_s=0), "plan.controller.window_s"),
        (lambda: WaitThreshold(price=1.0), "plan.controller.price"),
        (lambda: WaitThreshold(explore=1), "plan.controller.explore"),  # type: ignore[arg-type]
        (lambda: ByProgress((BSP(), ASP()), at=(0.5, 0.6), steps=9), "plan.controller.at"),
        (lambda: ByProgress((BSP(), ASP(), ASP()), at=(0.5, 0.6), steps=9), "plan.controller.policies"),
        (lambda: ByProgress((BSP(), ASP()), at=(0.5,), steps=0), "plan.controller.steps"),
        (lambda: AdaptQuorum(4, 4), "plan.controller.most"),
        (lambda: AdaptQuorum(2, 4, late="lose"), "plan.controller.late"),  # type: ignore[arg-type]
        (lambda: AdaptQuorum(2, 4, above=0.2, below=0.2), "plan.controller.below"),
        (lambda: AdaptQuorum(2, 4, too_late=1.0), "plan.controller.too_late"),
        (lambda: AdaptQuorum(2, 4, least_s=0), "plan.controller.least_s"),
        (lambda: Plan(sync=KSync(4), controller=AdaptQuorum(2, 4), fabric=SERVER).check_world(3), "plan.sync.k"),
        (lambda: Plan(controller=AdaptQuorum(2, 4), fabric=SERVER), r"Begin with sync=KSync\(k=4"),
        (lambda: Plan(controller=AdaptQuorum(2, 4)), "there is no server"),
        (lambda: Plan(controller=WaitThreshold()), "there is no server"),
        (lambda: Plan(controller=WaitThreshold(), fabric=ProcessGroup()), r"with ASP\(\).* there is no server"),
        (lambda: Plan(controller=ByProgress((BSP(), SSP(2)), at=(0.5,), steps=9), fabric=Elastic()), "with SSP"),
        (lambda: Plan(controller=WaitThreshold(loose=LocalSGD(8)), sync=LocalSGD(4)), "it would never swap"),
        (lambda: Plan(controller=WaitThreshold(), fabric=SERVER, sync=SSP(4)), "it would never swap"),
        (lambda: Plan(controller=BSP(), fabric=SERVER), "plan.controller"),  # type: ignore[arg-type]
        (lambda: Plan(controller=WaitThreshold(loose=KSync(4)), fabric=SERVER).check_world(3), "plan.controller.k"),
    ],
)
def test_what_cannot_be_is_refused_when_the_plan_is_made(make: object, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()  # type: ignore[operator]


def adapting(k: int, waited: float, left_out: float, *, since_s: float = 0.0, too_late: float = 0.3) -> Keep | Swap:
    """Four workers that wait for that part of the time, and of whose contributions that part comes too late; what a
    controller of two to four makes of that.
    """
    readings = [
        Reading(
            at_s,
            brought := {w: int(10 * at_s) for w in range(4)},
            dict.fromkeys(range(4), waited * at_s),
            brought=brought,
            left_out={w: int(10 * at_s * left_out) for w in range(4)},
        )
        for at_s in (0.0, *[10 + number / 4 for number in range(41)])
    ]
    return AdaptQuorum(2, 4, too_late=too_late).decide(Metrics(KSync(k), tuple(readings), since_s))


def test_the_quorum_falls_while_much_is_waited_and_not_too_many_would_come_too_late() -> None:
    down = Swap(KSync(3), "35% of the last 2 s were spent waiting for others, above 30%")
    assert adapting(4, 0.35, 0.0) == down
    assert adapting(4, 0.35, 0.0, since_s=17.0) == Keep(), "not for less than 4 s"
    assert adapting(4, 0.25, 0.0) == Keep()
    assert adapting(3, 0.35, 0.25) == Keep(), "half of all would"
    assert isinstance(adapting(3, 0.35, 0.25, too_late=0.6), Swap)
    assert adapting(2, 0.35, 0.0) == Keep(), "that is the least"
    assert AdaptQuorum(2, 4).decide(dataclasses.replace(told(BSP(), 0.9), sync=KSync(7))) == Keep(), "it knows no such"


def test_the_quorum_rises_where_too_many_come_too_late_and_where_hardly_anybody_would_wait() -> None:
    up = Swap(KSync(4), "40% of the contributions of the last 2 s came too late, above 30%")
    assert adapting(3, 0.35, 0.4) == up
    assert adapting(3, 0.05, 0.0) == Swap(
        KSync(4), "less than 10% of the last 2 s would have been spent waiting for others"
    )
    assert adapting(4, 0.0, 0.0) == Keep(), "that is the most"
    assert adapting(3, 0.05, 0.0, since_s=13.0) == Keep(), "a trial takes 8 s"
    assert adapting(3, 0.2, 0.2) == Keep()


def test_a_plan_with_a_controller_is_what_it_prints_and_what_it_writes() -> None:
    adapts = Plan(sync=KSync(4), fabric=Switch("127.0.0.1:1"), controller=AdaptQuorum(2, 4))
    assert Plan.from_toml(adapts.to_toml()) == adapts
    assert eval(repr(adapts.controller)) == adapts.controller
    for controller in (WaitThreshold(loose=SSP(4)), ByProgress((BSP(), SSP(2), ASP()), at=(0.25, 0.5), steps=100)):
        plan = Plan(fabric=SERVER, controller=controller)
        assert Plan.from_toml(plan.to_toml()) == plan
        assert eval(repr(controller)) == controller


@pytest.mark.parametrize("fabric", [ProcessGroup(), Elastic()], ids=repr)
def test_where_there_is_no_server_policies_that_need_none_do(fabric: FabricSpec) -> None:
    for controller in (
        WaitThreshold(loose=LocalSGD(8)),
        ByProgress((BSP(), LocalSGD(2), LocalSGD(8)), at=(0.25, 0.5), steps=100),
    ):
        plan = Plan(fabric=fabric, controller=controller)
        assert Plan.from_toml(plan.to_toml()) == plan
        assert plan.swapped('[sync]\nkind = "LocalSGD"\nevery = 4\n').controller is None


def test_a_person_who_swaps_the_policy_takes_over_from_the_controller() -> None:
    plan = Plan(fabric=SERVER, controller=WaitThreshold())
    by_hand = plan.swapped('[sync]\nkind = "SSP"\nbound = 3\n')
    assert (by_hand.sync, by_hand.controller) == (SSP(3), None)
    assert plan.controlled(ASP()) == Plan(sync=ASP(), fabric=SERVER, controller=WaitThreshold())
    back = by_hand.swapped('[sync]\nkind = "BSP"\n[controller]\nkind = "WaitThreshold"\n')
    assert back == plan
