"""Law 3 where a switch's table lets workers go on: by how much each was ahead, and by which window that was decided.

A step that not all have finished is granted by one window, whoever asks: the change of a policy holds from a step on
that nobody can have been granted before. Beyond the window a worker may have been allowed steps by name, within what
the policy promises. Whether what a worker knew of the others was true is seen, too: nobody can have known that all had
finished a step which one of them never came to.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat.audit.findings import AuditResult
    from offbeat.audit.replicas import WorkerHistory
    from offbeat.history import StepGranted

_RING = 64  # a worker that rests says that it has finished steps of the ring's next round


def check_grants(histories: list[WorkerHistory], result: AuditResult) -> None:
    """Look at every step behind which a worker went on."""
    granted = [(history, index, one) for history in histories for index, one in enumerate(history.granted)]
    if not granted:
        return
    result.checked.add(3)
    windows: dict[tuple[int, int, int], dict[int, str]] = defaultdict(dict)
    for history, index, one in granted:
        result.releases += 1
        lead = one.clock - one.low
        most = one.window if lead <= one.window or one.until <= one.clock else _allowed(history, index, one)
        result.lead, result.bound = max(result.lead, lead), max(result.bound or 0, most)
        if lead > most:
            result.violated(
                3,
                f"Rank {history.rank} went on behind step {one.clock}, {lead} ahead of step {one.low}, which all had "
                f"finished: it may be {most} ahead.",
                (_told(history, one),),
            )
        if lead > 0:  # else any window grants it
            windows[one.model, history.table_of(index), one.clock].setdefault(one.window, _told(history, one))
    for (_, _, clock), by in sorted(windows.items()):
        if len(by) > 1:
            result.violated(3, f"Step {clock} was granted by two windows, {min(by)} and {max(by)}.", tuple(by.values()))
    _check_known(histories, result)


def _allowed(history: WorkerHistory, index: int, one: StepGranted) -> int:
    """Steps that a worker may be ahead by name: as many as the policy promises that it went by.

    That is the last one recorded before, or the next: a worker has gone on behind the first step that a policy decides
    about when it records that this one holds.
    """
    before = [policy for count, policy in history.decided if count <= index][-1:]
    after = [policy for count, policy in history.decided if count == index + 1]
    bounds = (_RING - 2 if policy.bound is None else policy.bound for policy in (*before, *after) if policy is not None)
    return max(bounds, default=one.window)


def _check_known(histories: list[WorkerHistory], result: AuditResult) -> None:
    """See that nobody knew of steps that others never finished, as far as those recorded everything."""
    for history in histories:
        low: dict[tuple[int, int], int] = defaultdict(int)
        for place, one in _by_table(history):
            if one.low < low[place]:
                result.violated(3, f"Rank {history.rank} knew less of the others than before.", (_told(history, one),))
            low[place] = max(low[place], one.low)
    known: dict[tuple[int, int], int] = defaultdict(int)
    for place, one in (found for history in histories for found in _by_table(history)):
        known[place] = max(known[place], one.low)
    for history in histories:
        own: dict[tuple[int, int], int] = defaultdict(int)
        for place, one in _by_table(history):
            own[place] = max(own[place], one.clock)
        for place, last in own.items():
            if history.is_whole and last + _RING < known[place]:
                result.violated(
                    3, f"Step {known[place]} was taken for finished by all, and rank {history.rank} ended at {last}."
                )


def _by_table(history: WorkerHistory) -> Iterator[tuple[tuple[int, int], StepGranted]]:
    """Each grant, with its model and which of that model's tables it was by."""
    for index, one in enumerate(history.granted):
        yield (one.model, history.table_of(index)), one


def _told(history: WorkerHistory, one: StepGranted) -> str:
    return f"rank {history.rank}, behind step {one.clock}: all at {one.low}, window {one.window}, epoch {one.epoch}"
