"""Frameworks that are too old, or newer than what was tried."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

worker_start = pytest.importorskip("offbeat.integrations.worker_start", reason="packaging is not installed")


def installed(version: str) -> Callable[[str], str]:
    return lambda _: version


def test_one_that_is_too_old_is_named_with_what_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", installed("2.1.0"))
    with pytest.raises(PlanError, match=r"Cannot give Lightning 2.1.0 a plan: that takes 2.5 or newer"):
        worker_start.LIGHTNING.check_version()


def test_one_that_is_newer_than_what_was_tried_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", installed("2.9.0"))
    worker_start.LIGHTNING.check_version()
    assert not caplog.text
    monkeypatch.setattr(importlib.metadata, "version", installed("3.0.0"))
    worker_start.LIGHTNING.check_version()
    assert "Lightning 3.0.0 is newer than what this was tried with (2.6.6)" in caplog.text
