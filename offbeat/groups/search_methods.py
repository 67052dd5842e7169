"""Methods of search: the configurations to try in each group, and the choice of one by rows that are held out.

    GroupedTrainer(Logistic(l2=LogUniform(1e-3, 10)), search=RandomSearch(20), ...)
    GroupedTrainer(Net(make, optimizer=AdamW(lr=Grid(0.1, 0.01, 1e-3))), search=Halving(), ...)
    GroupedTrainer(Logistic(l2=Grid(0.1, 1, 10)), search=Pooled(), ...)

What is tried depends on the spec and the method alone, never on data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from offbeat.groups.mixing import mixed
from offbeat.groups.search import LogUniform, Uniform, configs, searched, with_value
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from offbeat.groups.fitting import BucketFit, BucketTask


class SearchMethod(Protocol):
    """The Protocol of a search, a frozen dataclass."""

    def configs(self, spec: Any) -> list[Any]:
        """Return the configurations to try, the spec itself if it leaves nothing open.

        Raises:
            GroupDataError: if the spec cannot be searched so.
        """


@runtime_checkable
class RungModel(Protocol):
    """The Protocol of a model spec that is trained in epochs, and can be stopped between them."""

    epochs: Any

    def fit_in_rungs(
        self, task: BucketTask, configs: Sequence[Any], budgets: Sequence[int]
    ) -> Generator[BucketFit, np.ndarray, None]:
        """Train to each of the budgets, in epochs; yields all models, and is sent those that continue.

        Args:
            budgets: ascending.
        """


@dataclass(frozen=True)
class GridSearch:
    """Try all combinations of the values of the `Grid`s in a spec. A `SearchMethod`."""

    def configs(self, spec: Any) -> list[Any]:
        """Return them, the last grid changing fastest."""
        for name, value in searched(spec).items():
            if isinstance(value, Uniform | LogUniform):
                raise GroupDataError(f"Cannot try all of {name}={value!r}: use search=RandomSearch(count), or a Grid.")
        return configs(spec)


@dataclass(frozen=True)
class RandomSearch:
    """Try configurations that are drawn: each value from its `Grid`, `Uniform` or `LogUniform`. A `SearchMethod`.

    Args:
        count: how many there are; equal ones are tried once.
        seed: of the draws. The first ones of a larger count are those of a smaller one.
    """

    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise GroupDataError(f"Cannot draw {self.count!r} configurations: name 1 or a greater whole number.")

    def configs(self, spec: Any) -> list[Any]:
        """Return them, in the order in which they are drawn."""
        open_fields = searched(spec)
        if not open_fields:
            raise GroupDataError(f"Cannot draw configurations of {spec!r}: it has no Grid, Uniform or LogUniform.")
        made = []
        for number in range(self.count):
            config = spec
            for place, (name, field) in enumerate(open_fields.items()):
                chance = float(mixed(self.seed, np.array(number), place) >> np.uint64(11)) * 2.0**-53
                config = with_value(config, name, field.at(chance))
            if config not in made:
                made.append(config)
        return made


@dataclass(frozen=True)
class Halving:
    """Train all configurations for a few epochs, and the better ones on: successive halving in each group.

    At each rung a configuration has been trained for `factor` times the epochs of the rung before, and one of `factor`
    goes on, by the loss of held-out rows; the last rung has the epochs of the spec. A `SearchMethod` (Jamieson and
    Talwalkar, AISTATS 2016).

    Args:
        factor: 2 or greater.
        search: what is tried.
    """

    factor: int = 3
    search: GridSearch | RandomSearch = GridSearch()

    def __post_init__(self) -> None:
        if not isinstance(self.factor, int) or self.factor < 2:
            raise GroupDataError(f"Cannot halve by factor={self.factor!r}: name a whole number that is 2 or greater.")

    def configs(self, spec: Any) -> list[Any]:
        """Return what is tried."""
        if not isinstance(spec, RungModel):
            raise GroupDataError(
                f"Cannot search {type(spec).__name__} by Halving: it is not trained in epochs. Use GridSearch()."
            )
        if "epochs" in searched(spec):
            raise GroupDataError("Cannot search `epochs` by Halving, which stops by epochs: name one number.")
        return self.search.configs(spec)

    def budgets(self, count: int, epochs: int) -> list[int]:
        """Return the epochs after which some of so many configurations are stopped, and those of the spec.

        >>> Halving(3).budgets(9, 27)
        [3, 9, 27]
        """
        rungs = math.ceil(math.log(count, self.factor) - 1e-9)
        return sorted({max(1, round(epochs / self.factor**left)) for left in range(rungs + 1)})

    def survivors(self, losses: np.ndarray, is_alive: np.ndarray) -> np.ndarray:
        """Return which configurations go on: of each group one of `factor`, and at least one.

        Args:
            losses: (groups, configs), of held-out rows; NaN is worst.
            is_alive: (groups, configs): whether it has come so far.
        """
        left = -(-int(is_alive[0].sum()) // self.factor) if len(is_alive) else 0
        ranked = np.argsort(
            np.where(np.isfinite(losses) & is_alive, losses, np.where(is_alive, 1e300, np.inf)), 1, "stable"
        )
        made = np.zeros_like(is_alive)
        np.put_along_axis(made, ranked[:, :left], True, 1)
        return made


@dataclass(frozen=True)
class Pooled:
    """Choose one configuration for all groups, by the loss of all rows that are held out. A `SearchMethod`.

    Losses of a few held-out rows are noise: where groups are small and alike, all of them together choose better.

    Args:
        search: what is tried.
    """

    search: GridSearch | RandomSearch = GridSearch()

    def configs(self, spec: Any) -> list[Any]:
        """Return what is tried."""
        return self.search.configs(spec)
