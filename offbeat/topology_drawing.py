"""Drawings of a topology, as text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class DrawnLink(NamedTuple):
    """A link: its ends, and what is written on it."""

    a: str
    b: str
    label: str


def lines(edges: Sequence[DrawnLink], notes: Mapping[str, str]) -> str:
    """One line for each link; `notes` are what is said of a node beside its name."""
    return "\n".join(f"{_noted(one.a, notes)} ── {one.label} ── {_noted(one.b, notes)}" for one in edges)


def fan(switch: str, edges: Sequence[DrawnLink], notes: Mapping[str, str]) -> str:
    """All hosts of one switch."""
    width = max((len(one.label) for one in edges), default=0)
    middle = (len(edges) - 1) // 2
    drawn = []
    for index, one in enumerate(edges):
        first, last = index == 0, index == len(edges) - 1
        stem = f"{switch} ─" if index == middle else " " * (len(switch) + 2)
        joint = "─" if first and last else ("┬" if index == middle else "┌") if first else ("└" if last else "├")
        if index == middle and not first and not last:
            joint = "┼"
        host = one.a if one.b == switch else one.b
        drawn.append(f"{stem}{joint}── {one.label:>{width}} ── {_noted(host, notes)}")
    return "\n".join(drawn)


def grid(
    names: Sequence[str], dims: Sequence[int], edges: Sequence[DrawnLink], notes: Mapping[str, str], *, wraps: bool
) -> str:
    """Hosts in rows and columns; a third dimension as planes one after the other. Links unlike most are listed below.

    Args:
        names: in row-major order.
        wraps: whether the last one in a dimension is linked to the first one.
    """
    planes, rows, columns = (1,) * (3 - len(dims)) + tuple(dims)
    width = max(map(len, names))
    # In a ring of two the one link is that between them.
    across, along = wraps and columns > 2, wraps and rows > 2
    margin = "── " if across else ""
    bars = (" " * len(margin) + "│".ljust(width + 4) * columns).rstrip()
    drawn: list[str] = []
    for plane in range(planes):
        if planes > 1:
            drawn += ([""] if plane else []) + [f"plane {plane}:"]
        drawn += [bars] if along else []
        for row in range(rows):
            begin = (plane * rows + row) * columns
            *cells, last = names[begin : begin + columns]
            joined = "".join(f"{name} ".ljust(width + 3, "─") + " " for name in cells)
            drawn.append(f"{margin}{joined}{f'{last} '.ljust(width + 3, '─') if across else last}")
            drawn += [bars] if row < rows - 1 or along else []
    return "\n".join([*drawn, *_legend(edges, notes, planes=planes, rings=across or along or (wraps and planes > 2))])


def _legend(edges: Sequence[DrawnLink], notes: Mapping[str, str], *, planes: int, rings: bool) -> list[str]:
    legend = []
    if planes > 1:
        legend.append("each host is linked to those in its place of the next planes")
    if rings:
        legend.append("what leaves at one side comes in at the other")
    counts = Counter(one.label for one in edges)
    if counts:
        usual = max(counts, key=lambda label: counts[label])
        legend.append(f"each link: {usual}")
        legend += [f"but {one.a} ── {one.label} ── {one.b}" for one in edges if one.label != usual]
    return ["", *legend, *(f"{_noted(name, notes)}" for name in notes)] if legend or notes else []


def _noted(name: str, notes: Mapping[str, str]) -> str:
    return f"{name}  ({notes[name]})" if name in notes else name
