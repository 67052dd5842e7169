"""`offbeat lab`: build a network of shaped links on this machine, and measure in it."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from offbeat.cli.help_group import HelpGroup
from offbeat.errors import OffbeatError, ScenarioError

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from offbeat.lab.results import ResultFile
    from offbeat.scenario import Scenario

app = typer.Typer(
    cls=HelpGroup, help="Measure on real, shaped links: hosts are network namespaces.", no_args_is_help=True
)

_HEADING_WIDTH = 6
_LEAST_WIDTH = 80
_WAY_OUT = "Give the path of a TOML file, such as those in benchmarks/scenarios."
_UNBOUNDED_WIDTH = 1000
_SPARED = ("simulated", "uneven", "idle", "max", "min", "MB sent", "ms at barrier", "MB to target")
"""Columns a narrow terminal does without, the first ones first; the file has them all."""
_LEAST_REPEATS = 3
"""With fewer, a difference of microseconds is noise."""

ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="A scenario as TOML.", show_default=False)]


@app.command()
def run(
    scenario: ScenarioFile,
    json: Annotated[Path, typer.Option(help="File for the result.", show_default=False)],
    png: Annotated[Path | None, typer.Option(help="File for a picture of it.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Instead of the scenario's run.repeats.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the scenario's run.steps.")] = None,
) -> None:
    """Run every row of a scenario, interleaved and repeated, and write what was measured. Needs root.

    The result is written anew after each run. A row that fails is left out from then on; the others continue.
    """
    import msgspec

    from offbeat.lab import hardware, plots, results, runner
    from offbeat.lab.refusals import lacking_data

    parsed, text = read_scenario(scenario)
    changes = {name: value for name, value in (("repeats", repeats), ("steps", steps)) if value is not None}
    if changes:
        parsed = msgspec.structs.replace(parsed, run=msgspec.structs.replace(parsed.run, **changes))
    check_writable(json, png)
    if png is not None:
        plots.check_can_draw()
    console = Console(stderr=True)
    if lacking := lacking_data(parsed, scenario.parent):
        console.print(lacking, markup=False, highlight=False, soft_wrap=True)
    total = parsed.run.repeats * len(parsed.row)
    kept, failed = 0, 0
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("building", total=total)
        begun = 0

        def tell(row: str, repeat: int) -> None:
            nonlocal begun
            progress.update(task, description=f"repeat {repeat + 1}: {row}", completed=begun)
            begun += 1
            if progress.disable:  # into a file: a line per run, as minutes pass between two
                console.print(f"{begun} of {total}: repeat {repeat + 1}, {row}", markup=False, highlight=False)

        def keep(report: ResultFile) -> None:
            nonlocal kept
            results.write(report, json)
            kept += 1

        def fail(row: str, error: OffbeatError) -> None:
            nonlocal failed
            failed += 1
            console.print(f"Row {row!r} has failed and is not run again. {error}", markup=False, highlight=False)

        signal.signal(signal.SIGTERM, _stop)
        try:
            report = runner.run(
                parsed, text, scenario.parent, command=hardware.command_line(), tell=tell, keep=keep, fail=fail
            )
        except OffbeatError:
            if failed == len(parsed.row):
                raise typer.Exit(1) from None  # each has been told
            raise
        except (KeyboardInterrupt, SystemExit):
            if kept:
                console.print(f"{json} has {kept} of {total} runs.", markup=False, highlight=False)
            raise
        progress.update(task, description="done", completed=begun)
    results.write(report, json)
    if png is not None:
        plots.draw(report, png)
    _show_table(report)
    if report.failed:
        names = ", ".join(map(repr, report.failed))
        typer.echo(f"Failed: {names}. {json} has {kept} of {total} runs.", err=True)
        raise typer.Exit(1)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # through every with block, so that nothing is left behind


@app.command()
def show(scenario: ScenarioFile) -> None:
    """Draw a scenario's hosts and links, and say what it measures, and what `offbeat lab run` needs or would refuse."""
    from offbeat.lab.jobs import jobs
    from offbeat.lab.refusals import lacking_data, needs, refusals
    from offbeat.scenario import Replay

    parsed, _ = read_scenario(scenario)
    made = jobs(parsed, scenario.parent)  # whose plans and scripts are looked at
    workload = parsed.workload
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{parsed.scenario.name}: {parsed.scenario.description}", markup=False)
    drawing = "plain processes on loopback: " if parsed.loopback else ""
    names = ", ".join(host.name for host in parsed.topology.hosts)
    console.print(f"\n{drawing + names if parsed.loopback else parsed.topology.draw()}\n", markup=False)
    if isinstance(workload, Replay):
        from offbeat import model_profiles

        layers = workload.layers()
        size_bytes = model_profiles.size_bytes(layers)
        compute_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        at_least = _at_least(parsed, size_bytes)
        name = workload.profile or "a table of layers"
        console.print(
            f"replay of {name}: {size_bytes / 1e6:.2f} MB of gradients in {len(layers)} layers; "
            f"computation {compute_s:.3f} s, all-reduce {at_least}",
            markup=False,
        )
    else:
        console.print(f"script {workload.path} {' '.join(workload.args)}", markup=False)
    rows = ", ".join(row.name for row in parsed.row)
    console.print(f"{parsed.run.repeats} x {parsed.run.steps} steps of: {rows}", markup=False)
    for job in made:
        for fault in parsed.fault:
            if (lacking := job.lacks(fault)) is not None:
                console.print(f"left out of {job.row.name}: {fault.words}, which takes {lacking}", markup=False)
    console.print(f"offbeat lab run {needs(parsed, made)}", markup=False)
    if lacking := lacking_data(parsed, scenario.parent):
        console.print(lacking, markup=False)
    for error in refusals(parsed):
        console.print(f"offbeat lab run would refuse this here: {error}", markup=False)


def _at_least(parsed: Scenario, size_bytes: float) -> str:
    """Say how long an all-reduce takes at least; without one switch, also one that gathers when all is summed."""
    if parsed.workers.is_star:
        return f"at least {parsed.workers.allreduce_bound_s(size_bytes):.3f} s per step"
    from offbeat.collective.bounds import bound
    from offbeat.errors import PlanError

    try:
        found = bound(parsed.workers, size_bytes)
    except PlanError as error:
        return f"unknown: {error}"
    whole_s = f"{found.sequential_s:.3f} s if all is summed before it is gathered"
    return f"at least {found.any_method_s:.3f} s per step, {whole_s}"


@app.command()
def clean(
    force: Annotated[bool, typer.Option("--force", help="Remove what living labs hold, too.")] = False,
) -> None:
    """Remove what a dead lab left behind, and nothing else."""
    from offbeat.lab import lab_registry
    from offbeat.lab.network import require_rights

    require_rights()
    removed, kept = lab_registry.clean(force=force)
    for claim in removed:
        typer.echo(f"removed lab {claim.lab} of process {claim.owner_pid}: {len(claim.namespaces)} namespaces")
    for claim in kept:
        typer.echo(f"kept lab {claim.lab}: process {claim.owner_pid} still runs it (--force removes it, too)")
    if not removed and not kept:
        typer.echo("nothing to remove")


def read_scenario(path: Path) -> tuple[Scenario, str]:
    """The scenario in a file, and its text.

    Raises:
        ScenarioError: if the file cannot be read, or holds no scenario.
    """
    from offbeat.scenario import Scenario
    from offbeat.toml_reader import read_text

    text = read_text(path, "scenario", _WAY_OUT, ScenarioError)
    try:
        return Scenario.from_toml(text), text
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from error


def check_writable(*paths: Path | None) -> None:
    """Refuse paths whose folders are not there: minutes of measuring should not end in a folder that is not there."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ScenarioError(f"Cannot write {path}: there is no folder {path.parent}. Make it, or choose another.")


def _show_table(report: ResultFile) -> None:
    from offbeat.lab.result_table import table as cells_of

    console = Console(width=max(_LEAST_WIDTH, Console().width))
    unbounded = console.options.update(width=_UNBOUNDED_WIDTH)
    headings, rows = cells_of(report)
    left_out: list[str] = []
    while console.measure(shown := drawn(report.name, headings, rows), options=unbounded).minimum > console.width:
        spared = next((heading for heading in _SPARED if heading in headings), None)
        if spared is None:
            break
        index = headings.index(spared)
        headings, rows = _without(index, headings), [_without(index, cells) for cells in rows]
        left_out.append(spared)
    console.print(shown, crop=False)
    if left_out:
        typer.echo(f"left out to fit the terminal: {', '.join(reversed(left_out))}")
    for cost in report.recoveries:
        typer.echo(f"{cost.row}: {cost.words}")
    for swap in report.handovers:
        typer.echo(f"{swap.row}: {swap.words}")
    if report.rows[0].repeats < _LEAST_REPEATS:
        return
    for name, overhead_us in report.overhead_us_per_bucket.items():
        typer.echo(f"{name}: {overhead_us:+.0f} us per bucket against {report.rows[0].baseline}")


def drawn(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    """A table for the terminal: long headings are broken, numbers are not."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, (heading, *cells) in enumerate(zip(headings, *rows, strict=True)):
        # Long headings are broken, to save room; a number cut short would be another number.
        lines = textwrap.wrap(heading, max(_HEADING_WIDTH, *map(len, cells)), break_long_words=False)
        width = max(map(len, (*lines, *cells)))
        justify: JustifyMethod = "right" if index else "left"
        table.add_column("\n".join(lines), justify=justify, no_wrap=True, min_width=width, vertical="bottom")
    for cells in rows:
        table.add_row(*cells)
    return table


def _without(index: int, cells: list[str]) -> list[str]:
    return cells[:index] + cells[index + 1 :]
