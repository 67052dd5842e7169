"""The cap of a job: no worker's value in a sum of the stream is larger, whatever the worker sends.

A cap c is in the units of what is sent, and E is the least exponent with c < 2**E. Of each packet of a worker a switch

    takes its exponent e as min(e, E + attempt), and the exponents that it announces (`PRIME`) as at most E
    clamps its integers to floor(c * 2**(31 - L - e)), which is c by that exponent (see `fixed_point`)
    flags a chunk (`SATURATED`) whose packets do not say the same of it: its integers would be in different units

So who announces a large exponent makes others' values no coarser than 2**(E + L - 31), and a value that fits no unit
ends the sum with a sentence. Of what was added of each worker a switch counts the elements and those that were clamped,
and adds up their squares: of the upper bits of each, in units of 2**(E + L - 15), which takes no floats.

`limits` are made by control; data planes look them up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from offbeat.switch.packet import ZERO_EXPONENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_ATTEMPTS = 8  # at one sum
_MOST = (1 << 31) - 1
_DROPPED_BITS = 16  # of an integer, before it is squared


class Brought(NamedTuple):
    """The statistics of what a worker has brought.

    Args:
        elements: that were added.
        clamped: those of them that were clamped.
        squares: the sum of their squares; see `Cap.root_mean_square`.
    """

    elements: int = 0
    clamped: int = 0
    squares: int = 0

    def plus(self, other: Brought) -> Brought:
        """The statistics of both."""
        return Brought(*map(sum, zip(self, other, strict=True)))


class Clamped(NamedTuple):
    """Packets as they are added.

    Args:
        values: [B, V].
        exponent: [B].
        clamped, squares: [B] of each packet; 0 of one that primes.
    """

    values: NDArray[np.int32]
    exponent: NDArray[np.int8]
    clamped: NDArray[np.int64]
    squares: NDArray[np.int64]


@dataclass(frozen=True)
class Cap:
    """The cap of one job.

    Args:
        value: the largest magnitude; above 0.
        spare_bits: L, by which integers leave room for the sum of all workers.

    >>> Cap(1.5, 2).exponent, int(Cap(1.5, 2).limits[1])
    (1, 402653184)
    """

    value: float
    spare_bits: int

    @property
    def exponent(self) -> int:
        """The least exponent that is above the cap."""
        return math.frexp(self.value)[1]

    @cached_property
    def limits(self) -> NDArray[np.int32]:
        """[256] the largest integer by exponent, as an unsigned byte."""
        signed = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int64)
        exact = np.floor(np.ldexp(np.float64(self.value), 31 - self.spare_bits - signed))
        return np.minimum(exact, _MOST).astype(np.int32)

    def clamp(
        self,
        values: NDArray[np.int32],
        exponent: NDArray[np.int8],
        attempt: NDArray[np.uint16],
        primes: NDArray[np.bool_],
    ) -> Clamped:
        """Clamp the values [B, V] of packets that all have values, with [B] of what else they say."""
        most = np.minimum(self.exponent + np.minimum(attempt, MOST_ATTEMPTS).astype(np.int64), 127)
        taken = np.minimum(exponent, most).astype(np.int8)
        limit = np.where(primes, self.exponent - ZERO_EXPONENT, self.limits[taken.view(np.uint8)]).astype(np.int32)
        found = np.clip(values, -limit[:, None], limit[:, None])
        upper = ((found ^ (found >> 31)) >> _DROPPED_BITS).astype(np.int64)
        sums, shift = (upper * upper).sum(axis=1), 2 * (self.exponent - taken.astype(np.int64))
        squares = np.where(shift < 0, sums << np.maximum(-shift, 0), sums >> np.clip(shift, 0, 63))
        clamped = (found != values).sum(axis=1)
        return Clamped(found, taken, np.where(primes, 0, clamped), np.where(primes, 0, squares))

    def root_mean_square(self, brought: Brought) -> float:
        """The root of the mean square of what was added, in the units of what is sent."""
        unit = 2.0 ** (self.exponent + self.spare_bits - 31 + _DROPPED_BITS)
        return unit * math.sqrt(brought.squares / brought.elements) if brought.elements else 0.0
