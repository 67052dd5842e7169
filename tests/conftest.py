"""The closing line of a test run: how many lab tests were skipped, and why."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say whether the lab was tested; without root it is not, and a green run should not hide that."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    lab = [report for report in reports if "lab" in getattr(report, "keywords", ())]
    skipped = [report for report in lab if getattr(report, "skipped", False)]
    if skipped:
        reason = str(skipped[0].longrepr[2]).removeprefix("Skipped: ")
        terminalreporter.write_line(f"lab: {len(skipped)} tests were skipped ({reason})")
    elif lab:
        terminalreporter.write_line("lab: none of its tests was skipped")
