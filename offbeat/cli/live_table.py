"""The display of `offbeat run` while the workers train: one line per worker, and a table at the end.

Both are made of columns, and columns that the console is too narrow for are never squeezed: the lines leave the least
important ones out, the table is continued below itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table

from offbeat.report import Records, WorkerTotals, steps_heading, tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderResult

_WIDEST = 1 << 16  # more than any table needs
_GAP = 2  # between the columns of the live lines
_NUMBER = 9  # characters of the longest number, such as -1.23e-05


@dataclass(frozen=True)
class _LiveColumn:
    """One thing that is said of each worker.

    Args:
        cells: for each worker, in order.
        width: to keep free, so that the lines do not jump when a number grows.
    """

    heading: str
    cells: tuple[str, ...]
    width: int = 0

    @property
    def needs(self) -> int:
        return max(self.width, *map(len, self.cells))


class LiveView:
    """A live table of a run's records; silent when the console is no terminal.

    Args:
        console: also prints what the workers say, above the lines.
        path: the run's metrics.jsonl.
        ranks: for whom to keep lines free.
    """

    def __init__(self, console: Console, path: Path, ranks: Sequence[int]) -> None:
        # In a folder that was used before, the earlier run is not shown.
        self.skip_bytes = path.stat().st_size if path.exists() else 0
        self._records = Records(path, self.skip_bytes)
        self._tallies = {rank: WorkerTotals(rank) for rank in ranks}
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Take in what has been recorded since, and show it."""
        if self._live is None:
            return
        for record in self._records.new():
            self._tallies.setdefault(record.rank, WorkerTotals(record.rank)).add(record)
        self._live.update(self._lines())

    def _lines(self) -> Table:
        columns = _that_fit(_live_columns(list(self._tallies.values())), self._console.width)
        grid = Table.grid(padding=(0, _GAP))
        for column in columns:
            grid.add_column(no_wrap=True, min_width=column.needs)
        for cells in zip(*(column.cells for column in columns), strict=True):
            grid.add_row(*cells)
        return grid


def _live_columns(workers: Sequence[WorkerTotals]) -> list[tuple[int, _LiveColumn]]:
    """All columns as they are shown, each with its priority; 0 is the highest."""
    names = _names(workers)
    first = "loss" if "loss" in names else next(iter(names), "")
    values = [
        (1 if name == first else 4 + place, _LiveColumn(name, _cells(workers, name), len(name) + 1 + _NUMBER))
        for place, name in enumerate(names)
    ]
    values.sort(key=lambda value: value[0])
    return [
        (0, _LiveColumn("worker", tuple(f"rank {worker.rank}" for worker in workers))),
        (0, _LiveColumn("step", tuple(f"step {w.step + 1}" if w.steps else "starting" for w in workers))),
        *values,
        (2, _LiveColumn("samples/s", tuple(_rate(worker) for worker in workers))),
        (3, _LiveColumn("waiting", tuple(f"waiting {w.recent_waiting_share:.0%}" if w.steps else "" for w in workers))),
        (3, _LiveColumn("done", tuple("done" if worker.ended else "" for worker in workers))),
    ]


def _cells(workers: Sequence[WorkerTotals], name: str) -> tuple[str, ...]:
    return tuple(f"{name} {_number(name, w.values[name])}" if name in w.values else "" for w in workers)


def _rate(worker: WorkerTotals) -> str:
    return f"{worker.recent_samples_per_s:,.0f} samples/s" if worker.samples else ""


def _that_fit(columns: Sequence[tuple[int, _LiveColumn]], width: int) -> list[_LiveColumn]:
    """The columns in their order, without those of low priority that there is no room for."""
    chosen: set[int] = set()
    left = width + _GAP
    for place in sorted(range(len(columns)), key=lambda place: columns[place][0]):
        priority, column = columns[place]
        if not any(column.cells):
            continue
        left -= column.needs + _GAP
        if left < 0 and priority:
            break
        chosen.add(place)
    return [column for place, (_, column) in enumerate(columns) if place in chosen]


class FinalTable:
    """The totals of each worker, as one table; as several, one below the other, if a terminal is too narrow for it."""

    def __init__(self, workers: Sequence[WorkerTotals]) -> None:
        self._workers = _LiveColumn("worker", tuple(f"rank {worker.rank}" for worker in workers))
        self._values = [
            _LiveColumn(name, tuple(_number(name, w.values[name]) if name in w.values else "" for w in workers))
            for name in _names(workers)
        ]
        self._fixed = [
            _LiveColumn(steps_heading(workers), tuple(f"{worker.steps}" for worker in workers)),
            _LiveColumn("steps/s", tuple(f"{worker.steps_per_s:.2f}" for worker in workers)),
            # Unknown if batches hold no tensor.
            _LiveColumn("samples/s", tuple(f"{w.samples_per_s:,.0f}" if w.samples else "" for w in workers)),
            _LiveColumn("waiting", tuple(f"{worker.waiting_share:.0%}" for worker in workers)),
            _LiveColumn("waited s", tuple(f"{worker.waited_s:.2f}" for worker in workers)),
            _LiveColumn("sent MB", tuple(f"{worker.bytes_sent / 1e6:.2f}" for worker in workers)),
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=_WIDEST)

        def width(columns: Sequence[_LiveColumn]) -> int:
            return Measurement.get(console, unbounded, self._table(columns)).maximum

        # A pipe or a file has no width, and who reads it may want to split its lines.
        most = options.max_width if console.is_terminal else _WIDEST
        whole = [*self._values, *self._fixed]
        groups: list[Sequence[_LiveColumn]] = [whole]
        if width(whole) > most:
            groups = [group for part in (self._fixed, self._values) for group in _grouped(part, most, width)]
        for group in groups:
            yield from console.render(self._table(group), options.update(max_width=max(most, width(group))))

    def _table(self, columns: Sequence[_LiveColumn]) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1))
        table.add_column(self._workers.heading, no_wrap=True)
        for column in columns:
            table.add_column(column.heading, justify="right", no_wrap=True)
        for cells in zip(self._workers.cells, *(column.cells for column in columns), strict=True):
            table.add_row(*cells)
        return table


def _grouped(
    columns: Sequence[_LiveColumn], most: int, width: Callable[[Sequence[_LiveColumn]], int]
) -> Iterator[list[_LiveColumn]]:
    """The columns in order, in groups that are no wider than `most`; one that is wider is alone."""
    group: list[_LiveColumn] = []
    for column in columns:
        if group and width([*group, column]) > most:
            yield group
            group = []
        group.append(column)
    if group:
        yield group


def final_table(records: Records) -> FinalTable | None:
    """Make the table of each worker's totals; None if nothing was recorded."""
    workers = tally(records.all())
    return FinalTable(workers) if any(worker.steps for worker in workers) else None


def _names(workers: Sequence[WorkerTotals]) -> list[str]:
    return list(dict.fromkeys(name for worker in workers for name in worker.values))


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "NaN"
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.3g}"
