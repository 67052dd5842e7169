"""Boosted trees of LightGBM for each group: a spec.

    Trees(loss="log", rounds=Grid(20, 100), learning_rate=Grid(0.05, 0.2), num_leaves=Grid(7, 31))

A group's rows are binned once, for all configurations, and what cannot differ is trained once: a model of fewer rounds
is the beginning of one with more, and trees that stayed below a limit of leaves are the same with a lower one above
them. Each group is one thread's work. A model is kept as LightGBM's text.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from offbeat.groups.families import BernoulliFamily, Family, GaussianFamily, PoissonFamily
from offbeat.groups.feature_bins import common_bins
from offbeat.groups.fitting import BucketFit, BucketTask, GroupStatus, has_model, joined, usable_rows
from offbeat.groups.mixing import mixed
from offbeat.groups.search import Grid
from offbeat.groups.summing import Summand
from offbeat.groups.table_input import GroupDataError
from offbeat.groups.tree_growing import BoostedLoss, GrowthLimits, RoundDraw, TreeGrowth, boosted
from offbeat.groups.tree_text import model_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from offbeat.groups.summing import Summing

_FAMILIES: dict[str, Family] = {"squared": GaussianFamily(), "log": BernoulliFamily(), "poisson": PoissonFamily()}
_OBJECTIVES = {"squared": "regression", "log": "binary", "poisson": "poisson"}
_USUAL_LEAF, _SHARE_OF_LEAF = 20, 10
_TOLD = ("learning_rate", "num_leaves", "min_data_in_leaf", "lambda_l2", "max_bin", "seed")
_LEAVES = re.compile(r"^num_leaves=(\d+)$", re.MULTILINE)
_NO_COUNTS = "a target is less than 0, or all are 0"
_CANNOT_BE_SEARCHED = ("loss", "max_bin", "seed")


@dataclass(frozen=True)
class Trees:
    """Boosted trees for each group, trained by LightGBM with its names and defaults.

    Args:
        loss: "squared", "log" (of two or more classes) or "poisson".
        rounds: of boosting; with more than two classes each adds a tree for each class.
        learning_rate: of each round.
        num_leaves: of a tree, at most.
        min_data_in_leaf: rows of a leaf, at least; None for 20, and in a group of fewer than 200 rows a tenth of them.
        lambda_l2: the ridge penalty of leaves.
        feature_fraction: of the features, drawn for each tree.
        bagging_fraction: of the rows, drawn for each round.
        max_bin: values of a feature that are told apart, at most.
        seed: of what is drawn, with the group's key and the configuration; it is the same for any rounds and leaves.
    """

    loss: str = "squared"
    rounds: int | Grid = 100
    learning_rate: float | Grid = 0.1
    num_leaves: int | Grid = 31
    min_data_in_leaf: int | Grid | None = None
    lambda_l2: float | Grid = 0.0
    feature_fraction: float | Grid = 1.0
    bagging_fraction: float | Grid = 1.0
    max_bin: int = 255
    seed: int = 0
    most_classes: ClassVar[int] = 1000
    takes_missing: ClassVar[bool] = True
    dtype: ClassVar[type] = str

    def __post_init__(self) -> None:
        if not isinstance(self.loss, str) or self.loss not in _FAMILIES:
            raise GroupDataError(f"Cannot minimize the loss {self.loss!r}: name 'squared', 'log' or 'poisson'.")
        for name in _CANNOT_BE_SEARCHED:
            if isinstance(getattr(self, name), Grid):
                raise GroupDataError(f"Cannot search in `{name}`: fit once for each.")

    @property
    def is_classifier(self) -> bool:
        """Return whether the target is a class."""
        return self.loss == "log"

    def check(self) -> None:
        """Check one configuration.

        Raises:
            GroupDataError: if it cannot be used, or LightGBM is missing.
        """
        try:
            import lightgbm  # noqa: F401
        except ModuleNotFoundError as error:
            raise GroupDataError("Cannot fit trees: LightGBM is missing. `pip install 'offbeat[trees]'`.") from error
        least = {"rounds": 1, "num_leaves": 2, "max_bin": 2, "min_data_in_leaf": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= bound) and not (name == "min_data_in_leaf" and value is None):
                raise GroupDataError(f"Cannot use {name}={value!r}: name a whole number that is {bound} or greater.")
        for name in ("learning_rate", "feature_fraction", "bagging_fraction"):
            value = getattr(self, name)
            most = float("inf") if name == "learning_rate" else 1.0
            if not isinstance(value, int | float) or not 0 < value <= most or value == float("inf"):
                raise GroupDataError(
                    f"Cannot use {name}={value!r}: name a number above 0{' and up to 1' * (most == 1)}."
                )
        if not isinstance(self.lambda_l2, int | float) or not 0 <= self.lambda_l2 < float("inf"):
            raise GroupDataError(f"Cannot use lambda_l2={self.lambda_l2!r}: name a number that is 0 or greater.")

    def shown(self, coefficients: np.ndarray, features: Sequence[str]) -> dict[str, np.ndarray]:
        """Return nothing: trees are in `rounds`."""
        return {}

    def width(self, features: int) -> int:
        """Return 1: a model is one text."""
        return 1

    def fit(self, task: BucketTask, configs: Sequence[Trees]) -> BucketFit:
        """Fit a model for each group of a bucket and each configuration."""
        found = BucketFit.empty(len(task.offsets) - 1, len(configs), 1, object)
        usable = found.mark_unusable(task, is_classifier=self.is_classifier, takes_missing=True)
        if self.loss == "poisson":
            is_wrong = (task.sums(task.target < 0) > 0) | (task.sums(task.target) == 0)
            found.errors[usable & is_wrong] = _NO_COUNTS
            found.status[usable & is_wrong] = GroupStatus.FAILED
            usable &= ~is_wrong
        for group in np.flatnonzero(usable | (found.status == GroupStatus.ONE_CLASS)):
            rows = slice(*task.offsets[group : group + 2])
            training = GroupTraining(self, task.features[rows], task.target[rows], task.hashes[group], task.classes)
            for at, (text, margins, steps) in training.models(configs):
                found.coefficients[group, at, 0], found.steps[group, at] = text, steps
                found.losses[group, at] = self.loss_of(margins, task.target[rows]).mean()
        return found

    def fit_summed(self, tasks: Callable[[], Iterable[BucketTask]], configs: Sequence[Trees]) -> Summing[BucketFit]:
        """Fit one model for each configuration to rows in several places, of which this is one.

        The trees are offbeat's own, by LightGBM's algorithm: LightGBM does not tell the sums that places would add.
        """
        found = BucketFit.empty(1, len(configs), 1, object)
        parts = list(tasks())
        here = joined(parts, takes_missing=True)
        keys = [int(part.hashes[0] >> np.uint64(1)) for part in parts if len(part.hashes)]
        agreed = torch.tensor([max(keys, default=0), here.classes])
        key, classes = (yield Summand(agreed, "max")).tolist()  # a place without rows knows neither
        unusable = sum(len(part.target) for part in parts) - len(here.target)
        ones = np.bincount(here.target.astype(np.int64) if classes else [], minlength=classes)
        facts = np.array([len(here.target), unusable, (here.target < 0).sum(), (here.target > 0).sum(), *ones])
        count, unusable, negative, positive, *of_class = (yield Summand(torch.from_numpy(facts))).tolist()
        if not count or unusable:
            found.status[0] = GroupStatus.NOT_FINITE if unusable else GroupStatus.NO_ROWS
            return found
        if self.loss == "poisson" and (negative or not positive):
            found.status[0], found.errors[0] = GroupStatus.FAILED, _NO_COUNTS
            return found
        if sum(map(bool, of_class)) == 1:
            found.status[0] = GroupStatus.ONE_CLASS
        training = SummedTraining(self, here, count, key, classes)
        made = yield from training.models(configs)
        for at, (text, loss, steps) in enumerate(made):
            found.coefficients[0, at, 0], found.losses[0, at], found.steps[0, at] = text, loss, steps
        return found

    def fit_together(self, tasks: Callable[[], Iterable[BucketTask]], config: Trees) -> np.ndarray:
        """Fit one model to the rows of all groups, which have to be in memory together."""
        return np.asarray(self.fit(joined(tasks(), takes_missing=True), [config]).coefficients[0, 0])

    def margins(self, coefficients: np.ndarray, features: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return raw scores of rows, (rows,) or (rows, classes); NaN where there is no model.

        Args:
            coefficients: (groups, 1), texts.
            features: (rows, features).
            groups: (rows,), which of the models.

        Raises:
            GroupDataError: if LightGBM cannot read a text.
        """
        groups = groups % len(coefficients)
        which = np.flatnonzero(has_model(coefficients)[groups] & usable_rows(features, takes_missing=True))
        which = which[np.argsort(groups[which], kind="stable")]
        made = np.full(len(groups), np.nan)
        for part in np.split(which, np.flatnonzero(np.diff(groups[which])) + 1) if len(which) else ():
            found = _scores(_booster(coefficients[groups[part[0]], 0]), features[part])
            if found.ndim != made.ndim:
                made = np.full((len(groups), found.shape[1]), np.nan)
            made[part] = found
        return made

    def means(self, margins: np.ndarray) -> np.ndarray:
        """Return what the margins of rows predict."""
        if margins.ndim == 2:
            return torch.softmax(torch.from_numpy(margins), 1).numpy()
        return np.asarray(_FAMILIES[self.loss].means(torch.from_numpy(margins)))

    def loss_of(self, margins: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the loss of each row."""
        if margins.ndim == 2:
            places = np.nan_to_num(target).astype(np.int64)[:, None]
            found = -torch.log_softmax(torch.from_numpy(margins), 1).numpy()
            return np.where(np.isnan(target), np.nan, np.take_along_axis(found, places, 1)[:, 0])
        return np.asarray(_FAMILIES[self.loss].losses(torch.from_numpy(margins), torch.tensor(target)))

    def in_group(self, rows: int) -> Trees:
        """Return this configuration as it works in a group of so many rows."""
        if self.min_data_in_leaf is not None:
            return self
        return dataclasses.replace(self, min_data_in_leaf=min(_USUAL_LEAF, max(1, rows // _SHARE_OF_LEAF)))


@dataclass(frozen=True)
class GroupTraining:
    """The training of one group's models.

    Args:
        features: (rows, features); NaN where one is missing.
        target: (rows,).
        key: the hash of the group's key.
        classes: of the table, of a classification; else 0.
    """

    spec: Trees
    features: np.ndarray
    target: np.ndarray
    key: np.uint64
    classes: int

    def models(self, configs: Sequence[Trees]) -> Iterable[tuple[int, tuple[str, np.ndarray, int]]]:
        """Yield, for the place of each configuration, its model as text, the scores of the rows, and its rounds."""
        from lightgbm import Dataset

        data = Dataset(self.features, self.target, params=self._common())
        alike: dict[Trees, list[int]] = {}
        for at, config in enumerate(configs):
            rest = dataclasses.replace(config.in_group(len(self.target)), rounds=1, num_leaves=2)
            alike.setdefault(rest, []).append(at)
        for rest, places in alike.items():
            booster, grown = None, 0
            made: dict[int, tuple[str, np.ndarray, int]] = {}
            for at in sorted(places, key=lambda at: -configs[at].num_leaves):  # type: ignore[operator]
                leaves, rounds = int(configs[at].num_leaves), int(configs[at].rounds)  # type: ignore[arg-type]
                if booster is None or grown > leaves:
                    most = max(int(configs[at].rounds) for at in places)  # type: ignore[arg-type]
                    booster = self._trained(data, dataclasses.replace(rest, num_leaves=leaves, rounds=most), rest)
                    made = {most: self._model(booster, most)}
                    grown = max(map(int, _LEAVES.findall(made[most][0])), default=1)
                if rounds not in made:
                    made[rounds] = self._model(booster, rounds)
                yield at, made[rounds]

    def _trained(self, data: Any, config: Trees, seeded: Trees) -> Any:
        from lightgbm import Booster

        booster = Booster({**self._common(), **self._own(config, seeded)}, data)
        is_random = config.feature_fraction != 1 or config.bagging_fraction != 1
        for _ in range(int(config.rounds)):  # type: ignore[arg-type]
            if booster.update() and not is_random:
                break  # no split is left, and a further round would find the same
        return booster

    def _model(self, booster: Any, rounds: int) -> tuple[str, np.ndarray, int]:
        rounds = min(rounds, booster.current_iteration())
        text = booster.model_to_string(num_iteration=rounds, importance_type="split")
        return text, _scores(booster, self.features, num_iteration=rounds), rounds

    def _common(self) -> dict[str, Any]:
        """The parameters of all configurations."""
        made: dict[str, Any] = {"objective": _OBJECTIVES[self.spec.loss], "max_bin": self.spec.max_bin}
        if self.classes > 2:
            made |= {"objective": "multiclass", "num_class": self.classes}
        # Which rows a leaf needs is no part of the data; how histograms are made is not left to a stop-watch.
        made |= {"feature_pre_filter": False, "force_col_wise": True, "deterministic": True}
        return made | {"num_threads": 1, "verbosity": -1}

    def _own(self, config: Trees, seeded: Trees) -> dict[str, Any]:
        """The parameters of one configuration, with the seed of all that differ in rounds and leaves alone."""
        names = ("learning_rate", "num_leaves", "min_data_in_leaf", "lambda_l2", "feature_fraction", "bagging_fraction")
        made: dict[str, Any] = {name: getattr(config, name) for name in names}
        # Room for leaves is made beforehand, so no more is asked for than the rows allow.
        made["num_leaves"] = max(2, min(made["num_leaves"], len(self.target) // made["min_data_in_leaf"]))
        if config.bagging_fraction != 1:
            made["bagging_freq"] = 1
        digest = xxh3_64_intdigest(repr(seeded).encode())
        return made | {"seed": int(mixed(np.array([self.key]), digest)[0] >> np.uint64(33))}


@dataclass(frozen=True)
class SummedTraining:
    """The training of the models of a group of which several places have rows.

    Args:
        here: the rows of this place.
        count: of rows in all places.
        key: of the group, the same in all places.
        classes: of the table, of a classification; else 0.
    """

    spec: Trees
    here: BucketTask
    count: int
    key: int
    classes: int

    def models(self, configs: Sequence[Trees]) -> Summing[list[tuple[str, float, int]]]:
        """Return the model of each configuration as text, its loss for each row, and its rounds."""
        bins = yield from common_bins(self.here.features, self.spec.max_bin)
        growth, loss = TreeGrowth(bins, self.here.features, self.count), BoostedLoss(self.spec.loss, self.classes)
        start = yield from loss.start(self.here.target, self.count)
        objective = _OBJECTIVES[self.spec.loss] + (" sigmoid:1" if self.spec.loss == "log" else "")
        if self.classes > 2:
            objective = f"multiclass num_class:{self.classes}"
        wanted: dict[Trees, list[int]] = {}
        for at, config in enumerate(configs):
            wanted.setdefault(dataclasses.replace(config.in_group(self.count), rounds=1), []).append(at)
        made = dict[int, tuple[str, float, int]]()
        for one, places in wanted.items():
            rounds = {at: int(configs[at].rounds) for at in places}  # type: ignore[arg-type]
            losses = dict[int, float]()

            def tell(turn: int, scores: np.ndarray, losses: dict[int, float] = losses) -> None:
                margins = scores if scores.shape[1] > 1 else scores[:, 0]
                losses[turn] = float(self.spec.loss_of(margins, self.here.target).sum())

            limits = GrowthLimits(one.num_leaves, one.min_data_in_leaf, one.lambda_l2, one.learning_rate)  # type: ignore[arg-type]
            draw = (
                functools.partial(self._drawn, one) if one.feature_fraction != 1 or one.bagging_fraction != 1 else None
            )
            most = max(rounds.values())
            trees = yield from boosted(growth, loss, self.here.target, limits, start, most, draw, rounds.values(), tell)
            sums = yield Summand(torch.tensor(list(losses.values()), dtype=torch.float64))
            totals = dict(zip(losses, sums.tolist(), strict=True))
            for at, most in rounds.items():
                own = trees[:most]
                told = {name: getattr(configs[at], name) for name in _TOLD} | {"objective": objective.split()[0]}
                text = model_text(own, start, bins, limits.rate, objective, told)
                made[at] = text, totals[len(own)] / self.count, len(own)
        return [made[at] for at in range(len(configs))]

    def _drawn(self, config: Trees, turn: int) -> RoundDraw:
        """Draw features, and rows by their values: equal rows are drawn together, wherever they are."""
        shares = float(config.bagging_fraction), float(config.feature_fraction)  # type: ignore[arg-type]
        digest = xxh3_64_intdigest(repr(dataclasses.replace(config, num_leaves=2)).encode())
        values = np.where(np.isnan(self.here.features), np.inf, self.here.features + 0.0)  # one NaN, and one 0
        columns = [column.view(np.uint64) for column in np.ascontiguousarray(values.T)]
        chance = mixed(self.key, digest, turn, *columns, (self.here.target + 0.0).view(np.uint64))
        rows = (chance >> np.uint64(11)).astype(np.float64) < shares[0] * 2**53
        count = len(columns)
        order = np.argsort(mixed(np.arange(count), self.key, digest, turn), kind="stable")
        features = np.zeros(count, np.bool_)
        features[order[: max(1, round(count * shares[1]))]] = True
        return RoundDraw(rows, features)


def _booster(text: str) -> Any:
    from lightgbm import Booster
    from lightgbm.basic import LightGBMError

    try:
        return Booster(model_str=text)
    except LightGBMError as error:
        raise GroupDataError(f"Cannot read the trees of a group, written by another LightGBM: {error}") from error


def _scores(booster: Any, features: np.ndarray, num_iteration: int = -1) -> np.ndarray:
    made = booster.predict(features, raw_score=True, num_threads=1, num_iteration=num_iteration)
    return np.asarray(made, np.float64)
