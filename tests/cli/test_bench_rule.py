"""`offbeat bench rule`: it measures what it says, and what it says stands in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.cli.rule_benchmark import rules
from tests.cli.commands import offbeat

if TYPE_CHECKING:
    from pathlib import Path

FAST = ("--workers", "7", "--size-mb", "1", "--seconds", "0", "--repeats", "2")


def test_what_is_measured_stands_in_the_file(tmp_path: Path) -> None:
    asked = ("Median()", "Krum(2)", "GeometricMedian()")
    code, output = offbeat("bench", "rule", *asked, *FAST, "--json", "rule.json", folder=tmp_path)
    assert code == 0, output
    report = msgspec.json.decode((tmp_path / "rule.json").read_bytes())
    assert [row["rule"] for row in report["rows"]] == [
        "",
        "Median()",
        "Krum(faulty=2)",
        "GeometricMedian(iterations=8, smoothing=0.1)",
    ]
    for row in report["rows"]:
        assert len(row["values"]) == 2
        assert 0 < min(row["values"]) <= row["median"] <= max(row["values"])
    assert report["settings"] == {"workers": 7, "size_mb": 1.0}
    assert "the mean" in output


def test_each_rule_bears_so_many_workers() -> None:
    for workers in (3, 7, 16):
        assert [rule for rule in rules(workers) if rule is not None and rule.check(workers)] == []


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for asked, says in (
        (("Krum(3)", "--workers", "5"), "needs at least 9 contributions, and there are 5"),
        (("Nothing()",), "Unknown"),
        (("--json", "no/such/folder.json"), "there is no folder"),
    ):
        code, output = offbeat("bench", "rule", *asked, folder=tmp_path)
        assert code == 2, output
        assert says in " ".join(output.split())
