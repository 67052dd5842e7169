"""`offbeat groups`: one model for each group of a table."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from offbeat.cli.help_group import HelpGroup
from offbeat.errors import OffbeatError
from offbeat.safe_write import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.groups import GroupedTrainer

app = typer.Typer(cls=HelpGroup, help="Fit a model for each group of a table.", no_args_is_help=True)

_MOST_SHOWN = 20
_Data = Annotated[str, typer.Argument(help="A file, folder or pattern of Parquet, CSV or Arrow files.")]
_By = Annotated[str, typer.Option(metavar="COLUMN,...", help="The columns of the keys.")]
_Target = Annotated[str, typer.Option(help="The column that is predicted.")]
_Model = Annotated[str, typer.Option(help="linear, logistic or poisson.")]
_L2 = Annotated[str, typer.Option(metavar="NUMBER,...", help="Ridge penalties to try.")]
_Features = Annotated[
    str, typer.Option(metavar="COLUMN,...", help="The columns to predict by.", show_default="all others")
]
_Standardize = Annotated[bool, typer.Option("--standardize", help="Scale features within each group.")]


@app.callback()
def groups() -> None:
    """Fit a model for each group of a table."""


@app.command()
def fit(
    data: _Data,
    by: _By,
    target: _Target,
    model: _Model = "linear",
    l2: _L2 = "1",
    features: _Features = "",
    standardize: _Standardize = False,
    hold_out: Annotated[
        float, typer.Option(help="Share of a group's rows by which one of several penalties is chosen.")
    ] = 0.2,
    hold_out_by: Annotated[
        str, typer.Option(metavar="COLUMN", help="Hold the last rows by this column out.", show_default="by chance")
    ] = "",
    min_rows: Annotated[int, typer.Option(min=1, help="Fit no group that has less rows.")] = 1,
    small_fallback: Annotated[
        str,
        typer.Option(help="What predicts for groups without a model and new keys: skip, parent, global; or raise."),
    ] = "skip",
    workers: Annotated[int, typer.Option(min=1, help="Processes that fit groups.")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Leave what was fitted there; started again, continue with the rest.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file of the models.")] = Path("groups.models"),
    results: Annotated[
        Path | None, typer.Option(help="Write what was tried, one row for each group and penalty: Parquet or CSV.")
    ] = None,
) -> None:
    """Fit one model for each group, and write all of them to a file."""
    validation = {"share": hold_out, "by": hold_out_by or None}
    trainer = _trainer(by, target, model, l2, features, standardize, validation, (min_rows, small_fallback), workers)
    _check_place(out)
    if results is not None:
        _check_table(results)
    begin = time.monotonic()
    with _Bar() as bar:
        fitted = trainer.fit(data, bar.show, folder=folder)
    fitted.save(out)
    if results is not None:
        _write(fitted.results, results)
    counts = {row["values"]: row["counts"] for row in fitted.models["status"].value_counts().to_pylist()}
    told = ", ".join(f"{count:,} {status}" for status, count in sorted(counts.items(), key=lambda one: -one[1]))
    typer.echo(f"{len(fitted.index):,} groups in {time.monotonic() - begin:.1f} s: {told}. Models are in {out}.")


@app.command()
def explain(
    data: _Data,
    by: _By,
    target: _Target,
    model: _Model = "linear",
    l2: _L2 = "1",
    features: _Features = "",
    standardize: _Standardize = False,
    workers: Annotated[int, typer.Option(min=1, help="The most workers to tell about.")] = 4,
) -> None:
    """Say how a fit would go, and how long it would take; a few groups are fitted and timed."""
    trainer = _trainer(by, target, model, l2, features, standardize, {}, (), 1)
    typer.echo(str(trainer.explain(data, workers)))


@app.command()
def predict(
    models: Annotated[Path, typer.Argument(help="A file that `offbeat groups fit` has written.")],
    data: _Data,
    out: Annotated[Path, typer.Option(help="Where predictions are written, in the order of the rows: Parquet or CSV.")],
) -> None:
    """Predict by the model of each row's group."""
    from offbeat.groups import FittedGroups

    _check_table(out)
    found = FittedGroups.load(models).predict(data)
    _write(found, out)
    lacking = found["model"].to_pylist().count("none")
    typer.echo(f"{found.num_rows:,} rows are predicted in {out}; no model is there for {lacking:,} of them.")


@app.command()
def show(
    models: Annotated[Path, typer.Argument(help="A file that `offbeat groups fit` has written.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Write all of it, Parquet or CSV, or a page with plots, HTML.", show_default="20 rows"),
    ] = None,
) -> None:
    """Show the models: keys, rows, what was chosen, status, and coefficients."""
    from rich.table import Table

    from offbeat.groups import FittedGroups

    fitted = FittedGroups.load(models)
    found = fitted.models
    if out is not None and out.suffix == ".html":
        from offbeat.report.groups_page import groups_page

        _check_place(out)
        write_whole(out, groups_page(found, fitted.results, title=f"Models of {models.name}").encode())
        return
    if out is not None:
        _check_table(out)
        _write(found, out)
        return
    console, shown = Console(), found.slice(0, _MOST_SHOWN)
    columns = {name: [_cell(value) for value in shown[name].to_pylist()] for name in found.column_names}
    widths = [3 + max(map(len, (name, *cells))) for name, cells in columns.items()]
    fitting = max(1, sum(end < console.width for end in itertools.accumulate(widths)))
    table = Table(*itertools.islice(columns, fitting))
    for cells in zip(*itertools.islice(columns.values(), fitting), strict=True):
        table.add_row(*cells)
    console.print(table)
    left_out = [f"{len(found) - len(shown):,} groups"] if len(found) > len(shown) else []
    if fitting < len(columns):
        left_out.append(f"the columns {', '.join(itertools.islice(columns, fitting, None))}")
    if left_out:
        typer.echo(f"Not shown: {' and '.join(left_out)}. --out FILE.csv writes all, --out FILE.html plots.")


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _trainer(
    by: str,
    target: str,
    model: str,
    l2: str,
    features: str,
    standardize: bool,
    validation: dict[str, Any],
    small: tuple[Any, ...],
    workers: int,
) -> GroupedTrainer:
    """The trainer that options name; `small` are those of `Small`."""
    from offbeat.groups import (
        Grid,
        GroupDataError,
        GroupedTrainer,
        HoldOut,
        Linear,
        Logistic,
        Poisson,
        Processes,
        Small,
        ThisProcess,
    )

    specs: dict[str, Callable[..., Any]] = {"linear": Linear, "logistic": Logistic, "poisson": Poisson}
    if model not in specs:
        raise GroupDataError(f"Cannot fit {model!r}: name one of {', '.join(specs)}.")
    try:
        penalties = [float(value) for value in l2.split(",")]
    except ValueError as error:
        raise GroupDataError(f"Cannot use --l2 {l2}: name numbers, as in 0.1,1,10.") from error
    return GroupedTrainer(
        specs[model](l2=Grid(*penalties) if len(penalties) > 1 else penalties[0], standardize=standardize),
        by=by.split(","),
        target=target,
        features=features.split(",") if features else None,
        validation=HoldOut(**validation),
        small=Small(*small),
        executor=Processes(workers) if workers > 1 else ThisProcess(),
    )


class _Bar:
    """The groups that have ended, on a terminal."""

    def __init__(self) -> None:
        columns = (TextColumn("groups"), BarColumn(), TextColumn("{task.fields[pace]}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task, self._began_s = self._bar.add_task("groups", total=None, pace=""), time.monotonic()

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, ended: int, total: int) -> None:
        """Show how many groups of all have ended."""
        pace = ended / max(1e-3, time.monotonic() - self._began_s)
        self._bar.update(self._task, completed=ended, total=total, pace=f"{ended:,} of {total:,}, {pace:,.0f}/s")


def _check_place(path: Path) -> None:
    """Refuse what cannot be written before anything is computed for it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise OffbeatError(f"Cannot write {path}: {why}. Name a file in a folder that is there.")


def _check_table(path: Path) -> None:
    _check_place(path)
    if path.suffix not in (".parquet", ".csv"):
        raise OffbeatError(f"Cannot write {path}: name a file that ends in .parquet or .csv.")


def _write(table: Any, path: Path) -> None:
    from pyarrow import csv, parquet

    if path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path)
