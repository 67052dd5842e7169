"""Which tests prove which promise: `promises.toml`, read.

`make test` runs the promised tests first, whatever they take, then the other fast ones. `make test-slow` runs the rest;
continuous integration runs one slice of it for each commit.
"""

from __future__ import annotations

import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Promise:
    """One promise and its proof.

    Args:
        page: the page that makes it, from the root of the repository.
        says: its words there.
        tests: test ids. A folder, a file, or a test without brackets stands for all that it contains.
        law: the number of the law that it is an instance of, if any.
    """

    page: str
    says: str
    tests: tuple[str, ...]
    law: int | None = None


def read() -> tuple[Promise, ...]:
    """Read the promises in the order of the file."""
    tables = tomllib.loads(FILE.read_text())["promise"]
    return tuple(Promise(**{**table, "tests": tuple(table["tests"])}) for table in tables)


def containers(test: str) -> Iterable[str]:
    """Name a test id and everything that contains it: the test without brackets, its file, and the file's folders."""
    yield test
    path, _, _ = test.partition("::")
    if "[" in test:
        yield test.partition("[")[0]
    yield path
    yield from (str(folder) for folder in Path(path).parents)


def promised(test: str, names: Collection[str]) -> bool:
    """Say whether one of the names stands for this test."""
    return any(one in names for one in containers(test))


def missing(names: Iterable[str], collected: Iterable[str]) -> list[str]:
    """Find the names that stand for no test that there is."""
    known = {one for test in collected for one in containers(test)}
    return sorted(set(names) - known)


def slice_of(test: str, slices: int) -> int:
    """Tell which slice a test belongs to. The answer depends on its id alone, so that new tests move no other test."""
    return zlib.crc32(test.encode()) % slices
