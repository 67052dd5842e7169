"""What `offbeat run` shows while the workers train: one line per worker, and a table at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table

from offbeat.report import Records, Tally, tally

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


class LiveView:
    """Follows a run's records; silent when the console is no terminal.

    Args:
        console: also prints what the workers say, above the lines.
        path: the run's metrics.jsonl.
        workers: how many lines to keep free.
    """

    def __init__(self, console: Console, path: Path, workers: int) -> None:
        # In a folder that was used before, the earlier run is not shown.
        self._records = Records(path, skip_bytes=path.stat().st_size if path.exists() else 0)
        self._tallies = {rank: Tally(rank) for rank in range(workers)}
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
            self._tallies.setdefault(record.rank, Tally(record.rank)).add(record)
        self._live.update(self._lines())

    def _lines(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for _ in range(6):
            grid.add_column(no_wrap=True)
        for worker in self._tallies.values():
            if not worker.steps:
                grid.add_row(f"rank {worker.rank}", "starting")
                continue
            grid.add_row(
                f"rank {worker.rank}",
                f"step {worker.step + 1}",
                "  ".join(f"{name} {_number(name, value)}" for name, value in worker.values.items()),
                f"{worker.recent_samples_per_s:,.0f} samples/s" if worker.samples else "",
                f"waiting {worker.recent_waiting_share:.0%}",
                "done" if worker.ended else "",
            )
        return grid


def final_table(records: Records) -> Table | None:
    """What each worker did; None if nothing was recorded."""
    workers = tally(records.all())
    if not any(worker.steps for worker in workers):
        return None
    names = list(dict.fromkeys(name for worker in workers for name in worker.values))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("worker", no_wrap=True)
    for heading in (*names, "steps", "steps/s", "samples/s", "waiting", "waited s", "sent MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in workers:
        table.add_row(
            f"rank {worker.rank}",
            *(_number(name, worker.values[name]) if name in worker.values else "" for name in names),
            f"{worker.steps}",
            f"{worker.steps_per_s:.2f}",
            f"{worker.samples_per_s:,.0f}" if worker.samples else "",  # unknown if batches hold no tensor
            f"{worker.waiting_share:.0%}",
            f"{worker.wait_s:.2f}",
            f"{worker.bytes_sent / 1e6:.2f}",
        )
    return table


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "NaN"
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.3g}"
