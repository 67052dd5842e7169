"""`offbeat bench switch`: a tiny run of each target, and what it would see if something were wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from offbeat.cli.switch_benchmark import cells_of
from offbeat.errors import PlanError
from offbeat.lab.switch_load import CHUNKS, KnownVectors
from tests.cli.commands import offbeat
from tests.switch.kernel_replay import why_not

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.lab
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@pytest.mark.parametrize(("target", "values"), [("udp", "64"), ("ebpf", "64,2048"), ("xdp", "64,2048")])
def test_a_tiny_run(target: str, values: str, tmp_path: Path) -> None:
    arguments = ("--target", target, "--workers", "2", "--values", values, "--loss", "0,5", "--repeats", "1")
    code, output = offbeat("bench", "switch", *arguments, "--seconds", "0.2", "--json", "switch.json", folder=tmp_path)
    assert code == 0, output
    report = msgspec.json.decode((tmp_path / "switch.json").read_bytes())
    rows = report["rows"]
    sizes = [int(one) for one in values.split(",")]
    assert len(rows) == 3 * len(sizes) + 2 * 2, "packets and results with and without loss, clocks by two windows"
    for row in rows:
        assert row["per_second"][0] > 0, row
        assert (row["wrong"], row["errors"]) == (0, []), row
        if row["what"] == "results":
            assert row["checked"] >= 2 * CHUNKS
            assert row["gb_per_s"] == pytest.approx(row["median"] * row["values"] * 4 / 1e9)
        if row["loss_percent"] and row["what"] == "results":
            assert 0.02 < row["lost"] / row["passed"] < 0.10, row
            assert row["resent"] > 0
    assert {"python", "clang", "libbpf"} <= set(report["versions"])
    assert {"processor", "kernel"} <= set(report["hardware"])
    assert all(f"0 of {row['checked']:,}" in output for row in rows if row["checked"])


def test_a_wrong_sum_would_be_counted() -> None:
    all_of_them = [KnownVectors(rank, 3, 64) for rank in range(3)]
    total = np.sum([one.vector(7, is_last=rank == 1) for rank, one in enumerate(all_of_them)], axis=0)
    assert total[0] == 1, "one hand is up"
    assert all_of_them[0].wrong_chunks(7, total, 0b111) == 0
    assert all_of_them[0].wrong_chunks(8, total, 0b111) == CHUNKS, "of another exchange"
    assert all_of_them[0].wrong_chunks(7, total, 0b101) == CHUNKS, "a worker is missing"
    total[[1, 63, 64 * 9]] += 1
    assert all_of_them[2].wrong_chunks(7, total, 0b111) == 2


def test_jumbo_frames_are_for_the_kernel_alone() -> None:
    cells = cells_of(["udp", "ebpf"], [2], [352, 2048], [0])
    assert {(one.target, one.mtu) for one in cells if one.values == 2048 and one.target} == {("ebpf", 9000)}
    assert len([one for one in cells if one.what == "clocks"]) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--values", "100"), "multiple of 16"), (("--loss", "99"), "--loss"), (("--workers", "x"), "2,4")],
)
def test_what_cannot_be_is_said(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    code, output = offbeat("bench", "switch", *arguments, folder=tmp_path)
    assert code == 2, output
    assert says in output


def test_nothing_to_measure() -> None:
    with pytest.raises(PlanError, match="nothing"):
        cells_of([], [2], [64], [0])
