"""docs/compatibility.md is what the parts say, and has each of them."""

from __future__ import annotations

import re

import pytest

from offbeat import Plan
from offbeat.errors import PlanError
from offbeat.plan import _KINDS
from tests.docs.compatibility import PAGE, page, parts, refusal, table


def test_the_page_is_as_the_parts_have_it() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


@pytest.mark.parametrize("room", ["codec", "fabric", "rule", "sync", "scheduling"])
def test_every_part_is_on_it(room: str) -> None:
    made = parts(room)
    assert {type(part).__name__ for part in made} == set(_KINDS[room])
    assert all(f"`{type(part).__name__}(" in PAGE.read_text() for part in made)


def test_every_note_is_referred_to_and_there() -> None:
    for section in PAGE.read_text().split("\n## "):
        assert set(re.findall(r"\[(\d+)\]", section)) == set(re.findall(r"^(\d+)\. ", section, re.MULTILINE))


def test_what_a_pair_is_refused_for_is_in_its_note() -> None:
    """With the part of the column left out of the sentence, so that one note is of several."""

    class Part:
        def __repr__(self) -> str:
            return "Part()"

    text = table([1], [Part(), 2], lambda row, column: {"sync": column, "bucket_bytes": row}, "x")
    assert text.endswith(
        "1. It is no sync part. Use one of " + ", ".join(sorted(_KINDS["sync"])) + ", made with ().\n"
    ), text
    with pytest.raises(PlanError, match="it is no sync part"):
        Plan(sync=2)  # type: ignore[arg-type]
    assert refusal() == ""
