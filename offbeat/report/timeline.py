"""One picture of a whole run, on one axis of time: what each worker did, how fast all were, and what happened when.

From top to bottom: a lane per worker (computing or waiting), samples per second of all, how stale what they computed
on was, the values that the script logged, and what they used of their machines. A numbered line goes through all of
them for each event, as the table of events numbers them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.report.job_events import UNMARKED, began_s, job_events
from offbeat.report.plots import COLOURS, INK, colour, svg
from offbeat.report.records import LogRecord, ResourceRecord, StepRecord
from offbeat.report.time_bins import band, edges_of, spread, with_gaps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.report.records import Record

_MOST_LANES = 32
_MOST_VALUES = 2
_MOST_MARKS = 40
_WIDTH, _PANEL, _LANE = 14.0, 1.25, 0.22  # inches
Panel = tuple[str, float, "Callable[[Any], None]"]
Point = tuple[float, float]


def draw_timeline(records: Sequence[Record]) -> str:
    """The picture as SVG; empty if no step was recorded.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    steps: dict[int, list[StepRecord]] = defaultdict(list)
    for record in records:
        if isinstance(record, StepRecord):
            steps[record.rank].append(record)
    if not steps:
        return ""
    origin_s = began_s(records)
    # What was before is the start of the processes, which would take up much of the picture.
    edges = edges_of(origin_s, max(step.time_s + step.step_s for one in steps.values() for step in one))
    panels = [*_lanes(steps, edges, origin_s), *_rates(steps, edges, origin_s), *_values(records, origin_s)]
    panels += _resources(records, origin_s)
    # An event before the first step, such as a joining that was waited for, is shown where the picture begins.
    marks = [
        (max(0.0, event.time_s - origin_s), event.bad) for event in job_events(records) if event.what not in UNMARKED
    ]

    def draw(axes: Any) -> None:
        for place, ((title, _, draw_panel), one) in enumerate(zip(panels, axes, strict=True)):
            draw_panel(one)
            one.set_ylabel(title, rotation=0, ha="right", va="center", color=INK)
            one.set_xlim(0.0, max([edges[-1] - origin_s, *(1.01 * at_s for at_s, _ in marks)]))
            for number, (at_s, bad) in enumerate(marks[:_MOST_MARKS], 1):
                line = COLOURS[1] if bad else INK
                one.axvline(at_s, color=line, linewidth=0.9, linestyle=(0, (3, 2)), zorder=3)
                if place == 0:
                    style: Mapping[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8, "color": line}
                    one.text(at_s, 1.02, str(number), transform=one.get_xaxis_transform(), **style)
            one.tick_params(labelbottom=place == len(panels) - 1)
        axes[-1].set_xlabel("seconds since the model was prepared")

    return svg(draw, heights=[height for _, height, _ in panels], width=_WIDTH)


def _lanes(steps: Mapping[int, Sequence[StepRecord]], edges: Any, origin_s: float) -> list[Panel]:
    shown = sorted(steps)[:_MOST_LANES]
    shares = np.full((len(shown), len(edges) - 1), np.nan)
    for lane, rank in enumerate(shown):
        waited, covered = spread(steps[rank], edges, [min(step.wait_s, step.step_s) for step in steps[rank]])
        there = covered > 0.02 * (edges[1] - edges[0])
        shares[lane, there] = waited[there] / covered[there]

    def draw(axes: Any) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        map_ = LinearSegmentedColormap.from_list("waiting", [COLOURS[2], "#E8E2D0", COLOURS[1]])
        borders = np.arange(len(shown) + 1) - 0.5
        shown_shares = np.ma.masked_invalid(shares)
        axes.pcolormesh(edges - origin_s, borders, shown_shares, cmap=map_, vmin=0, vmax=1)
        axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.grid(visible=False)

    return [("computing (green)\nor waiting (orange)", max(_PANEL * 0.6, _LANE * len(shown)), draw)]


def _rates(steps: Mapping[int, Sequence[StepRecord]], edges: Any, origin_s: float) -> list[Panel]:
    middles, width_s = (edges[1:] + edges[:-1]) / 2 - origin_s, edges[1] - edges[0]
    rates = {rank: spread(own, edges, [step.samples for step in own])[0] / width_s for rank, own in steps.items()}

    def draw_samples(axes: Any) -> None:
        axes.fill_between(middles, sum(rates.values()), color=COLOURS[0], alpha=0.2, linewidth=0)
        axes.plot(middles, sum(rates.values()), color=COLOURS[0], linewidth=1.2)
        axes.set_ylim(bottom=0)

    panels: list[Panel] = [("samples/s,\nall workers", _PANEL, draw_samples)]
    stale = [(step.time_s + step.step_s - origin_s, float(step.staleness)) for own in steps.values() for step in own]
    if any(value for _, value in stale):
        panels.append(("staleness,\nupdates", _PANEL, lambda axes: _band(axes, stale, COLOURS[3], from_zero=True)))
    return panels


def _values(records: Sequence[Record], origin_s: float) -> list[Panel]:
    points: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if isinstance(record, LogRecord):
            for name, value in record.values.items():
                if value is not None:
                    points[name][record.rank].append((record.time_s - origin_s, value))
    names = sorted(points, key=lambda name: name != "loss")[:_MOST_VALUES]
    return [(name, _PANEL, _per_worker(points[name])) for name in names]


def _resources(records: Sequence[Record], origin_s: float) -> list[Panel]:
    of: tuple[tuple[str, Callable[[ResourceRecord], float]], ...] = (
        ("processor,\ncores", lambda used: used.cpu_cores),
        ("memory, MB", lambda used: used.memory_bytes / 1e6),
        ("sent, MB/s", lambda used: used.sent_bytes_per_s / 1e6),
    )
    panels: list[Panel] = []
    for title, figure in of:
        points: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for record in records:
            if isinstance(record, ResourceRecord):
                points[record.rank].append((record.time_s - origin_s, figure(record)))
        if points:
            panels.append((title, _PANEL * 0.8, _per_worker(points, from_zero=True)))
    return panels


def _per_worker(
    points: Mapping[int, Sequence[tuple[float, float]]], *, from_zero: bool = False
) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        if len(points) > len(COLOURS):  # so many lines would hide each other
            _band(axes, [point for own in points.values() for point in own], COLOURS[0], from_zero=from_zero)
            return
        for rank in sorted(points):
            _band(axes, points[rank], colour(rank), from_zero=from_zero)

    return draw


def _band(axes: Any, points: Sequence[Point], shade: str, *, from_zero: bool = False) -> None:
    x, low, middle, high = with_gaps(band(points))
    axes.fill_between(x, low, high, color=shade, alpha=0.18, linewidth=0)
    axes.plot(x, middle, color=shade, linewidth=1.1)
    if from_zero:
        axes.set_ylim(bottom=0)
