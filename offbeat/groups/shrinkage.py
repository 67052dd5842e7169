"""The weights by which predictions of a group and of the groups around it are averaged, as scikit-lego does it.

A row belongs to one group on each level: all rows, those of its country, those of its country and store. Each rule
turns the sizes of these groups, the largest level first, into weights; they are scaled to a sum of 1 afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Weights = Callable[[Sequence[int]], np.ndarray]
RULES = ("constant", "relative", "min_n_obs", "equal")


def weights_by(rule: str | Weights, alpha: float | None, min_n_obs: int | None) -> Weights:
    """Return the weights by sizes that a rule stands for.

    Args:
        rule: its name, or a function of the sizes.
        alpha: of "constant", between 0 and 1: the weight of the level above, at each level.
        min_n_obs: of "min_n_obs".

    Raises:
        ValueError: if there is no such rule, or it lacks its number.

    >>> weights_by("constant", 0.25, None)([100, 20, 5])
    array([0.0625, 0.1875, 0.75  ])
    """
    if rule == "constant":
        if alpha is None or not 0 <= alpha <= 1:
            raise ValueError(f"Cannot shrink by 'constant' with alpha={alpha!r}: name a number from 0 to 1.")
        return lambda sizes: _constant(len(sizes), alpha)
    if rule == "min_n_obs":
        if min_n_obs is None:
            raise ValueError("Cannot shrink by 'min_n_obs': name it, as in min_n_obs=20.")
        return lambda sizes: _deepest(sizes, min_n_obs)
    if rule == "relative":
        return lambda sizes: np.asarray(sizes, np.float64)
    if rule == "equal":
        return lambda sizes: np.ones(len(sizes))
    if callable(rule):
        return rule
    raise ValueError(f"Cannot shrink by {rule!r}: name one of {', '.join(RULES)}, or pass a function of sizes.")


def _constant(levels: int, alpha: float) -> np.ndarray:
    made = (1 - alpha) * alpha ** np.arange(levels - 1, -1, -1.0)
    made[0] = alpha ** (levels - 1)
    return np.asarray(made)


def _deepest(sizes: Sequence[int], least: int) -> np.ndarray:
    large = np.flatnonzero(np.asarray(sizes) >= least)
    if not len(large):
        raise ValueError(f"Cannot shrink by min_n_obs={least}: no level has as many rows, the largest {max(sizes)}.")
    made = np.zeros(len(sizes))
    made[large[-1]] = 1.0
    return made
