"""docs/simulator.md shows what `offbeat simulate` prints."""

from __future__ import annotations

from tests.docs.simulator import PAGE, page, timeless


def test_it_shows_what_is_printed_today() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run `make docs`"


def test_another_figure_is_noticed_and_another_time_is_not() -> None:
    text = PAGE.read_text()
    assert timeless(page(text.replace("  bsp  ", "  bps  ", 1))) == timeless(text)
    later = text.replace(" s of training in ", " s of training in 1")
    assert later != text
    assert page(later) == later
