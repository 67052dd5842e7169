"""Do torch's own tests pass on the backend "offbeat"? `python -m benchmarks.torch_tests`, half an hour.

torch's wheel has the tests of its collectives and of DistributedDataParallel
(torch.testing._internal.distributed.distributed_test). They are run with four workers on Gloo, and then on offbeat,
where each group that asks for "gloo" gets "offbeat": asked for by its own name they would skip what only Gloo has.
The result is benchmarks/results/torch_tests.json.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.lab import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/torch_tests.json"
COMMAND = "python -m benchmarks.torch_tests"
WORLD, TIMEOUT_S = 4, 60
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
_BY_NAME = (
    "`torch.distributed.monitored_barrier` refuses every backend but Gloo's by its name, and does not ask the group. "
    "The group's own method does it (`torch.distributed.group.WORLD.monitored_barrier()`), and any `barrier` names who "
    "has not come."
)
EXPLAINED = {
    "test_get_backend": "It wants the group to be called gloo; it is called offbeat.",
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
}
"""Why a test that passes on Gloo does not on offbeat."""
_PLACE = re.compile(r"/\S*/(?=(site-packages|python3\.\d+)/)")  # where this machine has its files
# Runs the tests named on its command line, one after the other, in workers that are forked from it; a line for each.
_RUNNER = """
import os, sys, unittest
import torch
import torch.distributed as dist

backend = os.environ["OURS"]
init, new_group = dist.init_process_group, dist.new_group


def begin(backend_asked=None, **options):
    asked = options.pop("backend", backend_asked)
    return init(backend=backend if asked == "gloo" else asked, **options)


def group(*arguments, **options):
    if options.get("backend") == "gloo":
        options["backend"] = backend
    return new_group(*arguments, **options)


dist.init_process_group, dist.new_group = begin, group
from torch.testing._internal.distributed import distributed_test as theirs


class TestDistBackendWithFork(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


names = unittest.TestLoader().getTestCaseNames(TestDistBackendWithFork)
if sys.argv[1:] == ["--list"]:
    print("\\n".join(names))
    sys.exit()
for name in sys.argv[1:]:
    outcome = unittest.TestResult()
    TestDistBackendWithFork(name).run(outcome)
    bad = outcome.errors + outcome.failures
    ended = "failed" if bad else "skipped" if outcome.skipped else "passed"
    said = " ".join((bad or outcome.skipped or [("", "")])[0][1].split())
    print(f"ENDED {name} {ended} {said[-600:]}", flush=True)
"""


class TestOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of torch's tests.

    Args:
        gloo, offbeat: how it ended.
        said: on offbeat, in its last words, if it failed there.
    """

    name: str
    gloo: str
    offbeat: str
    said: str = ""

    @property
    def is_worse(self) -> bool:
        """Whether it passes on Gloo and not on offbeat."""
        return self.gloo == PASSED and self.offbeat != PASSED


class TorchTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    world: int
    tests: list[TestOutcome]


def read() -> TorchTests:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=TorchTests)


def section(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """The part of the page of results; nothing before they were run.

    Args:
        lines: makes a table of headings and rows.
    """
    if not RESULT.exists():
        return ""
    found = read()
    rows = []
    for backend in ("gloo", "offbeat"):
        counts = Counter(getattr(one, backend) for one in found.tests)
        rows.append([backend, *(str(counts[how]) for how in (PASSED, SKIPPED, FAILED))])
    worse = [[f"`{one.name}`", EXPLAINED.get(one.name, "**not explained**")] for one in found.tests if one.is_worse]
    return (
        "\n### torch's own tests\n\nThose of collectives and of DistributedDataParallel that come with torch "
        f"{found.versions['torch']}, with {found.world} workers. Most of those that are skipped need a GPU or NCCL."
        "\n\n"
        f"{lines(['', PASSED, SKIPPED, FAILED], rows)}\nThose that pass on Gloo alone:\n\n"
        f"{lines(['', 'why'], worse)}\n`{found.command}`, {found.date}. [Raw records](torch_tests.json).\n"
    )


def run(backend: str, *names: str) -> dict[str, tuple[str, str]]:
    """Run tests; by name, how each ended, and what it said."""
    ended: dict[str, tuple[str, str]] = {}
    left = list(names)
    while left:  # a test that kills its process is said to have failed, and the next ones are run in another
        done = _started(backend, *left)
        for line in done.splitlines():
            if line.startswith("ENDED "):
                _, name, how, *said = line.split(" ", 3)
                ended[name] = how, _PLACE.sub("", said[0]) if said else ""
        first = next((name for name in left if name not in ended), None)
        if first is not None:
            ended[first] = FAILED, f"its process ended: {done.strip().splitlines()[-1:]}"
        left = [name for name in left if name not in ended]
    return ended


def _started(backend: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "BACKEND": "gloo", "OURS": backend, "WORLD_SIZE": str(WORLD), "TEMP_DIR": folder, "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIMEOUT_S), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", _RUNNER, *arguments], env={**os.environ, **own}, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return done.stdout


def main() -> None:
    if importlib.util.find_spec("expecttest") is None:
        sys.exit("torch's tests need a package that torch does not bring: pip install expecttest")
    names = sys.argv[1:] or _started("gloo", "--list").split()
    on_gloo, on_ours = run("gloo", *names), run("offbeat", *names)
    tests = [
        TestOutcome(
            name=name,
            gloo=on_gloo[name][0],
            offbeat=on_ours[name][0],
            said=on_ours[name][1] if on_ours[name][0] == FAILED else "",
        )
        for name in names
    ]
    for one in tests:
        if one.is_worse:
            print(f"{one.name}: {one.said}", file=sys.stderr, flush=True)  # noqa: T201
    unexplained = [one.name for one in tests if one.is_worse and one.name not in EXPLAINED]
    print(Counter((one.gloo, one.offbeat) for one in tests), file=sys.stderr)  # noqa: T201
    if not sys.argv[1:]:
        measured = TorchTests(
            command=COMMAND,
            date=hardware.date(),
            versions=hardware.versions(),
            hardware=hardware.hardware(),
            world=WORLD,
            tests=tests,
        )
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    if unexplained:
        sys.exit(f"These pass on Gloo and not on offbeat, and nobody has said why: {', '.join(unexplained)}")


if __name__ == "__main__":
    main()
