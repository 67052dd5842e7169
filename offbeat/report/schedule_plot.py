"""The picture of a schedule: how gradients come in steps, and when their blocks travel beside backward and forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.report.plots import COLOURS, INK

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.report.scheduled_steps import ScheduledSteps
    from offbeat.scheduling import BackwardProfile

_ROW = 0.16  # inches
_MOST_INCHES = 12.0


def draw(shown: ScheduledSteps, profile: BackwardProfile, path: Path) -> None:
    """Draw a schedule as PNG.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = min(_MOST_INCHES, 1.0 + _ROW * len(shown.blocks))
    figure = Figure(figsize=(10, 2.6 + height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, sharex=True, height_ratios=(2.2, height))
    _draw_arrivals(above, shown, profile)
    _draw_blocks(below, shown)
    measured = "" if shown.measured_step_s is None else f", measured {shown.measured_step_s * 1e3:.0f} ms"
    figure.suptitle(
        f"{shown.scheduler}: a step is predicted to take {shown.step_s * 1e3:.0f} ms{measured}; at least "
        f"{shown.lower_bound_s * 1e3:.0f} ms",
        fontsize=9,
    )
    figure.savefig(path)


def _draw_arrivals(axes: Any, shown: ScheduledSteps, profile: BackwardProfile) -> None:
    """Megabytes that are complete over time in backward, and that have arrived."""
    at_ms, size_mb = [0.0], [0.0]
    for i in profile.arrivals:
        at_ms.append(profile.gradients[i].ready_s * 1e3)
        size_mb.append(size_mb[-1] + profile.gradients[i].size_bytes / 1e6)
    axes.step([*at_ms, shown.step_s * 1e3], [*size_mb, size_mb[-1]], where="post", color=COLOURS[0], label="complete")
    share = size_mb[-1] / (sum(block.size_bytes for block in shown.blocks) / 1e6)  # of two rounds each is a half
    done_ms, done_mb = [0.0], [0.0]
    for block in sorted(shown.blocks, key=lambda block: block.done_s):
        done_ms.append(block.done_s * 1e3)
        done_mb.append(done_mb[-1] + share * block.size_bytes / 1e6)
    axes.step(
        [*done_ms, shown.step_s * 1e3], [*done_mb, done_mb[-1]], where="post", color=COLOURS[1], label="exchanged"
    )
    for burst in shown.bursts[:-1]:
        axes.axvline(burst.ready_s * 1e3, color=INK, linewidth=0.5, alpha=0.5)
    axes.set_ylabel("MB of gradients")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _draw_blocks(axes: Any, shown: ScheduledSteps) -> None:
    """A bar for each block from when it is issued until it is done, as predicted and as measured, below the passes."""
    backward_ms, step_ms = shown.backward_s * 1e3, shown.step_s * 1e3
    axes.axvspan(0, backward_ms, color=COLOURS[0], alpha=0.08, label="backward")
    axes.axvspan(backward_ms, step_ms, color=COLOURS[2], alpha=0.08, label="next forward, with its waits")
    for number, block in enumerate(shown.blocks, 1):
        times: tuple[tuple[str, str, float, float], ...] = (("predicted", COLOURS[1], block.issued_s, block.done_s),)
        if block.measured_issued_s is not None and block.measured_done_s is not None:
            times += (("measured", COLOURS[6], block.measured_issued_s, block.measured_done_s),)
        for place, (how, colour, issued_s, done_s) in enumerate(times):
            axes.barh(
                number - 0.2 + 0.4 * place,
                (done_s - issued_s) * 1e3,
                left=issued_s * 1e3,
                height=0.4,
                color=colour,
                label=f"block, {how}" if number == 1 else None,
            )
    axes.set_ylim(len(shown.blocks) + 0.6, 0.4)
    axes.set_ylabel("block")
    axes.set_xlabel("milliseconds since backward began")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
