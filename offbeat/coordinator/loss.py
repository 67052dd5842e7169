"""A contribution that is lost with its worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.sync import Push


@dataclass(frozen=True)
class LostContribution:
    """A contribution that did not arrive whole, and is in no update.

    Args:
        blocks: how many of its blocks did not.
    """

    push: Push
    blocks: int
