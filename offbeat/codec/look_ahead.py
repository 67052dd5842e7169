"""A part is sent of local steps at a server, and the rest leads the next steps alone (see `local_offset`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from offbeat.codec.codec import Codec  # noqa: TC001 - read when a plan is
from offbeat.codec.grbs import GRBS
from offbeat.codec.local_offset import LocalOffset


@dataclass(frozen=True)
class LookAhead(LocalOffset):
    """A codec whose offset leads the next steps, and is gone with them: what is sent is of the last steps alone.

    Raises:
        PlanError: if `inner` has no decoder of its own, or what it does not send may grow without end.

    >>> LookAhead(GRBS(5))
    LookAhead(inner=GRBS(ratio=5, block=256))
    """

    inner: Codec = field(default_factory=lambda: GRBS(5))

    def __post_init__(self) -> None:
        self.check_inner()

    @property
    def offset(self) -> Literal["carried", "dropped"]:
        return "dropped"
