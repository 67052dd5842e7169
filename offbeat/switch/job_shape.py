"""The shape of a job: what it takes of a switch."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers
from offbeat.switch.cap import Cap
from offbeat.switch.fixed_point import spare_bits
from offbeat.switch.packet import MOST_VALUES, MOST_WORKERS, VALUES_STEP

MOST_SLOTS, _MOST_RING, _MOST_ROWS = 1 << 16, 128, 1 << 20
_CAPS = RealNumbers(2.0**-80, 2.0**110)
RING = 64  # clocks that a switch keeps track of for a job that trains


@dataclass(frozen=True)
class JobShape:
    """The shape of a job, which takes so much of a switch; it stays as it is while the job lives.

    Args:
        number: of the job; a new one for every incarnation.
        workers: how many there are at most; ranks are below it.
        values: int32 in a packet.
        slots: chunks of which sums and results are kept; a power of two. Workers are at most half as many ahead.
        ring: clocks that are kept track of; a power of two.
        rows: of the table, each of `values` int32; 0 for none.
        most: the largest magnitude of a worker's value in a sum of the stream, as it is sent; 0 if none is too large.

    Raises:
        PlanError: if a number is out of range.
    """

    number: int
    workers: int
    values: int = 256
    slots: int = 512
    ring: int = RING
    rows: int = 0
    most: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise PlanError(
                f"Cannot sum the gradients of {self.workers} workers in a switch: a packet has room for the names of "
                f"{MOST_WORKERS}. Use Elastic() or ParameterServer() - at `plan.fabric`."
            )
        if self.values % VALUES_STEP or not VALUES_STEP <= self.values <= MOST_VALUES:
            raise PlanError(
                f"Cannot put {self.values} values into a packet: choose a multiple of {VALUES_STEP} up to "
                f"{MOST_VALUES} - at `plan.fabric.values`."
            )
        if not 0 <= self.rows <= _MOST_ROWS:
            raise PlanError(
                f"Cannot keep a table of {self.rows:,} rows: a switch takes {_MOST_ROWS:,} at most. Put more values "
                "into a row - at `plan.fabric.values`."
            )
        if self.most and self.most not in _CAPS:
            raise PlanError(
                f"Cannot clamp each worker's part to {self.most!r}: fixed point has room from 2^-80 to 2^110 - at "
                "`plan.fabric.cap`."
            )
        for name, number, most in (("slots", self.slots, MOST_SLOTS), ("ring", self.ring, _MOST_RING)):
            if not 4 <= number <= most or number & (number - 1):
                raise PlanError(
                    f"Cannot use {name}={number}: choose a power of two from 4 to {most} - at `plan.fabric.{name}`."
                )

    @property
    def cap(self) -> Cap | None:
        """The bound of a worker's values in a sum of the stream; None if there is none."""
        return Cap(self.most, spare_bits(self.workers)) if self.most else None

    @property
    def span(self) -> int:
        """Chunks that a worker may be ahead of the first whose result it lacks."""
        return self.slots // 2
