"""What became of the contributions of a cell: three witnesses, held against one another.

* The job's own history, as `offbeat.audit` reads it: which contribution is in which update, and with which share.
* The marks that contributions left in the parameters (see `benchmarks/workloads/marked.py`): what really got there.
* Words: what the workers and the server said that is not used.

A mark has to be what the history says; what is not used has to have been said; and what was said not to be used may
not be there. Without a server there is no history of decisions, and marks are held against themselves: all of a step
add up to 1.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from benchmarks.cell import Story
    from offbeat.audit import AuditResult, ContributionFate

_A_LITTLE = 0.02  # by which a mark may differ from its share, relative to that
_MOST_BROKEN = 3
Place = tuple[int, int]  # a rank, and one of its steps


class Books(msgspec.Struct, kw_only=True, frozen=True):
    """What became of the contributions, counted in steps.

    Args:
        applied: steps that count: their marks are not 0.
        more, less: of which the mark is larger, or smaller, than the history says.
        torn: elements in which the two copies differ: of those contributions only a part counts.
        dropped, lost: of workers that came to the end, steps that do not count, as the history says: outdated; gone
            with a server or a link, or left out with NaN or Inf.
        missing: of these, those of which nobody has said so.
        denied: of which a worker or the server said that they do not count, and they do.
        miscounted: contributions that the server counts as used and the history does not, or the other way round.
        checked: whether the history is whole, so that each mark was held against it.
        broken: laws that the audit found broken, the first ones.
    """

    applied: int
    more: int = 0
    less: int = 0
    torn: int = 0
    dropped: int = 0
    lost: int = 0
    missing: int = 0
    denied: int = 0
    miscounted: int = 0
    checked: bool = True
    broken: tuple[str, ...] = ()


def books(story: Story, each: int = 1) -> Books | None:
    """Count what became of the contributions; None if nobody came to the end.

    Args:
        each: steps of a contribution.
    """
    if not story.held:
        return None
    held = next(iter(story.held.values()))
    marks = {(rank, step): -value for rank, row in enumerate(held.marks) for step, value in enumerate(row) if value}
    result, known = story.verdict, story.known
    broken = tuple(f"law {one.law}: {one.what}" for one in result.violations[:_MOST_BROKEN])
    ends = {rank: one.done for rank, one in story.held.items()}
    if not known:
        idle = {(rank, step) for rank, one in story.held.items() for step in one.idle}
        stepped = {rank: range(one.began, one.done) for rank, one in story.held.items()}
        return _together(marks, stepped, idle, held.torn, result, broken)
    spans = list(_spans(known, each, ends))
    shares: dict[Place, float | None] = {(rank, step): 0.0 for rank, done in ends.items() for step in range(done)}
    fates: dict[Place, str] = dict.fromkeys(shares, "pending")
    for one, steps in spans:
        shares |= {(one.rank, step): one.share for step in steps}
        fates |= dict.fromkeys(((one.rank, step) for step in steps), "left out" if _weighs_nothing(one) else one.fate)
    words = _Words(story, spans)
    # A change of several steps counts, without the one in which there was NaN or Inf.
    shares |= dict.fromkeys(words.left_out & shares.keys(), 0.0)
    fates |= dict.fromkeys(words.left_out & fates.keys(), "left out")
    more, less = _compare(marks, shares)
    unused = [place for place, fate in fates.items() if fate != "applied" and place[0] in ends]
    return Books(
        applied=len(marks),
        more=more,
        less=less,
        torn=held.torn,
        dropped=sum(fates[place] == "dropped" for place in unused),
        lost=sum(fates[place] != "dropped" for place in unused),
        missing=words.missing(unused, each),
        denied=sum(fates.get(place) == "applied" and place in marks for place in words.places),
        miscounted=_miscounted(known, held.seen),
        checked=all(share is not None for share in shares.values()),
        broken=broken,
    )


def _weighs_nothing(one: ContributionFate) -> bool:
    """Whether it took its turn, and moved nothing: it held NaN or Inf."""
    return one.fate == "applied" and one.share == 0


def _spans(
    known: Iterable[ContributionFate], each: int, ends: Mapping[int, int]
) -> Iterator[tuple[ContributionFate, range]]:
    """Each contribution, and the steps of its worker that it is of."""
    following: Counter[int] = Counter()
    for one in known:
        # What its worker could not record any more it brought after what it did record.
        first = following[one.rank]
        stop = first + each if one.step is None else one.step + 1
        following[one.rank] = max(first, min(stop, ends.get(one.rank, stop)))
        yield one, range(first, following[one.rank])


def _compare(marks: Mapping[Place, float], shares: Mapping[Place, float | None]) -> tuple[int, int]:
    """How many marks are larger, and how many smaller, than what is recorded."""
    more = less = 0
    for place in marks.keys() | shares.keys():
        mark, share = marks.get(place, 0.0), shares.get(place, 0.0)
        most = 1.0 if share is None else share
        more += mark > most * (1 + _A_LITTLE)
        less += mark <= 0 if share is None else mark < most * (1 - _A_LITTLE)
    return more, less


def _together(
    marks: Mapping[Place, float],
    steps: Mapping[int, range],
    idle: Collection[Place],
    torn: int,
    result: AuditResult,
    broken: tuple[str, ...],
) -> Books:
    """Where all step together, the marks of a step add up to 1, and who came to the end is in each."""
    sums: Counter[int] = Counter()
    for (_, step), mark in marks.items():
        sums[step] += mark  # type: ignore[assignment]
    whole = range(max(own.stop for own in steps.values()))
    return Books(
        applied=len(marks),
        more=sum(sums[step] > 1 + _A_LITTLE for step in whole),
        less=sum(sums[step] < 1 - _A_LITTLE for step in whole),
        torn=torn,
        missing=sum(
            (rank, step) not in marks and (rank, step) not in idle for rank, own in steps.items() for step in own
        ),
        checked=result.compared > 0,
        broken=broken,
    )


def _miscounted(known: Iterable[ContributionFate], seen: Iterable[Mapping[str, int]]) -> int:
    """How many contributions more, or fewer, of a fate the server counts than the history has."""
    # What a worker brings that was left behind is dropped; to the history it went with that worker before.
    recorded = Counter((one.rank, one.fate == "applied") for one in known if one.fate != "pending")
    counted = Counter[tuple[int, bool]]()
    for one in seen:
        counted[(one["worker"], True)] += one["applied"]
        counted[(one["worker"], False)] += one["dropped"] + one["lost"]
    return sum(abs(recorded[which] - count) for which, count in counted.items())


class _Words:
    """Which steps were said not to be used.

    Attributes:
        places: by name.
        left_out: of these, those with NaN or Inf.
        counts: by rank, of those that were only counted: they were lost with a killed server.
    """

    _WORKERS = re.compile(r"Rank (\d+) is back: what it had computed in step (\d+) (was outdated, and )?is not used")
    _SERVERS = re.compile(r"Contribution (\d+) of rank (\d+) \(.* samples\) is (lost|dropped): ")
    _LEFT_OUT = re.compile(r"step (\d+): the .* holds NaN or Inf on this worker; it is left out")

    def __init__(self, story: Story, spans: Iterable[tuple[ContributionFate, range]]) -> None:
        numbered, ending = dict[Place, range](), dict[Place, range]()
        for one, steps in spans:
            numbered |= {(one.rank, number): steps for number in one.numbers}
            ending[(one.rank, steps.stop - 1)] = steps
        self.places: set[Place] = set()
        self.left_out: set[Place] = set()
        self.counts: Counter[int] = Counter()
        for line in story.lines:
            if found := self._WORKERS.search(line.text):
                rank, step = int(found[1]), int(found[2])
                self._take(rank, ending.get((rank, step), range(step, step + 1)))
            elif found := self._SERVERS.search(line.text):
                number, rank = int(found[1]), int(found[2])
                self._take(rank, numbered.get((rank, number), range(0)))
            elif found := self._LEFT_OUT.search(line.text):
                rank, step = int(line.who.removeprefix("worker ")), int(found[1])
                self._take(rank, range(step, step + 1))
                self.left_out.add((rank, step))
        for text in {line.text for line in story.lines if "restarted" in line.text}:
            for rank, count in re.findall(r"rank (\d+): (\d+)", text):
                self.counts[int(rank)] += int(count)

    def _take(self, rank: int, steps: range) -> None:
        self.places.update((rank, step) for step in steps)

    def missing(self, unused: Iterable[Place], each: int) -> int:
        """How many of these nobody has spoken of."""
        unsaid = Counter(place[0] for place in unused if place not in self.places)
        return sum(max(0, count - each * self.counts[rank]) for rank, count in unsaid.items())
