"""Nets of split groups: models hop from shard to shard, with all that they are trained by.

A configuration of a group visits each shard once in an epoch, and is at one of them at a time: its training is plain
SGD over the shards' rows, in the order of its visits (Li and Kumar, PVLDB 14(11), 2021; after Cerebro's model hopper).
Configurations of a group that travel together are a block. After the last epoch each visits the shards once more, and
its losses are summed, by which one is chosen.

Without I/O: `HopCourse` says which block visits which shard next, and is told what has been done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from offbeat.groups.unit_scheduler import TrainingUnit, UnitScheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.groups.carrier import Tensors
    from offbeat.groups.fitting import BucketTask


@runtime_checkable
class HoppingModel(Protocol):
    """The Protocol of a model spec that is trained by one batch of rows after another."""

    def epochs_of(self, config: Any) -> int:
        """Return the epochs of a configuration."""

    def steps_of(self, config: Any, rows: int) -> int:
        """Return the steps of a configuration over a shard of so many rows, in all epochs."""

    def visit(self, task: BucketTask, configs: Sequence[Any], state: Tensors, epoch: int, shard: int) -> Tensors:
        """Train configurations of one group for an epoch on the rows of one shard.

        Args:
            task: of the one group, with these rows.
            configs: the same at each visit.
            state: with which they have come; empty at first.
            epoch, shard: their numbers.

        Returns:
            The state with which they go.
        """

    def visited(self, configs: Sequence[Any], state: Tensors, features: int) -> np.ndarray:
        """Return (configs, width): the models that a state holds; NaN for one that diverged."""


def blocks_of(model: HoppingModel, configs: Sequence[Any], shards: int) -> list[list[int]]:
    """Return the places of configurations that travel together: of equally many epochs, in as many blocks as shards.

    >>> from offbeat.groups import Grid, Net
    >>> from offbeat.groups.search import configs
    >>> net = Net(None, batch=Grid(1, 2, 3), epochs=Grid(5, 6))
    >>> blocks_of(net, configs(net), 4)
    [[0, 2], [4], [1, 3], [5]]
    """
    found: dict[int, list[int]] = {}
    for at, config in enumerate(configs):
        found.setdefault(model.epochs_of(config), []).append(at)
    parts = -(-shards // len(found))
    cuts = [np.array_split(places, min(parts, len(places))) for places in found.values()]
    return [block.tolist() for those in cuts for block in those]


@dataclass(frozen=True)
class HopGroup:
    """A split group.

    Args:
        holders: the worker of each shard.
        rows: of each shard.
        blocks: places of configurations that travel together.
        epochs: of each block.
    """

    holders: tuple[int, ...]
    rows: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    epochs: tuple[int, ...]


@dataclass(frozen=True)
class Visit:
    """A visit of a block to a shard.

    Args:
        group, block, shard: their numbers.
        epoch: its number; -1 for the visit after the last one, at which nothing is trained.
        before: how many visits the block has made: its state is that of the last of them.
    """

    group: int
    block: int
    shard: int
    epoch: int
    before: int


@dataclass
class HopCourse:
    """The visits of all blocks: epoch by epoch, in each by the longest remaining processing time.

    Args:
        groups: by number.

    Attributes:
        visits: by group and block, the shards visited in each epoch, and after the last.
    """

    groups: Mapping[int, HopGroup]
    visits: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._epoch, self._last = 0, max((max(one.epochs) for one in self.groups.values()), default=0)
        self._running: dict[int, Visit] = {}
        self._seconds: dict[TrainingUnit, float] = {}
        self._made: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int, int], int] = {}
        for group, one in self.groups.items():
            self.visits |= {(group, block): [] for block in range(len(one.blocks))}
        self._scheduler = self._of_epoch()

    @property
    def is_done(self) -> bool:
        """Whether all visits were made."""
        return self._epoch > self._last

    def next(self, worker: int) -> Visit | None:
        """Give a free worker its next visit; None if it has to wait, or there is none left."""
        if self.is_done or (unit := self._scheduler.next(worker)) is None:
            return None
        self._running[worker] = visit = self._visit(unit)
        return visit

    def ahead(self, worker: int) -> Visit | None:
        """Return a later visit of a worker whose state can be fetched while it makes one."""
        unit = None if self.is_done else self._scheduler.ahead(worker)
        return None if unit is None else self._visit(unit)

    def done(self, worker: int, seconds: float) -> None:
        """A worker has made its visit.

        Args:
            seconds: that it took, by which later ones are planned.

        Raises:
            ValueError: if it makes none.
        """
        if (visit := self._running.pop(worker, None)) is None:
            raise ValueError(f"Worker {worker} makes no visit.")
        unit, model = TrainingUnit(visit.group, visit.block, visit.shard), (visit.group, visit.block)
        self._scheduler.done(worker, unit)
        self._seconds[unit] = seconds
        self._made[model] = visit.before + 1
        self._places[model] = worker
        while not self.is_done and self._scheduler.is_done:
            for model, shards in self._scheduler.visits.items():
                self.visits[model].append(shards)
            self._epoch += 1
            if not self.is_done:
                self._scheduler = self._of_epoch()

    def _visit(self, unit: TrainingUnit) -> Visit:
        epoch = -1 if self._epoch == self._last else self._epoch
        return Visit(unit.group, unit.config, unit.shard, epoch, self._made.get(unit.model, 0))

    def _of_epoch(self) -> UnitScheduler:
        costs: dict[TrainingUnit, float] = {}
        holders: dict[tuple[int, int], int] = {}
        for number, group in self.groups.items():
            holders |= {(number, shard): holder for shard, holder in enumerate(group.holders)}
            for block, places in enumerate(group.blocks):
                if group.epochs[block] > self._epoch or self._epoch == self._last:
                    for shard, rows in enumerate(group.rows):
                        unit = TrainingUnit(number, block, shard)
                        costs[unit] = self._seconds.get(unit, float(rows * len(places)))
        return UnitScheduler(costs, holders, self._places)


def replay(
    model: HoppingModel,
    shards: Sequence[BucketTask],
    configs: Sequence[Any],
    visits: Sequence[Sequence[int]],
) -> Tensors:
    """Return the state of a block after visits, made again in one process: the same bits.

    Args:
        shards: of a group, the rows that models are trained on.
        configs: of the block.
        visits: as `HopCourse.visits` has them, without those after the last epoch.
    """
    state: Tensors = {}
    for epoch, order in enumerate(visits):
        for shard in order:
            state = model.visit(shards[shard], configs, state, epoch, shard)
    return state
