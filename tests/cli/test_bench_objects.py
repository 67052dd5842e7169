"""`offbeat bench objects`: stores of objects on this machine, or in namespaces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.cli.object_benchmark import _figures
from offbeat.errors import ScenarioError

if TYPE_CHECKING:
    from pathlib import Path

QUICK = ("bench", "objects", "--hosts", "2", "--repeats", "2", "--size-mb", "0.5")


def rows(path: Path, *arguments: str) -> dict[tuple[str, bool], dict[str, object]]:
    done = CliRunner().invoke(app, [*QUICK, *arguments, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "allreduce, striped" in done.output
    return {(row["op"], row["is_striped"]): row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_processes_of_this_machine(tmp_path: Path) -> None:
    found = rows(tmp_path / "objects.json")
    assert sorted(found) == [("allreduce", False), ("allreduce", True), ("broadcast", False), ("reduce", False)]
    for row in found.values():
        assert row["size_bytes"] == 1 << 19
        assert row["bound_s"] is None
        assert len(row["values"]) == 2  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(120)
def test_links_are_no_faster_than_they_are_shaped(tmp_path: Path) -> None:
    for row in rows(tmp_path / "objects.json", "--mbps", "100").values():
        bound_s = (1 << 19) * 8 / 100e6
        assert row["bound_s"] == bound_s
        assert 0.8 * bound_s < min(row["values"]) < 50 * bound_s  # type: ignore[call-overload]


def test_other_bytes_would_be_seen() -> None:
    line = {"size": 4, "op": "broadcast", "repeat": 1, "took_s": 1.0}
    logs = [json.dumps(line | {"digest": digest}) for digest in ("a", "b")]
    with pytest.raises(ScenarioError, match="other bytes after broadcast of 4 bytes"):
        _figures(logs, None, is_striped=False)
    assert _figures(logs[:1], 8.0, is_striped=False)[0].bound_s == 4e-6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--size-mb", "much"), "Cannot read 'much'"),
        (("--size-mb", "1,0"), "each has to be 4 bytes at least"),
        (("--json", "/nowhere/a.json"), "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_is_said(arguments: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, ["bench", "objects", *arguments])
    assert done.exit_code != 0
    assert says in str(done.exception) + done.output
