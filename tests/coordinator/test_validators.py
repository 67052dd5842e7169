"""Validators as the coordinator sees them: what is decided without one, and what of workers' words counts then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat import ASP, BSP, LocalSGD, OuterSGD, ParameterServer, Plan
from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.events import (
    CoordinatorEvent,
    ModelBegun,
    ShardSaid,
    SwapAsked,
    WorkerGone,
    WorkerOpened,
    WorkerSaid,
)
from offbeat.coordinator.instructions import AppendHistory, RejectPeer, SendReply, SendToShards, SendToWorker, WriteLog
from offbeat.coordinator.model_record import revived
from offbeat.coordinator.progress import TrainingProgress
from offbeat.errors import NetworkError
from offbeat.history import WorkerReturned
from offbeat.protocol.checkpoints import LOADING, MayPut, RequestReplacement
from offbeat.protocol.optimizer_spec import OptimizerSpec, outer_hyper
from offbeat.protocol.plan_swap import SwapPlan, SwapResult
from offbeat.protocol.shards import AllowReplacement, ApplyContributions, ModelFilled, PushDone, ReleaseFromShard
from offbeat.protocol.training import (
    AllWorkersAnswer,
    Announce,
    AskAllWorkers,
    BlockOf,
    ContributionInfo,
    LeaveAfter,
    ModelInfo,
    Notice,
    PieceOf,
    PullDone,
    Reconnect,
    Refused,
)
from offbeat.robust import FLTrust, Rule, TrimmedMean, Zeno, ZenoPlusPlus, ZenoPS

if TYPE_CHECKING:
    from offbeat.robust import TooFew
    from offbeat.sync import Policy

WORLD, VALIDATOR = 2, 7
HYPER: Any = ({"lr": 0.1},)


class Job:
    """Workers 0 and 1 of a job, which has validators if it has a rule for them."""

    def __init__(self, policy: Policy, rule: Rule | None = None, too_few: TooFew = "skip") -> None:
        self.plan = Plan(sync=policy, fabric=ParameterServer(), validator=rule, too_few=too_few)
        self.coordinator = Coordinator(Plan.from_toml, 1, check_hyper=lambda *_: None)
        self.now_s = 0.0
        self.did: list[Any] = []
        self.clocks = dict.fromkeys(range(10), 0)
        self.hear(ModelBegun(0.0, 0, self.details()))
        for worker in range(WORLD):
            self.open(worker)
        self.hear(ShardSaid(0.0, ModelFilled(0)))
        self.arrive(0, 1)

    def details(self, **changes: Any) -> ModelInfo:
        known: dict[str, Any] = {
            "world": WORLD, "shards": 1, "holders": 1, "plan": self.plan.to_toml(), "layout": "", "names": ("a",),
            "blocks": (BlockOf(0, "float32", (PieceOf(0, 0, 4),)),),
            "optimizer": OptimizerSpec("SGD", HYPER, (("a",),)),
        }  # fmt: skip
        return ModelInfo(**{**known, **changes})

    def hear(self, event: CoordinatorEvent) -> list[Any]:
        self.did = self.coordinator.handle(event)
        return self.did

    def open(self, worker: int, *, is_validator: bool = False, **changes: Any) -> list[Any]:
        did = self.hear(WorkerOpened(self.now_s, worker, 0, self.details(**changes), is_validator=is_validator))
        member = self.coordinator.models[0].runner.state.members.get(worker)
        self.clocks[worker] = 0 if member is None else member.step
        return did

    def arrive(self, *workers: int) -> None:
        """They have the parameters that they were given."""
        for worker in workers:
            self.say(worker, PullDone(0, self.clocks[worker]))

    def say(self, worker: int, message: Any) -> list[Any]:
        self.now_s += 0.1
        return self.hear(WorkerSaid(self.now_s, worker, message))

    def bring(self, worker: int, weight: float = 32.0, hyper: Any = HYPER, **about: Any) -> list[ApplyContributions]:
        """A contribution, whole; the updates that come of it. Who is released has the next parameters at once."""
        clock = self.clocks[worker]
        did = self.say(worker, Announce(0, clock, ContributionInfo(weight, hyper, **about)))
        did += self.hear(ShardSaid(self.now_s, PushDone(0, worker, clock)))
        for released in [one.decision for one in did if isinstance(one, SendToShards)]:
            if isinstance(released, ReleaseFromShard):
                self.clocks[released.worker] = released.step
                did += self.say(released.worker, PullDone(0, released.step))
        decided = [one.decision for one in did if isinstance(one, SendToShards)]
        return [one for one in decided if isinstance(one, ApplyContributions)]

    @property
    def told(self) -> str:
        return " ".join(one.text for one in self.did if isinstance(one, WriteLog))

    @property
    def refusal(self) -> str:
        return " ".join(str(one.error) for one in self.did if isinstance(one, RejectPeer))


def test_the_history_says_who_validates() -> None:
    job = Job(BSP(), ZenoPS())
    job.open(VALIDATOR, is_validator=True)
    (record,) = (
        one.record for one in job.did if isinstance(one, AppendHistory) and isinstance(one.record, WorkerReturned)
    )
    assert (record.worker, record.weight, record.validates) == (VALIDATOR, 0.0, True)


def test_nothing_is_decided_before_one_comes_and_after_the_last_is_gone() -> None:
    job = Job(BSP(), ZenoPS())
    one = job.coordinator.models[0]
    assert not one.runner.started
    assert "No validator takes part" in one.note
    assert job.coordinator.status(0.0)[0].note == one.note
    job.open(VALIDATOR, is_validator=True)
    assert one.runner.started
    assert not one.note
    assert "A validator takes part" in job.told
    assert [seen.validates for seen in job.coordinator.status(0.0)[0].workers] == [False, False, True]
    job.arrive(VALIDATOR)
    assert job.bring(0) == job.bring(1) == [], "an update waits for its reference"
    (update,) = job.bring(VALIDATOR)
    assert update.pushes == ((0, 0), (1, 0), (VALIDATOR, 0))
    assert update.references == (VALIDATOR,)
    assert (update.rate, one.runner.state.version) == (1.0, 1)

    job.bring(0)
    job.hear(WorkerGone(job.now_s, VALIDATOR, NetworkError("It was killed.")))
    assert job.told.count("No validator takes part") == 1
    assert "Start one: offbeat run --validator" in job.told
    notices = [one.message for one in job.did if isinstance(one, SendToWorker) and isinstance(one.message, Notice)]
    assert [notice.waits for notice in notices if "No validator" in notice.text] == [True] * WORLD
    assert job.bring(1) == [], "all contributions are there, and nothing is made of them"
    job.open(VALIDATOR + 1, is_validator=True)
    job.arrive(VALIDATOR + 1)
    (update,) = job.bring(VALIDATOR + 1)
    assert {worker for worker, _ in update.pushes} == {0, 1, VALIDATOR + 1}
    assert update.references == (VALIDATOR + 1,)


def test_of_several_one_is_enough() -> None:
    job = Job(BSP(), FLTrust())
    for validator in (VALIDATOR, VALIDATOR + 1):
        job.open(validator, is_validator=True)
        job.arrive(validator)
    job.bring(0), job.bring(1), job.bring(VALIDATOR)
    (update,) = job.bring(VALIDATOR + 1)
    assert update.references == (VALIDATOR, VALIDATOR + 1)
    job.bring(0), job.bring(1), job.bring(VALIDATOR)
    did = job.hear(WorkerGone(job.now_s, VALIDATOR + 1, NetworkError("It was killed.")))
    (update,) = [one.decision for one in did if isinstance(getattr(one, "decision", None), ApplyContributions)]
    assert update.references == (VALIDATOR,)
    assert "No validator" not in job.told


def test_validators_are_not_counted_with_the_workers() -> None:
    job = Job(BSP(), FLTrust())
    for validator in (VALIDATOR, VALIDATOR + 1):
        job.open(validator, is_validator=True)
        job.arrive(validator)
    job.open(3)
    assert "Rank 3 has joined at version 0: 3 workers take part;" in job.told
    job.say(3, LeaveAfter(1))
    job.hear(WorkerGone(job.now_s, 3))
    assert "Rank 3 was asked to leave, and left cleanly behind its step 1: 2 workers continue; each keeps" in job.told
    job.say(VALIDATOR, LeaveAfter(1))
    job.hear(WorkerGone(job.now_s, VALIDATOR))
    assert job.told == "Rank 7, a validator, was asked to leave, and left cleanly behind its step 1."


def test_without_waiting_a_reference_is_an_update_of_no_size_and_workers_make_up_a_round() -> None:
    job = Job(ASP(), ZenoPlusPlus())
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)
    (reference,) = job.bring(VALIDATOR)
    assert (reference.references, reference.rate) == ((VALIDATOR,), 0.0)
    job.bring(0)
    (update,) = job.bring(1)
    assert (update.references, update.rate) == ((), 0.5), "half of a round of two workers"
    (update,) = job.bring(0, weight=1e12)
    assert update.rate == 0.5, "it weighs no more than the validator's"


@pytest.mark.parametrize(("policy", "rule"), [(BSP(), ZenoPS()), (ASP(), ZenoPlusPlus())], ids=repr)
def test_hyperparameters_are_the_validators(policy: Policy, rule: Rule) -> None:
    job = Job(policy, rule)
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)
    mad: Any = ({"lr": 1e9},)
    updates = [*job.bring(0, hyper=mad), *job.bring(VALIDATOR, hyper=({"lr": 0.05},)), *job.bring(1, hyper=mad)]
    updates += [*job.bring(0, hyper=mad)]
    assert [update.hyper for update in updates if update.pushes[0][1] == 0][-1] == ({"lr": 0.05},)
    assert all(update.hyper in (HYPER, ({"lr": 0.05},)) for update in updates)


def test_how_changes_are_applied_is_in_the_plan() -> None:
    outer = OuterSGD(lr=0.7, momentum=0.5)
    job = Job(LocalSGD(2, outer=outer), ZenoPS())
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)
    mad = outer_hyper(OuterSGD(lr=0.9, momentum=0.9))
    for worker in range(WORLD):
        job.clocks[worker] = job.coordinator.models[0].runner.state.members[worker].step
        job.bring(worker, hyper=mad, change=True)
    (update,) = job.bring(VALIDATOR, hyper=mad, change=True)
    assert update.hyper == outer_hyper(outer)


def test_roles_are_not_exchanged() -> None:
    job = Job(BSP(), ZenoPS())
    job.open(VALIDATOR, is_validator=True)
    job.hear(WorkerGone(job.now_s, VALIDATOR, NetworkError("It was killed.")))
    job.open(VALIDATOR)
    assert "Cannot admit rank 7 as a worker: it is a validator's" in job.refusal
    job.hear(WorkerGone(job.now_s, 1, NetworkError("It was killed.")))
    job.open(1, is_validator=True)
    assert "Cannot admit rank 1 as a validator: it is a worker's" in job.refusal


def test_a_plan_without_one_has_no_use_for_it() -> None:
    job = Job(BSP())
    assert job.coordinator.models[0].runner.started
    job.open(VALIDATOR, is_validator=True)
    assert "Cannot admit rank 7 as a validator: the plan of this job has none" in job.refusal


def test_only_who_is_trusted_swaps() -> None:
    job = Job(BSP(), FLTrust())
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)
    wish = SwapPlan(1, 'sync = { kind = "ASP" }', whole=False)
    job.hear(SwapAsked(job.now_s, "asker", wish, "rank 0"))
    ((reply,),) = [[one.message for one in job.did if isinstance(one, SendReply)]]
    assert isinstance(reply, SwapResult)
    assert reply.refusal == (
        "Cannot swap the plan for rank 0: in this job only who shows a validator's credential may."
    )
    job.hear(SwapAsked(job.now_s, "asker", wish, "rank 7", is_trusted=True))
    assert not any(isinstance(one, SendReply) for one in job.did), "all are asked"
    # A worker that claims to know of later swaps is told which plan holds.
    back = Reconnect(life=99, clock=0, version=0, holds=False, waits=True, swaps=5)
    job.hear(WorkerGone(job.now_s, 0, NetworkError("It was killed.")))
    other = Plan(sync=ASP(), fabric=ParameterServer(), validator=FLTrust()).to_toml()
    job.open(0, back=back, plan=other)
    assert isinstance(job.coordinator.models[0].runner.policy, BSP)


def test_parameters_are_replaced_by_a_validator_alone() -> None:
    job = Job(BSP(), ZenoPS())
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)
    job.say(0, RequestReplacement(0, 1))
    (answer,) = [one.message for one in job.did if isinstance(one, SendToWorker)]
    assert isinstance(answer, MayPut)
    assert "Cannot take other parameters from rank 0: in this job they are those of a validator alone" in answer.refused
    job.say(VALIDATOR, RequestReplacement(0, 2))
    for worker in range(WORLD):
        assert not _decided(job.did, AllowReplacement)
        job.say(worker, AskAllWorkers(0, LOADING, refresh=True, numbers=(0.0, 0.0)))
    assert _decided(job.did, AllowReplacement) == [AllowReplacement(0, VALIDATOR, 2)]
    assert not _answers(job.did), "until it has put them"
    job.say(VALIDATOR, AskAllWorkers(3, LOADING, refresh=True, numbers=(1.0, 0.0)))
    did = list(job.did)
    for worker in range(WORLD):
        job.clocks[worker] = job.coordinator.models[0].runner.state.members[worker].step
        did += job.say(worker, PullDone(0, job.clocks[worker]))
    answers = _answers(did)
    assert {worker: (one.number, one.numbers) for worker, one in answers.items()} == {
        0: (0, (1.0, 0.0)),
        1: (0, (1.0, 0.0)),
        VALIDATOR: (3, (1.0, 0.0)),
    }


def test_of_several_the_first_brings_a_checkpoint_and_the_others_are_answered_too() -> None:
    job = Job(BSP(), ZenoPS())
    for validator in (VALIDATOR, VALIDATOR + 1):
        job.open(validator, is_validator=True)
        job.arrive(validator)
    did = job.say(VALIDATOR + 1, AskAllWorkers(5, LOADING, refresh=True, numbers=(0.0, 0.0)))
    for worker in range(WORLD):
        did += job.say(worker, AskAllWorkers(0, LOADING, refresh=True, numbers=(0.0, 0.0)))
    assert not _answers(did), "the first has not brought it"
    did += job.say(VALIDATOR, AskAllWorkers(3, LOADING, refresh=True, numbers=(1.0, 0.0)))
    for worker in (*range(WORLD), VALIDATOR, VALIDATOR + 1):
        did += job.say(worker, PullDone(0, job.coordinator.models[0].runner.state.members[worker].step))
    assert {worker: (one.number, one.numbers) for worker, one in _answers(did).items()} == {
        0: (0, (1.0, 0.0)),
        1: (0, (1.0, 0.0)),
        VALIDATOR: (3, (1.0, 0.0)),
        VALIDATOR + 1: (5, (1.0, 0.0)),
    }


def test_one_that_nobody_has_waited_for_is_answered_as_all_were() -> None:
    job = Job(BSP(), ZenoPS())
    for validator in (VALIDATOR, VALIDATOR + 1):
        job.open(validator, is_validator=True)
        job.arrive(validator)
    did = job.say(VALIDATOR, AskAllWorkers(3, LOADING, refresh=True, numbers=(1.0, 0.0)))
    for worker in range(WORLD):
        did += job.say(worker, AskAllWorkers(0, LOADING, refresh=True, numbers=(0.0, 0.0)))
    for worker in (*range(WORLD), VALIDATOR):
        did += job.say(worker, PullDone(0, job.coordinator.models[0].runner.state.members[worker].step))
    assert VALIDATOR + 1 not in _answers(did)
    did = job.say(VALIDATOR + 1, AskAllWorkers(5, LOADING, refresh=True, numbers=(0.0, 0.0)))
    assert {worker: (one.number, one.numbers) for worker, one in _answers(did).items()} == {
        VALIDATOR + 1: (5, (1.0, 0.0))
    }


def test_it_takes_part_in_no_question() -> None:
    job = Job(BSP(), ZenoPS())
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)
    job.say(VALIDATOR, AskAllWorkers(0, "the mean over all workers"))
    assert "Cannot ask the workers for 'the mean over all workers' as rank 7, a validator" in job.refusal
    did = []
    for worker in range(WORLD):
        did += job.say(worker, AskAllWorkers(0, "the mean over all workers", numbers=(1.0,)))
    for worker in range(WORLD):
        step = job.coordinator.models[0].runner.state.members[worker].step
        did += job.say(worker, PullDone(0, step))
    assert {worker: one.numbers for worker, one in _answers(did).items()} == {0: (2.0,), 1: (2.0,)}


@pytest.mark.parametrize(("rule", "times"), [(ZenoPS(), 1), (ZenoPS(calibrate=1.4), 0)])
def test_unlike_batches_are_told_once(rule: ZenoPS, times: int) -> None:
    job = Job(BSP(), rule)
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)
    told = ""
    for _ in range(3):
        job.bring(0, 32.0), job.bring(1, 32.0)
        job.say(VALIDATOR, Announce(0, job.clocks[VALIDATOR], ContributionInfo(64.0, HYPER)))
        told += job.told
        job.hear(ShardSaid(job.now_s, PushDone(0, VALIDATOR, job.clocks[VALIDATOR])))
        for worker in (0, 1, VALIDATOR):
            job.clocks[worker] += 1
            job.say(worker, PullDone(0, job.clocks[worker]))
    assert told.count("Rank 7, a validator, contributes 64 samples at a time, and workers 32") == times


class WithRule(Job):
    """Workers 0 to 2 under a rule that needs three."""

    def __init__(self, too_few: TooFew) -> None:
        self.plan = Plan(fabric=ParameterServer(), rule=TrimmedMean(1), too_few=too_few)
        self.coordinator = Coordinator(Plan.from_toml, 1, check_hyper=lambda *_: None)
        self.now_s, self.did, self.clocks = 0.0, [], dict.fromkeys(range(10), 0)
        self.hear(ModelBegun(0.0, 0, self.details()))
        for worker in range(3):
            self.open(worker)
        self.hear(ShardSaid(0.0, ModelFilled(0)))
        self.arrive(0, 1, 2)

    def details(self, **changes: Any) -> ModelInfo:
        return super().details(world=3, **changes)


def test_updates_that_too_few_contribute_to_are_held_until_more_come() -> None:
    job = WithRule("hold")
    one = job.coordinator.models[0]
    assert job.bring(0) == job.bring(1) == []
    job.hear(WorkerGone(job.now_s, 2, NetworkError("It was killed.")))
    assert (
        "2 workers take part, and TrimmedMean(faulty=1) needs 3, and workers wait. Start more: offbeat run --join "
        "PLACE --workers N SCRIPT."
    ) in job.told
    assert not _decided(job.did, ApplyContributions)
    assert one.runner.is_paused
    job.open(5)
    assert "Enough workers take part: training goes on." in job.told
    job.arrive(5)
    (update,) = job.bring(5)
    assert {worker for worker, _ in update.pushes} == {0, 1, 5}


def test_who_is_done_is_not_waited_for() -> None:
    """At the end of a job workers are done one after the other."""
    job = WithRule("hold")
    job.hear(WorkerGone(job.now_s, 2, None))
    assert not job.coordinator.models[0].runner.is_paused
    (update,) = [*job.bring(0), *job.bring(1)]
    assert {worker for worker, _ in update.pushes} == {0, 1}, "which the rule leaves out"


class Logged(WithRule):
    """One of which everything that is logged is kept."""

    def __init__(self, too_few: TooFew = "skip") -> None:
        self.log: list[str] = []
        super().__init__(too_few)

    def hear(self, event: CoordinatorEvent) -> list[Any]:
        did = super().hear(event)
        self.log += [one.text for one in did if isinstance(one, WriteLog) and "left out" in one.text]
        return did


END_OF_DATA = (
    "An update is left out: nothing came to it from rank 2, as at the end of its data, and TrimmedMean(faulty=1) needs "
    "at least 3 contributions. The 12 samples of rank 0, 1 are in no update."
)


@pytest.mark.parametrize("ends", ["leaves", "brings nothing", "waits"])
def test_the_end_of_a_workers_data_is_no_lack_of_workers(ends: str) -> None:
    """The last round of leased data may be of fewer workers than there are."""
    job = Logged()
    (update,) = [*job.bring(0), *job.bring(1), *job.bring(2)]
    assert (update.is_short, job.log) == (False, [])
    if ends == "leaves":
        job.hear(WorkerGone(job.now_s, 2, None))
    elif ends == "waits":
        job.say(2, AskAllWorkers(0, "mean", refresh=False, numbers=(0.0,)))
    updates = job.bring(2, weight=0.0) if ends == "brings nothing" else []
    (update,) = [*updates, *job.bring(0, weight=6.0), *job.bring(1, weight=6.0)]
    assert (update.is_short, job.log) == (True, [END_OF_DATA])


def test_of_many_updates_without_data_of_one_worker_it_is_said_how_many() -> None:
    job = Logged()
    job.hear(WorkerGone(job.now_s, 2, None))
    for _ in range(5):
        job.bring(0, weight=6.0), job.bring(1, weight=6.0)
    assert job.log == [END_OF_DATA]
    job.hear(WorkerGone(job.now_s, 0, None))
    job.hear(WorkerGone(job.now_s, 1, None))
    assert job.log[1:] == ["In all 5 updates were left out because of that, of 60 samples."]


def test_of_workers_that_are_lost_it_is_said_that_there_are_too_few() -> None:
    job = Logged()
    job.hear(WorkerGone(job.now_s, 2, NetworkError("It was killed.")))
    for _ in range(2):
        job.bring(0), job.bring(1)
    (text,) = job.log
    assert text.startswith("Updates are left out: TrimmedMean(faulty=1) needs at least 3 contributions, and there are")


def test_nobody_is_told_to_start_more_while_all_are_waited_for() -> None:
    job = WithRule("hold")
    assert "Start more" not in job.coordinator.models[0].note
    assert job.coordinator.models[0].runner.started


def test_who_has_stepped_out_is_there() -> None:
    """As for a question to all, which the last one still computes for."""
    for job in (WithRule("hold"), WithRule("raise")):
        for worker in (0, 1):
            job.say(worker, AskAllWorkers(0, "the mean over all workers", numbers=(1.0,)))
        assert not job.coordinator.models[0].runner.is_paused
        (update,) = job.bring(2)
        assert [worker for worker, _ in update.pushes] == [2], "which the rule leaves out"
        did = job.say(2, AskAllWorkers(0, "the mean over all workers", numbers=(1.0,)))
        for worker in range(3):
            step = job.coordinator.models[0].runner.state.members[worker].step
            did += job.say(worker, PullDone(0, step))
        assert set(_answers(did)) == {0, 1, 2}


def test_who_was_done_before_a_restart_is_not_waited_for_after_it() -> None:
    job = WithRule("hold")
    job.hear(WorkerGone(job.now_s, 2, None))
    progress = job.coordinator.models[0].progress({})
    assert progress.done == (2,)
    old = msgspec.convert(msgspec.to_builtins(progress), TrainingProgress)
    again = revived(BSP(), job.details(), 0, old, lambda: 0.0, frozenset())
    again.runner.least = 3
    for worker in (0, 1):
        again.runner.join(worker)
    assert again.runner.left_to_train == 3
    assert not again.runner.is_paused


def test_a_validator_that_is_done_is_no_worker() -> None:
    job = Job(BSP(), Zeno(1), too_few="hold")
    for validator in (VALIDATOR, VALIDATOR + 1):
        job.open(validator, is_validator=True)
        job.arrive(validator)
    job.hear(WorkerGone(job.now_s, VALIDATOR + 1, None))
    assert job.coordinator.models[0].runner.left_to_train == WORLD


def test_a_job_ends_when_too_few_are_left_if_its_plan_says_so() -> None:
    job = WithRule("raise")
    job.hear(WorkerGone(job.now_s, 2, NetworkError("It was killed.")))
    said = {one.worker: one.message.reason for one in job.did if isinstance(getattr(one, "message", None), Refused)}
    assert said == dict.fromkeys(
        (0, 1),
        "Cannot go on: 2 workers take part, and TrimmedMean(faulty=1) needs 3. The plan has too_few='raise'; with "
        "'hold' it would wait.",
    )
    job = WithRule("raise")
    job.hear(WorkerGone(job.now_s, 2, None))
    assert not any(isinstance(getattr(one, "message", None), Refused) for one in job.did), "it is done"


def test_that_a_job_cannot_go_on_is_said_once() -> None:
    job = WithRule("raise")
    job.hear(WorkerGone(job.now_s, 2, NetworkError("It was killed.")))
    job.hear(WorkerGone(job.now_s, 1, NetworkError("It was refused.")))
    assert not any(isinstance(getattr(one, "message", None), Refused) for one in job.did)


def test_a_job_ends_with_its_last_validator_if_its_plan_says_so() -> None:
    job = Job(BSP(), ZenoPS(), too_few="raise")
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)
    job.hear(WorkerGone(job.now_s, VALIDATOR, NetworkError("It was killed.")))
    said = [one.message.reason for one in job.did if isinstance(getattr(one, "message", None), Refused)]
    assert len(said) == WORLD
    assert said[0].startswith("Cannot go on: no validator is left, and ZenoPS(")


def _decided(did: list[Any], kind: type) -> list[Any]:
    return [one.decision for one in did if isinstance(one, SendToShards) and isinstance(one.decision, kind)]


def _answers(did: list[Any]) -> dict[int, AllWorkersAnswer]:
    sent = [one for one in did if isinstance(one, SendToWorker)]
    return {one.worker: one.message for one in sent if isinstance(one.message, AllWorkersAnswer)}


def test_a_worker_has_one_contribution_for_each_reference_and_the_others_weigh_nothing() -> None:
    """An honest gradient pushed again and again agrees with the reference each time."""
    job = Job(ASP(), ZenoPlusPlus())
    job.open(VALIDATOR, is_validator=True)
    job.arrive(VALIDATOR)

    def weights(*workers: int) -> list[float]:
        return [update.about[0].weight for worker in workers for update in job.bring(worker)]

    assert weights(VALIDATOR, *[0] * 5) == [32.0, 32.0, 32.0, 0.0, 0.0, 0.0]
    assert weights(1, VALIDATOR, 1, 1) == [32.0] * 4, "another worker has its own"
    assert weights(0, 0) == [32.0, 0.0], "and a new reference allows one more"
