"""`offbeat bench wire`: it measures what it says, and what it says stands in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.cli.commands import offbeat

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """What is printed, and what is written, after the shortest run."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = ("--json", "wire.json", "--seconds", "0.05", "--repeats", "2", "--tls")
    code, output = offbeat("bench", "wire", *arguments, folder=folder)
    assert code == 0, output
    return output, msgspec.json.decode((folder / "wire.json").read_bytes())


@pytest.mark.slow
def test_every_row_is_measured_as_often_as_asked(measured: tuple[str, Any]) -> None:
    output, report = measured
    rows = {row["name"]: row for row in report["rows"]}
    rates, latencies = ["bare", "link", "bare tls", "link tls"], ["bare request", "request p50", "request p99"]
    assert list(rows) == [*rates, *latencies, "memory"]
    for name, row in rows.items():
        assert len(row["values"]) == (1 if name == "memory" else 2)
        assert all(value > 0 for value in row["values"])
        assert min(row["values"]) <= row["median"] <= max(row["values"])
        assert name in output
    assert rows["request p50"]["median"] <= rows["request p99"]["median"]


def test_ratios_are_of_turns_next_to_each_other(measured: tuple[str, Any]) -> None:
    _, report = measured
    rows = {row["name"]: row for row in report["rows"]}
    for ours, theirs in (("link", "bare"), ("link tls", "bare tls")):
        pairs = zip(rows[ours]["values"], rows[theirs]["values"], strict=True)
        ratios = sorted(one / other for one, other in pairs)
        assert rows[ours]["ratio"] == pytest.approx(sum(ratios) / 2)
    assert rows["link"]["met"] == (rows["link"]["ratio"] >= 0.70)


def test_a_link_keeps_within_its_memory(measured: tuple[str, Any]) -> None:
    _, report = measured
    row = report["rows"][-1]
    assert row["met"]
    assert row["median"] < 100_000, "the scratch, and what is said about frames; no message"


def test_the_file_says_where_it_comes_from(measured: tuple[str, Any]) -> None:
    _, report = measured
    assert report["command"].endswith("bench wire --json wire.json --seconds 0.05 --repeats 2 --tls")
    assert {"python", "xxhash", "openssl"} <= set(report["versions"])
    assert {"processor", "cores", "kernel"} <= set(report["hardware"])
    assert report["settings"]["block_bytes"] == 1 << 20


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    code, output = offbeat("bench", "wire", "--json", "nowhere/wire.json", folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert "there is no folder nowhere" in output
