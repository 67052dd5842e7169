"""Pictures of an algorithm: the trees of its chunks over the network, and what each link carries when."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from offbeat.collective.cost_model import BLOCK_BYTES, occupancies
from offbeat.collective.paths import Paths
from offbeat.errors import PlanError
from offbeat.routing import DimensionOrder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology

_ACROSS = 4  # pictures of trees side by side
_UP, _DOWN = "#D55E00", "#0072B2"
_BEND = 0.18  # of arrows, so that there and back are two


def draw_trees(algorithm: Algorithm, network: Topology, path: Path, chunks: Sequence[int] = (0,)) -> None:
    """Draw the ways of some chunks over the links of a network, as PNG: those of sums, and those of results.

    Raises:
        PlanError: if matplotlib is not installed, or there is no such chunk.
    """
    for chunk in chunks:
        if not 0 <= chunk < len(algorithm.chunks):
            raise PlanError(f"Cannot draw chunk {chunk}: there are chunks 0 to {len(algorithm.chunks) - 1}.")
    across = max(1, min(_ACROSS, len(chunks)))
    down = max(1, math.ceil(len(chunks) / across))
    figure = _figure(3.2 * across, 3.4 * down + 0.4)
    places, names = node_places(network), [host.name for host in network.hosts]
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
        axes.set_aspect("equal")
    for chunk, axes in zip(chunks, grid.flat, strict=False):
        axes.set_title(f"chunk {chunk}", fontsize=8)
        for link in network.links:
            (x0, y0), (x1, y1) = places[link.a], places[link.b]
            axes.plot([x0, x1], [y0, y1], color="0.85", linewidth=1, zorder=0)
        for name, (x, y) in places.items():
            axes.plot(x, y, "s" if name in network.switches else "o", color="0.6", markersize=4, zorder=1)
            axes.annotate(name, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=5)
        for op in algorithm.ops:
            if op.chunk == chunk:
                colour = _UP if op.kind == "reduce" else _DOWN
                (x0, y0), (x1, y1) = places[names[op.source]], places[names[op.destination]]
                arrow = {"arrowstyle": "->", "color": colour, "lw": 1, "connectionstyle": f"arc3,rad={_BEND}"}
                axes.annotate("", (x1, y1), xytext=(x0, y0), arrowprops=arrow)
                middle = ((x0 + x1 + _BEND * (y1 - y0)) / 2, (y0 + y1 - _BEND * (x1 - x0)) / 2)
                axes.annotate(str(op.step), middle, fontsize=5, color=colour, ha="center", va="center")
        axes.margins(0.2)
    figure.suptitle(f"{algorithm.name}: sums (red) and results (blue), with their steps", fontsize=9)
    figure.savefig(path)


def draw_time_line(
    algorithm: Algorithm, network: Topology, size_bytes: float, path: Path, *, block_bytes: float = BLOCK_BYTES
) -> None:
    """Draw what each direction of each link carries over time, as PNG, a colour for each chunk.

    Raises:
        PlanError: if matplotlib is not installed, or the algorithm is not for this network.
    """
    seen = occupancies(algorithm, network, size_bytes, block_bytes=block_bytes)
    arcs = Paths(network).arcs
    figure = _figure(10, min(40, 1.2 + 0.16 * len(arcs)))
    axes = figure.subplots()
    from matplotlib import colormaps

    colours = colormaps["turbo"]
    bars: dict[int, list[tuple[float, float]]] = {}
    fills: dict[int, list[Any]] = {}
    for one in seen:
        op = algorithm.ops[one.op]
        bars.setdefault(one.arc, []).append((one.begin_s, one.end_s - one.begin_s))
        alpha = 1.0 if op.kind == "reduce" else 0.55
        fills.setdefault(one.arc, []).append(colours(op.chunk / max(1, len(algorithm.chunks) - 1), alpha=alpha))
    for arc, spans in bars.items():
        axes.broken_barh(spans, (arc - 0.4, 0.8), facecolors=fills[arc])
    axes.set_yticks(range(len(arcs)), [f"{arc.source} → {arc.target}" for arc in arcs], fontsize=5)
    axes.set_ylim(len(arcs) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    end_s = max((one.end_s for one in seen), default=0.0)
    axes.set_title(f"{algorithm.name}: {size_bytes / 1e6:g} MB in {end_s:.3g} s; results are paler", fontsize=9)
    figure.savefig(path)


def node_places(network: Topology) -> dict[str, tuple[float, float]]:
    """The place of each node in a picture: a grid as such, else hosts in a circle and switches in a smaller one."""
    grid = network.routing
    if isinstance(grid, DimensionOrder) and len(grid.dims) > 1:
        found = {}
        for index, name in enumerate(grid.hosts):
            *planes, row, column = grid.place(index)
            shift = sum(planes) * (grid.dims[-1] + 1)
            found[name] = (float(column + shift), float(-row))
        return found
    places = _circle([host.name for host in network.hosts], 1.0)
    return places | _circle(network.switches, 0.0 if len(network.switches) == 1 else 0.5)


def _circle(names: Sequence[str], radius: float) -> dict[str, tuple[float, float]]:
    turns = [2 * math.pi * index / len(names) for index in range(len(names))]
    return {name: (radius * math.sin(turn), radius * math.cos(turn)) for name, turn in zip(names, turns, strict=True)}


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(
            f"Cannot draw an algorithm: {error}. Install what plots need: pip install 'offbeat[plot]'."
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
