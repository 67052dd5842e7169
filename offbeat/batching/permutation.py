"""The order of an epoch: a permutation of which any part can be had by itself, without the rest.

A worker that takes positions 640 to 672 of an epoch computes just these 32 indices. As an array the permutation of 10^9
samples would be 8 GB in every worker, anew for each epoch; here it takes no memory at all.

How it is made, for ever (a checkpoint depends on it):

1. Sixteen keys of 64 bits: the first 128 bytes, little-endian, of SHAKE-256 of ``offbeat order 1 {seed} {epoch}``.
2. A position x below n is a cell (x div b, x mod b) of a table of a rows and b columns: a is the smallest even number
   not below sqrt(n), b = ceil(n / a). (With odd numbers of rows and columns only even permutations could come out.)
3. A Feistel network on the cell, of sixteen rounds (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002):
   in even rounds the row grows by F(column + key) modulo a, in odd rounds the column by F(row + key) modulo b. F is the
   finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Each round can be undone, so no two cells meet.
4. A cell outside the n is sent through the network again until it is inside, which keeps it a permutation. On average
   less than one pass in sqrt(n) is repeated.

Whole numbers only, so that it is the same on every machine and with every version of numpy. It is a good shuffle, no
cipher. With twelve rounds the 720 orders of six samples are visibly not all as likely; with sixteen they are as far as
30,000 epochs can tell. A batch of 32 takes 0.15 ms, one of 256 0.4 ms, a large one 0.5 microseconds per sample.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 16
_MIX = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_LAST_SHIFT = np.uint64(31)


def shuffled(positions: NDArray[np.int64], *, samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Indices of the samples at these positions of an epoch. Pure.

    Args:
        positions: [n] whole numbers from 0 to below `samples`.
        samples: size of the dataset, up to 2^62.
        seed, epoch: choose the permutation; any whole numbers.

    >>> shuffled(np.arange(4, 8), samples=10, seed=0, epoch=0).tolist()
    [0, 9, 4, 6]
    """
    rows = math.isqrt(samples - 1) + 1
    rows += rows % 2
    columns = -(-samples // rows)
    indices = positions.astype(np.uint64)
    outside = np.arange(len(indices))
    while len(outside):
        indices[outside] = _pass(indices[outside], np.uint64(rows), np.uint64(columns), _keys(seed, epoch))
        outside = outside[indices[outside] >= np.uint64(samples)]
    return indices.astype(np.int64)


def _pass(cells: NDArray[np.uint64], rows: np.uint64, columns: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    row, column = np.divmod(cells, columns)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        row = (row + _mixed(column + even) % rows) % rows
        column = (column + _mixed(row + odd) % columns) % columns
    return row * columns + column


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; arrays of numpy wrap around at 2^64."""
    for shift, factor in _MIX:
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> _LAST_SHIFT)


@functools.lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> list[np.uint64]:
    digest = hashlib.shake_256(f"offbeat order 1 {seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return list(np.frombuffer(digest, dtype="<u8").astype(np.uint64))
