"""Apply each fault of `mutants.toml` to a copy of the tree, and run tests of its room until one fails.

    python -m tests.mutants [--room sync] [--only 12,13] [--jobs 2] [--json tests/mutants/result.json]

A fault is found if a test fails that passes on the unchanged copy. One that no test finds is shown, and the exit code
is 1. One whose text is not there exactly once cannot be applied: exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("offbeat", "tests", "benchmarks", "docs", "examples", "fuzz", "changes")
FILES = ("pyproject.toml", "README.md", "Makefile", "CONTRIBUTING.md", "constraints.txt")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault.

    Args:
        file: below offbeat/.
        old: occurs there once.
        new: stands in its place.
        tests: of the room, below tests/; as pytest takes them.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")


class Verdict(msgspec.Struct, frozen=True):
    """What became of a fault.

    Args:
        test: the one that found it; "" if none has.
        seconds: until then.
    """

    room: str
    file: str
    old: str
    new: str
    test: str
    seconds: float


class WrongMutant(ValueError):
    """The fault cannot be applied; the text says why."""


def read() -> list[Mutant]:
    """The list."""
    table = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    return msgspec.convert(table["mutant"], list[Mutant])


def applied(mutant: Mutant, text: str) -> str:
    """The file's text with the fault in it.

    Raises:
        WrongMutant: if its text is not there once.
    """
    if (count := text.count(mutant.old)) != 1:
        raise WrongMutant(
            f"Cannot apply {mutant.old!r} -> {mutant.new!r} to offbeat/{mutant.file}: its text is there {count} times, "
            "not once. Write it anew in tests/mutants/mutants.toml, from what the file says today."
        )
    return text.replace(mutant.old, mutant.new)


class Copy:
    """A copy of the tree, in which one fault after the other is tried."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy(ROOT / name, folder / name)

    def try_one(self, mutant: Mutant) -> Verdict:
        """Whether a test finds the fault that passes without it."""
        path, began_s = self._folder / "offbeat" / mutant.file, time.monotonic()
        text = path.read_text()
        path.write_text(applied(mutant, text))
        try:
            test = self._first_failure([f"tests/{one}" for one in mutant.tests])
        finally:
            path.write_text(text)
        seconds = round(time.monotonic() - began_s, 1)
        if test and self._first_failure([test]):
            sys.stdout.write(f"{test} fails without the fault, too\n")
            test = ""
        return Verdict(mutant.room, mutant.file, mutant.old, mutant.new, test, seconds)

    def _first_failure(self, tests: list[str]) -> str:
        """The first of these tests that fails; "" if none does."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not lab", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        # A session of its own: whatever a mutant leaves behind ends with it.
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            sys.stdout.write(f"{' '.join(tests)} did not end within {self._limit_s:g} s\n")
            return ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            return ""
        found = FAILED.search(output)
        if found is None:
            sys.stdout.write(
                f"Cannot run {' '.join(tests)}: pytest ended with {process.returncode}.\n{output[-2000:]}\n"
            )
            return ""
        return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", help="only faults of this room")
    parser.add_argument("--only", help="only these, by their place in the list, from 0: 3,4")
    parser.add_argument("--jobs", type=int, default=2, help="so many at once")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of one fault")
    parser.add_argument("--json", type=Path, help="a result, in which what was tried now replaces what was there")
    asked = parser.parse_args()
    chosen = {int(one) for one in asked.only.split(",")} if asked.only else None
    mutants = [
        mutant
        for place, mutant in enumerate(read())
        if (chosen is None or place in chosen) and asked.room in (None, mutant.room)
    ]
    try:
        for mutant in mutants:
            applied(mutant, (ROOT / "offbeat" / mutant.file).read_text())
    except WrongMutant as error:
        sys.stderr.write(f"{error}\n")
        return 2
    found = _all(mutants, asked.jobs, asked.limit, asked.json)
    survivors = [verdict for verdict in found if not verdict.test]
    sys.stdout.write(f"{len(found) - len(survivors)} of {len(found)} faults are found\n")
    return 1 if survivors else 0


def _note(path: Path, found: list[Verdict]) -> None:
    """Put verdicts into a result: in the order of the list, and without faults that are not in it any more."""
    known = msgspec.json.decode(path.read_bytes(), type=list[Verdict]) if path.exists() else []
    by_fault = {(one.file, one.old, one.new): one for one in [*known, *found]}
    faults = [(one.file, one.old, one.new) for one in read()]
    whole = [by_fault[fault] for fault in faults if fault in by_fault]
    path.write_text("[\n" + ",\n".join(f" {msgspec.json.encode(one).decode()}" for one in whole) + "\n]\n")


def _all(mutants: list[Mutant], jobs: int, limit_s: float, result: Path | None) -> list[Verdict]:
    noting = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number), limit_s))

        def try_one(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                verdict = copy.try_one(mutant)
            finally:
                copies.put(copy)
            how = f"found in {verdict.seconds:.1f} s by {verdict.test}" if verdict.test else "NOT FOUND"
            sys.stdout.write(f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}: {how}\n")
            sys.stdout.flush()
            if result is not None:
                with noting:
                    _note(result, [verdict])
            return verdict

        return list(pool.map(try_one, mutants))


if __name__ == "__main__":
    sys.exit(main())
