"""The outcome of a run: the last records of its workers, and their reports about each other.

A worker that ends in order, or raises, leaves an end record. One that is killed leaves none: then the others' stall
reports (stall-rank*.json, see `offbeat.diagnosis.explain`) say what is known of it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from offbeat.diagnosis.explain import error_line
from offbeat.exit_codes import how_it_ended
from offbeat.report.formatting import listed, ranks, span
from offbeat.report.job_events import job_events
from offbeat.report.per_worker import tally
from offbeat.report.records import EndRecord, EventRecord, StartRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from offbeat.report.per_worker import WorkerTotals
    from offbeat.report.records import Record

# Errors of a worker that only stopped because another was lost.
_VICTIM = ("WorkerLostError", "NetworkError")
# That of one that a signal ended, such as the launcher's when another was lost.
_STOPPED = "KeyboardInterrupt"
_MOST_SUSPECTS = 3  # in one line


class ReportedCulprit(msgspec.Struct, frozen=True):
    """A worker that had not arrived."""

    rank: int
    reason: str = ""
    text: str = ""
    detail: str = ""


class Stall(msgspec.Struct, frozen=True):
    """The last stall that a worker reported."""

    rank: int
    culprits: tuple[ReportedCulprit, ...] = ()
    step: int = 0
    fatal: bool = False
    note: str = ""
    server: str = ""


@dataclass(frozen=True)
class Suspect:
    """The stall reports' statement on one worker.

    Args:
        rank: of that worker; None if nobody was late, or for the parameter server.
        by: ranks that reported it.
    """

    rank: int | None
    reason: str
    text: str
    by: tuple[int, ...]

    def __str__(self) -> str:
        verb = "reports" if len(self.by) == 1 else "report"
        whom = self.reason or "no culprit" if self.rank is None else f"rank {self.rank} ({self.reason})"
        return f"{ranks(self.by, capital=True)} {verb} {whom}{': ' if self.text else '.'}{self.text}"


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run.

    Args:
        well: whether all workers said that they did.
        text: what they said, in a few sentences.
        suspects: what the stall reports say; nothing if all ended well.
    """

    well: bool
    text: str
    suspects: tuple[Suspect, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The same in one or two lines."""
        told = " ".join(map(str, self.suspects[:_MOST_SUSPECTS]))
        return [self.text, told] if told else [self.text]


def read_stalls(run_dir: Path, since_s: float) -> list[Stall]:
    """The stall reports in a run's folder, in order of rank.

    Args:
        since_s: unix time; older ones are of an earlier run.
    """
    found = []
    for path in run_dir.glob("stall-rank*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):  # half a report is none
            if path.stat().st_mtime >= since_s:
                found.append(msgspec.json.decode(path.read_bytes(), type=Stall))
    return sorted(found, key=lambda stall: stall.rank)


def ending(
    records: Sequence[Record], stalls: Iterable[Stall] = (), exit_codes: Mapping[int, int] | None = None
) -> RunOutcome:
    """Find how the run with these records ended.

    Args:
        exit_codes: of workers, by rank, as far as they are known; for those whose last record is missing.
    """
    workers = {worker.rank: worker for worker in tally(records)}
    starts = [record for record in records if isinstance(record, StartRecord)]
    # Workers on other machines write elsewhere; so do those of the beginning, for one that joined: its rank is beyond
    # its own world.
    began = [start for start in starts if start.rank < start.world]
    here = {
        rank
        for start in began
        for rank in (range(start.first_here, start.first_here + start.here) if start.here else range(start.world))
    }
    everyone = sorted({*workers, *here})
    who = ranks(everyone, capital=True) if any(start.world > len(everyone) for start in began) else _all(len(everyone))
    ends = _last_words(records)
    errors = {rank: end.error for rank, end in ends.items() if end.error is not None}
    if not everyone:
        return RunOutcome(False, "Nothing was recorded.")
    if len(ends) == len(everyone) and all(end.left for end in ends.values()):  # such as by Ctrl-C, where others go on
        was = "was" if len(ends) == 1 else "were"
        text = f"{who} {was} asked to stop, and left cleanly after {_steps(ends.values())}."
        return RunOutcome(True, text + _on_the_way(records))
    if len(ends) == len(everyone) and not errors:
        text = f"{who} ended well after {_steps(ends.values())}"
        text += ", though the job was asked to stop." if _was_interrupted(records) else "."
        return RunOutcome(True, text + _on_the_way(records))
    killed = {
        record.rank: record.text
        for record in records
        if isinstance(record, EventRecord) and record.what in ("killed", "exited")
    }
    silent = [rank for rank in everyone if rank not in ends and rank not in killed]
    exited = {rank: code for rank, code in (exit_codes or {}).items() if rank in silent}
    interrupted = _was_interrupted(records)
    victims = [ends[rank] for rank, error in errors.items() if error.startswith(_VICTIM)]
    stopped = [ends[rank] for rank, error in errors.items() if error.startswith(_STOPPED)]
    sentences = [  # from the cause to its consequences
        *_raised([end for end in ends.values() if end.error is not None and end not in victims + stopped]),
        *_killed({rank: text for rank, text in killed.items() if rank not in ends}, workers),
        *_exited(exited, workers),
        *_silent([rank for rank in silent if rank not in exited], workers, nobody=not ends),
        *_stopped(stopped, interrupted=interrupted),
        *_others(victims, "gave up waiting"),
        *_others([end for end in ends.values() if end.error is None], "ended well"),
    ]
    return RunOutcome(False, " ".join(sentences), tuple(_suspects(stalls, workers, errors)))


def _was_interrupted(records: Iterable[Record]) -> bool:
    return any(isinstance(record, EventRecord) and record.what == "interrupted" for record in records)


def _last_words(records: Iterable[Record]) -> dict[int, EndRecord]:
    """Each worker's end; the first one that tells of an error, if there are several."""
    ends: dict[int, EndRecord] = {}
    for record in records:
        if isinstance(record, EndRecord) and (record.rank not in ends or ends[record.rank].error is None):
            ends[record.rank] = record
    return ends


def _raised(ends: Sequence[EndRecord]) -> list[str]:
    alike: dict[str, list[EndRecord]] = {}
    for end in ends:
        alike.setdefault(_headline(end.error or ""), []).append(end)
    return [f"{_who(group)} ended after {_steps(group)} with {error}." for error, group in alike.items()]


def _killed(killed: Mapping[int, str], workers: Mapping[int, WorkerTotals]) -> list[str]:
    """Say which workers were killed, as the launcher knows it."""
    told = []
    for rank, text in sorted(killed.items()):
        counts = [workers[rank].step + 1] if rank in workers and workers[rank].steps else []
        told.append(f"{text.rstrip('.')} after {_recorded(counts)}.")
    return told


def _stopped(ends: Sequence[EndRecord], *, interrupted: bool) -> list[str]:
    if not ends:
        return []
    were = "were" if len(ends) > 1 else "was"
    why = "by Ctrl-C or SIGTERM at the launcher" if interrupted else "by SIGTERM or Ctrl-C"
    return [f"{_who(ends)} {were} asked to stop after {_steps(ends)}, {why}."]


def _exited(codes: Mapping[int, int], workers: Mapping[int, WorkerTotals]) -> list[str]:
    """Say which workers left no record of their end, nor the launcher one for them: the disk may be full."""
    alike: dict[int, list[int]] = {}
    for rank, code in sorted(codes.items()):
        alike.setdefault(code, []).append(rank)
    told = []
    for code, group in alike.items():
        counts = [workers[rank].step + 1 for rank in group if rank in workers and workers[rank].steps]
        how = how_it_ended(code) if len(group) == 1 else how_it_ended(code).replace("was ", "were ", 1)
        told.append(f"{ranks(group, capital=True)} {how} after {_recorded(counts)}: what came then was not recorded.")
    return told


def _silent(silent: Sequence[int], workers: Mapping[int, WorkerTotals], *, nobody: bool) -> list[str]:
    if not silent:
        return []
    why = "killed, or still running?" if nobody else "killed?"
    counts = [workers[rank].step + 1 for rank in silent if rank in workers and workers[rank].steps]
    return [f"{ranks(silent, capital=True)} left no last word ({why}) after {_recorded(counts)}."]


def _recorded(counts: Sequence[int]) -> str:
    """Steps, as far as they were written down."""
    return f"{span(counts)} recorded step{'' if set(counts) == {1} else 's'}" if counts else "no recorded step"


def _others(ends: Sequence[EndRecord], did: str) -> list[str]:
    if not ends:
        return []
    names = sorted({end.error.partition(":")[0] for end in ends if end.error})
    return [f"{_who(ends)} {did} after {_steps(ends)}{f' ({listed(names)})' if names else ''}."]


def _suspects(stalls: Iterable[Stall], workers: Mapping[int, WorkerTotals], errors: Mapping[int, str]) -> list[Suspect]:
    """List what bears on the end, each but once."""
    reporters: dict[tuple[int | None, str], list[int]] = {}
    texts: dict[tuple[int | None, str], str] = {}
    for stall in stalls:
        # A wait that came to an end was followed by the record of its step: it explains nothing.
        if not stall.fatal and stall.rank in workers and stall.step <= workers[stall.rank].step:
            continue
        found: list[tuple[int | None, str, str]] = [(c.rank, c.reason, _said(c)) for c in stall.culprits]
        if stall.server:
            found.append((None, "the parameter server", stall.server))
        for rank, reason, text in found or [(None, "", "")]:
            if rank in errors and reason == "raised":
                continue  # its own last words say so better
            reporters.setdefault((rank, reason), []).append(stall.rank)
            texts.setdefault((rank, reason), f"{text} {stall.note}".strip())
    return [Suspect(*key, texts[key], tuple(by)) for key, by in reporters.items()]


def _said(culprit: ReportedCulprit) -> str:
    if culprit.reason != "raised":
        return culprit.text
    return f"{culprit.text} {error_line(culprit.detail)}".rstrip()


def _on_the_way(records: Sequence[Record]) -> str:
    events = [record for record in records if isinstance(record, EventRecord)]
    pauses = [event for event in events if event.what in ("pause", "resumption")]  # all but the last one are over
    last = max(pauses, key=lambda event: event.time_s, default=None)
    # Every worker is told the same about the server; who paced the rounds is told by one, at the end.
    told = [
        f" {text}"
        for text in dict.fromkeys(
            event.text
            for event in events
            if event.what in ("server", "pace", "privacy") or (event is last and event.what == "pause")
        )
    ]
    if warned := [event.text for event in events if event.what == "warning"]:  # each worker's own says the same
        told.insert(0, f" {warned[0]}")
    stalls = sum(event.what == "stall" for event in job_events(records))
    if stalls:
        told.insert(0, f" {stalls} stall{' was' if stalls == 1 else 's were'} reported on the way.")
    return "".join(told)


def _all(count: int) -> str:
    return "The worker" if count == 1 else f"All {count} workers"


def _who(ends: Iterable[EndRecord]) -> str:
    return ranks(sorted(end.rank for end in ends), capital=True)


def _steps(ends: Iterable[EndRecord]) -> str:
    counts = [end.steps for end in ends]
    return f"{span(counts)} step{'' if set(counts) == {1} else 's'}"


def _headline(error: str) -> str:
    return error.strip().partition("\n")[0].rstrip(".:")
