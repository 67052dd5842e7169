"""A job without a server as the hub in rank 0's sentinel sees it, in the same words as one with a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.protocol.status import ModelStatus, WorkerStatus

if TYPE_CHECKING:
    from offbeat.protocol.worker_status import TableClock, TrainingStatus
    from offbeat.wire.messages import Overview, WorkerReport

_MOST_TEXT = 16  # of a phase
_ENDED = ("finished", "raised", "lost")


def model_status_of(overview: Overview) -> ModelStatus:
    """Make the status of a model from an overview.

    A step of all is an update; of several models the steps are those of the first.
    """
    clocks = _clocks(overview)
    workers = tuple(_seen(words, overview.statuses.get(words.rank), clocks.get(words.rank)) for words in overview.words)
    said = [seen for seen in workers if seen.status is not None]
    newest = max(said, key=lambda seen: (not seen.gone, seen.made), default=None)
    return ModelStatus(
        model=0,
        policy=newest.status.policy if newest is not None and newest.status is not None else "",
        fabric=newest.status.fabric if newest is not None and newest.status is not None else "",
        version=max((seen.made for seen in workers), default=0),
        started=all(seen.phase != "starting" for seen in workers if seen.worker < overview.world),
        running_s=max(0.0, overview.running_s),
        workers=workers,
        world=overview.world,
    )


def _clocks(overview: Overview) -> dict[int, TableClock]:
    """The clocks on a switch's table, by rank, as one who is there says it; empty if there is none."""
    for words in sorted(overview.words, key=lambda words: (words.process != "running", words.rank)):
        status = overview.statuses.get(words.rank)
        if status is not None and status.clocks and words.phase not in _ENDED:
            return {clock.worker: clock for clock in status.clocks}
    return {}


def _seen(words: WorkerReport, status: TrainingStatus | None, clock: TableClock | None) -> WorkerStatus:
    phase, since_s = _phase(words, status)
    step = max(0, words.step)
    if status is not None:  # older than the words
        step = status.step + max(0, words.step - status.exchanges) // status.models
    return WorkerStatus(
        worker=words.rank,
        phase=phase,
        step=step,
        clock=step,
        made=step,
        since_s=max(0.0, since_s),
        computing_s=status.computing_s if status is not None else 0.0,
        waited_s=status.waited_s if status is not None else 0.0,
        here_s=status.here_s if status is not None else 0.0,
        status=status,
        table=clock,
    )


def _phase(words: WorkerReport, status: TrainingStatus | None) -> tuple[str, float]:
    """The activity of a worker, or how it ended, and for how long."""
    since_s, state_s = words.since_s + words.age_s, words.state_since_s + words.age_s
    if words.phase == "finished":
        return "left" if status is not None and status.left else "done", since_s
    if words.phase in _ENDED:
        return "failed", since_s
    if words.process == "dead":
        return "gone", state_s
    if words.process == "paused":
        return "paused", state_s
    if words.process == "unreachable":
        return ("unreachable", words.age_s) if words.host else ("starting", words.age_s)
    return words.phase[:_MOST_TEXT], since_s
