"""The screen of `offbeat top`: one paragraph and one table per model.

Columns that the terminal is too narrow for are left out, the least important first; so are lines of workers that it is
too low for, those who keep nobody waiting first. In a pipe nothing is left out.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from offbeat.protocol.status import ENDS
from offbeat.report.job_status import pacemaker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from offbeat.protocol.status import ModelStatus, WorkerStatus
    from offbeat.protocol.worker_status import TrainingStatus

_GAP = 2  # between columns
_SPAN_S = 5.0  # that "now" means, so that the figure of a slow job does not jump
_PATIENCE_S = 2.0  # after which it is said that there is no answer
_EVENTS = 4  # that are shown
_LONGEST_EVENT = 160  # characters, in a pipe
_MAY_BE_EMPTY = 2  # priority from which on a column of which nothing is known is left out
_FURNITURE = 6  # lines of a model besides its workers: three above them, two below, one between models
_WORDS = {"pushed": "pushed, waits"}
_ENDED = {"left": "has left", "done": "is done", "evicted": "evicted", "failed": "gone (error)"}
_STYLES = {
    "computing": "green", "held": "yellow", "pushed": "yellow", "exchanging": "yellow", "waiting": "yellow",
    "paused": "red", "unreachable": "red", **dict.fromkeys(ENDS, "dim"),
}  # fmt: skip


@dataclass(frozen=True)
class _TopColumn:
    """One thing that is told of each worker.

    Args:
        priority: 0 is never left out.
        width: to keep free, so that the table does not jump when a number grows.
    """

    priority: int
    heading: str
    cells: tuple[str, ...]
    width: int = 0

    @property
    def needs(self) -> int:
        return max(self.width, len(self.heading), *map(len, self.cells))


class TopView:
    """The screen for the latest status; remembers a few before it to measure how fast the job goes."""

    def __init__(self) -> None:
        self.model_statuses: tuple[ModelStatus, ...] = ()
        self.looked = False
        self.silent_s = 0.0  # for how long there has been no answer
        self.seen_at_s = 0.0  # in seconds since 1970
        self._before: dict[int, deque[ModelStatus]] = {}

    def add(self, model_statuses: tuple[ModelStatus, ...]) -> None:
        """Take in what has just been seen."""
        self.model_statuses, self.looked, self.silent_s, self.seen_at_s = model_statuses, True, 0.0, time.time()
        for model_status in model_statuses:
            past = self._before.setdefault(model_status.model, deque())
            if past and (model_status.fabric != past[-1].fabric or model_status.running_s < past[-1].running_s):
                past.clear()  # it is another server, or none any more: updates and steps are counted anew
            past.append(model_status)
            # One look of at least that age stays, or the one before this.
            while len(past) > 2 and model_status.running_s - past[1].running_s >= _SPAN_S:
                past.popleft()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A pipe or a file has neither width nor height.
        size = console.size if console.is_terminal else None
        yield self.drawn(size and size.width, size and size.height)

    def drawn(self, width: int | None = None, height: int | None = None) -> RenderableType:
        """All models.

        Args:
            width, height: of the terminal; None for no limit.
        """
        parts: list[RenderableType] = []
        if self.silent_s > _PATIENCE_S:
            who = "hub of the workers" if any(model_status.fabric for model_status in self.model_statuses) else "server"
            parts.append(Text(f"The {who} has not answered for {lasting(self.silent_s)}.", "red"))
        if self.looked and not self.model_statuses:
            parts.append(Text("The server is running, but no worker has joined yet."))
        room = None
        if height is not None:
            texts = [text for one in self.model_statuses for text in (one.note, _of_rejected(one)) if text]
            notes = sum(-(-len(text) // (width or len(text))) for text in texts)
            notes += sum(
                bool(how_far(model_status)) + len(self._events(model_status)) for model_status in self.model_statuses
            )
            room = max(1, (height - len(parts) - notes) // max(1, len(self.model_statuses)) - _FURNITURE)
        for model_status in self.model_statuses:
            parts += [Text()] if model_status is not self.model_statuses[0] else []
            parts.append(self._head(model_status))
            parts += [Text(far)] if (far := how_far(model_status, width)) else []
            parts.append(_table(model_status, width, room))
            pace = pacemaker(model_status)
            parts += [Text(pace)] if pace else []
            parts += [Text(printable(model_status.note), "yellow")] if model_status.note else []
            parts += [Text(hint, "dim")] if (hint := _of_rejected(model_status)) else []
            parts += [Text(_cut(line, width or _LONGEST_EVENT), "dim") for line in self._events(model_status)]
        return Group(*parts)

    def _events(self, model_status: ModelStatus) -> list[str]:
        """The last events, the latest last; what several workers report alike is shown once."""
        found: dict[str, tuple[float, str, list[int]]] = {}
        for seen in model_status.workers:
            for event in seen.status.events if seen.status is not None else ():
                what = event.text.rpartition(" (")[0] or event.text  # in brackets is how long it took each
                at_s, text, ranks = found.setdefault(what, (event.time_s, event.text, []))
                found[what] = (min(at_s, event.time_s), text, [*ranks, seen.worker])
        last = sorted(found.values())[-_EVENTS:]
        return [
            f"{lasting(max(0.0, self.seen_at_s - at_s))} ago{f', rank {ranks[0]}' if len(ranks) == 1 else ''}: "
            f"{printable(text)}"
            for at_s, text, ranks in last
        ]

    def _head(self, model_status: ModelStatus) -> Text:
        model = f"model {model_status.model}: " if len(self.model_statuses) > 1 else ""
        where = f" on {printable(model_status.fabric)}" if model_status.fabric else ""
        text = Text.assemble((f"{model}{printable(model_status.policy)}{where}", "bold"))
        then = self._before[model_status.model][0]
        now = f"{model_status.updates_per_s(then):,.1f}/s now, " if then is not model_status else ""
        text.append(
            f"  {model_status.version:,} {model_status.counts} ({now}{model_status.updates_per_s():,.1f}/s in all)"
        )
        text.append(f", running for {lasting(model_status.running_s)}")
        if not model_status.started:
            here = _counted(sum(not seen.validates for seen in model_status.present), "worker")
            verb = "is" if here.startswith("1 ") else "are"
            last = "the last"
            if _lacks_validator(model_status):
                last = "a validator" if _are_all_here(model_status) else "the last and a validator"
            text.append(f"; {here} {verb} here, it begins with {last}", "yellow")
        return text


def _lacks_validator(model_status: ModelStatus) -> bool:
    """Whether it waits for a validator, with whose parameters it begins."""
    needs_one = re.search(r"^\[validator\]$", model_status.plan, re.MULTILINE) is not None
    return needs_one and not any(seen.validates for seen in model_status.present)


def _are_all_here(model_status: ModelStatus) -> bool:
    return 0 < model_status.world <= sum(not seen.validates for seen in model_status.present)


def _of_rejected(model_status: ModelStatus) -> str:
    """Say where it stands who is rejected, if a rule or a validator is used: what is shown here any worker may ask."""
    if not re.search(r"^\[(rule|validator)\]$", model_status.plan, re.MULTILINE):
        return ""
    return (
        "Rejected contributions count as applied here, as workers may look, too; who is rejected stands in the history "
        "(offbeat verify-run)."
    )


def printable(text: str) -> str:
    """Remove what a terminal would take as a command: it comes from another machine."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def lasting(seconds: float) -> str:
    """A time in words.

    >>> lasting(0.31), lasting(47.2), lasting(600), lasting(9000)
    ('0.3 s', '47 s', '10 min', '2.5 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def how_far(model_status: ModelStatus, width: int | None = None) -> str:
    """Say in one line how far the training is and how fast, as far as the workers report it; "" if they do not.

    Args:
        width: that there is room for; what does not fit is left out, the last first. None for no limit.
    """
    all_here = [(seen.status, seen.validates) for seen in model_status.present if seen.status is not None]
    here = [status for status, validates in all_here if not validates]  # on data of its own: it is no part of the job's
    if not here:
        return ""
    parts = [*_place(here)]
    parts += [
        f"{printable(name)} {value_of(name, statistics.fmean(values))}"
        for name in _names(model_status)[:3]
        if (values := [status.values[name] for status in here if name in status.values])
    ]
    if any(status.samples for status in here):
        parts.append(f"{sum(status.samples_per_s for status in here):,.0f} samples/s")
    hosts = {status.host for status, _ in all_here if status.host}
    validators = len(all_here) - len(here)
    who = _counted(len(here), "worker") + (f" and {_counted(validators, 'validator')}" if validators else "")
    parts.append(f"{who} on {_counted(len(hosts), 'host')}")
    while width is not None and len(parts) > 1 and len(", ".join(parts)) > width:
        parts.pop()
    return ", ".join(parts)


def _place(here: Sequence[TrainingStatus]) -> Iterator[str]:
    """Say where the training is, and how long it takes from there, if that is known."""
    epochs, total_epochs = max(status.epochs for status in here), max(status.total_epochs for status in here)
    step, total_steps = max(status.step for status in here), max(status.total_steps for status in here)
    if epochs >= 0:
        yield f"epoch {epochs:.2f}" + (f" of {total_epochs:g}" if total_epochs else "")
    if total_steps:
        yield f"step {step:,} of {total_steps:,}"
    left_s = max((status.left_s for status in here if status.left_s is not None), default=None)
    epoch_left_s = max((status.epoch_left_s for status in here if status.epoch_left_s is not None), default=None)
    if left_s is not None:
        yield f"about {lasting(left_s)} left"
    elif epoch_left_s is not None and not (total_epochs or total_steps):
        yield f"this epoch about {lasting(epoch_left_s)} more"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def value_of(name: str, value: float) -> str:
    """Format a value that a script logged, in a few characters.

    >>> value_of("loss", 0.123456), value_of("accuracy", 0.9875), value_of("loss", float("nan"))
    ('0.123', '98.8%', 'NaN')
    """
    if math.isnan(value):
        return "NaN"
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.3g}"


def sized(count_bytes: float) -> str:
    """A number of bytes in words.

    >>> sized(0), sized(812), sized(45_300), sized(268_435_456), sized(3.2e9)
    ('0', '812 B', '45 kB', '268 MB', '3.2 GB')
    """
    if not count_bytes:
        return "0"
    for unit in ("B", "kB", "MB", "GB"):
        if count_bytes < 1000 or unit == "GB":
            break
        count_bytes /= 1000
    return f"{count_bytes:.1f} {unit}" if unit == "GB" else f"{count_bytes:.0f} {unit}"


def _names(model_status: ModelStatus) -> list[str]:
    """The names of what the workers' scripts log; the loss first."""
    return list(
        dict.fromkeys(name for seen in model_status.workers if seen.status is not None for name in seen.status.values)
    )


def state(seen: WorkerStatus, *, has_parameters: bool = True) -> str:
    """The activity of a worker, in words.

    Args:
        has_parameters: whether there are any; else it waits for the first ones, whatever it is released for.
    """
    who = "validator, " if seen.validates else ""
    if seen.gone:
        return f"{who}{_ENDED.get(seen.phase, seen.phase)}"
    phase = printable(seen.phase) if has_parameters else "waiting"
    return f"{who}{_WORDS.get(phase, f'{phase} for')} {lasting(seen.since_s)}"


def _table(model_status: ModelStatus, width: int | None, room: int | None) -> RenderableType:
    if not model_status.workers:
        return Text("No worker takes part.")
    shown = _that_matter(model_status, room)
    columns = _that_fit(_columns(model_status, shown), width)
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for column in columns:
        left = column.heading == "state"
        table.add_column(justify="left" if left else "right", no_wrap=True, min_width=column.needs)
    table.add_row(*(Text(column.heading, "dim") for column in columns))
    for seen, *cells in zip(shown, *(column.cells for column in columns), strict=True):
        style = _STYLES.get(seen.phase, "") if seen.gone else ""
        words = [Text(cell, style) for cell in cells]
        words[1].stylize(_STYLES.get(seen.phase, ""))
        table.add_row(*words)
    ranks = {seen.worker for seen in shown}
    rest = Counter(seen.phase for seen in model_status.workers if seen.worker not in ranks)
    if not rest:
        return table
    told = ", ".join(f"{count} {printable(phase)}" for phase, count in rest.most_common())
    return Group(table, Text(f"and {sum(rest.values())} more: {told}", "dim"))


def _columns(model_status: ModelStatus, workers: Sequence[WorkerStatus]) -> list[_TopColumn]:
    """All columns, in their order."""

    def column(priority: int, heading: str, cells: list[str], width: int = 0) -> _TopColumn:
        return _TopColumn(priority, heading, tuple(cells), width)

    has_any = model_status.started or model_status.version > 0 or not _lacks_validator(model_status)
    columns = [
        column(0, "rank", [str(w.worker) for w in workers]),
        column(0, "state", [state(w, has_parameters=has_any) for w in workers], len("computing for 12.3 s")),
        column(1, "step", [str(w.made) for w in workers], 6),
        *_said(model_status, workers),
        column(3, "ahead", ["" if w.gone or model_status.fabric else str(model_status.ahead(w)) for w in workers]),
        column(3, "stale", [f"{w.staleness:.1f}" if w.applied else "" for w in workers]),
        column(5, "worst", [str(w.worst) if w.applied else "" for w in workers]),
        *_on_table(workers),
        column(4, "waits", ["" if w.gone else f"{model_status.waiting_share(w):.0%}" for w in workers]),
        column(7, "batch", [f"{w.samples:.6g}" if w.samples and not w.gone else "" for w in workers]),
        column(8, "applied", ["" if model_status.fabric or w.validates else str(w.applied) for w in workers]),
    ]
    # Without a server nothing is stale, or brought by one.
    columns = [one for one in columns if one.priority < _MAY_BE_EMPTY or any(one.cells)]
    # Most policies never drop, and most jobs never lose.
    if any(w.dropped for w in model_status.workers):
        columns.append(column(6, "dropped", [str(w.dropped) for w in workers]))
    if any(w.lost for w in model_status.workers):
        columns.append(column(6, "lost", [str(w.lost) for w in workers]))
    return columns


def _on_table(workers: Sequence[WorkerStatus]) -> list[_TopColumn]:
    """The columns of what a switch knows of the workers on its table; empty columns if there is none."""
    known = [None if w.gone else w.table for w in workers]
    silent = [None if at is None else at.silent_s for at in known]
    return [
        _TopColumn(3, "lag", tuple("" if at is None else str(at.lag) for at in known)),
        _TopColumn(4, "barrier", tuple("" if at is None else lasting(at.waited_s) for at in known)),
        _TopColumn(5, "silent", tuple("" if s is None else lasting(s) for s in silent)),
    ]


def _said(model_status: ModelStatus, workers: Sequence[WorkerStatus]) -> list[_TopColumn]:
    """The columns of what the workers report themselves; empty columns if they do not."""
    said = [None if w.gone else w.status for w in workers]
    names = _names(model_status)
    first = names[0] if names else "loss"
    values = [None if one is None else one.values.get(first) for one in said]
    rates = ["" if one is None or not one.samples else f"{one.samples_per_s:,.0f}" for one in said]
    known = [one if one is not None and one.memory_bytes else None for one in said]
    return [
        _TopColumn(2, printable(first), tuple("" if v is None else value_of(first, v) for v in values), 7),
        _TopColumn(3, "samples/s", tuple(rates)),
        _TopColumn(6, "cores", tuple("" if one is None else f"{one.cpu_cores:.2f}" for one in known)),
        _TopColumn(6, "memory", tuple("" if one is None else sized(one.memory_bytes) for one in known)),
        _TopColumn(6, "sent/s", tuple("" if one is None else sized(one.sent_bytes_per_s) for one in known), 6),
        _TopColumn(9, "host", tuple("" if w.status is None else printable(w.status.host) for w in workers)),
    ]


def _that_fit(columns: Sequence[_TopColumn], width: int | None) -> list[_TopColumn]:
    """The columns in their order, without the least important ones that there is no room for."""
    left = float("inf") if width is None else width + _GAP
    chosen: set[int] = set()
    for place in sorted(range(len(columns)), key=lambda place: columns[place].priority):
        left -= columns[place].needs + _GAP
        if left < 0 and columns[place].priority:
            break
        chosen.add(place)
    return [column for place, column in enumerate(columns) if place in chosen]


def _that_matter(model_status: ModelStatus, room: int | None) -> list[WorkerStatus]:
    """The workers in order of rank, as many as there is room for: the slowest, and no others who are gone."""
    workers = sorted(model_status.workers, key=lambda seen: seen.worker)
    if room is None or len(workers) <= room:
        return workers
    # One line less: it says how many there are besides. A step that is lasting now may be longer than any before.
    first = sorted(workers, key=lambda seen: (seen.gone, -max(seen.step_s, _busy_s(seen))))[: max(1, room - 1)]
    return sorted(first, key=lambda seen: seen.worker)


def _busy_s(seen: WorkerStatus) -> float:
    return seen.since_s if seen.phase in ("computing", "pushing", "pulling") else 0.0
