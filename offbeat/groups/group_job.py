"""The work of a fit that is the same wherever it is done: from the rows of a bucket to the records of its groups."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from offbeat.groups.buckets import GroupRows, numbers_in
from offbeat.groups.fitting import BucketTask, GroupStatus, MixedModel, ShrunkModel, no_model
from offbeat.groups.hopping import HoppingModel
from offbeat.groups.mixing import mixed
from offbeat.groups.overrides import GroupOverrides
from offbeat.groups.partition import GroupPartition, distribute
from offbeat.groups.records import GroupRecords
from offbeat.groups.search import HoldOut, held_out, searched, values_of
from offbeat.groups.search_methods import Halving, RungModel
from offbeat.groups.summing import Summand, SummingModel, greatest
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from offbeat.groups.fitting import BucketFit, GroupModel
    from offbeat.groups.group_index import GroupIndex
    from offbeat.groups.search_methods import SearchMethod
    from offbeat.groups.summing import Summing


@dataclass(frozen=True)
class Small:
    """The treatment of groups that have few rows.

    Args:
        min_rows: below which a group is small.
        fallback: what predicts for it, for other groups without a model, and for keys that are not known. "skip":
            nothing; "global": one model of all rows; "parent": the model of all rows of the key without its last value,
            as of a country for a store, then that one's parent, then the model of all rows; "raise": `fit` refuses the
            table. With one column in `by`, "parent" means "global". It is not the default: for each column of `by` but
            one, it reads the table and fits all rows once more, and has all rows of a parent in memory.
    """

    min_rows: int = 1
    fallback: str = "skip"

    def __post_init__(self) -> None:
        if self.fallback not in ("global", "parent", "skip", "raise"):
            raise GroupDataError(f"Cannot fall back to {self.fallback!r}: name 'skip', 'global', 'parent' or 'raise'.")

    @property
    def has_global(self) -> bool:
        """Return whether there is a model of all rows."""
        return self.fallback in ("global", "parent")

    def check(self, index: GroupIndex) -> None:
        """Check the sizes of groups.

        Raises:
            GroupDataError: if one is small, and that is to be refused.
        """
        is_small = index.rows < self.min_rows
        if self.fallback == "raise" and is_small.any():
            first = index.keys.slice(int(np.argmax(is_small)), 1).to_pylist()[0]
            raise GroupDataError(f"Cannot fit the group {first}: it has less than {self.min_rows} rows.")


@dataclass(frozen=True)
class GroupJob:
    """A fit of groups: what is fitted to which columns, and how.

    Args:
        model: the spec, and `configs` the configurations that it stands for.
        by, features, target: columns.
        classes: the values of the target, of a classification; else None.
        schema: of the columns that are needed.
        fixed: the numbers of the groups that are overridden.
        choice: the configuration of all groups, if one is chosen already.
        parents: (groups, width), the models toward which each group is shrunk; None if nothing is.
        leaves_out: whether rows that the model cannot compute with are left out; else their groups have no model.
    """

    model: GroupModel
    configs: Sequence[Any]
    by: Sequence[str]
    features: Sequence[str]
    target: str
    classes: pa.Array | None
    schema: pa.Schema
    validation: HoldOut
    small: Small
    search: SearchMethod
    overrides: GroupOverrides
    fixed: tuple[int, ...] = ()
    choice: int | None = None
    parents: np.ndarray | None = None
    leaves_out: bool = False

    @property
    def width(self) -> int:
        """Return how many numbers a model is."""
        return self.model.width(len(self.features))

    def records(self, groups: int) -> GroupRecords:
        """Return the records of groups that are not fitted yet."""
        return GroupRecords.empty(groups, len(self.configs), self.width, self.model.dtype)

    @property
    def tried(self) -> dict[str, list[Any]]:
        """Return the value of each hyper-parameter that is open in each configuration, of single groups at last."""
        names = dict.fromkeys([*searched(self.model), *self.overrides.names])
        every = [*self.configs, *self.overrides.configs(self.model)]
        return {name: values_of(name, every) for name in names}

    def task(self, rows: GroupRows, hashes: np.ndarray) -> BucketTask:
        """Return the rows of a bucket as numbers.

        Args:
            hashes: (groups,), of the keys of these groups.
        """
        if self.classes is None:
            target = numbers_in(rows.table[self.target], self.target)
        else:
            places = pc.index_in(rows.table[self.target], value_set=self.classes)
            target = np.array(places.cast(pa.float64()).to_numpy(), np.float64)
        classes = 0 if self.classes is None else len(self.classes)
        return BucketTask(rows.matrix(self.features), target, rows.offsets, hashes, classes)

    def checked(self, index: GroupIndex) -> GroupJob:
        """Return the job for the groups of a table.

        Raises:
            GroupDataError: if one is small, and that is to be refused, or one that is overridden is not there.
        """
        self.small.check(index)
        return replace(self, fixed=self.overrides.numbers(index))

    @property
    def parent_columns(self) -> range:
        """Return by how many columns of the key there are parents, for each level of them."""
        return range(1, len(self.by) if self.small.fallback == "parent" else 1)

    def of_parents(self, columns: int) -> GroupJob:
        """Return the job of the groups by the first columns of the key."""
        return replace(self, by=self.by[:columns], overrides=GroupOverrides(), fixed=(), choice=None, leaves_out=True)

    @property
    def is_shrunk(self) -> bool:
        """Return whether groups are shrunk toward their parents."""
        return any(is_shrunk(config) for config in [*self.configs, *self.overrides.configs(self.model)])

    def of(self, numbers: np.ndarray) -> GroupJob:
        """Return the job of some of the groups."""
        return self if self.parents is None else replace(self, parents=self.parents[numbers])

    def fit(self, rows: GroupRows, hashes: np.ndarray) -> GroupRecords:
        """Fit the groups of a bucket, and return their records, in the order of `rows.numbers`.

        Args:
            hashes: (groups,), of the keys of these groups.
        """
        rows = self._usable(rows, hashes)
        task = replace(self.task(rows, hashes), parents=self.parents)
        records = self.records(len(rows.numbers))
        if self.choice is not None:
            records.chosen[:] = self.choice
        elif len(self.configs) > 1:
            found = self._try(rows, task, records)
            if self.model.dtype is float:  # the model of most rows is close to that of all
                task = replace(task, start=found.coefficients[np.arange(len(rows.numbers)), records.chosen])
        self._fit_chosen(rows, task, records)
        return records

    def try_all(self, rows: GroupRows, hashes: np.ndarray) -> GroupRecords:
        """Fit all configurations to the rows that are not held out, and return records without models."""
        records = self.records(len(rows.numbers))
        if len(self.configs) > 1:
            rows = self._usable(rows, hashes)
            self._try(rows, replace(self.task(rows, hashes), parents=self.parents), records)
        return records

    def _usable(self, rows: GroupRows, hashes: np.ndarray) -> GroupRows:
        """The rows that are fitted."""
        if not self.leaves_out:
            return rows
        is_usable = self.task(rows, hashes).usable(takes_missing=self.model.takes_missing)
        kept = np.append(0, np.cumsum(is_usable))
        return GroupRows(rows.numbers, kept[rows.offsets], rows.table.filter(pa.array(is_usable)))

    def _try(self, rows: GroupRows, task: BucketTask, records: GroupRecords) -> BucketFit:
        part, rest = self.parted(rows, task)
        if isinstance(self.search, Halving):
            found = self._halve(self.search, part, rest, records)
        else:
            found = self.model.fit(part, self.configs)
            for at, losses in enumerate(self.losses(rest, found.coefficients)):
                records.held_losses[:, at] = rest.means(losses)
            records.choose()
        records.losses[:], records.steps[:] = found.losses, found.steps
        return found

    def parted(self, rows: GroupRows, task: BucketTask) -> tuple[BucketTask, BucketTask]:
        """Return the rows that configurations are fitted to, and those that are held out."""
        held = held_out(task.hashes, task.offsets, self.validation, self._moments(rows), self._strata(task))
        return task.rows(~held), task.rows(held)

    def _halve(self, search: Halving, part: BucketTask, rest: BucketTask, records: GroupRecords) -> BucketFit:
        """Train to each rung, and choose among the configurations that have come to the last one."""
        assert isinstance(self.model, RungModel)
        budgets = search.budgets(len(self.configs), self.model.epochs)
        training = self.model.fit_in_rungs(part, self.configs, budgets)
        found, is_alive = next(training), np.ones(records.losses.shape, np.bool_)
        for rung in range(len(budgets)):
            for at, losses in enumerate(self.losses(rest, found.coefficients)):
                records.held_losses[is_alive[:, at], at] = rest.means(losses)[is_alive[:, at]]
            if rung < len(budgets) - 1:
                is_alive = search.survivors(records.held_losses, is_alive)
                found = training.send(is_alive)
        records.choose(is_alive)
        return found

    def _fit_chosen(self, rows: GroupRows, task: BucketTask, records: GroupRecords) -> None:
        configs = [*self.configs, *self.overrides.configs(self.model)]
        for place, number in enumerate(self.fixed):
            records.chosen[rows.numbers == number] = len(self.configs) + place
        if isinstance(self.model, MixedModel) and not self.fixed and len(configs) > 1:
            final = self.model.fit_each(task, [configs[at] for at in records.chosen])
            records.coefficients[:], records.status[:] = final.coefficients[:, 0], final.status
            configs = []
        for at, config in enumerate(configs):
            which = np.flatnonzero(records.chosen == at)
            if not len(which):
                continue
            final = config.fit(task.groups(which), [config])
            records.coefficients[which] = final.coefficients[:, 0]
            records.status[which], records.errors[which] = final.status, final.errors
            if len(self.configs) == 1:
                records.losses[which], records.steps[which] = final.losses, final.steps
        is_small = np.diff(rows.offsets) < self.small.min_rows
        records.status[is_small] = GroupStatus.TOO_SMALL
        records.coefficients[is_small] = no_model(self.model.dtype)

    def distribute(self, rows: np.ndarray, groups: np.ndarray, workers: int) -> GroupPartition:
        """Distribute buckets to workers; one of a single group may be split.

        Args:
            rows, groups: (buckets,), how many each has.
        """
        hops = isinstance(self.model, HoppingModel)
        whole = (groups > 1) | (not hops and not isinstance(self.model, SummingModel))
        # Parts of a sum are computed at the same time, whereas a configuration is at one shard at a time.
        return distribute(rows, workers, len(self.configs) if hops else workers, whole)

    def fit_shard(self, rows: GroupRows, hashes: np.ndarray, place: int, places: int) -> Summing[GroupRecords]:
        """Fit a group of which several places have rows; for a spec that is a `SummingModel`.

        Args:
            rows: that are here, of this one group.
            hashes: (1,), of its key.
            place, places: of this one, and how many there are.
        """
        assert isinstance(self.model, SummingModel)
        task, records = self.task(rows, hashes), self.records(1)
        moments = self._moments(rows) if len(self.configs) > 1 else None
        del rows  # they are as large as the task
        if len(self.configs) > 1:
            held = yield from self._held_of_shard(moments, task, place, places)
            yield from self._try_shard(task.rows(~held), task.rows(held), records)
        config = self.configs[int(records.chosen[0])]
        final = yield from self.model.fit_summed(functools.partial(list, [task]), [config])
        records.coefficients[:], records.status[:] = final.coefficients[:, 0], final.status
        records.errors[:] = final.errors
        if len(self.configs) == 1:
            records.losses[:], records.steps[:] = final.losses, final.steps
        return records

    def _try_shard(self, part: BucketTask, rest: BucketTask, records: GroupRecords) -> Summing[None]:
        """Fit all configurations to the rows that are not held out, and choose by the others, of all places."""
        assert isinstance(self.model, SummingModel)
        found = yield from self.model.fit_summed(functools.partial(list, [part]), self.configs)
        mine = [len(rest.target), *(float(one.sum()) for one in self.losses(rest, found.coefficients))]
        count, *sums = (yield Summand(torch.tensor(mine, dtype=torch.float64))).tolist()
        records.losses[:], records.steps[:] = found.losses, found.steps
        records.held_losses[0] = np.array(sums) / max(1.0, count)
        records.choose()

    def prepare_shard(
        self, rows: GroupRows, hashes: np.ndarray, place: int, places: int
    ) -> Summing[tuple[BucketTask, BucketTask, GroupStatus]]:
        """Return the rows of a shard that models are trained on, those that are held out, and whether they can be.

        Args:
            rows: that are here, of one group of which several places have rows.
            hashes: (1,), of its key.
            place, places: of this one, and how many there are.
        """
        task = self.task(rows, hashes)
        facts = torch.tensor([len(task.target), (~task.is_finite).sum(), task.target.sum()], dtype=torch.float64)
        count, unusable, ones = (yield Summand(facts)).tolist()
        held = np.zeros(len(task.target), np.bool_)
        if len(self.configs) > 1:
            held = yield from self._held_of_shard(self._moments(rows), task, place, places)
        status = GroupStatus.OK
        if unusable:
            status = GroupStatus.NOT_FINITE
        elif self.model.is_classifier and ones in (0, count):
            status = GroupStatus.ONE_CLASS
        return task.rows(~held), task.rows(held), status

    def _held_of_shard(
        self, moments: np.ndarray | None, task: BucketTask, place: int, places: int
    ) -> Summing[np.ndarray]:
        """The rows of a shard that are held out: by chance in each shard, and by a column in all of them together."""
        if moments is None:
            hashes = mixed(task.hashes, place)
            return held_out(hashes, task.offsets, self.validation, None, self._strata(task))
        total = int((yield Summand(torch.tensor([len(moments)]))))
        count = min(int(total * self.validation.share + 0.5), total - 1)
        return (yield from greatest(moments, count, place, places))

    def pooled(self, records: GroupRecords, index: GroupIndex) -> Any:
        """Return the configuration that is best over all groups, each with the weight of its rows."""
        return self.configs[records.best_of_all(index.rows)]

    def losses(self, task: BucketTask, coefficients: np.ndarray) -> Iterator[np.ndarray]:
        """The loss of each row by the model of each configuration.

        Args:
            coefficients: (groups, configs, width).
        """
        for at in range(coefficients.shape[1]):
            margins = self.model.margins(coefficients[:, at], task.features, task.group)
            yield self.model.loss_of(margins, task.target)

    def _moments(self, rows: GroupRows) -> np.ndarray | None:
        if self.validation.by is None:
            return None
        column = rows.table[self.validation.by]
        if pa.types.is_temporal(column.type):
            column = column.cast(pa.timestamp("us")).cast(pa.int64())
        return numbers_in(column, self.validation.by)

    def _strata(self, task: BucketTask) -> np.ndarray | None:
        return np.nan_to_num(task.target).astype(np.int64) if self.model.is_classifier else None


def is_shrunk(config: Any) -> bool:
    """Return whether a configuration shrinks groups toward their parents."""
    return isinstance(config, ShrunkModel) and bool(config.shrink)


class JobMaker(Protocol):
    """The Protocol of what makes the work of a fit of the columns that a table has."""

    target: str

    def classes(self, parts: Iterable[pa.Table], schema: pa.Schema) -> pa.Array | None:
        """Return the distinct values of the target, or those found until there were too many; None for a regression.

        Args:
            parts: of the table, with the column of the target.
        """

    def job(self, schema: pa.Schema, values: pa.Array | None) -> GroupJob:
        """Return the work with a table of these columns.

        Args:
            values: the distinct values of the target, of a classification; else None.

        Raises:
            GroupDataError: if a column is missing or cannot be used, or there are not two classes.
        """
