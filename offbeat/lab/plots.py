"""The picture of a result file: seconds per step of every row beside the physical limit, and the way to the target, or,
where there is none but a server, how its link was used over time. Where policies were swapped, how the training loss
went, too. Where something went wrong (`[[fault]]`): throughput, waiting and staleness over time, and when it did.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from typing import TYPE_CHECKING, Any

from offbeat.errors import ScenarioError
from offbeat.report.formatting import brief
from offbeat.scenario import Scenario

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.lab.results import LinkUse, RawRun, ResultFile, RowResult

# Okabe and Ito's palette: told apart by everyone.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def check_can_draw() -> None:
    """Refuse a picture that could not be drawn, before anything is measured for it.

    Raises:
        ScenarioError: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ScenarioError(
            "Cannot draw: the package matplotlib is not installed. Install it with pip install 'offbeat[plot]', "
            "or leave out --png."
        )


def draw(report: ResultFile, path: Path) -> None:
    """Draw a report as PNG.

    Raises:
        ScenarioError: if matplotlib is not installed.
    """
    check_can_draw()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = any(raw.metrics for raw in report.raw)
    struck = {row.row: found for row in report.rows if (found := _happened(row, "fault"))}
    if struck:
        from offbeat.lab.timeline_plot import draw_courses

        figure = Figure(figsize=(10, 1.7 * len(report.rows) + 1), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        draw_courses(figure, report, struck, {row.row: _happened(row, "swap") for row in report.rows})
        figure.suptitle(f"{report.name}: {report.description}", fontsize=9)
        figure.savefig(path)
        return
    # Where there is a way to the target, that is what people look for.
    links = [] if curves else report.links
    tall, low = 0.55 * len(report.rows) + 2, 0.8 * len(links) + (0.6 if links else 0)
    columns = 1 + bool(curves) + bool(report.courses)
    figure = Figure(figsize=((7, 11, 15)[columns - 1], tall + low), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [tall, low] if links else [tall]
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    axes = parts[0].subplots(1, columns, squeeze=False)[0]
    _draw_steps(axes[0], report)
    if curves:
        _draw_curves(axes[1], report)
    if report.courses:
        _draw_losses(axes[-1], report)
    for part in parts[1:]:
        _draw_links(part.subplots(len(links), 1, sharex=True, squeeze=False)[:, 0], report)
    figure.suptitle(f"{report.name}: {report.description}", fontsize=9)
    figure.savefig(path)


def _happened(row: RowResult, what: str) -> list[tuple[float, str]]:
    """List what happened in a row, a "fault" or a "swap", and at which second of the measured steps."""
    found = (
        re.fullmatch(rf"{what}: (.*), (-?[\d.]+) s after the first measured step began", text) for text in row.events
    )
    return [(float(one[2]), one[1]) for one in found if one is not None]


def _draw_steps(axes: Any, report: ResultFile) -> None:
    """One bar per row: the median, and a whisker from least to most of the repeats."""
    for place, (row, colour) in enumerate(zip(report.rows, COLOURS * 8, strict=False)):
        step = row.seconds_per_step
        axes.barh(place, step.median * 1e3, color=colour, alpha=0.75, height=0.6)
        axes.plot([step.min * 1e3, step.max * 1e3], [place, place], color="black", linewidth=1)
        note = f"{step.median * 1e3:.4g} ms, x{row.ratio_to_baseline:.3f}"
        # What sends less may end left of the limit: the line must not cross what is written there.
        end = (step.max * 1e3, place)
        axes.annotate(note, end, xytext=(4, 0), textcoords="offset points", va="center", fontsize=7, bbox=_PAPER)
    _draw_limits(axes, report)
    furthest_ms = 1e3 * max(max(row.bound_s, row.seconds_per_step.max) for row in report.rows)
    axes.set_yticks(range(len(report.rows)), [row.row for row in report.rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(len(report.rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.45 * furthest_ms)
    axes.set_xlabel("milliseconds per step (median; least to most of the repeats)", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_limits(axes: Any, report: ResultFile) -> None:
    """One line if the limit is the same for all rows, else one for each."""
    bounds_ms = [row.bound_s * 1e3 for row in report.rows]
    # Above the axes: the line ends where its label begins.
    label = {"ha": "center", "va": "bottom", "fontsize": 7, "transform": axes.get_xaxis_transform()}
    if len(set(bounds_ms)) == 1:
        axes.axvline(bounds_ms[0], color="black", linestyle="--", linewidth=1)
        axes.text(bounds_ms[0], 1.01, f"limit {bounds_ms[0]:.4g} ms", **label)
        return
    for place, bound_ms in enumerate(bounds_ms):
        axes.plot([bound_ms] * 2, [place - 0.45, place + 0.45], color="black", linestyle="--", linewidth=1)
    axes.text(max(bounds_ms), 1.01, "dashed: each row's limit", **label)


def _draw_links(axes: Any, report: ResultFile) -> None:
    """One strip per row: what the host received upwards, what it sent downwards, as shares of the link's rate."""
    colours = dict(zip((row.row for row in report.rows), COLOURS * 8, strict=False))
    for strip, link in zip(axes, report.links, strict=True):
        capacity_bytes = link.rate_mbps * 1e6 / 8 * link.interval_s
        for series, sign in ((link.received_bytes, 1), (link.sent_bytes, -1)):
            edges_s = [link.interval_s * index for index in range(len(series) + 1)]
            heights = [sign * 100 * amount / capacity_bytes for amount in series]
            strip.stairs(heights, edges_s, fill=True, color=colours[link.row], alpha=0.75)
        strip.axhline(0, color="black", linewidth=0.5)
        strip.set_ylim(-110, 110)
        strip.set_yticks([-100, 0, 100], ["100 %", "0", "100 %"])
        strip.set_title(_link_words(link), fontsize=7, loc="left", pad=2)
        strip.tick_params(labelsize=6)
        strip.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds; received by the host upwards, sent by it downwards", fontsize=8)


def _link_words(link: LinkUse) -> str:
    return (
        f"{link.row}, link of {link.host}: {100 * link.share:.0f} % used, variation within a round "
        f"{link.variation:.2f}, idle {100 * link.idle_share:.0f} % of {link.seen_s:.1f} s"
    )


def _draw_curves(axes: Any, report: ResultFile) -> None:
    """The metric over training time, every repeat of every row; and when the policy was swapped, in the first one."""
    warmup_steps = Scenario.from_toml(report.scenario).run.warmup_steps
    for place, (row, colour) in enumerate(zip(report.rows, COLOURS * 8, strict=False)):
        style = "-" if place < len(COLOURS) else "--"
        for raw in report.raw:
            if raw.row == row.row and raw.rank == 0 and raw.metrics:
                times, values = zip(*raw.metrics, strict=True)
                label = row.row if raw.repeat == 0 else None
                axes.plot(times, values, color=colour, linestyle=style, linewidth=1.2, alpha=0.8, label=label)
                if raw.repeat == 0:
                    _mark_swaps(axes, row, _warmup_s(raw, warmup_steps), colour)
    axes.set_xlabel("seconds of training", fontsize=8)
    axes.set_ylabel("test metric", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_losses(axes: Any, report: ResultFile) -> None:
    """The training loss of each step, and when the policy was swapped; every repeat of every row."""
    colours = dict(zip((row.row for row in report.rows), COLOURS * 8, strict=False))
    for course in report.courses:
        first = next(raw for raw in report.raw if (raw.row, raw.repeat) == (course.row, course.repeat))
        ends_s = list(itertools.accumulate(first.step_s))[: len(course.losses)]
        label = course.row if course.repeat == 0 else None
        losses = course.losses[: len(ends_s)]
        axes.plot(ends_s, losses, color=colours[course.row], linewidth=0.8, alpha=0.8, label=label)
    for row in report.rows:
        _mark_swaps(axes, row, 0.0, colours[row.row])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the first measured step began", fontsize=8)
    axes.set_ylabel("training loss, mean of all workers", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _warmup_s(raw: RawRun, warmup_steps: int) -> float:
    """Seconds of training before the first measured step; 0 if it is not known at which steps there was a metric."""
    if not raw.metrics or not raw.metric_steps:
        return 0.0
    measured = max(0, raw.metric_steps[-1] - warmup_steps)
    return max(0.0, raw.metrics[-1][0] - sum(raw.step_s[:measured]))


def _mark_swaps(axes: Any, row: RowResult, begin_s: float, colour: str) -> None:
    """A dotted line where another policy came to decide, with its name."""
    for at_s, policy in _happened(row, "swap"):
        axes.axvline(begin_s + at_s, color=colour, linestyle=":", linewidth=0.9)
        axes.annotate(
            brief(policy), (begin_s + at_s, 0), xycoords=axes.get_xaxis_transform(), xytext=(-2, 3),
            textcoords="offset points", rotation=90, ha="right", va="bottom", fontsize=5, color=colour,
            in_layout=False,
        )  # fmt: skip
