"""The list of tests that `make test` leaves to `make test-slow`: those that take long, of which shorter ones are alike.

    PYTEST_ADDOPTS="--durations=0 --durations-min=0.3" make test test-slow > log
    python -m tests.slow_tests log                # writes slow_tests.txt anew

Of the variants of one test the shortest stays, unless it is long by itself; of the others those stay that are short. A
test by itself stays up to five seconds. What is marked slow in its file is not in the list.
"""

from __future__ import annotations

import collections
import re
import sys
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
SHORTEST_S, VARIANT_S, ALONE_S = 6.0, 1.5, 5.0  # from here on it is slow, on two cores that three tests share


def read() -> frozenset[str]:
    """Read the names of the tests in the list."""
    return frozenset(LIST.read_text().splitlines())


def slow_of(log: str) -> list[str]:
    """Choose by how long each test took, as pytest tells at its end with `--durations`."""
    took: dict[str, float] = collections.defaultdict(float)
    for seconds, name in re.findall(r"^([\d.]+)s (?:call|teardown) +(\S+?\.py::.+)$", log, re.MULTILINE):
        took[name] += float(seconds)
    variants: dict[str, list[str]] = collections.defaultdict(list)
    for name in took:
        variants[name.partition("[")[0]].append(name)
    slow = []
    for test, names in variants.items():
        shortest = min(names, key=lambda name: took[name])
        for name in names:
            most_s = ALONE_S if name == test else SHORTEST_S if name == shortest else VARIANT_S
            slow += [name] if took[name] >= most_s else []
    return sorted(slow)


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in slow_of(Path(sys.argv[1]).read_text())))
