"""Laws of the coordinator: whatever workers say it answers in instructions, and the same events lead to the same."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.control import WaitThreshold
from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.events import (
    ModelBegun,
    ShardSaid,
    SwapAsked,
    TimePassed,
    WorkerGone,
    WorkerMissed,
    WorkerOpened,
    WorkerSaid,
)
from offbeat.coordinator.instructions import RejectPeer, SendToShards, SendToWorker, SetTimer
from offbeat.errors import NetworkError
from offbeat.fabric import ParameterServer
from offbeat.plan import Plan
from offbeat.protocol.checkpoints import LOADING, RequestReplacement
from offbeat.protocol.data_leases import (
    MemoryExhausted,
    RegisterLoader,
    RequestLease,
    ReturnLease,
    SetDataState,
)
from offbeat.protocol.optimizer_spec import OptimizerSpec
from offbeat.protocol.plan_swap import LEAVING, PlanAgreement, PlanProposed, SwapPlan
from offbeat.protocol.shards import (
    ApplyContributions,
    DropContribution,
    ModelFilled,
    PushDone,
    PushNearlyDone,
    WithdrawContribution,
    WorkerDrained,
    WorkerRemoved,
)
from offbeat.protocol.training import (
    Announce,
    AskAllWorkers,
    ContributionInfo,
    LeaveAfter,
    ModelInfo,
    PullDone,
    Reconnect,
    ReleaseWorker,
)
from offbeat.server.optimizers import check_hyper
from offbeat.sync import ASP, SSP, KSync

if TYPE_CHECKING:
    from offbeat.coordinator.events import CoordinatorEvent
    from offbeat.coordinator.instructions import Instruction, Timer
    from offbeat.protocol.optimizer_spec import Hyper

WORLD = 3
RANKS = st.integers(0, WORLD)  # the last one was not there from the beginning
HYPER: Hyper = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
PLANS = [
    Plan(fabric=ParameterServer()),
    Plan(sync=ASP(), fabric=ParameterServer()),
    Plan(sync=SSP(bound=1), fabric=ParameterServer()),
    Plan(sync=KSync(k=2), fabric=ParameterServer()),
    Plan(controller=WaitThreshold(least_s=0.1), fabric=ParameterServer()),
]
PARTS = ['[sync]\nkind = "ASP"\n', '[sync]\nkind = "BSP"\n', "[sync]\nkind = 7\n", "x", "[fabric]\n"]
read_plan = functools.cache(Plan.from_toml)
small = st.integers(0, 3)


def details(plan: str, shards: int, back: Reconnect | None = None) -> ModelInfo:
    spec = OptimizerSpec("SGD", (HYPER,), (("a",),))
    return ModelInfo(WORLD, shards, shards, plan, "layout", ("a",), (), spec, back)


def loader(samples: int, ahead: int) -> RegisterLoader:
    return RegisterLoader(
        loader=0,
        plan=PLANS[0].to_toml(),
        world=WORLD,
        samples=samples,
        seed=3,
        shuffle=True,
        drop_last=False,
        batch=4,
        ahead=ahead,
    )


backs = st.none() | st.builds(
    Reconnect, life=st.sampled_from([0, 1, 9]), clock=small, version=small, holds=st.booleans(), waits=st.booleans()
)
said = st.one_of(
    st.builds(PullDone, st.integers(0, 1), small),
    st.builds(AskAllWorkers, small, st.sampled_from([LOADING, LEAVING, "a"]), st.booleans(), st.just((1.0,))),
    st.builds(PlanAgreement, small, st.sampled_from(["", "ff"]), st.sampled_from(["", "no"]), small),
    st.builds(LeaveAfter, small),
    st.builds(RequestReplacement, st.integers(0, 1), small),
    st.builds(SetDataState, small),
    st.builds(loader, st.sampled_from([40, 41]), st.integers(1, 2)),
    st.builds(RequestLease, st.integers(0, 1)),
    st.builds(ReturnLease, st.just(0), st.lists(small, max_size=2).map(tuple)),
    st.builds(MemoryExhausted, st.just(0), small),
    st.builds(
        Announce,
        st.integers(0, 1),
        small,
        st.builds(
            ContributionInfo, st.sampled_from([0.0, 4.0]), st.sampled_from([(HYPER,), ({},), ()]), change=st.booleans()
        ),
    ),
)
moves = st.one_of(
    st.tuples(st.just("goes on"), RANKS),
    st.tuples(st.just("pushes in part"), RANKS),
    st.tuples(st.just("all go on")),
    st.tuples(st.just("all ask"), st.sampled_from([LOADING, "a"]), st.booleans()),
    st.tuples(st.just("all load"), st.integers(1, 2)),
    st.tuples(st.just("opens"), RANKS, backs),
    st.tuples(st.just("says"), RANKS, said),
    st.tuples(st.just("leaves"), RANKS, st.booleans()),
    st.tuples(st.just("misses"), RANKS),
    st.tuples(st.just("swaps"), st.sampled_from(PARTS), st.booleans()),
    st.tuples(st.just("waits"), st.floats(0.001, 2.0)),
)


class Owner:
    """Plays a coordinator as a server does, with workers that go on as they should, and say what they should not."""

    def __init__(self, plan: str, shards: int) -> None:
        self.shards, self.drains = shards, list[WorkerDrained]()
        self.plan, self.now_s, self.counts = plan, 0.0, Counter[str]()
        self.coordinator = self.fresh()
        self.events: list[CoordinatorEvent] = []
        self.instructions: list[list[Instruction]] = []
        self.timers: dict[Timer, float] = {}
        self.here: set[int] = set()
        self.go: dict[int, ReleaseWorker] = {}
        self.decided: set[tuple[int, int]] = set()
        self.proposed: dict[int, PlanProposed] = {}
        self.asked = 0
        self.hear(ModelBegun(0.0, 0, details(plan, shards)))
        for _ in range(shards):
            self.hear(ShardSaid(0.0, ModelFilled(0)))

    @staticmethod
    def fresh() -> Coordinator:
        return Coordinator(read_plan, 1, check_hyper=check_hyper)

    def hear(self, event: CoordinatorEvent) -> None:
        found = self.coordinator.handle(event)
        self.events.append(event)
        self.instructions.append(found)
        for place, instruction in enumerate(found):
            match instruction:
                case SendToWorker(worker=worker, message=ReleaseWorker() as message):
                    self.go[worker] = message
                case SendToWorker(worker=worker, message=PlanProposed() as message):
                    self.proposed[worker] = message
                case SendToShards(decision=ApplyContributions(pushes=pushes)):
                    assert not self.decided & set(pushes), "once"
                    self.decided |= set(pushes)
                    self.counts["applied"] += len(pushes)
                case SendToShards(decision=DropContribution(worker=worker, clock=clock)):
                    assert (worker, clock) not in self.decided, "once"
                    self.decided.add((worker, clock))
                case SendToShards(decision=WorkerRemoved(worker=worker, number=number)):
                    self.go.pop(worker, None)
                    self.drains += [WorkerDrained(0, number)] * bool(number)
                case SendToShards(decision=WithdrawContribution()):
                    self.counts["withdrawn"] += 1
                case SetTimer(timer=timer, at_s=None):
                    self.timers.pop(timer, None)
                case SetTimer(timer=timer, at_s=at_s):
                    assert at_s is not None
                    self.timers[timer] = at_s
                case RejectPeer():
                    self.counts["rejected"] += 1
                    assert place == len(found) - 1, "nothing follows"
                    self.reject(event)

    def reject(self, event: CoordinatorEvent) -> None:
        """The connection ends."""
        if isinstance(event, WorkerSaid | WorkerOpened) and event.worker in self.here:
            self.leave(event.worker, NetworkError("it was refused"))

    def leave(self, worker: int, error: NetworkError | None) -> None:
        self.here.discard(worker)
        self.proposed.pop(worker, None)
        self.hear(WorkerGone(self.now_s, worker, error))

    def move(self, kind: str, *about: Any) -> None:
        self.now_s += 0.01
        while self.drains:
            self.hear(ShardSaid(self.now_s, self.drains.pop()))
        match kind, about:
            case "opens", (worker, back):
                self.decided = {push for push in self.decided if push[0] != worker}
                self.here.add(worker)
                self.hear(WorkerOpened(self.now_s, worker, 0, details(self.plan, self.shards, back)))
            case "says", (worker, message) if worker in self.here:
                self.hear(WorkerSaid(self.now_s, worker, message, b"{}", "asker"))
            case "leaves", (worker, is_lost) if worker in self.here:
                self.leave(worker, NetworkError("it is gone") if is_lost else None)
            case "misses", (worker,) if worker not in self.here:
                self.hear(WorkerMissed(self.now_s, worker))
            case "swaps", (part, whole):
                self.hear(SwapAsked(self.now_s, "asker", SwapPlan(1, part, whole), "somebody"))
            case "waits", (wait_s,):
                self.pass_time(wait_s)
            case "goes on", (worker,) if worker in self.here:
                self.go_on(worker)
            case "pushes in part", (worker,) if worker in self.here:
                self.go_on(worker, shards=1)
            case "all go on", ():
                for worker in sorted(self.here):
                    self.go_on(worker)
            case "all ask", (question, refresh):
                for worker in sorted(self.here):
                    self.hear(WorkerSaid(self.now_s, worker, AskAllWorkers(self.asked, question, refresh)))
                self.asked += 1
            case "all load", (ahead,):
                for worker in sorted(self.here):
                    self.hear(WorkerSaid(self.now_s, worker, loader(40, ahead)))

    def pass_time(self, wait_s: float) -> None:
        until_s = self.now_s + wait_s
        for timer, at_s in sorted(self.timers.items(), key=repr):
            if at_s <= until_s and timer in self.timers:
                del self.timers[timer]
                self.now_s = max(self.now_s, at_s)
                self.hear(TimePassed(self.now_s, timer))
        self.now_s = until_s

    def go_on(self, worker: int, shards: int | None = None) -> None:
        """It agrees to what is proposed, pulls, computes, pushes; to so many shards, or all."""
        if (proposed := self.proposed.pop(worker, None)) is not None:
            agrees = PlanAgreement(proposed.number, read_plan(proposed.plan).digest)
            self.hear(WorkerSaid(self.now_s, worker, agrees))
        go = self.go.pop(worker, None)
        if go is None or worker not in self.here:
            return
        if go.values:
            self.hear(WorkerSaid(self.now_s, worker, PullDone(0, go.step)))
        if worker not in self.here:
            return
        runner = self.coordinator.models[0].runner
        change = runner.policy.contributes(go.step) != "gradient"
        hyper: Hyper = {} if change else HYPER
        about = ContributionInfo(4.0, (hyper,), change=change, step=go.step)
        self.hear(WorkerSaid(self.now_s, worker, Announce(0, go.step, about)))
        if self.coordinator.has_granted(0, (worker, go.step)) and worker in self.here:
            for _ in range(shards or self.shards):
                self.hear(ShardSaid(self.now_s, PushNearlyDone(0, worker, go.step)))
                self.hear(ShardSaid(self.now_s, PushDone(0, worker, go.step)))


def seen(coordinator: Coordinator) -> tuple[object, ...]:
    """All that can be seen of a coordinator."""
    return (
        [one.runner.state for one in coordinator.models.values()],
        [coordinator.progress(model) for model in coordinator.models],
        coordinator.status(1e6),
        coordinator.data_state(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=repr)
@settings(max_examples=40)
@given(first=st.booleans(), shards=st.integers(1, 2), script=st.lists(moves, min_size=25, max_size=60))
def test_whatever_workers_say_is_answered_in_instructions_that_a_replay_repeats(
    plan: Plan, first: bool, shards: int, script: list[tuple[Any, ...]]
) -> None:
    owner = Owner(plan.to_toml(), shards)
    for worker in range(WORLD) if first else ():
        owner.move("opens", worker, None)
    for kind, *about in script:
        owner.move(kind, *about)
    again = Owner.fresh()
    assert [repr(again.handle(event)) for event in owner.events] == [repr(found) for found in owner.instructions]
    assert seen(again) == seen(owner.coordinator)
