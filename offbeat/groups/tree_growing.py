"""Gradient boosting of trees whose rows are in several places: LightGBM's algorithm, on sums.

Each place adds up slopes, curvatures and rows by bin. The sums of all places tell the best split of a leaf, and the
leaf that gains most is split next. Slopes and curvatures are whole numbers, scaled so that each sum stays below 2^53:
float64 adds those exactly in any order. So the trees do not depend on where the rows are, to the bit.

Sums by bin are (3, features, bins): slopes, curvatures and rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from offbeat.groups.summing import Summand

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from offbeat.groups.feature_bins import FeatureBins
    from offbeat.groups.summing import Summing

_EXACT_BITS = 52
_LEAST_CURVATURE = 1e-3  # LightGBM's min_sum_hessian_in_leaf
_LEAST_CHANCE = 1e-15
_POISSON_DAMPING = 0.7  # LightGBM's poisson_max_delta_step


@dataclass(frozen=True)
class GrowthLimits:
    """The settings of a tree.

    Args:
        most_leaves: of a tree, at most.
        least_rows: of a leaf, at least.
        penalty: of leaves, the ridge penalty.
        rate: by which a leaf's value is multiplied.
    """

    most_leaves: int
    least_rows: int
    penalty: float
    rate: float


class RoundDraw(NamedTuple):
    """The part of the data by which the trees of a round are trained.

    Args:
        rows, features: (rows,) of this place and (features,), whether a tree is trained by it.
    """

    rows: np.ndarray
    features: np.ndarray


@dataclass
class GrownTree:
    """A tree, as LightGBM numbers it: a split keeps the number of the leaf for the left part; leaf n is the child ~n.

    Args:
        values: of leaves; `sums` are their (slopes, curvatures, rows).
        splits: with the place of the left and the right child of each in `children`.
    """

    values: list[float] = field(default_factory=list)
    sums: list[np.ndarray] = field(default_factory=list)
    splits: list[LeafSplit] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class LeafSplit:
    """The best split of a leaf.

    Args:
        bin: of the feature, the last one that goes to the left.
        left, right: scaled sums of the parts; `whole` of the leaf, as they are.
        value: of the leaf, if it were not split.
    """

    gain: float
    feature: int
    bin: int
    missing_left: bool
    left: np.ndarray
    right: np.ndarray
    whole: np.ndarray
    value: float


@dataclass
class _Leaf:
    """A leaf that grows: its rows here, the sums of its bins in all places, and its split."""

    rows: np.ndarray
    sums: np.ndarray
    bins: np.ndarray
    split: LeafSplit | None = None
    parent: tuple[int, int] | None = None


class TreeGrowth:
    """The growth of trees over binned rows.

    Args:
        bins: of all places.
        features: (rows, features) of this place.
        count: of rows in all places.
    """

    def __init__(self, bins: FeatureBins, features: np.ndarray, count: int) -> None:
        self._bins, self._places, self._count = bins, bins.places(features), count
        offsets = np.arange(len(bins.edges), dtype=np.int32) * bins.width
        self._columns = np.ascontiguousarray((self._places - offsets).T)  # a split reads one feature of many rows
        self._ones = np.ones(self._places.size)
        self._is_cut, self.features = bins.is_cut, len(bins.edges)

    def grow(
        self, slopes: np.ndarray, curvatures: np.ndarray, limits: GrowthLimits, drawn: RoundDraw
    ) -> Summing[tuple[GrownTree, np.ndarray]]:
        """Return a tree, and the value that it adds to each row.

        Args:
            slopes, curvatures: (rows,), of the loss by the scores.
        """
        greatest = np.array([np.abs(part).max(initial=0) for part in (slopes, curvatures)])
        greatest = (yield Summand(torch.from_numpy(greatest), "max")).numpy()
        if not np.isfinite(greatest).all():  # the scores have run away
            return GrownTree([0.0], [np.zeros(3)]), np.zeros(len(slopes))
        shifts = _EXACT_BITS - int(self._count).bit_length() - np.frexp(greatest)[1]
        weights = np.column_stack(
            (np.rint(np.ldexp(slopes, shifts[0])), np.rint(np.ldexp(curvatures, shifts[1])), drawn.rows)
        )
        weights[~drawn.rows] = 0
        units = np.append(np.ldexp(1.0, -shifts), 1.0)
        own = yield from self._histogram(self._places, weights)
        root = _Leaf(np.arange(len(slopes)), own[:, 0].sum(1), own)
        root.split = self._best(root, units, limits, drawn.features)
        leaves, tree = [root], GrownTree()
        while len(leaves) < limits.most_leaves:
            gains = [0.0 if leaf.split is None else leaf.split.gain for leaf in leaves]
            at = int(np.argmax(gains))
            if not gains[at] > 0:
                break
            pair = self._divided(tree, leaves, at)
            if len(leaves) < limits.most_leaves and any(one.sums[2] >= 2 * limits.least_rows for one in pair):
                small, large = sorted(pair, key=lambda one: float(one.sums[2]))
                small.bins = yield from self._histogram(self._places[small.rows], weights[small.rows])
                large.bins = large.bins - small.bins
                for one in pair:
                    one.split = self._best(one, units, limits, drawn.features)
        added = np.zeros(len(slopes))
        for leaf in leaves:
            tree.sums.append(leaf.sums * units)
            tree.values.append(_value(tree.sums[-1], limits) if len(leaves) > 1 else 0.0)
            added[leaf.rows] = tree.values[-1]
        return tree, added

    def _divided(self, tree: GrownTree, leaves: list[_Leaf], at: int) -> tuple[_Leaf, _Leaf]:
        """Split a leaf: the left part takes its place, the right one is the last; both have the bins of the whole."""
        leaf = leaves[at]
        split = leaf.split
        assert split is not None
        place = self._columns[split.feature][leaf.rows]
        is_left = place <= split.bin
        if split.missing_left:
            is_left |= place == self._bins.width - 1
        number = len(tree.splits)
        if leaf.parent is not None:
            tree.children[leaf.parent[0]][leaf.parent[1]] = number
        tree.splits.append(split)
        tree.children.append([~at, ~len(leaves)])
        left = _Leaf(leaf.rows[is_left], split.left, leaf.bins, parent=(number, 0))
        right = _Leaf(leaf.rows[~is_left], split.right, leaf.bins, parent=(number, 1))
        leaves[at] = left
        leaves.append(right)
        return left, right

    def _histogram(self, places: np.ndarray, weights: np.ndarray) -> Summing[np.ndarray]:
        """The sums of some rows by bin, of all places."""
        from scipy.sparse import csc_array

        (rows, features), width = places.shape, self._bins.width
        # A product with a sparse matrix of ones reads a row's numbers once for all features.
        ends = np.arange(0, places.size + 1, features, dtype=np.int32 if places.size < 1 << 31 else np.int64)
        is_in = csc_array((self._ones[: places.size], places.ravel(), ends), shape=(features * width, rows))
        total = yield Summand(torch.from_numpy(np.asarray(is_in @ weights).astype(np.int64)))
        return total.numpy().T.reshape(3, features, width).astype(np.float64)

    def _best(self, leaf: _Leaf, units: np.ndarray, limits: GrowthLimits, drawn: np.ndarray) -> LeafSplit | None:
        """The split of a leaf that gains most, if one gains anything; of equal ones the first."""
        if leaf.sums[2] < 2 * limits.least_rows:
            return None
        whole, penalty = leaf.sums * units, limits.penalty / units[1]
        least = _LEAST_CURVATURE / units[1]
        below = np.cumsum(leaf.bins[..., :-2], 2)
        sides = [below]  # where missing values go to the right; then where they go to the left
        if self._bins.has_missing.any():
            sides.append(below + leaf.bins[..., -1:])
        best = (0.0, 0, 0)
        scale = units[0] * units[0] / units[1]
        for side, (slopes, curvatures, rows) in enumerate(sides):
            can_be = self._is_cut & (drawn[:, None] if not side else (drawn & self._bins.has_missing)[:, None])
            can_be &= (rows >= limits.least_rows) & (rows <= leaf.sums[2] - limits.least_rows)
            can_be &= (curvatures >= least) & (curvatures <= leaf.sums[1] - least)
            others = leaf.sums[0] - slopes
            with np.errstate(divide="ignore", invalid="ignore"):
                gains = slopes * slopes / (curvatures + penalty)
                gains += others * others / (leaf.sums[1] - curvatures + penalty)
            at = int(np.where(can_be, gains, -np.inf).argmax())
            if can_be.flat[at]:
                best = max(best, (float(gains.flat[at]), -side, -at))
        gain = best[0] * scale - whole[0] * whole[0] / (whole[1] + limits.penalty)
        if not gain > 0:
            return None
        side = -best[1]
        feature, cut = divmod(-best[2], below.shape[2])
        goes_left = bool(side) or not self._bins.has_missing[feature]
        left = sides[side][:, feature, cut]
        return LeafSplit(gain, feature, cut, goes_left, left, leaf.sums - left, whole, _value(whole, limits))


def _value(sums: np.ndarray, limits: GrowthLimits) -> float:
    weight = float(sums[1]) + limits.penalty
    return -float(sums[0]) / weight * limits.rate if weight > 0 else 0.0


@dataclass(frozen=True)
class BoostedLoss:
    """A loss, by the scores of rows: (rows, columns), a column for each class if there are more than two.

    Args:
        name: "squared", "log" or "poisson".
        classes: of the target, of a classification; else 0.
    """

    name: str
    classes: int

    @property
    def columns(self) -> int:
        """Return how many trees a round adds."""
        return self.classes if self.classes > 2 else 1

    def start(self, target: np.ndarray, count: int) -> Summing[np.ndarray]:
        """Return (columns,): the scores at which boosting begins, of the mean of the target.

        Args:
            target: of this place.
            count: of rows in all places.
        """
        if self.name == "log":
            ones = np.bincount(target.astype(np.int64), minlength=self.classes)
            chance = (yield Summand(torch.from_numpy(ones))).numpy() / count
            chance = np.clip(chance, _LEAST_CHANCE, 1 - _LEAST_CHANCE)
            return np.log(chance) if self.classes > 2 else np.log(chance[1:2] / (1 - chance[1:2]))
        greatest = float((yield Summand(torch.tensor([np.abs(target).max(initial=0)]), "max")))
        shift = _EXACT_BITS - int(count).bit_length() - int(np.frexp(greatest)[1])
        own = np.rint(np.ldexp(target, shift)).astype(np.int64).sum(keepdims=True)
        mean = np.ldexp((yield Summand(torch.from_numpy(own))).numpy().astype(np.float64), -shift) / count
        return np.log(np.maximum(mean, _LEAST_CHANCE)) if self.name == "poisson" else mean

    def slopes(self, scores: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first two derivatives of each row's loss, as LightGBM takes them.

        They are numpy's: torch's exp of a row depends on the place of the row.
        """
        if self.name == "squared":
            return scores - target[:, None], np.ones_like(scores)
        if self.name == "poisson":
            means = np.exp(scores)
            return means - target[:, None], means * np.exp(_POISSON_DAMPING)
        if self.columns == 1:
            chance = 1 / (1 + np.exp(-scores))
            return chance - target[:, None], chance * (1 - chance)
        chance = np.exp(scores - scores.max(1, keepdims=True))
        total = np.zeros(len(chance))
        for column in chance.T:
            total += column
        chance /= total[:, None]
        is_own = target[:, None] == np.arange(self.columns)
        return chance - is_own, chance * (1 - chance) * (self.columns / (self.columns - 1))


def boosted(
    growth: TreeGrowth,
    loss: BoostedLoss,
    target: np.ndarray,
    limits: GrowthLimits,
    start: np.ndarray,
    rounds: int,
    draw: Callable[[int], RoundDraw] | None,
    tell_at: Container[int],
    tell: Callable[[int, np.ndarray], None],
) -> Summing[list[list[GrownTree]]]:
    """Return the trees of each round, one for each column of the loss; fewer rounds where no split is left.

    Args:
        target: of the rows of this place.
        start: of `loss`.
        draw: by which rows and features a round is trained; None for all.
        tell: given the scores of the rows after the rounds `tell_at`, and after the last one.
    """
    scores = np.tile(start, (len(target), 1))
    everything = RoundDraw(np.ones(len(target), np.bool_), np.ones(growth.features, np.bool_))
    made: list[list[GrownTree]] = []
    for turn in range(rounds):
        slopes, curvatures = loss.slopes(scores, target)
        drawn, trees = everything if draw is None else draw(turn), list[GrownTree]()
        for column in range(loss.columns):
            tree, added = yield from growth.grow(slopes[:, column], curvatures[:, column], limits, drawn)
            scores[:, column] += added
            trees.append(tree)
        made.append(trees)
        has_ended = draw is None and not any(tree.splits for tree in trees)  # a further round would find the same
        if has_ended or turn + 1 in tell_at:
            tell(turn + 1, scores)
        if has_ended:
            break
    return made
