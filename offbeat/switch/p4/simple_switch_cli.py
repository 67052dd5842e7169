"""Rules as commands of simple_switch_CLI, which BMv2 comes with.

Its commands name entries and multicast nodes by handles, which a switch gives out by itself: the lowest that is free,
and with each use of it 2^24 more. So the commands hold for a switch that has nothing in these tables yet.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from offbeat.switch.p4.rules import MulticastGroup, TableEntry, TableRule, Value

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Handles:
    """The handles that a table of an empty switch gives out.

    Args:
        counts_uses: whether a handle says how often it was given out before.
    """

    def __init__(self, *, counts_uses: bool) -> None:
        self._taken: dict[object, int] = {}
        self._uses: dict[int, int] = {}
        self._counts_uses = counts_uses

    def take(self, key: object) -> int:
        """The handle of a new entry."""
        lowest = next(number for number in itertools.count() if number not in self._taken.values())
        self._taken[key] = lowest
        return self.of(key)

    def of(self, key: object) -> int:
        """The handle of an entry."""
        number = self._taken[key]
        return (self._uses.get(number, 0) << 24 if self._counts_uses else 0) | number

    def release(self, key: object) -> int:
        """The handle of an entry that is deleted."""
        handle, number = self.of(key), self._taken.pop(key)
        self._uses[number] = self._uses.get(number, 0) + 1
        return handle


class SimpleSwitchCommands:
    """The commands that write rules, one after the other, to a switch that was empty."""

    def __init__(self) -> None:
        self._tables: dict[str, _Handles] = {}
        self._nodes = _Handles(counts_uses=False)
        self._groups: dict[int, dict[int, Value]] = {}

    def commands(self, rules: Iterable[TableRule]) -> list[str]:
        """The commands for these rules, which come after those before."""
        lines: list[str] = []
        for rule in rules:
            if isinstance(rule.entry, MulticastGroup):
                lines += self._group(rule.verb, rule.entry)
            else:
                lines.append(self._entry(rule.verb, rule.entry))
        return lines

    def _entry(self, verb: str, entry: TableEntry) -> str:
        handles = self._tables.setdefault(entry.table, _Handles(counts_uses=True))
        key = tuple(entry.keys.values())
        if verb == "delete":
            return f"table_delete {entry.table} {handles.release(key)}"
        values = " ".join(_text(value) for value in entry.parameters.values())
        if verb == "modify":
            return f"table_modify {entry.table} {entry.action} {handles.of(key)} => {values}".rstrip()
        handles.take(key)
        return f"table_add {entry.table} {entry.action} {' '.join(map(_text, key))} => {values}".rstrip()

    def _group(self, verb: str, group: MulticastGroup) -> list[str]:
        number, before = group.number, self._groups.pop(group.number, {})
        lines = [f"mc_mgrp_create {number}"] if verb == "insert" else []
        wanted = {} if verb == "delete" else group.ports
        for worker, port in before.items():
            if wanted.get(worker) != port:
                node = self._nodes.release((number, worker))
                lines += [f"mc_node_dissociate {number} {node}", f"mc_node_destroy {node}"]
        for worker, port in wanted.items():
            if before.get(worker) != port:
                node = self._nodes.take((number, worker))
                lines += [f"mc_node_create {worker} {_text(port)}", f"mc_node_associate {number} {node}"]
        if verb == "delete":
            return [*lines, f"mc_mgrp_destroy {number}"]
        self._groups[number] = dict(wanted)
        return lines


def _text(value: Value) -> str:
    return value if isinstance(value, str) else str(value) if value < 1 << 16 else f"{value:#x}"
