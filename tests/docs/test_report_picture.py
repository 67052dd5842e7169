"""docs/report.png shows what a report says today."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.docs.report_picture import PICTURE, digest, digest_in, report, shown_text, signed

if TYPE_CHECKING:
    from pathlib import Path


def test_it_was_drawn_from_the_text_of_today(tmp_path: Path) -> None:
    text = shown_text(report(tmp_path))
    assert "Rank 2 was killed by SIGKILL" in text
    assert "<" not in text.replace("< ", "")
    assert digest_in(PICTURE.read_bytes()) == digest(text), f"run `make report-picture`; the report now says: {text}"


def test_a_picture_names_what_it_was_drawn_from() -> None:
    picture = PICTURE.read_bytes()
    unsigned = picture.replace(picture[picture.index(b"tEXtreport") - 4 :][: 12 + 7 + 64], b"")
    assert digest_in(unsigned) == ""
    assert signed(unsigned, "another text") != picture
    assert digest_in(signed(unsigned, "another text")) == digest("another text")
