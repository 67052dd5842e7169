"""`offbeat plan`: write, read and compare plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat import toml_reader
from offbeat.errors import PlanError

if TYPE_CHECKING:
    from offbeat.plan import Plan

app = typer.Typer(help="Write, check and compare plans.", no_args_is_help=True)

PlanFile = Annotated[Path, typer.Argument(help="A plan as TOML.", show_default=False)]


@app.command()
def show(
    path: Annotated[Path | None, typer.Argument(help="A plan as TOML; the default plan if left out.")] = None,
) -> None:
    """Check a plan and print it whole, defaults filled in."""
    from offbeat.plan import Plan

    plan = Plan() if path is None else read_plan(path)
    typer.echo(f"# {plan!r}\n# digest {plan.digest}\n{plan.to_toml()}", nl=False)


@app.command()
def diff(first: PlanFile, second: PlanFile) -> None:
    """Say in which fields two plans differ; exit code 1 if they do."""
    differences = read_plan(first).diff(read_plan(second))
    for name, (here, there) in differences.items():
        typer.echo(f"{name}: {here!r} -> {there!r}")
    if differences:
        raise typer.Exit(1)


def read_plan(path: Path, **instead: Any) -> Plan:
    """The plan in a TOML file.

    Args:
        instead: fields to take instead of the file's.

    Raises:
        PlanError: if the file cannot be read, or holds no valid plan.
    """
    from offbeat.plan import Plan

    text = toml_reader.read_text(path, "plan", "Write one with `offbeat plan show > plan.toml`.", PlanError)
    try:
        return Plan.from_toml(text, **instead)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
