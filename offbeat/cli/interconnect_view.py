"""MultiTree's evaluation as people look at it: a line per method, and a picture."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from offbeat.sim.interconnect import SIZES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from offbeat.sim.interconnect import InterconnectRow


def groups(rows: Iterable[InterconnectRow]) -> Iterator[list[InterconnectRow]]:
    """Rows that are compared with each other: of one study, network and variant."""
    for _, group in itertools.groupby(rows, key=lambda row: (row.study, row.network, row.variant, _size(row))):
        yield list(group)


def _size(row: InterconnectRow) -> int:
    return 0 if row.study == "sizes" else row.size_bytes


def lines(group: Sequence[InterconnectRow]) -> Iterator[str]:
    """Some rows that are compared, as text: how many times as fast as the ring each method is."""
    first = group[0]
    ring = {row.size_bytes: row for row in group if row.method == first.method}
    sizes = [size for size in ring if len(ring) < 4 or size in (SIZES[0], 1 << 20, SIZES[-1])]
    what = "" if first.study in ("sizes", "strong", "weak") else f" {first.study},"
    scale = f", {first.study} scaling" if first.study in ("strong", "weak") else ""
    at = ", ".join(map(_bytes, sizes))
    yield f"{first.network}{scale},{what} {first.variant}: times as fast as the ring, at {at}"
    for method in dict.fromkeys(row.method for row in group):
        mine = {row.size_bytes: row for row in group if row.method == method}
        told = [f"{ring[size].cycles / mine[size].cycles:6.2f} ({mine[size].cycles:11,.0f} cycles)" for size in sizes]
        layers = mine[sizes[0]].layerwise_cycles
        beside = "" if layers is None else f"; layer by layer {layers:,.0f} cycles"
        yield f"  {method:<24} {'  '.join(told)}{beside}"


def _bytes(size: int) -> str:
    return f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB"


def draw(rows: Sequence[InterconnectRow], path: Path) -> None:
    """Draw how fast each method is on each network, by size of the vector, beside the ring, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [
        group for group in groups(rows) if group[0].study == "sizes" and group[0].variant in ("alpha", "delta", "gamma")
    ]
    columns = 3
    figure = Figure(figsize=(12, 2.6 * -(-len(shown) // columns)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for place, group in enumerate(shown):
        axes = figure.add_subplot(-(-len(shown) // columns), columns, place + 1)
        ring = {row.size_bytes: row.cycles for row in group if row.method == group[0].method}
        for method in dict.fromkeys(row.method for row in group):
            mine = [row for row in group if row.method == method]
            axes.plot(
                [row.size_bytes for row in mine], [ring[row.size_bytes] / row.cycles for row in mine], label=method
            )
        axes.set_xscale("log", base=2)
        axes.set_title(f"{group[0].network}, {group[0].variant}", fontsize=9)
        axes.set_ylabel("times as fast as the ring", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=6)
    figure.savefig(path)
