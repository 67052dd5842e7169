"""For the whole test run: what Ctrl-C means, the order of tests, and a closing line about skipped tests of the lab."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import promises, warm

_PROMISE_S = 300  # that a promised test may take


def pytest_addoption(parser: pytest.Parser) -> None:
    """No test may need what another one leaves behind: `make test-random`. Slow tests run in slices: `.ci/run`."""
    parser.addoption("--random-order-seed", type=int, help="run files, and tests within a file, in this seed's order")
    parser.addoption("--slice", metavar="K/N", help="run only the tests of slice K of N, K from 0 to N - 1")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say how to run the same tests again."""
    options = [(name, config.getoption(name)) for name in ("--random-order-seed", "--slice")]
    given = [f"{name} {value}" for name, value in options if value is not None]
    return f"selected by {' '.join(given)}" if given else None


@pytest.hookimpl(tryfirst=True)  # before marks select tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the promised tests and put them first, keep one slice, and shuffle files and the tests within each file.

    A file's tests stay together, with the fixtures that all of them share.
    """
    names = {name for promise in promises.read() for name in promise.tests}
    for item in items:
        if promises.promised(item.nodeid, names):
            item.add_marker(pytest.mark.promise)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_PROMISE_S))
    items.sort(key=lambda item: item.get_closest_marker("promise") is None)  # promises first
    everything = [Path(argument).absolute() for argument in config.args] == [config.rootpath / "tests"]
    if everything and (gone := promises.missing(names, (item.nodeid for item in items))):
        raise pytest.UsageError(f"tests/promises.toml names tests that do not exist: {', '.join(gone)}")
    if (chosen := config.getoption("--slice")) is not None:
        number, _, slices = chosen.partition("/")
        items[:] = [item for item in items if promises.slice_of(item.nodeid, int(slices)) == int(number)]
    seed = config.getoption("--random-order-seed")
    if seed is None:
        return
    chance = random.Random(seed)
    files = [list(tests) for _, tests in itertools.groupby(items, lambda item: item.path)]
    chance.shuffle(files)
    items[:] = [item for tests in files for item in chance.sample(tests, len(tests))]


def pytest_configure() -> None:
    """Have Ctrl-C end the run, forks be cheap, and examples take their time.

    A shell that starts a command in the background has it ignore SIGINT, and so would every process of a test.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    warm.in_pytest()
    hypothesis.settings.register_profile("offbeat", deadline=None)  # on a busy machine any example may be slow
    hypothesis.settings.load_profile("offbeat")


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
