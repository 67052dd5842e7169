"""Random 64-bit numbers that are functions of keys: vectorized, and the same on every machine (splitmix64)."""

from __future__ import annotations

import numpy as np

_PRIME = np.uint64(0x9E3779B97F4A7C15)


def mixed(*keys: np.ndarray | int) -> np.ndarray:
    """Return a number for each element, by what all keys have there.

    Args:
        keys: arrays of integers of one shape, or numbers for all.

    >>> bool((mixed(np.arange(3), 1) == mixed(np.arange(3), 1)).all())
    True
    """
    state: np.ndarray = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            part = (
                np.asarray(key).astype(np.uint64, copy=False) if isinstance(key, np.ndarray) else np.uint64(key & _MOST)
            )
            state = _scramble(np.asarray(state + _PRIME + part))
    return np.asarray(state)


_MOST = (1 << 64) - 1


def _scramble(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))
