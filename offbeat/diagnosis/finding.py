"""The findings of a doctor: one thing each that was looked at, and for what does not work the reason and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        level: "ok"; "note" if something optional cannot work; "bad" if training cannot.
        reason, remedy: for what cannot work.
    """

    name: str
    value: str
    level: str = "ok"
    reason: str = ""
    remedy: str = ""
