"""Hyper-parameters of single groups: `overrides={("FR", "Lyon"): {"l2": 10}}`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.groups.search import searched, with_value
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.groups.group_index import GroupIndex

_SHARED = ("family", "intercept", "loss", "make", "seed")
"""Fields that say how a model predicts, or what is random: the same in all groups."""


@dataclass(frozen=True)
class GroupOverrides:
    """Hyper-parameters of single groups, in which nothing is searched.

    Args:
        keys: of the groups, each a tuple of the values of all columns.
        fields: of each of them, name and value.
    """

    keys: tuple[tuple[Any, ...], ...] = ()
    fields: tuple[tuple[tuple[str, Any], ...], ...] = ()

    @classmethod
    def of(cls, given: Mapping[Any, Mapping[str, Any]], by: int) -> GroupOverrides:
        """Return those that a user has named.

        Args:
            given: by key; of one column a value alone.
            by: the number of columns.

        Raises:
            GroupDataError: if a key has not as many values.
        """
        keys = tuple(key if isinstance(key, tuple) else (key,) for key in given)
        for key in keys:
            if len(key) != by:
                raise GroupDataError(f"Cannot override the group {key}: a key has {by} values here.")
        return cls(keys, tuple(tuple(fields.items()) for fields in given.values()))

    @property
    def names(self) -> list[str]:
        """Return the fields that are named for any group."""
        return list(dict.fromkeys(name for fields in self.fields for name, _ in fields))

    def configs(self, model: Any) -> list[Any]:
        """Return the configuration of each of the groups.

        Raises:
            GroupDataError: if a field is not there, is shared by all groups, or would still be searched.
        """
        made = []
        for key, fields in zip(self.keys, self.fields, strict=True):
            config = model
            for name, value in fields:
                _check(model, name, key)
                config = with_value(config, name, value)
            if rest := list(searched(config)):
                raise GroupDataError(f"Cannot override the group {key} in part: name {' and '.join(rest)} for it, too.")
            config.check()
            made.append(config)
        return made

    def numbers(self, index: GroupIndex) -> tuple[int, ...]:
        """Return the numbers of the groups.

        Raises:
            GroupDataError: if one is not there.
        """
        made = tuple(map(index.number_of, self.keys))
        if -1 in made:
            raise GroupDataError(f"Cannot override the group {self.keys[made.index(-1)]}: no row has this key.")
        return made


def _check(model: Any, name: str, key: tuple[Any, ...]) -> None:
    spec = model
    for part in name.split("."):
        names = [field.name for field in dataclasses.fields(spec)] if dataclasses.is_dataclass(spec) else []
        if part not in names:
            can_be = ", ".join(one for one in names if one not in _SHARED) or "no field"
            raise GroupDataError(f"Cannot override {name!r} of the group {key}: {type(spec).__name__} has {can_be}.")
        spec = getattr(spec, part)
    if name in _SHARED:
        raise GroupDataError(f"Cannot override {name!r} of the group {key}: it is the same in all groups.")
