"""Draws the picture of README.md's first screen from benchmarks/results/kill.json: `python -m benchmarks.first_screen`.

One worker of four is killed: how many steps the others have made, second by second, in each of a few rows.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from benchmarks.claims import record
from benchmarks.page import RESULTS
from offbeat.lab import results
from offbeat.lab.plots import COLOURS

if TYPE_CHECKING:
    from pathlib import Path

PICTURE = RESULTS / "first_screen.png"
ROWS = {
    "elastic": "offbeat, all-reduce: Elastic()",
    "asp": "offbeat, with a parameter server: ASP()",
    "ddp+restarts": "DistributedDataParallel, restarted by torchrun",
}
"""The rows of the result that are drawn, and what each is called in the picture."""
_BEFORE_S, _AFTER_S = 4.0, 18.0


def course(report: results.ResultFile, row: str) -> tuple[list[float], list[int]]:
    """Seconds since the worker was killed, and steps since then, of the first worker of a row; steps made again once.

    >>> times_s, steps = course(results.read(RESULTS / "kill.json"), "elastic")
    >>> all(-_BEFORE_S <= time_s <= _AFTER_S for time_s in times_s)
    True
    """
    (text,) = (text for text in record(report, row).events if text.startswith("fault: sigkill of worker"))
    found = re.search(r"(-?[\d.]+) s after the first measured step began", text)
    assert found is not None
    first = next(raw for raw in report.raw if raw.row == row and raw.repeat == 0)
    ends_s = [end_s - float(found[1]) for end_s in itertools.accumulate(first.step_s)]
    made = sum(end_s < 0 for end_s in ends_s)
    points = [(end_s, step - made) for step, end_s in enumerate(ends_s, 1) if -_BEFORE_S <= end_s <= _AFTER_S]
    return [end_s for end_s, _ in points], [step for _, step in points]


def draw(report: results.ResultFile, path: Path) -> None:
    """Draw the first screen's picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (row, label), colour in zip(ROWS.items(), (COLOURS[0], COLOURS[2], COLOURS[1]), strict=True):
        times_s, steps = course(report, row)
        axes.step(times_s, steps, where="post", color=colour, linewidth=2, label=label)
    axes.axvline(0, color="black", linestyle=":", linewidth=1)
    axes.annotate("a worker is killed", (0, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
                  textcoords="offset points", fontsize=9)  # fmt: skip
    again = next(one for one in report.recoveries if one.row == "ddp+restarts")
    axes.annotate(
        f"{again.back_s:.0f} s until all workers are where they were, {again.redone_steps} steps made again",
        (0, 0), xytext=(8, -15), textcoords="offset points", fontsize=9, color=COLOURS[1],
    )  # fmt: skip
    axes.set_xlim(-_BEFORE_S, _AFTER_S)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_ylabel("steps made since", fontsize=9)
    axes.set_xticks(range(-3, int(_AFTER_S) + 1, 3))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.2, 0.92))
    figure.savefig(path)


if __name__ == "__main__":
    draw(results.read(RESULTS / "kill.json"), PICTURE)
