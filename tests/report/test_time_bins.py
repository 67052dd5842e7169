"""Sums and quantiles over bins, and the views that are made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.report.buckets import bucket_times
from offbeat.report.compare import ComparedRun, figures
from offbeat.report.per_worker import tally
from offbeat.report.plots import draw
from offbeat.report.records import Record, StepRecord
from offbeat.report.time_bins import band, edges_of, spread, with_gaps
from tests.report.fake_records import log, start, step, write

if TYPE_CHECKING:
    from pathlib import Path


def made(*records: object) -> list[Record]:
    return [msgspec.convert(record, Record) for record in records]


def test_samples_of_a_long_step_are_spread_over_it() -> None:
    long = [{**step(0, n, compute_s=5.0, wait_s=0.0), "time_s": 5.0 * n, "samples": 100} for n in range(4)]
    steps = [msgspec.convert(record, StepRecord) for record in long]
    sums, covered = spread(steps, edges_of(0, 20), [one.samples for one in steps])
    assert sums == pytest.approx([20.0] * 20)
    assert covered == pytest.approx([1.0] * 20)
    late, _ = spread(steps, edges_of(10, 20), [one.samples for one in steps])
    assert late.sum() == pytest.approx(200), "what was before the first bin is in none"


def test_a_band_holds_most_of_many_points_and_all_of_few() -> None:
    few = [(float(n), float(n * n)) for n in range(5)]
    x, low, middle, high = band(few[::-1])
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert low.tolist() == middle.tolist() == high.tolist() == [0, 1, 4, 9, 16]
    many = [(float(n), float(n % 100)) for n in range(8600)]
    x, low, middle, high = band(many, most=86)
    assert len(x) == 86
    assert middle == pytest.approx([49.5] * 86)
    assert (low == pytest.approx([9.9] * 86), high == pytest.approx([89.1] * 86)) == (True, True)


def test_no_line_is_drawn_across_a_gap() -> None:
    points = [(float(n), 1.0) for n in (*range(10), *range(40, 50))]
    x, _, middle, _ = with_gaps(band(points))
    assert np.isnan(x).tolist() == np.isnan(middle).tolist() == [False] * 10 + [True] + [False] * 10


def test_a_plot_of_a_long_run_is_no_larger_than_one_of_a_short_run() -> None:
    pytest.importorskip("matplotlib")

    def size(count: int) -> int:
        records = made(
            start(0), *(step(0, n) for n in range(count)), *(log(0, n, loss=1 / (n + 1)) for n in range(count))
        )
        return sum(len(svg) for _, svg in draw(records, tally(records)))

    assert size(4000) < 1.3 * size(400)


def test_a_bucket_holds_up_the_step_only_behind_those_before_it() -> None:
    layout = [{"index": n, "size_bytes": 100 * (n + 1), "parameters": [f"{n}.bias", f"{n}.weight"]} for n in range(3)]
    steps = [{**step(0, n), "buckets": [[0.01, 0.05], [0.06, 0.18], [0.09, 0.13]]} for n in range(5)]
    first, second, third = bucket_times(made({**start(0), "buckets": layout}, *steps))
    assert first.name == "bucket 1 of 3 (0.bias … 0.weight)"
    assert second.size_bytes == 200
    assert [second.issued_s, second.arrived_s] == pytest.approx([0.06, 0.18])
    assert first.computed_s == pytest.approx(0.1)
    held = [one.held_up_s for one in (first, second, third)]
    assert held == pytest.approx([0.0, 0.05, 0.03]), "first hidden; third until 0.13; second from there until 0.18"


def test_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    fast = made(start(0), *(step(0, n, compute_s=0.1, wait_s=0.1) for n in range(10)), log(0, 9, loss=0.5))
    slow = made(start(0), *(step(0, n, compute_s=0.1, wait_s=0.3) for n in range(10)), log(0, 9, loss=0.6))
    found = {one.name: one for one in figures([ComparedRun("a", fast), ComparedRun("b", slow)])}
    assert found["ms per step, median of all"].shown == ("200.00", "400.00")
    assert found["ms per step, median of all"].ratios == ("", "2 x")
    assert found["waiting, share of all time"].shown == ("50%", "75%")
    assert found["loss, last"].ratios == ("", "1.2 x")
    assert "staleness, mean" not in found, "none was stale"


def test_the_command_compares_folders_and_leaves_out_those_without_steps(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two<b>", "empty")]
    for folder, records in zip(folders, ([start(0), step(0, 0), step(0, 1)],) * 2 + ([start(0)],), strict=True):
        folder.mkdir()
        write(folder, list(records))
    output = tmp_path / "beside.html"
    run = CliRunner().invoke(app, ["report", *map(str, folders[:2]), "--output", str(output)])
    assert run.exit_code == 0, run.output
    text = output.read_text()
    assert "<th>one</th><th>two&lt;b&gt;</th>" in text
    assert "ms per step, median of all" in text
    output.unlink()
    some = CliRunner().invoke(app, ["report", *map(str, folders), str(tmp_path), "--output", str(output)])
    assert some.exit_code == 0, some.output
    assert f"Left out, as no step of it was recorded: {folders[2]}, {tmp_path}." in some.output
    assert "<th>one</th><th>two&lt;b&gt;</th></tr>" in output.read_text()
    refused = CliRunner().invoke(app, ["report", str(folders[2]), str(tmp_path)])
    assert "no step of any was recorded. Name folders of runs that have trained." in str(refused.exception)
    refused = CliRunner().invoke(app, ["report", *map(str, folders), str(tmp_path / "typo")])
    assert "typo: it is not there." in str(refused.exception)
