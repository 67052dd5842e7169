"""`offbeat plan`: write, read and compare plans; look at the schedule that one has led to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat import safe_read, toml_reader
from offbeat.cli.help_group import HelpGroup
from offbeat.errors import PlanError, ScenarioError

if TYPE_CHECKING:
    from offbeat.plan import Plan
    from offbeat.scheduling import MadeSchedule

app = typer.Typer(cls=HelpGroup, help="Write, check and compare plans; show a run's schedule.", no_args_is_help=True)

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


@app.command()
def schedule(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="A folder that `offbeat run` left.", show_default=False)
    ],
    scheduler: Annotated[
        str, typer.Option(help='What this one would do instead, such as "Credit()".', show_default=False)
    ] = "",
    model: Annotated[int, typer.Option(min=1, help="Of several that were prepared.")] = 1,
    json: Annotated[Path | None, typer.Option(help="File for the same as JSON.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(help="File for a picture of it.", show_default=False)] = None,
) -> None:
    """Show the schedule of gradients that a run goes by: bursts, blocks, predicted and measured step, lower bound."""
    import msgspec

    from offbeat.cli.lab import check_writable
    from offbeat.cli.part_syntax import read_part
    from offbeat.lab import plots
    from offbeat.report import Records
    from offbeat.report.schedule_plot import draw
    from offbeat.report.scheduled_steps import lines, scheduled_steps

    check_writable(json, png)
    if png is not None:
        plots.check_can_draw()
    made = _read_schedule(run_dir, model)
    if scheduler:
        other = read_part("scheduling", scheduler)
        made = msgspec.structs.replace(made, scheduler=repr(other), why="", schedule=other.schedule(made.profile))
    metrics = run_dir / "metrics.jsonl"
    records = Records(metrics).all() if metrics.is_file() and not scheduler and model == 1 else []
    shown = scheduled_steps(made, records)
    for line in lines(shown):
        typer.echo(line)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n")
    if png is not None:
        draw(shown, made.profile, png)


def _read_schedule(run_dir: Path, model: int) -> MadeSchedule:
    """The schedule in a run's folder.

    Raises:
        ScenarioError: if there is none, or it is damaged.
    """
    from offbeat.scheduling import MadeSchedule

    path = run_dir / MadeSchedule.file_name(model - 1)
    try:
        return safe_read.read_file(path, MadeSchedule.from_bytes)
    except FileNotFoundError as error:
        raise ScenarioError(
            f"Cannot show a schedule: there is no {path}. Name a folder of a run with a plan such as "
            "Plan(scheduling=Prophet()) that has made more than seven steps, without a parameter server, where each "
            "worker has an order of its own, and has not said that gradients are waited for behind backward; and with "
            "--model one of the models that it has prepared."
        ) from error
    except (OSError, safe_read.UnreadableError) as error:
        raise ScenarioError(
            f"Cannot show the schedule in {path}: {error}. Train again into another folder, or name another run."
        ) from error


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
