"""Several runs beside each other: the same figures of each, their ratios to the first, and their curves in one plot."""

from __future__ import annotations

import html
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.report.html_report import HEAD, amount_of_bytes
from offbeat.report.job_events import began_s, trained_s
from offbeat.report.per_worker import tally
from offbeat.report.records import LogRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.report.records import Record


@dataclass(frozen=True)
class ComparedRun:
    """A run that is compared.

    Args:
        name: of its folder.
        records: of its last run there.
        plan: that it began with, as TOML; empty if that is not known.
    """

    name: str
    records: Sequence[Record]
    plan: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure of each run.

    Args:
        name: in words, with its unit.
        values: one per run; None where a run has none.
        shown: the same for people.
    """

    name: str
    values: tuple[float | None, ...]
    shown: tuple[str, ...]

    @property
    def ratios(self) -> tuple[str, ...]:
        """The ratio of each run to the first, such as "0.97 x"; empty for the first, and where there is none."""
        first = self.values[0]
        known = [value / first if value is not None and first else None for value in self.values[1:]]
        return ("", *("" if ratio is None else f"{ratio:.3g} x" for ratio in known))


def figures(runs: Sequence[ComparedRun]) -> list[Figure]:
    """List the figures that at least one of the runs has."""
    of: list[tuple[str, Callable[[ComparedRun], float | None], Callable[[float], str]]] = [
        ("workers", lambda run: float(len(tally(run.records))), "{:.0f}".format),
        ("steps, all workers", lambda run: _total(run, "steps"), "{:,.0f}".format),
        ("samples, all workers", lambda run: _total(run, "samples"), "{:,.0f}".format),
        ("seconds to the last step", _seconds, "{:.1f}".format),
        ("samples per second, all workers", _per_second, "{:,.0f}".format),
        ("ms per step, median of all", _step_ms, "{:.2f}".format),
        ("waiting, share of all time", _waiting, "{:.0%}".format),
        ("sent, all workers", lambda run: _total(run, "bytes_sent"), amount_of_bytes),
        ("staleness, mean", _staleness, "{:.2f}".format),
    ]
    names = dict.fromkeys(
        name for run in runs for record in run.records if isinstance(record, LogRecord) for name in record.values
    )
    of += [(f"{name}, last", _last(name), "{:.4g}".format) for name in names]
    found = []
    for name, value_of, show in of:
        values = tuple(value_of(run) for run in runs)
        if any(value is not None for value in values):
            found.append(Figure(name, values, tuple("" if value is None else show(value) for value in values)))
    return found


def comparison(runs: Sequence[ComparedRun]) -> str:
    """The runs as one HTML page, self-contained."""
    title = " beside ".join(run.name for run in runs)
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f"<tr><td>{html.escape(figure.name)}</td>"
        + "".join(
            f"<td>{html.escape(shown)}{f' <small>({ratio})</small>' if ratio else ''}</td>"
            for shown, ratio in zip(figure.shown, figure.ratios, strict=True)
        )
        + "</tr>"
        for figure in figures(runs)
    )
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="about">In brackets: of the first run, {html.escape(runs[0].name)}.</p>',
        f'<div class="wide"><table><tr><th></th>{head}</tr>{rows}</table></div>',
        _plots(runs),
        *(f"<h2>Plan of {html.escape(run.name)}</h2><pre>{html.escape(run.plan)}</pre>" for run in runs if run.plan),
    ]
    return HEAD.format(title=html.escape(title)) + "\n".join(parts) + "\n</body></html>\n"


def _plots(runs: Sequence[ComparedRun]) -> str:
    try:
        drawn = _draw(runs)
    except ImportError:
        return "<p>There are no plots: matplotlib is not installed (pip install 'offbeat[plot]').</p>"
    inner = "".join(f"<figure><figcaption>{html.escape(name)}</figcaption>{svg}</figure>" for name, svg in drawn)
    return f'<div class="plots">{inner}</div>'


def _draw(runs: Sequence[ComparedRun]) -> list[tuple[str, str]]:
    from offbeat.report.plots import MOST_VALUES, colour, legend, svg
    from offbeat.report.time_bins import band

    names = dict.fromkeys(
        name for run in runs for record in run.records if isinstance(record, LogRecord) for name in record.values
    )
    clouds: list[tuple[str, str, list[list[tuple[float, float]]]]] = []
    for name in list(names)[:MOST_VALUES]:
        clouds += [
            (f"{name} over time", "seconds", [_logged(run, name, over_time=True) for run in runs]),
            (f"{name} over steps", "step", [_logged(run, name, over_time=False) for run in runs]),
        ]
    clouds.append(("Milliseconds per step", "seconds", [_step_times(run) for run in runs]))

    def draw(panels: Sequence[Any], cloud: list[list[tuple[float, float]]], xlabel: str) -> None:
        for place, (run, points) in enumerate(zip(runs, cloud, strict=True)):
            if points:
                x, low, middle, high = band(points)
                panels[0].fill_between(x, low, high, color=colour(place), alpha=0.18, linewidth=0)
                panels[0].plot(x, middle, color=colour(place), linewidth=1.2, label=run.name)
        panels[0].set_xlabel(xlabel)
        legend(panels[0])

    return [
        (title, svg(lambda panels, c=cloud, x=xlabel: draw(panels, c, x)))  # type: ignore[misc]
        for title, xlabel, cloud in clouds
        if any(cloud)
    ]


def _logged(run: ComparedRun, name: str, *, over_time: bool) -> list[tuple[float, float]]:
    origin_s = began_s(run.records)
    return [
        (record.time_s - origin_s if over_time else float(record.step), value)
        for record in run.records
        if isinstance(record, LogRecord) and (value := record.values.get(name)) is not None
    ]


def _step_times(run: ComparedRun) -> list[tuple[float, float]]:
    origin_s = began_s(run.records)
    return [(step.time_s + step.step_s - origin_s, step.step_s * 1e3) for step in _steps(run) if step.step > 0]


def _steps(run: ComparedRun) -> list[StepRecord]:
    return [record for record in run.records if isinstance(record, StepRecord)]


def _total(run: ComparedRun, name: str) -> float | None:
    workers = tally(run.records)
    return float(sum(getattr(worker, name) for worker in workers)) if workers else None


def _seconds(run: ComparedRun) -> float | None:
    return trained_s(run.records) or None


def _per_second(run: ComparedRun) -> float | None:
    """Samples per second over the whole time: also while workers were lost, stopped, or not there yet."""
    seconds, samples = trained_s(run.records), _total(run, "samples")
    return samples / seconds if samples is not None and seconds else None


def _step_ms(run: ComparedRun) -> float | None:
    times = [step.step_s * 1e3 for step in _steps(run) if step.step > 0]
    return statistics.median(times) if times else None


def _waiting(run: ComparedRun) -> float | None:
    steps = [step for step in _steps(run) if step.step > 0]
    took_s = sum(step.step_s for step in steps)
    return sum(step.wait_s for step in steps) / took_s if took_s else None


def _staleness(run: ComparedRun) -> float | None:
    steps = _steps(run)
    return sum(step.staleness for step in steps) / len(steps) if any(step.staleness for step in steps) else None


def _last(name: str) -> Callable[[ComparedRun], float | None]:
    def of(run: ComparedRun) -> float | None:
        """The mean of what each worker logged last."""
        values = [worker.values[name] for worker in tally(run.records) if name in worker.values]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return of
