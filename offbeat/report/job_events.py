"""The events of the whole job, once each, in order of time: workers write about the same thing at nearly one time.

A stall, a plan swap, a worker that was lost, joined, left or came back: each worker that knew of it has recorded it.
Those records are one event here, with the workers that tell of it. Ends of workers stand among them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.report.records import OF_JOB, EndRecord, EventRecord, StartRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat.report.records import Record

_TOGETHER_S = 10.0  # records of one event; a worker that was stopped hears of it late
_STOPPED = "KeyboardInterrupt"
OF_SERVER = ("server", "pause", "resumption")
"""Events that the server tells all workers of."""
UNMARKED = ("pace", "contributions", "privacy")
"""Events that sum up the whole run: they are at no moment of it."""


@dataclass
class JobEvent:
    """One thing that happened.

    Args:
        time_s: when the first worker recorded it, unix time.
        step: of that worker, when it did; -1 if it was in none.
        what: "start", "stall", "swap", "membership", "server", "pause", "resumption", "dropped", "killed", "exited",
            "interrupted", "ended", "left" and others.
        text: in words.
        ranks: that tell of it, or of whom it is; empty if the launcher does.
        bad: whether something went wrong.
    """

    time_s: float
    step: int
    what: str
    text: str
    ranks: list[int] = field(default_factory=list)
    bad: bool = False


def job_events(records: Sequence[Record]) -> list[JobEvent]:
    """All events of the job, oldest first."""
    found: list[JobEvent] = []
    ended_itself = {record.rank for record in records if isinstance(record, EndRecord)}
    for record in sorted(records, key=lambda one: one.time_s):
        if isinstance(record, EventRecord):
            if record.what != "exited" or record.rank not in ended_itself:  # whose own last word says more
                _add(found, record)
        elif isinstance(record, EndRecord) and (record.error or record.left):
            ended = _ended(record)
            asked = re.compile(rf"Rank {record.rank} was (asked|told) to leave")  # told: in records of before
            if ended.what != "left" or not any(asked.search(one.text) for one in found):
                found.append(ended)
    return sorted([*found, *_dropped(records)], key=lambda one: one.time_s)


def began_s(records: Iterable[Record]) -> float:
    """The time when the first worker had prepared its model, or else of the first record; 0 if there is none."""
    times = [(not isinstance(record, StartRecord), record.time_s) for record in records]
    return min(times, default=(False, 0.0))[1]


def trained_s(records: Sequence[Record]) -> float:
    """Seconds from when the first worker had prepared its model to the end of the last step; 0 without steps."""
    ends = [record.time_s + record.step_s for record in records if isinstance(record, StepRecord)]
    return max(0.0, max(ends) - began_s(records)) if ends else 0.0


def _dropped(records: Iterable[Record]) -> list[JobEvent]:
    """Contributions that are not in the parameters: those of a worker that were brought one soon after the other."""
    spells: list[list[StepRecord]] = []
    last: dict[int, list[StepRecord]] = {}
    for step in sorted(
        (one for one in records if isinstance(one, StepRecord) and one.dropped), key=lambda one: one.time_s
    ):
        spell = last.get(step.rank)
        if spell is None or step.time_s - spell[-1].time_s > _TOGETHER_S:
            spells.append(spell := [])
            last[step.rank] = spell
        spell.append(step)
    return [_of_spell(spell) for spell in spells]


def _of_spell(spell: Sequence[StepRecord]) -> JobEvent:
    first = spell[0]
    text = f"The contribution of rank {first.rank} in step {first.step} was dropped: it is not in the parameters."
    if len(spell) > 1:
        text = (
            f"{len(spell)} contributions of rank {first.rank} in steps {first.step} to {spell[-1].step} were dropped: "
            "they are not in the parameters."
        )
    return JobEvent(first.time_s, first.step, "dropped", text, [first.rank])


def _add(found: list[JobEvent], record: EventRecord) -> None:
    if record.what in (*OF_SERVER, "membership"):  # of a leaving that its worker has recorded
        found[:] = [one for one in found if one.what != "left" or one.text[:-1].partition(",")[0] not in record.text]
    bad = (
        record.what in ("stall", "killed", "exited", "skipped") or " is gone" in record.text or " died " in record.text
    )
    for earlier in reversed(found):
        if record.time_s - earlier.time_s > _TOGETHER_S:
            break
        alike = (record.what == "stall" and record.step == earlier.step) or record.text == earlier.text
        if record.what == earlier.what and alike and record.rank not in earlier.ranks:
            earlier.ranks.append(record.rank)
            return
    ranks = [] if record.rank == OF_JOB else [record.rank]
    found.append(JobEvent(record.time_s, record.step, record.what, record.text, ranks, bad))


def _ended(end: EndRecord) -> JobEvent:
    if end.left:
        text = f"Rank {end.rank} was asked to leave, and left cleanly behind its step {end.steps}."
        return JobEvent(end.time_s, end.steps, "left", text, [end.rank])
    error = end.error or ""
    if error.startswith(_STOPPED):
        text = f"Rank {end.rank} was asked to stop ({error.partition(': ')[2] or 'Ctrl-C'}) after {end.steps} steps."
        return JobEvent(end.time_s, end.steps, "stopped", text, [end.rank])
    return JobEvent(end.time_s, end.steps, "ended", f"Rank {end.rank} ended with {error}", [end.rank], bad=True)
