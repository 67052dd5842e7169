"""One object, as far as it is in a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import DisagreementError, ObjectError, OffbeatError
from offbeat.objects.stripes import cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.objects.data_links import FeederLink
    from offbeat.objects.memory import Segment
    from offbeat.protocol.objects import ObjectMeta, ObjectName
    from offbeat.wire.lane import GrowingBuffer


class AlreadyHereError(ObjectError):
    """A store has all of an object that is to be put."""


@dataclass
class LaneReading:
    """A stripe, or a stage's child, that comes from a feeder on a lane."""

    link: FeederLink
    lane: int

    def stop(self) -> None:
        self.link.stop(self.lane)


@dataclass
class StoredObject:
    """An object, as far as it is here.

    Args:
        stripes: of its memory, as they come; `is_own` ones are made here.
        readings: by stripe, where more comes from; `feeders` are their stores.
        refused: why the directory did not take the put of it; None if it did, or has not answered.
        is_taken: whether it has taken it.
        is_root: whether a sum of it, or of a stripe, is made here.
        is_settled: whether it is known to be what all others have: not a sum that may still begin anew.
        pins: of those that have mapped it.
        released: called when the store has let go of it.
    """

    name: ObjectName
    meta: ObjectMeta
    memory: memoryview
    segment: Segment | None
    stripes: list[GrowingBuffer]
    is_own: bool = False
    refused: OffbeatError | None = None
    is_taken: bool = False
    is_root: bool = False
    is_settled: bool = True
    digest: str = ""
    readings: dict[int, LaneReading] = field(default_factory=dict)
    feeders: dict[int, str] = field(default_factory=dict)
    pins: int = 0
    released: Callable[[], None] = lambda: None
    came_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here."""
        return all(stripe.is_whole for stripe in self.stripes)

    @property
    def have_bytes(self) -> int:
        """Return the number of its bytes that are here."""
        return sum(stripe.progress for stripe in self.stripes)

    @property
    def generations(self) -> tuple[int, ...]:
        """Return the generation of each stripe."""
        return tuple(stripe.generation for stripe in self.stripes)

    def range_of(self, stripe: int) -> tuple[int, int]:
        """The bytes of a stripe."""
        return cut(self.meta.size_bytes, self.meta.stripes, self.meta.item_bytes)[stripe]


Outcome = StoredObject | OffbeatError
"""The object that a caller waits for, or the reason why it does not come."""


def other_bytes(name: ObjectName) -> DisagreementError:
    """The refusal of a second put."""
    return DisagreementError(
        f"Cannot put {name}: this store has other bytes under that name already, and the bytes of a name never change. "
        "Put these under another version."
    )
