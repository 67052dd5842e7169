"""Fixed point: gradients as integers that a switch can add.

Each chunk has an exponent e, with 2**e above every value of every worker in it. Of N workers, with L = ceil(log2 N),

    integer = round(value * 2**(31 - L - e))        sum of integers < 2**31
    total   = sum * 2**(e + L - 31)                 error of a total at most N / 2 units of 2**(e + L - 31)

Scales are powers of two, so that scaling rounds nothing: a float32 is exact as an integer if it is within 2**(7 - L) of
the chunk's largest value. Sums of integers do not depend on their order, so that all workers have the same bits, and
every run does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import NumericsError
from offbeat.switch.packet import ZERO_EXPONENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_INT32 = np.iinfo(np.int32)
_MOST_FLOAT = np.float32((1 << 31) - 128)  # that is an int32
_TILE_VALUES = 1 << 14  # as floats 64 KiB
# Below it values are told apart no further; above it a float32 cannot be summed.
LEAST_EXPONENT, MOST_EXPONENT = -90, 126


def exponents(chunks: NDArray[np.float32]) -> NDArray[np.int8]:
    """The exponent of each chunk.

    Args:
        chunks: [M, V].

    Returns:
        [M], `ZERO_EXPONENT` for chunks of zeros.

    Raises:
        NumericsError: if a value is NaN, infinite, or too large to be summed.
    """
    most = np.empty(len(chunks), np.float32)
    for rows in _tiles(chunks):
        np.maximum(chunks[rows].max(axis=1), -chunks[rows].min(axis=1), out=most[rows])
    if not np.isfinite(most).all():
        raise NumericsError("Cannot send a gradient that holds NaN or Inf through a switch: it adds up integers.")
    found = np.maximum(np.frexp(most)[1], LEAST_EXPONENT)
    if len(found) and found.max() > MOST_EXPONENT:
        raise NumericsError(f"Cannot send a gradient with a value of {most.max():g} through a switch: it is too large.")
    return np.where(most > 0, found, ZERO_EXPONENT).astype(np.int8)


def scales(exponent: NDArray[np.int8], workers: int) -> NDArray[np.float32]:
    """[M] what the values of chunks with exponents [M] are multiplied by, of so many workers; 0 for chunks of zeros."""
    scale = np.ldexp(np.float32(1), 31 - spare_bits(workers) - np.maximum(exponent, LEAST_EXPONENT).astype(np.int32))
    return np.where(exponent == ZERO_EXPONENT, np.float32(0), scale)


def units(exponent: NDArray[np.int8], workers: int) -> NDArray[np.float32]:
    """[M] what a sum of 1 stands for in chunks with exponents [M], of so many workers."""
    unit: NDArray[np.float32] = np.ldexp(np.float32(1), exponent.astype(np.int32) + spare_bits(workers) - 31)
    return unit


def quantize(
    chunks: NDArray[np.float32], scale: NDArray[np.float32], out: NDArray[np.int32], *, clips: bool = False
) -> None:
    """Write chunks [M, V], multiplied by scales [M] and rounded, to `out` [M, V].

    Args:
        clips: whether values may be too large, and become the largest there are.
    """
    for rows in _tiles(chunks):
        scaled = chunks[rows] * scale[rows, None]
        np.rint(scaled, out=scaled)
        if clips:
            np.clip(scaled, -_MOST_FLOAT, _MOST_FLOAT, out=scaled)
        np.copyto(out[rows], scaled, casting="unsafe")


def to_sums(integers: NDArray[np.int32], unit: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write sums [M, V], multiplied by what 1 stands for in each [M], to `out` [M, V]."""
    for rows in _tiles(integers):
        np.copyto(out[rows], integers[rows], casting="unsafe")
        out[rows] *= unit[rows, None]


def to_integers(chunks: NDArray[np.float32], exponent: NDArray[np.int8], workers: int) -> NDArray[np.int32]:
    """Quantize chunks [M, V] with exponents [M] that hold for all of so many workers."""
    integers = np.empty(chunks.shape, np.int32)
    quantize(chunks, scales(exponent, workers), integers)
    return integers


def to_floats(integers: NDArray[np.int32], exponent: NDArray[np.int8], workers: int) -> NDArray[np.float32]:
    """Turn sums [M, V] of the integers of so many workers back into floats."""
    floats: NDArray[np.float32] = integers.astype(np.float32)
    floats *= units(exponent, workers)[:, None]
    return floats


def saturating_sum(values: NDArray[np.int32] | Sequence[int], addends: Sequence[int]) -> tuple[NDArray[np.int32], bool]:
    """Add integers [V] within 32 bits; the sums [V], and whether one did not fit.

    >>> saturating_sum([1, 1 << 30], [2, 1 << 30])
    (array([         3, 2147483647], dtype=int32), True)
    """
    total = np.array(values, np.int64) + np.array(addends, np.int64)
    found = np.clip(total, _INT32.min, _INT32.max)
    return found.astype(np.int32), bool((found != total).any())


def error_bound(exponent: int, workers: int) -> float:
    """The most that a total may differ from the sum of the workers' float32, but for the rounding of the total itself.

    >>> error_bound(0, 4) == 4 / 2 * 2.0**-29
    True
    """
    return workers / 2 * 2.0 ** (exponent + spare_bits(workers) - 31)


def _tiles(chunks: NDArray[np.float32] | NDArray[np.int32]) -> Iterator[slice]:
    """Rows of chunks [M, V], so many at a time that what is read once is still in the cache when it is read again."""
    rows = max(1, _TILE_VALUES // max(1, chunks.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(chunks), rows))


def spare_bits(workers: int) -> int:
    """The bits that integers leave free, so that the sum of so many workers' fits."""
    return (workers - 1).bit_length()
