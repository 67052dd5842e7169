"""The picture of a result file: seconds per step of every row beside the physical limit, and the way to the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.errors import ScenarioError

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.lab.results import Report

# Okabe and Ito's palette: told apart by everyone.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def draw(report: Report, path: Path) -> None:
    """Draw a report as PNG.

    Raises:
        ScenarioError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ScenarioError(
            "Cannot draw: the package matplotlib is not installed. Install it with pip install 'offbeat[plot]', "
            "or leave out --png."
        ) from error
    curves = any(raw.metrics for raw in report.raw)
    figure = Figure(figsize=(11 if curves else 7, 0.55 * len(report.rows) + 2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if curves else 1, squeeze=False)[0]
    _draw_steps(axes[0], report)
    if curves:
        _draw_curves(axes[1], report)
    figure.suptitle(f"{report.name}: {report.description}", fontsize=9)
    figure.savefig(path)


def _draw_steps(axes: Any, report: Report) -> None:
    """One bar per row: the median, and a whisker from least to most of the repeats."""
    for place, (row, colour) in enumerate(zip(report.rows, COLOURS * 8, strict=False)):
        step = row.seconds_per_step
        axes.barh(place, step.median * 1e3, color=colour, alpha=0.75, height=0.6)
        axes.plot([step.min * 1e3, step.max * 1e3], [place, place], color="black", linewidth=1)
        note = f"{step.median * 1e3:.4g} ms, x{row.ratio_to_baseline:.3f}"
        # What sends less may end left of the limit: the line must not cross what is written there.
        end = (step.max * 1e3, place)
        axes.annotate(note, end, xytext=(4, 0), textcoords="offset points", va="center", fontsize=7, bbox=_PAPER)
    bound_ms = report.rows[0].bound_s * 1e3
    axes.axvline(bound_ms, color="black", linestyle="--", linewidth=1)
    # Above the axes: the line ends where its label begins.
    above = axes.get_xaxis_transform()
    axes.text(bound_ms, 1.01, f"limit {bound_ms:.4g} ms", ha="center", va="bottom", fontsize=7, transform=above)
    axes.set_yticks(range(len(report.rows)), [row.row for row in report.rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(len(report.rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.45 * max(bound_ms, *(row.seconds_per_step.max * 1e3 for row in report.rows)))
    axes.set_xlabel("milliseconds per step (median; least to most of the repeats)", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curves(axes: Any, report: Report) -> None:
    """The metric over training time, every repeat of every row."""
    for row, colour in zip(report.rows, COLOURS * 8, strict=False):
        for raw in report.raw:
            if raw.row == row.row and raw.rank == 0 and raw.metrics:
                times, values = zip(*raw.metrics, strict=True)
                label = row.row if raw.repeat == 0 else None
                axes.plot(times, values, color=colour, linewidth=1.2, alpha=0.8, label=label)
    axes.set_xlabel("seconds of training", fontsize=8)
    axes.set_ylabel("test metric", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
