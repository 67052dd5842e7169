"""Hyper-parameters to try, written where they belong: `Logistic(l2=Grid(0.1, 1, 10))`."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from offbeat.groups.mixing import mixed
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Sequence

_Spec = TypeVar("_Spec")


class Grid:
    """Values of a hyper-parameter, all of which are tried in each group.

    Args:
        values: at least one.

    >>> Grid(0.1, 1, 10)
    Grid(0.1, 1, 10)
    """

    def __init__(self, *values: Any) -> None:
        if not values:
            raise GroupDataError("Cannot search in an empty Grid(): name the values to try.")
        self.values = values

    def at(self, chance: float) -> Any:
        """Return the value below which a share of all is.

        Args:
            chance: between 0 and 1.
        """
        return self.values[int(chance * len(self.values))]

    def __repr__(self) -> str:
        return f"Grid({', '.join(map(repr, self.values))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)


@dataclass(frozen=True)
class Uniform:
    """A range of a hyper-parameter, in which each value is equally likely; for `RandomSearch`.

    Args:
        low, high: its ends.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not -np.inf < self.low < self.high < np.inf:
            raise GroupDataError(f"Cannot draw from {self!r}: name a number and a greater one.")

    def at(self, chance: float) -> float:
        """Return the value below which a share of all is.

        Args:
            chance: between 0 and 1.
        """
        return self.low + chance * (self.high - self.low)


@dataclass(frozen=True)
class LogUniform:
    """A range of a hyper-parameter, in which each order of magnitude is equally likely; for `RandomSearch`.

    Args:
        low, high: its ends, greater than 0.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < np.inf:
            raise GroupDataError(f"Cannot draw from {self!r}: name a number that is greater than 0, and a greater one.")

    def at(self, chance: float) -> float:
        """Return the value below which a share of all is.

        Args:
            chance: between 0 and 1.
        """
        return float(self.low * (self.high / self.low) ** chance)


Searched = Grid | Uniform | LogUniform
"""The value of a hyper-parameter that is searched."""


@dataclass(frozen=True)
class HoldOut:
    """The part of each group's rows by which a configuration is chosen.

    Args:
        share: of the rows, between 0 and 1; a group of which no row would be left for one of the two takes the first
            configuration.
        by: a column: the rows in which it is greatest are held out, for data in time. None: rows by chance, the same
            ones whatever else is fitted; of a classification, of each class.
        seed: of that chance.
    """

    share: float = 0.2
    by: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise GroupDataError(f"Cannot hold out {self.share} of the rows: name a share between 0 and 1.")


def searched(spec: Any) -> dict[str, Searched]:
    """Return the hyper-parameters of a model spec that are searched, and among what.

    One of a spec within it has a dotted name: `optimizer.lr`. Parameters of another library's object, a mapping
    `settings` of the spec, have their own names.
    """
    found: dict[str, Searched] = {}
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    for name, value in {**fields, **fields.get("settings", {})}.items():
        if isinstance(value, Searched):
            found[name] = value
        elif _is_spec(value):
            found |= {f"{name}.{inner}": values for inner, values in searched(value).items()}
    return found


def configs(spec: _Spec) -> list[_Spec]:
    """Return the specs that a spec with grids stands for, the last grid changing fastest."""
    grids = {name: field.values for name, field in searched(spec).items() if isinstance(field, Grid)}
    made = []
    for values in itertools.product(*grids.values()):
        config = spec
        for name, value in zip(grids, values, strict=True):
            config = with_value(config, name, value)
        made.append(config)
    return made


def values_of(name: str, specs: Sequence[Any]) -> list[Any]:
    """Return the value of a searched hyper-parameter in each configuration; texts where no column can hold them."""
    values = [_value(name, spec) for spec in specs]
    kinds = {_column_type(value) for value in values if value is not None}
    is_text = len(kinds) > 1 or object in kinds
    return [str(value) if is_text and value is not None else value for value in values]


def _column_type(value: Any) -> type:
    if isinstance(value, bool | str):
        return type(value)
    return float if isinstance(value, int | float | np.number) else object


def _value(name: str, spec: Any) -> Any:
    settings = getattr(spec, "settings", {})
    return settings[name] if name in settings else operator.attrgetter(name)(spec)


def with_value(spec: Any, name: str, value: Any) -> Any:
    """Return a spec with another value of a hyper-parameter.

    Args:
        name: dotted if it is one of a spec within it.
    """
    settings = getattr(spec, "settings", {})
    if name in settings:
        return dataclasses.replace(spec, settings={**settings, name: value})
    name, _, rest = name.partition(".")
    return dataclasses.replace(spec, **{name: with_value(getattr(spec, name), rest, value) if rest else value})


def _is_spec(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def held_out(
    hashes: np.ndarray, offsets: np.ndarray, rule: HoldOut, moments: np.ndarray | None, classes: np.ndarray | None
) -> np.ndarray:
    """Return which rows are held out.

    Args:
        hashes: (groups,), of their keys.
        offsets: (groups + 1,), where the rows of each begin and end.
        moments: (rows,), the values of `rule.by`.
        classes: (rows,), of a classification.
    """
    counts = np.diff(offsets)
    group = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(group)) - offsets[group]
    if moments is not None:
        order = np.lexsort((place, moments, group))
        share, part = counts, group
    else:
        chance = mixed(rule.seed, hashes[group], place)
        part = group if classes is None else group * (1 + int(classes.max(initial=0))) + classes
        order = np.lexsort((place, chance, part))
        share = np.bincount(part)
    ordered = part[order]
    begins = np.searchsorted(ordered, ordered)
    rank = np.arange(len(order)) - begins
    size = share[ordered]
    # The last ones; rounded, and at least one row stays.
    held = np.minimum(np.floor(size * rule.share + 0.5), size - 1)
    found = np.zeros(len(order), np.bool_)
    found[order] = rank >= size - held
    return found
