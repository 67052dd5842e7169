"""The list of slow tests has none that is gone, and is made as its page says."""

from __future__ import annotations

from pathlib import Path

from tests import slow_tests

LOG = """
7.00s call     tests/a/test_a.py::test_alone
4.90s call     tests/a/test_a.py::test_short
3.00s call     tests/a/test_a.py::test_both[one]
3.50s teardown tests/a/test_a.py::test_both[two - with a dash]
9.00s call     tests/a/test_b.py::test_long[one]
9.50s call     tests/a/test_b.py::test_long[two]
0.40s call     tests/a/test_b.py::test_short[one]
"""


def test_the_shortest_of_each_test_stays_unless_it_is_long() -> None:
    assert slow_tests.slow_of(LOG) == [
        "tests/a/test_a.py::test_alone",
        "tests/a/test_a.py::test_both[two - with a dash]",
        "tests/a/test_b.py::test_long[one]",
        "tests/a/test_b.py::test_long[two]",
    ]


def test_all_in_the_list_are_there() -> None:
    texts: dict[str, str] = {}
    for name in slow_tests.read():
        path, _, rest = name.partition("::")
        text = texts.setdefault(path, Path(path).read_text() if Path(path).exists() else "")
        function = rest.partition("[")[0].rpartition("::")[2]
        assert f"def {function}(" in text, f"{name} is gone: run `python -m tests.slow_tests`"
