"""A page about the models of a table's groups, from the tables that `offbeat.groups` makes of them."""

from __future__ import annotations

import html
from collections import Counter
from typing import TYPE_CHECKING, Any

from offbeat.report.html_report import HEAD
from offbeat.report.plots import COLOURS, svg

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_POINTS = 5_000
_MOST_ROWS = 30
_OF_RESULTS = ("loss", "loss of held-out rows", "steps", "is chosen")


def groups_page(models: Any, results: Any, *, title: str) -> str:
    """Return a self-contained page of HTML.

    Args:
        models, results: `FittedGroups.models` and `.results`, tables of pyarrow.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    keys = models.column_names[: models.column_names.index("rows")]
    rows, status = models["rows"].to_pylist(), models["status"].to_pylist()
    chosen = results.filter(results["is chosen"])
    searched = [name for name in results.column_names if name not in (*keys, *_OF_RESULTS)]
    plots = [("Groups by their rows", svg(lambda axes: _draw_sizes(axes[0], rows, status)))]
    held = _losses(chosen, keys, models, "loss of held-out rows")
    losses, name = (
        (held, "Loss of a held-out row") if held else (_losses(chosen, keys, models, "loss"), "Loss of a row")
    )
    if losses:
        plots.append((f"{name}, by the rows of the group", svg(lambda axes: _draw_losses(axes[0], losses))))
    plots += [(f"{one}: how many groups have chosen it", svg(_choices(models[one].to_pylist()))) for one in searched]
    body = f"<h1>{html.escape(title)}</h1>{_cards(rows, status)}"
    figures = (f"<figure><figcaption>{html.escape(what)}</figcaption>{picture}</figure>" for what, picture in plots)
    body += f'<h2>All groups</h2><div class="plots">{"".join(figures)}</div>'
    failed = [at for at, one in enumerate(status) if one != "ok"]
    body += _table("Groups that are not as they should be", models.select([*keys, "rows", "status", "error"]), failed)
    worst = sorted(range(len(losses)), key=lambda at: -losses[at][1])
    told = [(*losses[at][2], losses[at][0], f"{losses[at][1]:.4g}") for at in worst[:_MOST_ROWS]]
    body += _rows(f"Groups with the largest {name.lower()}", [*keys, "rows", "loss"], told, len(losses))
    return f"{HEAD.format(title=html.escape(title))}{body}\n</body></html>\n"


def _losses(chosen: Any, keys: Sequence[str], models: Any, column: str) -> list[tuple[int, float, tuple[Any, ...]]]:
    """The rows, the loss and the key of each group that has one; `chosen` has the groups in the order of `models`."""
    rows = models["rows"].to_pylist()
    found = zip(rows, chosen[column].to_pylist(), *(models[key].to_pylist() for key in keys), strict=True)
    return [(count, loss, tuple(key)) for count, loss, *key in found if loss is not None]


def _draw_sizes(axes: Any, rows: Sequence[int], status: Sequence[str]) -> None:
    kinds = [kind for kind, _ in Counter(status).most_common()]
    most = max(rows, default=1)
    edges = [0.5]
    while edges[-1] < most:
        edges.append(edges[-1] * 2)
    values = [[max(1, count) for count, one in zip(rows, status, strict=True) if one == kind] for kind in kinds]
    axes.hist(values, bins=edges, stacked=True, label=kinds, color=COLOURS[: len(kinds)])
    axes.set_xscale("log")
    axes.set_xlabel("rows")
    axes.set_ylabel("groups")
    axes.legend(frameon=False, labelcolor="#808080")


def _draw_losses(axes: Any, losses: Sequence[tuple[int, float, tuple[Any, ...]]]) -> None:
    shown = losses[:: -(-len(losses) // _MOST_POINTS)]
    axes.scatter([rows for rows, _, _ in shown], [loss for _, loss, _ in shown], s=6, alpha=0.5, color=COLOURS[0])
    axes.set_xscale("log")
    if all(loss > 0 for _, loss, _ in shown):
        axes.set_yscale("log")
    axes.set_xlabel("rows")


def _choices(values: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
    counts = Counter(values)
    names = sorted(counts, key=lambda one: (str(type(one)), one)) if None not in counts else list(counts)

    def draw(panels: Sequence[Any]) -> None:
        panels[0].bar([str(name) for name in names], [counts[name] for name in names], color=COLOURS[0])
        panels[0].set_ylabel("groups")

    return draw


def _cards(rows: Sequence[int], status: Sequence[str]) -> str:
    told = [
        (f"{len(rows):,}", "groups"),
        (f"{sum(rows):,}", "rows"),
        (f"{max(rows, default=0):,}", "rows of the largest"),
    ]
    told += [(f"{count:,}", kind) for kind, count in Counter(status).most_common()]
    cards = "".join(f'<div class="card"><b>{value}</b><span>{html.escape(name)}</span></div>' for value, name in told)
    return f'<div class="cards">{cards}</div>'


def _table(heading: str, table: Any, which: Sequence[int]) -> str:
    rows = [tuple(row.values()) for at in which[:_MOST_ROWS] for row in table.slice(at, 1).to_pylist()]
    return _rows(heading, table.column_names, rows, len(which))


def _rows(heading: str, names: Sequence[str], rows: Sequence[tuple[Any, ...]], total: int) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    texts = (["" if one is None else html.escape(str(one)) for one in row] for row in rows)
    cells = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in texts)
    more = f" (the first {len(rows):,} of {total:,})" if total > len(rows) else ""
    return f'<h2>{html.escape(heading)}{more}</h2><div class="wide"><table><tr>{head}</tr>{cells}</table></div>'
