"""A part is sent of local steps at a server, and the rest with a later contribution (see `local_offset`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from offbeat.codec.codec import Codec  # noqa: TC001 - read when a plan is
from offbeat.codec.grbs import GRBS
from offbeat.codec.local_offset import LocalOffset


@dataclass(frozen=True)
class Carry(LocalOffset):
    """A codec whose offset is carried: nothing of a worker's own steps is lost, whatever is sent of them, and when.

    Raises:
        PlanError: if `inner` has no decoder of its own, or what it does not send may grow without end.

    >>> Carry(GRBS(5))
    Carry(inner=GRBS(ratio=5, block=256))
    """

    inner: Codec = field(default_factory=lambda: GRBS(5))

    def __post_init__(self) -> None:
        self.check_inner()

    @property
    def offset(self) -> Literal["carried", "dropped"]:
        return "carried"
