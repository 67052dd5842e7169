"""What people see of a result: the table on the terminal, and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from offbeat.cli.lab import _show_table
from offbeat.lab import plots, results
from offbeat.lab.result_table import table

RESULTS = Path(__file__).parent.parent.parent / "benchmarks/results"
NAMES = sorted(path.stem for path in RESULTS.glob("*.json") if path.with_suffix(".png").exists())


@pytest.mark.parametrize(("repeats", "said"), [(1, False), (2, False), (3, True)])
def test_microseconds_are_told_from_three_repeats_on(
    capsys: pytest.CaptureFixture[str], repeats: int, said: bool
) -> None:
    report = results.read(RESULTS / "loopback.json")
    rows = [msgspec.structs.replace(row, repeats=repeats) for row in report.rows]
    _show_table(msgspec.structs.replace(report, rows=rows))
    assert ("us per bucket against ddp" in capsys.readouterr().out) is said


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [40, 80])
def test_no_number_is_cut_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = results.read(RESULTS / f"{name}.json")
    _show_table(report)
    shown = capsys.readouterr().out
    headings, rows = table(report)
    said = [line for line in shown.splitlines() if line.startswith("left out")]
    left_out = said[0].partition(": ")[2].split(", ") if said else []
    assert set(left_out) <= {"simulated", "min", "max", "idle", "uneven", "MB sent", "ms at barrier", "MB to target"}
    kept = [cell for cells in rows for heading, cell in zip(headings, cells, strict=True) if heading not in left_out]
    assert all(cell in shown for cell in kept)
    assert "…" not in shown
    sentences = {f"{cost.row}: {cost.words}" for cost in report.recoveries}  # are broken by the terminal
    sentences |= {f"{swap.row}: {swap.words}" for swap in report.handovers}
    assert max(len(line) for line in shown.splitlines() if line not in sentences) <= 80


@pytest.mark.parametrize("name", ["uniform", "mnist", "loopback"])
def test_the_limit_is_written_clear_of_its_line(name: str) -> None:
    figure = Figure()
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.subplots()
    plots._draw_steps(axes, results.read(RESULTS / f"{name}.json"))
    canvas.draw()
    (label,) = (text for text in axes.texts if text.get_text().startswith(("limit ", "dashed: ")))
    lines = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert lines
    assert not any(label.get_window_extent().overlaps(line.get_window_extent()) for line in lines)
