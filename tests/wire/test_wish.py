"""What is left in a job's folder, and who takes it away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from offbeat.errors import NetworkError
from offbeat.wire import wish
from offbeat.wire.wish import Granted

if TYPE_CHECKING:
    from pathlib import Path


def test_a_wish_is_taken_once_and_answered(tmp_path: Path) -> None:
    left = wish.leave(tmp_path, "a part")
    with pytest.raises(NetworkError, match="it has not taken up what it was asked before"):
        wish.leave(tmp_path, "another")
    assert wish.take(tmp_path) == left
    assert wish.take(tmp_path) is None
    assert wish.answered(tmp_path, left) is None
    granted = Granted(left.number, "done")
    wish.answer(tmp_path, granted)
    assert wish.answered(tmp_path, left) == granted


def test_who_was_answered_takes_nobody_elses_wish_back(tmp_path: Path) -> None:
    """The first has been taken by the job, so that another may wish before it is answered."""
    first = wish.leave(tmp_path, "a part")
    wish.take(tmp_path)
    second = wish.leave(tmp_path, "another")
    wish.take_back(tmp_path, first)
    assert wish.take(tmp_path) == second


def test_what_nobody_has_taken_can_be_taken_back(tmp_path: Path) -> None:
    wish.take_back(tmp_path, wish.leave(tmp_path, "a part"))
    assert wish.take(tmp_path) is None
