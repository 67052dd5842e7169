"""The findings of an audit: for each law whether it holds, what was looked at, and the first thing that breaks it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.audit.rejections import RankJudgements

LAWS = {
    1: "equal parameters",
    2: "each contribution once",
    3: "nobody too far ahead",
    5: "the same again",
}
MOST_VIOLATIONS = 100  # that are kept; all are counted


@dataclass(frozen=True)
class Violation:
    """A law is broken.

    Args:
        law: its number in `LAWS`.
        what: as a sentence.
        story: the last events of the worker that it is about, or of all.
    """

    law: int
    what: str
    story: tuple[str, ...] = ()


@dataclass
class AuditResult:
    """The findings about one or more jobs.

    Args:
        files, jobs, lives, events, updates: that were looked at.
        judged: updates that a robust rule has decided about.
        rejected: contributions in these that move nothing.
        by_rank: of each worker, how many of its contributions were judged, and how many of these rejected.
        references: that validators brought, to judge others by.
        applied, dropped, lost, pending: what became of the other contributions in the end; lost are those that went
            with their worker, or with a server that was killed and had no snapshot of them.
        lost_samples: that the lost ones weigh.
        in_part: of the lost ones, those of which some blocks are in the parameters.
        unrecorded: of all these, those that a server had no time to record before it was killed, or no room, and of
            which workers know.
        twice: contributions that are in the parameters twice.
        replaced: how often parameters were replaced by a worker's, such as a checkpoint's, in the middle of training.
        swapped_by: who wanted each swap of the plan, in words.
        releases, lead, bound: how often a worker was let go on; the most it was ahead then, and the most it may be.
        staleness, stalest: sum and maximum, over the applied ones, of the updates between the parameters they were
            computed on and their own.
        hashes, compared: digests of parameters that workers recorded; those that have one to be equal to.
        borders: places at which workers went to a server, or left it; each stretch between counts as a job.
        steps_against: those that were compared with another run's.
        broken: how many violations there are; the first of them are in `violations`.
        notes: what could not be looked at, and why.
        checked: numbers of laws that something was checked of.
    """

    files: int = 0
    jobs: int = 0
    lives: int = 0
    events: int = 0
    updates: int = 0
    judged: int = 0
    rejected: int = 0
    by_rank: dict[int, RankJudgements] = field(default_factory=dict)
    references: int = 0
    applied: int = 0
    dropped: int = 0
    lost: int = 0
    lost_samples: float = 0.0
    in_part: int = 0
    pending: int = 0
    unrecorded: int = 0
    twice: int = 0
    replaced: int = 0
    replayed: int = 0
    releases: int = 0
    lead: int = 0
    bound: int | None = None
    staleness: int = 0
    stalest: int = 0
    swaps: int = 0
    swapped_by: list[str] = field(default_factory=list)
    hashes: int = 0
    compared: int = 0
    borders: int = 0
    steps_against: int = 0
    broken: int = 0
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: set[int] = field(default_factory=set)

    @property
    def holds(self) -> bool:
        """Whether nothing breaks any law."""
        return not self.broken

    def violated(self, law: int, what: str, story: tuple[str, ...] = ()) -> None:
        """Take down that a law is broken."""
        self.broken += 1
        self.checked.add(law)
        if len(self.violations) < MOST_VIOLATIONS:
            self.violations.append(Violation(law, what, story))

    def first(self, law: int) -> Violation | None:
        """The first violation of a law."""
        return next((one for one in self.violations if one.law == law), None)
