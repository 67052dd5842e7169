"""What `offbeat top` draws of a job: one paragraph and one table per model.

Columns that the terminal is too narrow for are left out, the least important first; so are lines of workers that it is
too low for, those who keep nobody waiting first. In a pipe nothing is left out.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from offbeat.report.sight import pacemaker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from offbeat.report.sight import Scene, Seen

_GAP = 2  # between columns
_SPAN_S = 5.0  # that "now" means, so that the figure of a slow job does not jump
_PATIENCE_S = 2.0  # after which it is said that there is no answer
_FURNITURE = 6  # lines of a model besides its workers: three above them, two below, one between models
_WORDS = {"pushed": "pushed, waits"}
_STYLES = {"computing": "green", "held": "yellow", "pushed": "yellow", "gone": "dim"}


@dataclass(frozen=True)
class _Column:
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


class Picture:
    """Draws the last look at a job, and remembers a few before it to tell how fast it goes."""

    def __init__(self) -> None:
        self.scenes: tuple[Scene, ...] = ()
        self.looked = False
        self.silent_s = 0.0  # for how long there has been no answer
        self._before: dict[int, deque[Scene]] = {}

    def add(self, scenes: tuple[Scene, ...]) -> None:
        """Take in what has just been seen."""
        self.scenes, self.looked, self.silent_s = scenes, True, 0.0
        for scene in scenes:
            past = self._before.setdefault(scene.model, deque())
            past.append(scene)
            # One look of at least that age stays, or the one before this.
            while len(past) > 2 and scene.running_s - past[1].running_s >= _SPAN_S:
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
            parts.append(Text(f"The server has not answered for {lasting(self.silent_s)}.", "red"))
        if self.looked and not self.scenes:
            parts.append(Text("The server is there, but no worker has come yet."))
        room = None
        if height is not None:
            notes = sum(-(-len(scene.note) // (width or len(scene.note))) for scene in self.scenes if scene.note)
            room = max(1, (height - len(parts) - notes) // max(1, len(self.scenes)) - _FURNITURE)
        for scene in self.scenes:
            parts += [Text()] if scene is not self.scenes[0] else []
            parts += [self._head(scene), _table(scene, width, room)]
            pace = pacemaker(scene)
            parts += [Text(pace)] if pace else []
            parts += [Text(printable(scene.note), "yellow")] if scene.note else []
        return Group(*parts)

    def _head(self, scene: Scene) -> Text:
        model = f"model {scene.model}: " if len(self.scenes) > 1 else ""
        text = Text.assemble((f"{model}{printable(scene.policy)}", "bold"))
        then = self._before[scene.model][0]
        now = f"{scene.updates_per_s(then):,.1f}/s now, " if then is not scene else ""
        text.append(f"  {scene.version:,} updates ({now}{scene.updates_per_s():,.1f}/s in all)")
        text.append(f", running for {lasting(scene.running_s)}")
        if not scene.started:
            text.append(f"; {len(scene.present)} workers are here, it begins with the last", "yellow")
        return text


def printable(text: str) -> str:
    """Without what a terminal would take as a command: it comes from another machine."""
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


def state(seen: Seen) -> str:
    """What a worker does, in words."""
    if seen.gone:
        return "gone"
    phase = printable(seen.phase)
    return f"{_WORDS.get(phase, f'{phase} for')} {lasting(seen.since_s)}"


def _table(scene: Scene, width: int | None, room: int | None) -> RenderableType:
    if not scene.workers:
        return Text("No worker takes part.")
    shown = _that_matter(scene, room)
    columns = _that_fit(_columns(scene, shown), width)
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
    rest = Counter(seen.phase for seen in scene.workers if seen.worker not in ranks)
    if not rest:
        return table
    told = ", ".join(f"{count} {printable(phase)}" for phase, count in rest.most_common())
    return Group(table, Text(f"and {sum(rest.values())} more: {told}", "dim"))


def _columns(scene: Scene, workers: Sequence[Seen]) -> list[_Column]:
    """All of them, in their order."""

    def column(priority: int, heading: str, cells: list[str], width: int = 0) -> _Column:
        return _Column(priority, heading, tuple(cells), width)

    columns = [
        column(0, "rank", [str(w.worker) for w in workers]),
        column(0, "state", [state(w) for w in workers], len("computing for 12.3 s")),
        column(1, "step", ["" if w.gone else str(w.step) for w in workers], 6),
        column(2, "ahead", ["" if w.gone else str(scene.ahead(w)) for w in workers]),
        column(3, "stale", [f"{w.staleness:.1f}" if w.applied else "" for w in workers]),
        column(5, "worst", [str(w.worst) if w.applied else "" for w in workers]),
        column(4, "waits", ["" if w.gone else f"{scene.waiting_share(w):.0%}" for w in workers]),
        column(7, "batch", [f"{w.samples:.6g}" if w.samples and not w.gone else "" for w in workers]),
        column(8, "applied", [str(w.applied) for w in workers]),
    ]
    # Most policies never drop, and most jobs never lose.
    if any(w.dropped for w in scene.workers):
        columns.append(column(6, "dropped", [str(w.dropped) for w in workers]))
    if any(w.lost for w in scene.workers):
        columns.append(column(6, "lost", [str(w.lost) for w in workers]))
    return columns


def _that_fit(columns: Sequence[_Column], width: int | None) -> list[_Column]:
    """The columns in their order, without the least important ones that there is no room for."""
    left = float("inf") if width is None else width + _GAP
    chosen: set[int] = set()
    for place in sorted(range(len(columns)), key=lambda place: columns[place].priority):
        left -= columns[place].needs + _GAP
        if left < 0 and columns[place].priority:
            break
        chosen.add(place)
    return [column for place, column in enumerate(columns) if place in chosen]


def _that_matter(scene: Scene, room: int | None) -> list[Seen]:
    """The workers in order of rank, as many as there is room for: the slowest, and no others who are gone."""
    workers = sorted(scene.workers, key=lambda seen: seen.worker)
    if room is None or len(workers) <= room:
        return workers
    # One line less: it says how many there are besides. A step that is lasting now may be longer than any before.
    first = sorted(workers, key=lambda seen: (seen.gone, -max(seen.step_s, _busy_s(seen))))[: max(1, room - 1)]
    return sorted(first, key=lambda seen: seen.worker)


def _busy_s(seen: Seen) -> float:
    return seen.since_s if seen.phase in ("computing", "pushing", "pulling") else 0.0
