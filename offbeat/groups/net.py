"""Neural nets of groups: a spec that owns its training.

    Net(lambda features: nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 1)),
        optimizer=AdamW(lr=Grid(1e-2, 1e-3)), loss="log", batch=32, epochs=20)

All models of a bucket, groups times configurations, are trained together on stacked tensors (`torch.func.vmap`). A
module that cannot be vmapped, such as one with BatchNorm, is trained model by model; a warning names the layer.

Initial weights and the order of rows are functions of (key, configuration, seed) alone, so a model depends neither on
other groups nor on other values that are tried. Dropout is an exception: torch draws the masks of all models
that are trained together at once, so they depend on who else is in the batch of models, and are repeated only with the
same groups.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from offbeat.groups.families import BernoulliFamily, Family, GaussianFamily, PoissonFamily
from offbeat.groups.fitting import BucketFit, BucketTask, GroupStatus, joined, similar_sizes
from offbeat.groups.mixing import mixed
from offbeat.groups.net_rungs import NetRun, runs_of
from offbeat.groups.net_training import NetModels, NetState, NetTraining, Trial
from offbeat.groups.optimizers import AdamW, StackedOptimizer
from offbeat.groups.search import Grid
from offbeat.groups.stacked_module import StackedModule
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from offbeat.groups.carrier import Tensors

_FAMILIES: dict[str, Family] = {"squared": GaussianFamily(), "log": BernoulliFamily(), "poisson": PoissonFamily()}


@dataclass(frozen=True)
class Net:
    """A neural net for each group.

    Args:
        make: a module by the number of features, with one output for each row: a value for "squared", the log odds of
            the second class for "log", the logarithm of the mean for "poisson".
        optimizer: `SGD`, `Adam` or `AdamW`; each starts from zero with each model.
        loss: "squared" (half of the squared difference), "log" (of two classes) or "poisson"; a step follows the
            gradient of its mean over a batch.
        batch: rows of a step.
        epochs: passes over a group's rows, each in another order.
        seed: of initial weights and orders.
    """

    make: Callable[[int], torch.nn.Module]
    optimizer: StackedOptimizer | Grid = AdamW()  # noqa: RUF009  (frozen)
    loss: str = "squared"
    batch: int | Grid = 32
    epochs: int | Grid = 10
    seed: int = 0
    most_classes: ClassVar[int] = 2
    takes_missing: ClassVar[bool] = False
    dtype: ClassVar[type] = float

    def __post_init__(self) -> None:
        if not isinstance(self.loss, str) or self.loss not in _FAMILIES:
            raise GroupDataError(f"Cannot minimize the loss {self.loss!r}: name 'squared', 'log' or 'poisson'.")
        if isinstance(self.make, Grid) or isinstance(self.seed, Grid):
            raise GroupDataError("Cannot search in `make` or `seed`: fit once for each.")

    @property
    def is_classifier(self) -> bool:
        """Return whether the target is one of two classes."""
        return self.loss == "log"

    def check(self) -> None:
        """Check one configuration.

        Raises:
            GroupDataError: if it cannot be used.
        """
        for name, value in (("batch", self.batch), ("epochs", self.epochs)):
            if not isinstance(value, int) or value < 1:
                raise GroupDataError(f"Cannot use {name}={value!r}: name a whole number that is 1 or greater.")
        if not hasattr(self.optimizer, "step") or not dataclasses.is_dataclass(self.optimizer):
            raise GroupDataError(f"Cannot use optimizer={self.optimizer!r}: use SGD, Adam or AdamW of offbeat.groups.")
        self.optimizer.check()

    def shown(self, coefficients: np.ndarray, features: Sequence[str]) -> dict[str, np.ndarray]:
        """Return nothing: single weights of a net tell users little."""
        return {}

    def width(self, features: int) -> int:
        """Return how many numbers a model is."""
        return self._module(features).width

    def fit(self, task: BucketTask, configs: Sequence[Net]) -> BucketFit:
        """Fit a model for each group of a bucket and each configuration."""
        module = self._module(task.features.shape[1])
        found = BucketFit.empty(len(task.offsets) - 1, len(configs), module.width)
        groups = np.flatnonzero(found.mark_unusable(task, is_classifier=self.is_classifier))
        features, target = (torch.from_numpy(values.astype(np.float32)) for values in (task.features, task.target))
        for alike in _alike(configs) if len(groups) else ():
            first = configs[alike[0]]
            training = NetTraining(module, first.optimizer, self._family, first.batch, features, target)
            models = _models(task, groups, [configs[at] for at in alike])
            trial = _tried(training, models)
            shape = (len(groups), len(alike))
            found.coefficients[np.ix_(groups, alike)] = training.fit(models, trial).reshape(*shape, -1)
            found.steps[np.ix_(groups, alike)] = training.steps(models, trial).reshape(shape)
        self._judge(found, task)
        return found

    def fit_in_rungs(
        self, task: BucketTask, configs: Sequence[Net], budgets: Sequence[int]
    ) -> Generator[BucketFit, np.ndarray, None]:
        """Train to each of the budgets, in epochs; yields all models, and is sent those that continue.

        Args:
            budgets: ascending.
        """
        module = self._module(task.features.shape[1])
        found = BucketFit.empty(len(task.offsets) - 1, len(configs), module.width)
        groups = np.flatnonzero(found.mark_unusable(task, is_classifier=self.is_classifier))
        features, target = (torch.from_numpy(values.astype(np.float32)) for values in (task.features, task.target))
        runs = list[NetRun]()
        for alike in _alike(configs) if len(groups) else ():
            first = configs[alike[0]]
            training = NetTraining(module, first.optimizer, self._family, first.batch, features, target)
            models = _models(task, groups, [configs[at] for at in alike])
            runs += runs_of(
                training, _tried(training, models), models, np.repeat(groups, len(alike)), np.tile(alike, len(groups))
            )
        goes_on = np.ones((len(task.offsets) - 1, len(configs)), np.bool_)
        for before, budget in itertools.pairwise([0, *budgets]):
            for run in runs:
                run.advance(budget - before, goes_on, found)
            self._judge(found, task)
            goes_on = yield found

    def _judge(self, found: BucketFit, task: BucketTask) -> None:
        """Write the losses of all models, and which groups have none."""
        is_usable = found.status == GroupStatus.OK
        found.status[is_usable & np.isnan(found.coefficients[:, :, 0]).all(1)] = GroupStatus.NOT_CONVERGED
        for at in range(found.coefficients.shape[1]):
            margins = self.margins(found.coefficients[:, at], task.features, task.group)
            found.losses[:, at] = task.means(self.loss_of(margins, task.target))

    def epochs_of(self, config: Net) -> int:
        """Return the epochs of a configuration."""
        return config.epochs  # type: ignore[return-value]

    def steps_of(self, config: Net, rows: int) -> int:
        """Return the steps of a configuration over a shard of so many rows, in all epochs."""
        return -(-rows // config.batch) * config.epochs  # type: ignore[operator]

    def visit(self, task: BucketTask, configs: Sequence[Net], state: Tensors, epoch: int, shard: int) -> Tensors:
        """Train configurations of one group for an epoch on the rows of one shard, as a `HoppingModel` does."""
        module, made = self._module(task.features.shape[1]), dict(state)
        features, target = (torch.from_numpy(values.astype(np.float32)) for values in (task.features, task.target))
        for at, alike in enumerate(_alike(configs)):
            those = [configs[place] for place in alike]
            training = NetTraining(module, those[0].optimizer, self._family, those[0].batch, features, target)
            models = _models(task, np.zeros(1, np.int64), those)
            models = dataclasses.replace(models, epochs=np.ones_like(models.epochs))
            came = NetState.of_tensors(state, f"{at}/") if state else None
            went = training.visit(models, training.try_two(models), came, epoch + (shard << 32))
            made |= went.as_tensors(f"{at}/")
        return made

    def visited(self, configs: Sequence[Net], state: Tensors, features: int) -> np.ndarray:
        """Return (configs, width): the models that a state holds; NaN for one that diverged."""
        module = self._module(features)
        made = np.full((len(configs), module.width), np.nan)
        for at, alike in enumerate(_alike(configs)):
            made[alike] = NetState.of_tensors(state, f"{at}/").models(module).numpy()
        made[~np.isfinite(made).all(1)] = np.nan
        return made

    def fit_together(self, tasks: Callable[[], Iterable[BucketTask]], config: Net) -> np.ndarray:
        """Fit one model to the rows of all groups, which have to be in memory together; rows that are not finite are
        left out."""
        return np.asarray(self.fit(joined(tasks()), [config]).coefficients[0, 0])

    def margins(self, coefficients: np.ndarray, features: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return the output for each row, in evaluation mode; NaN where there is no model.

        Args:
            coefficients: (groups, width), as `fit` has made them.
            features: (rows, features).
            groups: (rows,), which of the coefficients.
        """
        module, made = self._module(features.shape[1]), np.full(len(groups), np.nan)
        groups = groups % len(coefficients)
        order = np.argsort(groups, kind="stable")
        counts = np.bincount(groups, minlength=len(coefficients))
        begins = np.cumsum(counts) - counts
        usable = ~np.isnan(coefficients[:, 0]) & (counts > 0)
        for at in similar_sizes(counts, usable, module.width + features.shape[1]):
            places = np.arange(counts[at].max())
            rows = order[begins[at, None] + np.minimum(places, counts[at, None] - 1)]
            is_row = places < counts[at, None]
            outputs = module.predict(coefficients[at], torch.from_numpy(features[rows].astype(np.float32)))
            made[rows[is_row]] = outputs.numpy()[is_row]
        return made

    def means(self, margins: np.ndarray) -> np.ndarray:
        """Return what the margins of rows predict."""
        return np.asarray(self._family.means(torch.from_numpy(margins)))

    def loss_of(self, margins: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the loss of each row."""
        return np.asarray(self._family.losses(torch.tensor(margins), torch.tensor(target)))

    @property
    def _family(self) -> Family:
        return _FAMILIES[self.loss]

    def _module(self, features: int) -> StackedModule:
        return StackedModule(self.make, features, self.seed)


def _tried(training: NetTraining, models: NetModels) -> Trial:
    trial = training.try_two(models)
    if trial.obstacle:
        # Told at this line, Python shows it once, whatever has called and how often.
        warnings.warn(f"Training nets one by one, not together: {trial.obstacle}.", stacklevel=1)
    return trial


def _alike(configs: Sequence[Net]) -> Iterable[np.ndarray]:
    """The places of configurations that differ in the learning rate and in epochs alone, so that steps are shared."""
    found: dict[object, list[int]] = {}
    for at, config in enumerate(configs):
        rest = dataclasses.replace(config.optimizer, lr=0.0)  # type: ignore[type-var]
        found.setdefault((rest, config.batch), []).append(at)
    return [np.array(places) for places in found.values()]


def _models(task: BucketTask, groups: np.ndarray, configs: Sequence[Net]) -> NetModels:
    """The models of groups, each with all configurations."""
    texts = [repr((config.optimizer, config.loss, config.batch, config.epochs, config.seed)) for config in configs]
    digests = np.array([xxh3_64_intdigest(text.encode()) for text in texts], np.uint64)
    each = np.repeat(groups, len(configs))

    def tiled(values: Iterable[object], kind: type) -> np.ndarray:
        return np.tile(np.array(list(values), kind), len(groups))

    return NetModels(
        seeds=mixed(task.hashes[each], np.tile(digests, len(groups))),
        begins=task.offsets[each],
        counts=np.diff(task.offsets)[each],
        epochs=tiled((config.epochs for config in configs), np.int64),
        rates=tiled((config.optimizer.lr for config in configs), np.float64),  # type: ignore[union-attr]
    )
