"""An audit finds what is wrong: each history here was changed in one place, and the right law says so."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.audit import contributions, rejections, verify
from offbeat.audit.findings import AuditResult
from offbeat.audit.rejections import JudgedContributions
from offbeat.audit.updates import UpdateAudit
from offbeat.history import (
    HistoryEnded,
    HistoryLog,
    LifeBegan,
    ParametersAfter,
    PolicyStep,
    UpdateJudged,
    UpdateMade,
    actions_of,
    event_of,
    policy_step,
)
from offbeat.robust import ClippedMean, Krum
from offbeat.sync import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Apply,
    Drop,
    Grant,
    Hybrid,
    KSync,
    Policy,
    Pulled,
    Ready,
    Release,
    RoundRobin,
)
from tests.audit.recorded_runs import Recorded, rewrite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POLICIES: tuple[Policy, ...] = (
    BSP(),
    ASP(),
    SSP(1),
    DSSP(1, 3),
    KSync(2),
    RoundRobin(),
    RoundRobin(strict=True),
    Hybrid(BSP(), ASP(), groups=2),
)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_history_as_it_was_holds(tmp_path: Path, policy: Policy) -> None:
    job = Recorded(policy, tmp_path, leaves={2: 5})
    result = verify(tmp_path)
    assert result.holds, result.violations[0]
    assert (result.files, result.jobs, result.lives, result.notes) == (4, 1, 1, [])
    assert result.checked >= {2, 3}
    assert result.applied + result.dropped + result.lost + result.pending == 2 * job.steps + 5
    assert result.replayed == result.events - 3, "all but the first joins"
    assert result.hashes == result.applied + result.dropped
    assert policy.bound is None or result.lead <= policy.bound == result.bound


def index_of(records: list[Any], is_it: Callable[[Any], bool], number: int = 3) -> int:
    """Where the `number`-th of such records is."""
    return [i for i, record in enumerate(records) if is_it(record)][number]


def decides(kind: type) -> Callable[[Any], bool]:
    return lambda record: isinstance(record, PolicyStep) and any(isinstance(one, kind) for one in actions_of(record))


def happens(kind: type) -> Callable[[Any], bool]:
    return lambda record: isinstance(record, PolicyStep) and isinstance(event_of(record), kind)


def with_actions(record: PolicyStep, change: Callable[[list[Any]], list[Any]]) -> PolicyStep:
    actions = tuple(change(list(actions_of(record))))
    return policy_step(record.model, event_of(record), actions, asked=record.asked)


def apply_twice(records: list[Any]) -> None:
    """An earlier contribution is applied a second time."""
    first = next(one for one in actions_of(records[index_of(records, decides(Apply))]) if isinstance(one, Apply))
    at = index_of(records, decides(Apply), 5)
    records[at] = with_actions(records[at], lambda actions: [*actions, first])


def leave_apply_out(records: list[Any]) -> None:
    at = index_of(records, decides(Apply))
    records[at] = with_actions(records[at], lambda actions: [one for one in actions if not isinstance(one, Apply)])


def drop_instead(records: list[Any]) -> None:
    at = index_of(records, decides(Apply))
    records[at] = with_actions(
        records[at], lambda actions: [Drop(one.pushes) if isinstance(one, Apply) else one for one in actions]
    )


def lower_rate(records: list[Any]) -> None:
    at = index_of(records, decides(Apply))
    records[at] = with_actions(
        records[at],
        lambda actions: [
            Apply(one.pushes, one.rate / 2, one.in_order) if isinstance(one, Apply) else one for one in actions
        ],
    )


def lose_ready(records: list[Any]) -> None:
    del records[index_of(records, happens(Ready), 7)]


def lose_pulled(records: list[Any]) -> None:
    del records[index_of(records, happens(Pulled), 7)]


def make_twice(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, UpdateMade))
    records.insert(at, records[at])


def make_of_another(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, UpdateMade))
    used = tuple(msgspec.structs.replace(one, clock=one.clock + 1) for one in records[at].used)
    records[at] = msgspec.structs.replace(records[at], used=used)


def make_with_another_weight(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, UpdateMade))
    used = tuple(msgspec.structs.replace(one, weight=one.weight + 1) for one in records[at].used)
    records[at] = msgspec.structs.replace(records[at], used=used)


def make_with_a_lower_rate(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, UpdateMade))
    records[at] = msgspec.structs.replace(records[at], rate=records[at].rate / 2)


def make_in_part(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, UpdateMade))
    used = tuple(msgspec.structs.replace(one, blocks=one.blocks - 1) for one in records[at].used)
    records[at] = msgspec.structs.replace(records[at], used=used)


def make_one_block_twice(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, UpdateMade))
    records[at] = msgspec.structs.replace(records[at], times=records[at].times + 1)


def forget_to_make(records: list[Any]) -> None:
    del records[index_of(records, lambda record: isinstance(record, UpdateMade), -1)]


@pytest.mark.parametrize("policy", [BSP(), SSP(1)], ids=repr)
@pytest.mark.parametrize(
    "change",
    [
        apply_twice,
        leave_apply_out,
        drop_instead,
        lower_rate,
        make_twice,
        make_of_another,
        make_with_another_weight,
        make_with_a_lower_rate,
        make_in_part,
        make_one_block_twice,
        forget_to_make,
    ],
    ids=lambda change: change.__name__,
)
def test_each_contribution_counts_once(tmp_path: Path, policy: Policy, change: Callable[[list[Any]], None]) -> None:
    job = Recorded(policy, tmp_path, leaves={})
    rewrite(job.coordinator, change)
    result = verify(tmp_path)
    assert 2 in {one.law for one in result.violations}, result
    first = result.first(2)
    assert first is not None
    assert first.what.endswith(".")
    assert (result.twice > 0) == (change is apply_twice)


def judged_at(records: list[Any]) -> int:
    return index_of(records, lambda record: isinstance(record, UpdateJudged))


def never_judge(records: list[Any]) -> None:
    del records[judged_at(records)]


def judge_twice(records: list[Any]) -> None:
    records.insert(judged_at(records), records[judged_at(records)])


def judge_afterwards(records: list[Any]) -> None:
    judged = records.pop(judged_at(records))
    at = next(i for i, one in enumerate(records) if isinstance(one, UpdateMade) and one.version == judged.version)
    records.insert(at + 1, judged)


def judge_otherwise(records: list[Any]) -> None:
    at = judged_at(records)
    (worker, clock, scale), *others = records[at].scales
    records[at] = msgspec.structs.replace(records[at], scales=((worker, clock, scale + 1), *others))


def judge_another(records: list[Any]) -> None:
    at = judged_at(records)
    (worker, clock, scale), *others = records[at].scales
    records[at] = msgspec.structs.replace(records[at], scales=((worker, clock + 1, scale), *others))


def judge_what_is_not_decided(records: list[Any]) -> None:
    at = judged_at(records)
    records.insert(at, msgspec.structs.replace(records[at], version=1000))


def make_as_if_nothing_was_judged(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, UpdateMade))
    used = tuple(msgspec.structs.replace(one, scale=None) for one in records[at].used)
    records[at] = msgspec.structs.replace(records[at], used=used)


def make_without_one_that_is_judged(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, UpdateMade))
    records[at] = msgspec.structs.replace(records[at], used=records[at].used[1:])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (never_judge, "Update 4 was made, but never judged"),
        (judge_twice, "Update 4 is judged a second time."),
        (judge_afterwards, "Update 4 is judged after it was made."),
        (judge_otherwise, "has the scale"),
        (judge_another, "Update 4 is judged, but is not of these contributions."),
        (judge_what_is_not_decided, "Update 1000 is judged, but was never decided."),
        (make_as_if_nothing_was_judged, "has the scale None in update 4, but was judged"),
        (make_without_one_that_is_judged, "was made without contribution"),
    ],
    ids=lambda it: it if isinstance(it, str) else it.__name__,
)
def test_an_update_is_made_as_it_was_judged(tmp_path: Path, change: Callable[[list[Any]], None], says: str) -> None:
    job = Recorded(BSP(), tmp_path, leaves={}, rule=Krum(0))
    rewrite(job.coordinator, change)
    assert any(says in one.what for one in verify(tmp_path).violations)


@pytest.mark.parametrize("policy", [BSP(), KSync(2)], ids=repr)
def test_a_history_of_judged_updates_holds_and_has_their_shares(tmp_path: Path, policy: Policy) -> None:
    rule = ClippedMean() if isinstance(policy, KSync) else Krum(0)
    job = Recorded(policy, tmp_path, leaves={}, rule=rule)
    result = verify(tmp_path)
    assert result.holds, result.violations[0]
    assert result.judged == result.updates > 0
    assert result.rejected == (2 * job.steps if policy == BSP() else 0)
    known = [one for one in contributions(tmp_path) if one.fate in ("applied", "rejected")]
    assert Counter(one.fate for one in known) == Counter(applied=result.applied, rejected=result.rejected)
    if policy == BSP():
        assert all(one.share == (one.fate == "applied") for one in known)
    assert all(one.told for one in known), "nobody is told"
    by_rank = {
        rank: (
            sum(one.rank == rank for one in known),
            sum(one.rank == rank and one.fate == "rejected" for one in known),
        )
        for rank in range(3)
    }
    assert rejections(tmp_path) == result.by_rank == by_rank


def test_a_validators_references_are_neither_applied_nor_dropped() -> None:
    fates, result = UpdateAudit(), AuditResult()
    fates.fates, fates.weights = {(0, 3): "applied", (7, 3): "applied"}, {(0, 3): 4.0, (7, 3): 0.0}
    fates._validators = {7}
    for rank in (0, 7):
        fates.brought(rank, ParametersAfter(0, 3, 0.0, None, 4.0, numbers=(3,)), result, is_whole=True)
    fates.count(result)
    assert (fates.fate((7, 3)), result.applied, result.dropped, result.references) == ("reference", 1, 0, 1)
    assert result.holds


def test_what_a_server_goes_back_to_was_not_judged() -> None:
    judged = JudgedContributions()
    records: list[LifeBegan | UpdateJudged] = [
        LifeBegan(0, 1, ""),
        *(UpdateJudged(0, version, ((0, version, 1.0), (1, version, 0.0))) for version in (1, 2, 3)),
        LifeBegan(0, 2, "", version=2),
        UpdateJudged(0, 3, ((0, 3, 0.0), (1, 3, 1.0))),
    ]
    for record in records:
        judged.hear(record)
    assert judged.by_rank() == {0: (3, 1), 1: (3, 2)}


@pytest.mark.parametrize("policy", [BSP(), SSP(1), ASP()], ids=repr)
@pytest.mark.parametrize("change", [lose_ready, lose_pulled], ids=lambda change: change.__name__)
def test_an_event_that_is_lost_shows(tmp_path: Path, policy: Policy, change: Callable[[list[Any]], None]) -> None:
    job = Recorded(policy, tmp_path, leaves={})
    rewrite(job.coordinator, change)
    assert not verify(tmp_path).holds


def release_too_early(records: list[Any]) -> None:
    """Who is ready is let go on at once, whatever the others have."""
    at = index_of(records, lambda record: happens(Ready)(record) and not decides(Release)(record))
    event = event_of(records[at])
    assert isinstance(event, Ready)
    rank = event.worker

    def change(actions: list[Any]) -> list[Any]:
        granted = [] if any(isinstance(one, Grant) and one.worker == rank for one in actions) else [Grant(rank)]
        return [*actions, *granted, Release(rank)]

    records[at] = with_actions(records[at], change)


def release_nobody(records: list[Any]) -> None:
    at = index_of(records, decides(Release))
    records[at] = with_actions(records[at], lambda actions: [one for one in actions if not isinstance(one, Release)])


@pytest.mark.parametrize("policy", [BSP(), SSP(0), RoundRobin(strict=True)], ids=repr)
@pytest.mark.parametrize("change", [release_too_early, release_nobody], ids=lambda change: change.__name__)
def test_nobody_is_further_ahead_than_allowed(
    tmp_path: Path, policy: Policy, change: Callable[[list[Any]], None]
) -> None:
    job = Recorded(policy, tmp_path, leaves={})
    rewrite(job.coordinator, change)
    first = verify(tmp_path).first(3)
    assert first is not None
    assert any("Release" in line or "Ready" in line for line in first.story), "it tells the story"


def other_hash(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, ParametersAfter))
    records[at] = msgspec.structs.replace(records[at], digest=records[at].digest ^ 1)


def test_equal_versions_are_equal_parameters(tmp_path: Path) -> None:
    Recorded(BSP(), tmp_path, leaves={})
    rewrite(tmp_path / "worker-1.log", other_hash)
    result = verify(tmp_path)
    assert {one.law for one in result.violations} == {1}
    (broken, *_) = result.violations
    assert "After step 3 at version 4" in broken.what
    assert any("rank 1" in line for line in broken.story)


def under_two_numbers(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, ParametersAfter))
    records[at] = msgspec.structs.replace(records[at], numbers=(2, *records[at].numbers))


def from_other_samples(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, ParametersAfter))
    records[at] = msgspec.structs.replace(records[at], samples=77.0)


def never_announced(records: list[Any]) -> None:
    at = index_of(records, lambda record: isinstance(record, ParametersAfter))
    records[at] = msgspec.structs.replace(records[at], numbers=(1000,))


def under_one_number(records: list[Any]) -> None:
    first, second = (
        at for at, record in enumerate(records) if isinstance(record, ParametersAfter) and record.step in (2, 3)
    )
    records[second] = msgspec.structs.replace(records[second], numbers=records[first].numbers)


@pytest.mark.parametrize(
    "change",
    [under_two_numbers, under_one_number, from_other_samples, never_announced],
    ids=lambda change: change.__name__,
)
def test_what_workers_say_is_what_was_decided(tmp_path: Path, change: Callable[[list[Any]], None]) -> None:
    Recorded(ASP(), tmp_path, leaves={})
    rewrite(tmp_path / "worker-1.log", change)
    assert {one.law for one in verify(tmp_path).violations} == {2}


def test_a_killed_coordinator_has_recorded_less(tmp_path: Path) -> None:
    """What is cut off at the end breaks nothing: workers know more, and that is said."""
    job = Recorded(SSP(1), tmp_path, leaves={})
    rewrite(job.coordinator, lambda records: records.__delitem__(slice(len(records) // 2, None)))
    result = verify(tmp_path)
    assert result.holds, result.violations[0]
    assert result.unrecorded > 0
    assert len(list(HistoryLog(job.coordinator))) < len(job.records)


@pytest.mark.parametrize("kept", [0, 1], ids=["undone", "in the snapshot"])
def test_what_a_shard_that_was_told_to_end_did_not_make_is_undone(tmp_path: Path, kept: int) -> None:
    """Its history is whole, and so is the coordinator's, which decided one more update before it missed the shard."""
    job = Recorded(SSP(1), tmp_path, leaves={})

    def begin_anew(records: list[Any]) -> None:
        last = records[index_of(records, lambda record: isinstance(record, UpdateMade), -1)].version
        forget_to_make(records)
        began = next(record for record in records if isinstance(record, LifeBegan))
        records.insert(-1, msgspec.structs.replace(began, life=began.life + 1, version=last - 1 + kept))

    rewrite(job.coordinator, begin_anew)
    result = verify(tmp_path)
    assert result.lives == 2
    assert [one.law for one in result.violations] == [2] * kept, result
    assert kept or "says nothing of having made it" not in str(result)
    assert result.lost == 1 - kept


@pytest.mark.parametrize("policy", [BSP(), SSP(1)], ids=repr)
def test_a_coordinator_that_was_told_to_stop_need_not_make_what_it_decided_last(tmp_path: Path, policy: Policy) -> None:
    job = Recorded(policy, tmp_path, leaves={})

    def stop(records: list[Any]) -> None:
        forget_to_make(records)
        records[-1] = HistoryEnded("it was asked to stop")

    rewrite(job.coordinator, stop)
    result = verify(tmp_path)
    assert result.holds, result.violations[0]


@pytest.mark.parametrize("numbers", [(), (1000,)], ids=["left behind", "announced to nobody"])
def test_what_a_worker_was_told_is_outdated_is_dropped(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """It was cut off, and the coordinator had heard nothing of it."""
    Recorded(ASP(), tmp_path, leaves={})
    before = verify(tmp_path)

    def tell(records: list[Any]) -> None:
        at = index_of(records, lambda record: isinstance(record, ParametersAfter))
        outdated = msgspec.structs.replace(records[at], numbers=numbers, counted=False, digest=None)
        records.insert(at, outdated)

    rewrite(tmp_path / "worker-1.log", tell)
    result = verify(tmp_path)
    assert result.holds, result.violations[0]
    assert (result.applied, result.dropped) == (before.applied, before.dropped + 1)
    (one,) = (one for one in contributions(tmp_path) if one.fate != "applied")
    assert (one.rank, one.numbers, one.fate, one.share, one.told) == (1, numbers, "dropped", 0.0, False)


def test_each_contribution_has_its_share(tmp_path: Path) -> None:
    """Of three workers, which weigh 1, 2 and 3, one is cut off, and is missed from then on."""
    Recorded(BSP(), tmp_path, leaves={1: 4})
    known = contributions(tmp_path)
    assert {(one.rank, one.step) for one in known if one.step is not None} == {
        (rank, step) for rank in range(3) for step in range(4 if rank == 1 else 8)
    }
    shares = {(one.rank, one.step): one.share for one in known if one.step in (0, 7)}
    assert shares == pytest.approx({(0, 0): 1 / 6, (1, 0): 2 / 6, (2, 0): 3 / 6, (0, 7): 1 / 4, (2, 7): 3 / 4})
    assert all(one.told for one in known if one.fate == "applied")


def test_a_contribution_that_weighs_nothing_because_others_compute_it_is_dropped() -> None:
    """In an update it is, so that its round was complete; but one that was made from nothing keeps its fate."""
    fates, result = UpdateAudit(), AuditResult()
    fates.fates = {(0, 3): "applied", (1, 3): "applied"}
    fates.weights = {(0, 3): 0.0, (1, 3): 0.0}
    for rank, samples in ((0, 4.0), (1, 0.0)):
        has = ParametersAfter(0, 3, 0.0, None, samples, numbers=(3,), counted=not samples)
        fates.brought(rank, has, result, is_whole=True)
    assert fates.fates == {(0, 3): "dropped", (1, 3): "applied"}
    assert result.holds


def write_no_more(records: list[Any]) -> None:
    """The coordinator's disk is full in the middle of the job, which goes on."""
    at = index_of(records, decides(Apply))
    records[at + 1 :] = [HistoryEnded("No space left on device", gave_up=True)]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_what_could_not_be_written_is_not_said_to_be_lost(tmp_path: Path, policy: Policy) -> None:
    job = Recorded(policy, tmp_path, leaves={})
    whole = verify(tmp_path)
    rewrite(job.coordinator, write_no_more)
    result = verify(tmp_path)
    assert result.holds, result.violations[0]
    assert (result.lost, result.lost_samples) == (0, 0.0)
    assert result.unrecorded > 0
    counted = result.applied + result.dropped + result.pending
    assert counted == whole.applied + whole.dropped + whole.pending
    assert result.notes == [
        "coordinator.log ends before its process did, which could write no more of it: No space left on device."
    ]


def test_what_a_killed_server_had_not_recorded_is_still_lost(tmp_path: Path) -> None:
    job = Recorded(SSP(1), tmp_path, leaves={})
    rewrite(job.coordinator, lambda records: records.__delitem__(slice(index_of(records, decides(Apply)) + 1, None)))
    assert verify(tmp_path).lost > 0
