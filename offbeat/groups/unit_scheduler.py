"""The order in which units of one epoch are trained: a configuration of a group on one shard of its rows.

A configuration of a split group visits each shard once, one at a time; a worker trains one unit at a time. Which unit a
free worker takes is the rule of the longest remaining processing time: one of the configuration that has most left to
do. Without I/O and without time: whoever calls says who is free, what is done, and who is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

Model = tuple[int, int]
"""A group and a configuration of it."""
ShardKey = tuple[int, int]
"""A group and the number of a shard of it."""


@dataclass(frozen=True, order=True)
class TrainingUnit:
    """A configuration of a group on one of its shards.

    Args:
        group, config, shard: their numbers; what is whole, or many small groups together, is a group of one shard here.
    """

    group: int
    config: int
    shard: int = 0

    @property
    def model(self) -> Model:
        """Return what no two workers train at the same time."""
        return self.group, self.config


class UnitScheduler:
    """The units of one epoch.

    Args:
        costs: of each unit, in any measure of time.
        holders: by shard, the worker that has its rows.
        places: by model, the worker that has its state now: it begins there if it can, for nothing is sent then.

    Attributes:
        visits: by model, the shards that it has visited, in order: what a replay repeats.
    """

    def __init__(
        self,
        costs: Mapping[TrainingUnit, float],
        holders: Mapping[ShardKey, int],
        places: Mapping[Model, int] | None = None,
    ) -> None:
        self._costs, self._holders, self._places = dict(costs), dict(holders), dict(places or {})
        self._waiting: dict[int, set[TrainingUnit]] = {}
        self._running: dict[int, TrainingUnit] = {}
        self._busy: set[Model] = set()
        self._left: dict[Model, float] = {}
        for unit, cost in self._costs.items():
            self._waiting.setdefault(self._worker(unit), set()).add(unit)
            self._left[unit.model] = self._left.get(unit.model, 0.0) + cost
        self.visits: dict[Model, list[int]] = {model: [] for model in self._left}

    @property
    def is_done(self) -> bool:
        """Whether all units are."""
        return not self._running and not any(self._waiting.values())

    def next(self, worker: int) -> TrainingUnit | None:
        """Give a free worker its next unit; None if it has to wait for another worker, or has none left.

        Raises:
            ValueError: if the worker is not free.
        """
        if worker in self._running:
            raise ValueError(f"Worker {worker} trains {self._running[worker]} already.")
        if (unit := self.after(worker)) is not None:
            self._waiting[worker].discard(unit)
            self._running[worker] = unit
            self._busy.add(unit.model)
        return unit

    def after(self, worker: int) -> TrainingUnit | None:
        """Return the unit that a worker would take now."""
        free = (unit for unit in self._waiting.get(worker, ()) if unit.model not in self._busy)
        return max(free, key=self._worth, default=None)

    def ahead(self, worker: int) -> TrainingUnit | None:
        """Return a unit whose state a worker can fetch while it trains another one, for no other worker will change it.

        What others may visit first is not fetched: it would be fetched again.
        """
        unit = self.after(worker)
        if unit is not None:
            for other, waiting in self._waiting.items():
                if other != worker and any(one.model == unit.model for one in waiting):
                    return None
        return unit

    def done(self, worker: int, unit: TrainingUnit) -> None:
        """A worker has trained a unit; the state of its model is there.

        Raises:
            ValueError: if it did not train that.
        """
        if self._running.get(worker) != unit:
            raise ValueError(f"Worker {worker} does not train {unit}.")
        del self._running[worker]
        self._busy.discard(unit.model)
        self._left[unit.model] -= self._costs[unit]
        self._places[unit.model] = worker
        self.visits[unit.model].append(unit.shard)

    def shards_of(self, worker: int) -> list[ShardKey]:
        """Return the shards that a worker holds."""
        return sorted(key for key, holder in self._holders.items() if holder == worker)

    def lost(self, worker: int, heirs: Mapping[ShardKey, int]) -> None:
        """A worker is gone: what it trained is not done, and others hold its shards.

        Args:
            heirs: for each shard that it held, the worker that holds it from now on.

        Raises:
            ValueError: if one of them has no heir.
        """
        held = self.shards_of(worker)
        if missing := [key for key in held if heirs.get(key, worker) == worker]:
            raise ValueError(f"Nobody takes shard {missing[0][1]} of group {missing[0][0]} of worker {worker}.")
        left = self._waiting.pop(worker, set())
        if (running := self._running.pop(worker, None)) is not None:
            self._busy.discard(running.model)
            left.add(running)
        self._holders.update({key: heirs[key] for key in held})
        for unit in left:
            self._waiting.setdefault(self._worker(unit), set()).add(unit)

    def stop(self, model: Model) -> None:
        """Train a configuration no more: it has ended early. A unit of it that runs ends as usual."""
        for units in self._waiting.values():
            for unit in [unit for unit in units if unit.model == model]:
                units.discard(unit)
                self._left[model] -= self._costs[unit]

    def _worker(self, unit: TrainingUnit) -> int:
        return self._holders[unit.group, unit.shard]

    def _worth(self, unit: TrainingUnit) -> tuple[bool, float, float, int, int]:
        is_here = self._places.get(unit.model) == self._worker(unit)  # as its first one in an epoch alone
        return is_here, self._left[unit.model], self._costs[unit], -unit.group, -unit.config
