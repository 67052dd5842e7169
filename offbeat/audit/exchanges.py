"""Laws 2 and 3 where there is no server: what all exchanged in a step is what each of them had to give, once.

Along with each mean, on the same way as the gradients, comes the sum of the weights that are in it. So if all who took
part in a step recorded theirs, these add up to that sum, unless one is missing or counts twice. And as all in it is of
the same step, nobody is ahead of the others by more than its own steps between two exchanges.

Where a mean may be of some workers (`KSync` on a switch), each says for each bucket what of its own is in it: that has
to add up, bucket by bucket, and to be of as many workers as the policy says, or of all that are left.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from offbeat.sync import KSync, StepsLocally

if TYPE_CHECKING:
    from offbeat.audit.findings import AuditResult
    from offbeat.audit.replicas import WorkerHistory

    Place = tuple[int, int, int]  # model, step, and how many checkpoints had been taken over
    Took = list[tuple[WorkerHistory, int]]  # who took part, and which of its records says so


def check_exchanges(histories: list[WorkerHistory], result: AuditResult) -> None:
    """Add up what workers without a server gave, and count how far each went alone."""
    places: dict[Place, Took] = defaultdict(list)
    for history in histories:
        _check_lead(history, result)
        for index, has in enumerate(history.has):
            if not has.life and len(has.weights) > 1:
                places[has.model, has.step, history.loaded(index)].append((history, index))
    if not places:
        return
    there = {history.rank for history in histories}
    missing = (
        set(range(max(history.world for history in histories))).union(*(history.admitted for history in histories))
        - there
    )
    if missing:
        ranks = ", ".join(map(str, sorted(missing)))
        result.notes.append(f"The history of rank {ranks} is not there: what was exchanged cannot be added up.")
        return
    last = {id(history): _last(history) for history in histories}
    result.checked |= {2, 3}
    for place, took in sorted(places.items()):
        may_lack = any(_may_have_given(history, place, last[id(history)]) for history in histories)
        _check_sum(place, took, result, may_lack=may_lack)


def _may_have_given(history: WorkerHistory, place: Place, last: tuple[int, int]) -> bool:
    """Whether a worker may be in a mean without a record of it.

    A killed worker had no time to record what it gave. One that left did not wait for an average that was on its way.
    """
    _, step, loaded = place
    if last >= (loaded, step):
        return False
    if not history.is_whole or not history.has:
        return not history.is_whole
    policy = history.policy(len(history.has) - 1)
    return isinstance(policy, StepsLocally) and policy.delay > 0 and step - last[1] <= policy.interval


def _check_sum(place: Place, took: Took, result: AuditResult, *, may_lack: bool) -> None:
    """Add up what went into each mean of a step.

    A worker that is killed within a step may be in the means of its first buckets and not in those of the others.
    """
    _, step, _ = place
    records = [history.has[index] for history, index in took]
    story = tuple(line for history, index in took for line in history.story(index)[-1:])
    if any(has.given for has in records):
        _check_parts(step, took, story, result, may_lack=may_lack)
        return
    given = [has.weights[0] for has in records]
    result.applied += sum(weight > 0 for weight in given)
    if len({len(has.weights) for has in records}) > 1:
        sums = {total for has in records for total in has.weights[1:]}
        result.violated(2, _differ(step, sums), story)
        return
    columns = [(set(sums), given) for sums in zip(*(has.weights[1:] for has in records), strict=True)]
    _check_totals(step, columns, story, result, may_lack=may_lack)


def _check_parts(step: int, took: Took, story: tuple[str, ...], result: AuditResult, *, may_lack: bool) -> None:
    """Add up what is in each bucket's sum, where it may be of some workers, and count them."""
    records = [history.has[index] for history, index in took]
    shapes = {(len(has.given), len(has.weights) - 1) for has in records}
    if len(shapes) > 1 or any(buckets != sums for buckets, sums in shapes):
        result.violated(2, f"In step {step} the workers say of different numbers of buckets what they gave.", story)
        return
    history, index = took[0]
    policy = history.policy(index)
    in_none = sum(has.weights[0] > 0 and not any(has.given) for has in records)
    result.applied += sum(any(has.given) for has in records)
    result.dropped += in_none if isinstance(policy, KSync) and policy.drops else 0  # else it comes with a later one
    sums = zip(*(has.weights[1:] for has in records), strict=True)
    parts = [list(given) for given in zip(*(has.given for has in records), strict=True)]
    columns = [(set(totals), given) for totals, given in zip(sums, parts, strict=True)]
    _check_totals(step, columns, story, result, may_lack=may_lack)
    for given in parts:
        there, least = sum(weight > 0 for weight in given), policy.k if isinstance(policy, KSync) else len(took)
        if there < min(least, sum(has.weights[0] > 0 for has in records)) and not may_lack:
            result.violated(
                3, f"In step {step} a mean was made of {there} contributions, and {policy!r} says {least}.", story
            )


def _check_totals(
    step: int,
    columns: list[tuple[set[float], list[float]]],
    story: tuple[str, ...],
    result: AuditResult,
    *,
    may_lack: bool,
) -> None:
    """Hold the sums that came with each bucket against what was given to it.

    Args:
        columns: of each bucket, or of each different sum, the sums that workers recorded and what each of them gave.
        may_lack: a worker may have given something that it had no time to record.
    """
    is_more = False
    for sums, given in columns:
        if max(sums) - min(sums) >= _slack(given):
            result.violated(2, _differ(step, sums), story)
        elif min(sums) <= sum(given) - _slack(given):
            what = f"In step {step} a weight of {sum(given):g} was given, and of {min(sums):g} the mean was made."
            result.violated(2, what, story)
        elif max(sums) >= sum(given) + _slack(given):
            is_more = True
            if not may_lack:
                result.violated(
                    2,
                    f"In step {step} the mean was made of a weight of {max(sums):g}, and only {sum(given):g} was "
                    "given: something counts twice.",
                    story,
                )
    result.unrecorded += is_more and may_lack


def _differ(step: int, sums: set[float]) -> str:
    told = " and ".join(f"{total:g}" for total in sorted(sums))
    return f"In step {step} the workers' means differ: weights of {told} are in the means."


def _slack(given: list[float]) -> float:
    """Half of the least that somebody gave: sums are rounded, in the precision of what is sent."""
    return min((weight for weight in given if weight > 0), default=1.0) / 2


def _check_lead(history: WorkerHistory, result: AuditResult) -> None:
    """Check, each time, how many steps the worker made alone since the last exchange."""
    exchanged: dict[tuple[int, int, int], int] = {}
    for index, has in enumerate(history.has):
        if has.life:
            continue
        place, policy = (has.model, history.loaded(index), history.table(index)), history.policy(index)
        if has.weights:
            exchanged[place] = has.step
            result.releases += len(has.weights) > 1  # else nothing was waited for
        if policy is None or not policy.replicated or place not in exchanged:
            continue
        bound = policy.interval - 1 if isinstance(policy, StepsLocally) else 0
        lead = has.step - exchanged[place]
        result.lead, result.bound = max(result.lead, lead), max(result.bound or 0, bound)
        if lead > bound:
            result.violated(
                3,
                f"Rank {history.rank} has made {lead} steps without the others, behind step {exchanged[place]}: "
                f"{policy!r} lets it make {bound}.",
                history.story(index),
            )


def _last(history: WorkerHistory) -> tuple[int, int]:
    """The last step that it recorded, behind as many checkpoints."""
    return (history.loaded(len(history.has) - 1), history.has[-1].step) if history.has else (-1, -1)
