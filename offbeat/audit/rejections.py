"""Counts of rejected contributions, by rank: from what the coordinator recorded of each judged update alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from offbeat.audit.log_files import find_jobs
from offbeat.history import LifeBegan, UpdateJudged

if TYPE_CHECKING:
    from pathlib import Path


class RankJudgements(NamedTuple):
    """The decisions of a rule about one worker's contributions.

    Args:
        judged: so many were judged.
        rejected: so many of these move nothing.
    """

    judged: int = 0
    rejected: int = 0


class JudgedContributions:
    """The judgements in the history of one job. `hear` each record of its coordinators, in order."""

    def __init__(self) -> None:
        self._scales: dict[tuple[int, int], tuple[tuple[int, int, float], ...]] = {}  # by model and version

    def hear(self, record: LifeBegan | UpdateJudged) -> None:
        """The next record: an update was judged, or a server goes on from a snapshot, which undoes what came later."""
        if isinstance(record, UpdateJudged):
            self._scales.setdefault((record.model, record.version), record.scales)
            return
        for model, version in list(self._scales):
            if model == record.model and version > record.version:
                del self._scales[model, version]

    def by_rank(self) -> dict[int, RankJudgements]:
        """Count the contributions of each worker; of all models together."""
        counts: dict[int, RankJudgements] = {}
        for scales in self._scales.values():
            for rank, _, scale in scales:
                judged, rejected = counts.get(rank, RankJudgements())
                counts[rank] = RankJudgements(judged + 1, rejected + (scale == 0))
        return dict(sorted(counts.items()))


def rejections(path: Path) -> dict[int, RankJudgements]:
    """Count by rank how many contributions were judged, and rejected, in all jobs whose histories are there.

    Raises:
        HistoryError: if there is none, or one cannot be read.
    """
    counts: dict[int, RankJudgements] = {}
    for job in find_jobs([path]):
        judged = JudgedContributions()
        for record in (record for log in job.coordinators for record in log):
            if isinstance(record, LifeBegan | UpdateJudged):
                judged.hear(record)
        counts = added(counts, judged.by_rank())
    return counts


def added(some: dict[int, RankJudgements], more: dict[int, RankJudgements]) -> dict[int, RankJudgements]:
    """Add up the counts of two jobs."""
    both = {}
    for rank in sorted({*some, *more}):
        one, other = some.get(rank, RankJudgements()), more.get(rank, RankJudgements())
        both[rank] = RankJudgements(one.judged + other.judged, one.rejected + other.rejected)
    return both
