"""The parents of groups, and their models: that of a country predicts for its stores without a model of their own.

The parent of a key is the key without its last value, ("FR",) of ("FR", "Lyon"), and the parent of that is all rows. A
parent is fitted as any group, to the rows of all its children. Rows that no model can compute with are left out, as
they are for the model of all rows, so that a missing value of one child takes no model from the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.groups.fitting import has_model
from offbeat.groups.summing import SummingModel, run_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pyarrow as pa

    from offbeat.groups.buckets import GroupRows
    from offbeat.groups.fitting import BucketTask
    from offbeat.groups.group_job import GroupJob
    from offbeat.groups.records import ParentLevel


@dataclass(frozen=True)
class ParentModels:
    """The models of all levels above the groups.

    Args:
        levels: by one column of the key, by two, and so on; empty if none is fitted.
        of_all: (width,), the model of all rows; NaN, or None, if there is none.
    """

    levels: tuple[ParentLevel, ...]
    of_all: np.ndarray

    @cached_property
    def stacked(self) -> np.ndarray:
        """Return (models, width): those of each level in turn, and the one of all rows last."""
        return np.concatenate([*(level.coefficients for level in self.levels), self.of_all[None]])

    @cached_property
    def ends(self) -> np.ndarray:
        """Return (levels,): where the models of each level end in `stacked`."""
        return np.cumsum([len(level.index) for level in self.levels], dtype=np.int64)

    def places_of(self, keys: pa.Table) -> np.ndarray:
        """Return (rows,): the place in `stacked` of the nearest parent that has a model; else that of all rows.

        Args:
            keys: with the columns of the keys.
        """
        made = np.full(keys.num_rows, len(self.stacked) - 1)
        for level, end in zip(self.levels, self.ends.tolist(), strict=True):
            numbers = level.index.numbers_of(keys)
            is_there = np.append(has_model(level.coefficients), False)[numbers]
            made[is_there] = end - len(level.index) + numbers[is_there]
        return made

    @property
    def words(self) -> list[str]:
        """Return the word for a model of each level, and for that of all rows."""
        names = [f"parent {level.index.by[-1]}" if len(self.levels) > 1 else "parent" for level in self.levels]
        return [*names, "global" if has_model(self.of_all) else "none"]


def config_of_all(job: GroupJob, tasks: Callable[[], Iterable[tuple[GroupRows, BucketTask]]]) -> Any:
    """Return the configuration of the model of all rows, for a fit in which groups are shrunk.

    Other fits take the one that does best in the groups; here they are fitted only after all that is above them.

    Args:
        tasks: the rows of each bucket, and the same as numbers.
    """
    configs = list(dict.fromkeys(replace(config, shrink=0.0) for config in job.configs))
    if len(configs) == 1:
        return configs[0]
    model = job.model
    assert isinstance(model, SummingModel)
    found = run_alone(model.fit_summed(lambda: (job.parted(*one)[0].finite() for one in tasks()), configs))
    losses = np.zeros(len(configs))
    for one in tasks():
        rest = job.parted(*one)[1].finite()
        models = found.coefficients.repeat(len(rest.offsets) - 1, 0)
        losses += [float(values.sum()) for values in job.losses(rest, models)]
    return configs[int(np.where(np.isnan(losses), np.inf, losses).argmin())]
