"""Laws 2 and 3 where there is no server: what all exchanged in a step is what each of them had to give, once.

Along with each mean, on the same way as the gradients, comes the sum of the weights that are in it. So if all who took
part in a step recorded theirs, these add up to that sum, unless one is missing or counts twice. And as all in it is of
the same step, nobody is ahead of the others by more than its own steps between two exchanges.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from offbeat.sync import LocalSGD

if TYPE_CHECKING:
    from offbeat.audit.findings import AuditResult
    from offbeat.audit.replicas import WorkerHistory

    Place = tuple[int, int, int]  # model, step, and how many checkpoints had been taken over
    Took = list[tuple[WorkerHistory, int]]  # who took part, and which of its records says so


def check_exchanges(diaries: list[WorkerHistory], verdict: AuditResult) -> None:
    """Add up what workers without a server gave, and count how far each went alone."""
    places: dict[Place, Took] = defaultdict(list)
    for diary in diaries:
        _check_lead(diary, verdict)
        for index, has in enumerate(diary.has):
            if not has.life and len(has.weights) > 1:
                places[has.model, has.step, diary.loaded(index)].append((diary, index))
    if not places:
        return
    there = {diary.rank for diary in diaries}
    missing = set(range(max(diary.world for diary in diaries))).union(*(diary.admitted for diary in diaries)) - there
    if missing:
        ranks = ", ".join(map(str, sorted(missing)))
        verdict.notes.append(f"The history of rank {ranks} is not there: what was exchanged cannot be added up.")
        return
    last = {id(diary): _last(diary) for diary in diaries}
    verdict.checked |= {2, 3}
    for place, took in sorted(places.items()):
        # Who was killed may have given something, and had no time to record it.
        may_lack = any(not diary.is_whole and last[id(diary)] < place[2:] + place[1:2] for diary in diaries)
        _check_sum(place, took, verdict, may_lack=may_lack)


def _check_sum(place: Place, took: Took, verdict: AuditResult, *, may_lack: bool) -> None:
    _, step, _ = place
    sums = {total for diary, index in took for total in diary.has[index].weights[1:]}
    given = [diary.has[index].weights[0] for diary, index in took]
    story = tuple(line for diary, index in took for line in diary.story(index)[-1:])
    verdict.applied += sum(weight > 0 for weight in given)
    if max(sums) - min(sums) > _slack(given):
        told = " and ".join(f"{total:g}" for total in sorted(sums))
        verdict.violated(2, f"In step {step} the workers' means differ: weights of {told} are in the means.", story)
    elif min(sums) < sum(given) - _slack(given):
        verdict.violated(
            2, f"In step {step} a weight of {sum(given):g} was given, and of {min(sums):g} the mean was made.", story
        )
    elif max(sums) > sum(given) + _slack(given):
        if may_lack:
            verdict.unrecorded += 1
        else:
            verdict.violated(
                2,
                f"In step {step} the mean was made of a weight of {max(sums):g}, and only {sum(given):g} was given: "
                "something counts twice.",
                story,
            )


def _slack(given: list[float]) -> float:
    """Half of the least that somebody gave: sums are rounded, in the precision of what is sent."""
    return min((weight for weight in given if weight > 0), default=1.0) / 2


def _check_lead(diary: WorkerHistory, verdict: AuditResult) -> None:
    """Check, each time, how many steps the worker made alone since the last exchange."""
    exchanged: dict[tuple[int, int], int] = {}
    for index, has in enumerate(diary.has):
        if has.life:
            continue
        place, policy = (has.model, diary.loaded(index)), diary.policy(index)
        if has.weights:
            exchanged[place] = has.step
            verdict.releases += 1
        if policy is None or place not in exchanged:
            continue
        bound = policy.every - 1 if isinstance(policy, LocalSGD) else 0
        lead = has.step - exchanged[place]
        verdict.lead, verdict.bound = max(verdict.lead, lead), max(verdict.bound or 0, bound)
        if lead > bound:
            verdict.violated(
                3,
                f"Rank {diary.rank} has made {lead} steps without the others, behind step {exchanged[place]}: "
                f"{policy!r} lets it make {bound}.",
                diary.story(index),
            )


def _last(diary: WorkerHistory) -> tuple[int, int]:
    """The last step that it recorded, behind as many checkpoints."""
    return (diary.loaded(len(diary.has) - 1), diary.has[-1].step) if diary.has else (-1, -1)
