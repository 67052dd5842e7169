"""The fate of each contribution, one by one: for those who want to hold it against something else, as the fault matrix
does with marks that contributions leave in the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.audit.replicas import WorkerHistory
    from offbeat.audit.updates import Fate, UpdateAudit


@dataclass(frozen=True)
class ContributionFate:
    """The fate of one contribution to a server.

    Args:
        model: which of several.
        rank: of the worker.
        numbers: under which it was announced; more than one if the server was restarted meanwhile, none if it was
            outdated before.
        step: in which its worker brought it, or the next one, if all were to bring what they had; None if the worker
            recorded nothing of it, because it was killed before, or its disk was full.
        fate: what became of it in the end; "rejected" by a rule that compares whole contributions, or the "reference"
            that a validator brought.
        share: with which it counts in its update, times the update's rate; 0 if it is in none or moves nothing, None
            if no shard has recorded that update.
        told: whether its worker was told that it counts; None if it recorded nothing of it.
    """

    model: int
    rank: int
    numbers: tuple[int, ...]
    step: int | None
    fate: Fate
    share: float | None
    told: bool | None


def listed(model: int, fates: UpdateAudit, histories: Sequence[WorkerHistory]) -> Iterator[ContributionFate]:
    """List the contributions to one model: those that workers recorded, in order of their files, then the others."""
    seen = set()
    for history in histories:
        for has in history.has:
            if has.model != model or not has.is_brought:
                continue
            pushes = [(history.rank, number) for number in has.numbers]
            seen.update(pushes)
            used = [push for push in pushes if fates.fates.get(push) == "applied"]
            push = (used or pushes or [(history.rank, -1)])[-1]
            fate: Fate = fates.fate(push) if push in fates.fates else "dropped"
            yield ContributionFate(model, history.rank, has.numbers, has.step, fate, fates.share(push), has.counted)
    for rank, number in sorted(fates.fates.keys() - seen):
        push = (rank, number)
        yield ContributionFate(model, rank, (number,), None, fates.fate(push), fates.share(push), None)
