"""Every page keeps what it promises: each promise stands there, and tests that exist prove it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import promises

ROOT = Path(__file__).parent.parent
LAWS = range(1, 10)


@pytest.mark.parametrize("promise", promises.read(), ids=lambda promise: f"{promise.page}: {promise.says[:40]}")
def test_it_stands_on_its_page(promise: promises.Promise) -> None:
    assert promise.says in (ROOT / promise.page).read_text(), "the page no longer says this: change promises.toml too"
    assert promise.tests


def test_every_page_promises_something() -> None:
    pages = {"README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}
    assert {promise.page for promise in promises.read()} == pages


def test_every_law_has_its_proof() -> None:
    assert {promise.law for promise in promises.read() if promise.law} == set(LAWS)


def test_a_name_stands_for_what_it_contains() -> None:
    test = "tests/a/test_b.py::TestC::test_d[one/two]"
    for name in (test, "tests/a/test_b.py::TestC::test_d", "tests/a/test_b.py", "tests/a"):
        assert promises.promised(test, {name})
    assert not promises.promised(test, {"tests/a/test_b.py::TestC::test_dd", "tests/b"})


def test_a_name_that_stands_for_nothing_is_found() -> None:
    collected = ["tests/a/test_b.py::test_c[1]", "tests/a/test_b.py::test_c[2]"]
    assert promises.missing(["tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c[3]"], collected) == [
        "tests/a/test_b.py::test_c[3]"
    ]


def test_slices_are_about_even_and_leave_nothing_out() -> None:
    sizes = Counter(promises.slice_of(f"tests/a/test_b.py::test_c[{number}]", 8) for number in range(800))
    assert sorted(sizes) == list(range(8))
    assert min(sizes.values()) > 60
