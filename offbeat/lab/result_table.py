"""A result file as a table for people: on the terminal, and on the page of results."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from offbeat.lab.run_result import reached

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.lab.results import ResultFile, RowResult

    Column = tuple[str, Callable[[RowResult], str]]


def table(report: ResultFile) -> tuple[list[str], list[list[str]]]:
    """Headings, and one list of cells per row.

    In a race to a target the spread of the times per step and their limit give way to what the target took.
    """
    race = any(raw.metric_steps for raw in report.raw) and any(row.time_to_target_s for row in report.rows)
    columns: list[Column] = [
        ("row", lambda row: row.row),
        ("ms per step", lambda row: _ms(row.seconds_per_step.median)),
    ]
    if not race:
        columns += [
            ("min", lambda row: _ms(row.seconds_per_step.min)),
            ("max", lambda row: _ms(row.seconds_per_step.max)),
            ("limit", lambda row: _ms(row.bound_s)),
        ]
    if report.simulated:
        predicted = {one.row: one.seconds_per_step for one in report.simulated}
        columns.append(("simulated", lambda row: _ms(predicted[row.row]) if row.row in predicted else ""))
    columns.append((f"x {report.rows[0].baseline}", lambda row: f"{row.ratio_to_baseline:.3f}"))
    if any(row.staleness.max for row in report.rows):
        columns.append(("stale, mean/max", lambda row: f"{row.staleness.mean:.1f}/{row.staleness.max}"))
    if any(raw.barrier_s for raw in report.raw):
        columns.append(("ms at barrier", lambda row: _barrier(report, row.row)))
    columns.append(("MB sent", lambda row: _mb(statistics.fmean(row.bytes_sent_per_worker))))
    if race:
        columns += _race(report)
    elif any(row.time_to_target_s is not None for row in report.rows):
        columns.append(("s to target", lambda row: _or_never(row.time_to_target_s)))
    if any(row.final_metric is not None for row in report.rows):
        columns.append(("final", lambda row: "" if row.final_metric is None else f"{row.final_metric:.4f}"))
    elif report.links:
        use = {link.row: link for link in report.links}
        columns.append(("link used", lambda row: _percent(use[row.row].share) if row.row in use else ""))
        columns.append(("idle", lambda row: _percent(use[row.row].idle_share) if row.row in use else ""))
        columns.append(("uneven", lambda row: f"{use[row.row].variation:.2f}" if row.row in use else ""))
    return [heading for heading, _ in columns], [[cell(row) for _, cell in columns] for row in report.rows]


def _barrier(report: ResultFile, row: str) -> str:
    """Mean of what steps waited for others alone; empty where that is not told apart."""
    times = [second for raw in report.raw if raw.row == row for second in raw.barrier_s]
    return _ms(statistics.fmean(times)) if times else ""


def _race(report: ResultFile) -> list[Column]:
    took = {row.row: reached(report, row.row) for row in report.rows}
    return [
        ("steps to target", lambda row: "never" if (one := took[row.row]) is None else str(one.steps)),
        ("s to target", lambda row: _or_never(None if (one := took[row.row]) is None else one.time_s)),
        ("MB to target", lambda row: _or_never(None if (one := took[row.row]) is None else one.sent_bytes / 1e6)),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.2f}"


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _or_never(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"
