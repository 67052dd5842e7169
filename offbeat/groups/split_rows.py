"""The rows of X of a scikit-learn estimator, parted into keys of groups and features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from sklearn.utils import _safe_indexing, check_array

from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sklearn.base import BaseEstimator


@dataclass(frozen=True)
class SplitRows:
    """The rows of X.

    Args:
        features: without the columns of keys, as they were given.
        numbers: (rows, features), the same as finite numbers; None where that was not checked.
        keys: a column for each that `groups` names.
    """

    features: Any
    numbers: np.ndarray | None
    keys: pa.Table

    @classmethod
    def of(cls, X: Any, places: Sequence[int], owner: BaseEstimator, *, is_checked: bool) -> SplitRows:
        """Part X.

        Args:
            places: of the keys' columns.
            owner: the estimator, for errors.
            is_checked: whether features have to be finite numbers.

        Raises:
            ValueError: if they are not.
        """
        rest = [place for place in range(X.shape[1]) if place not in places]
        features = _safe_indexing(X, rest, axis=1) if places else X
        numbers = None
        if is_checked and not rest:
            numbers = np.zeros((X.shape[0], 0))
        elif is_checked:
            numbers = check_array(features, dtype="numeric", estimator=owner, input_name="X")
            features = features if hasattr(features, "columns") else numbers
        names = [str(number) for number in range(len(places))]
        columns = [_key_column(_safe_indexing(X, place, axis=1)) for place in places]
        return cls(features, numbers, pa.table(columns, names=names))

    def __len__(self) -> int:
        return int(self.features.shape[0])

    def take(self, which: np.ndarray) -> SplitRows:
        """Return some of the rows."""
        numbers = None if self.numbers is None else self.numbers[which]
        return SplitRows(_safe_indexing(self.features, which), numbers, self.keys.take(pa.array(which)))


def place_of(X: Any, name: int | str) -> int:
    """Return the place of a column.

    Args:
        name: its name, or its place.

    Raises:
        GroupDataError: if there is no such column.
    """
    columns = list(X.columns) if hasattr(X, "columns") else None
    if columns is not None and name in columns:
        return int(columns.index(name))
    if not isinstance(name, int | np.integer) or not -X.shape[1] <= name < X.shape[1]:
        known = f"columns are {', '.join(map(str, columns))}" if columns else f"there are {X.shape[1]} without names"
        raise GroupDataError(f"Cannot group by {name!r}: {known}.")
    return int(name % X.shape[1])


def _key_column(values: Any) -> pa.Array:
    try:
        found = values.to_arrow() if hasattr(values, "to_arrow") else pa.array(values, from_pandas=True)  # of polars
    except pa.ArrowException as error:
        raise GroupDataError(f"Cannot group by a column of values of several types: {error}") from error
    return found.dictionary_decode() if pa.types.is_dictionary(found.type) else found
