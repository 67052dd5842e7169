"""The arrays in which everything about the groups of a fit is kept: a million groups are no million objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from offbeat.errors import PeerError
from offbeat.groups.fitting import GroupStatus, no_models
from offbeat.groups.table_messages import text_stream, texts_in

if TYPE_CHECKING:
    import pyarrow as pa

    from offbeat.groups.fitting import GroupModel
    from offbeat.groups.group_index import GroupIndex


_OF_EACH = ("coefficients", "chosen", "losses", "held_losses", "steps", "status", "errors")


@dataclass
class GroupRecords:
    """The record of each group.

    Args:
        coefficients: (groups, width), of the chosen configuration, fitted to all rows; NaN, or None, where there is
            no model.
        chosen: (groups,), the configuration.
        losses, held_losses: (groups, configs), the objective for each row that was fitted, and the mean loss of a row
            that was held out.
        steps: (groups, configs).
        status: (groups,), of `GroupStatus`.
        fallback: (width,), of all rows; NaN, or None, if there is none.
        errors: (groups,), texts, and None where nothing failed.
    """

    coefficients: np.ndarray
    chosen: np.ndarray
    losses: np.ndarray
    held_losses: np.ndarray
    steps: np.ndarray
    status: np.ndarray
    fallback: np.ndarray
    errors: np.ndarray

    @classmethod
    def empty(cls, groups: int, configs: int, width: int, dtype: type = float) -> Self:
        """Return those of groups that are not fitted yet."""
        return cls(
            no_models((groups, width), dtype),
            np.zeros(groups, np.int64),
            np.full((groups, configs), np.nan),
            np.full((groups, configs), np.nan),
            np.zeros((groups, configs), np.int64),
            np.full(groups, GroupStatus.NO_ROWS, np.int8),
            no_models((width,), dtype),
            np.full(groups, None),
        )

    def choose(self, among: np.ndarray | None = None) -> None:
        """Choose the configuration of each group that loses least in the rows that were held out.

        Args:
            among: (groups, configs): whether it can be chosen; None for all.
        """
        can_be = np.isfinite(self.held_losses) if among is None else np.isfinite(self.held_losses) & among
        self.chosen[:] = np.where(can_be, self.held_losses, np.inf).argmin(1)

    def best_of_all(self, rows: np.ndarray) -> int:
        """Return the configuration that loses least in the rows that were held out of all groups.

        Args:
            rows: (groups,), the weight of each.
        """
        is_known = np.isfinite(self.held_losses)
        # Where a configuration failed that worked for others, it may not win by what it lacks.
        losses = np.where(is_known, self.held_losses, np.where(is_known.any(1, keepdims=True), np.inf, 0))
        return int((losses * rows[:, None]).sum(0).argmin())

    def of(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of some groups, by name; texts as an Arrow stream, in bytes."""
        made = {name: getattr(self, name)[numbers] for name in _OF_EACH}
        return {name: text_stream(value) if value.dtype == object else value for name, value in made.items()}

    def put(self, numbers: np.ndarray, part: GroupRecords | Mapping[str, np.ndarray]) -> None:
        """Take in the records of some groups.

        Args:
            numbers: of these groups.
            part: in the same order; or what `of` has returned elsewhere.

        Raises:
            PeerError: if they are not of this fit.
        """
        is_there = numbers.ndim == 1 and numbers.dtype == np.int64
        if not is_there or numbers.min(initial=0) < 0 or numbers.max(initial=-1) >= len(self.status):
            raise PeerError("Cannot take in the records of another worker: they are of groups that are not there.")
        if isinstance(part, Mapping) and (missing := set(_OF_EACH) - part.keys()):
            raise PeerError(f"Cannot take in the records of another worker: they lack {', '.join(sorted(missing))}.")
        for name in _OF_EACH:
            mine, its = getattr(self, name), part[name] if isinstance(part, Mapping) else getattr(part, name)
            if isinstance(part, Mapping) and mine.dtype == object:
                its = texts_in(its, (len(numbers), *mine.shape[1:]))
            if its.shape != (len(numbers), *mine.shape[1:]) or its.dtype != mine.dtype:
                raise PeerError(f"Cannot take in {name} of another worker: {its.dtype} of shape {its.shape}.")
            mine[numbers] = its


@dataclass(frozen=True)
class ParentLevel:
    """The groups by the first columns of the key.

    Args:
        index: of these groups.
        coefficients: (groups, width), their models; NaN, or None, where there is none.
    """

    index: GroupIndex
    coefficients: np.ndarray


@dataclass(frozen=True)
class GroupModels:
    """The models of a table's groups, and what they are of.

    Args:
        model: the spec; with `Grid` values it stands for several configurations.
        features, target: columns of the table.
        classes: the values of the target, of a classification; else None.
        tried: for each hyper-parameter in which configurations differ, its value in each: those that were searched
            first, then those of single groups.
        parents: the models of the levels above, as in `ParentModels`; empty if none are fitted.
    """

    model: GroupModel
    index: GroupIndex
    records: GroupRecords
    features: list[str]
    target: str
    classes: pa.Array | None = None
    tried: dict[str, list[Any]] = field(default_factory=dict)
    parents: tuple[ParentLevel, ...] = ()
