"""For the whole test run: what Ctrl-C means, the order of tests, and a closing line about skipped tests of the lab."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
from typing import Any

import pytest

from tests import slow_tests, warm


def pytest_addoption(parser: pytest.Parser) -> None:
    """No test may need what another one leaves behind: `make test-random`."""
    parser.addoption("--random-order-seed", type=int, help="run files, and tests within a file, in this seed's order")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say how to run them so again."""
    seed = config.getoption("--random-order-seed")
    return None if seed is None else f"in random order: --random-order-seed {seed}"


@pytest.hookimpl(tryfirst=True)  # before what deselects them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow. Shuffle files, and tests within a file: a file's tests stay together, with what is set up for
    all of them.
    """
    slow = slow_tests.read()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    seed = config.getoption("--random-order-seed")
    if seed is None:
        return
    chance = random.Random(seed)
    files = [list(tests) for _, tests in itertools.groupby(items, lambda item: item.path)]
    chance.shuffle(files)
    items[:] = [item for tests in files for item in chance.sample(tests, len(tests))]


def pytest_configure() -> None:
    """A shell that starts a command in the background has it ignore SIGINT, and so would every process of a test."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    warm.in_pytest()


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test marked so starts are new interpreters, as a shell starts them."""
    if request.node.get_closest_marker("cold") is not None:
        monkeypatch.setattr(subprocess, "Popen", warm.ColdPopen)


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
