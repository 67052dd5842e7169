"""Under torchrun a refusal is printed once, and every other error as it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import HashStore

from offbeat.errors import PlanError
from offbeat.run.refusal_hook import say_refusals_once

if TYPE_CHECKING:
    import pytest


class NamelessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


def test_what_it_cannot_read_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    store, nameless = HashStore(), NamelessError()
    refusals = [PlanError("Cannot read /data/\udcff: choose another.") for _ in range(2)]
    say_refusals_once(store, 1)
    for error in (nameless, *refusals):
        sys.excepthook(type(error), error, None)
    assert printed == [nameless, refusals[0]]
    assert capsys.readouterr().err == "offbeat: rank 1 was refused the same.\n"
