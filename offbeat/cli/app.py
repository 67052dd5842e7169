"""The table of commands, and what every command does with an error."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from offbeat.cli.bench import app as bench_app
from offbeat.cli.certs import certs
from offbeat.cli.collective import app as collective_app
from offbeat.cli.doctor import doctor
from offbeat.cli.groups import app as groups_app
from offbeat.cli.help_group import HelpGroup
from offbeat.cli.lab import app as lab_app
from offbeat.cli.objects import app as objects_app
from offbeat.cli.plan import app as plan_app
from offbeat.cli.privacy import privacy
from offbeat.cli.report import report
from offbeat.cli.run import run
from offbeat.cli.serve import serve
from offbeat.cli.simulate import simulate
from offbeat.cli.swap import swap
from offbeat.cli.switch import app as switch_app
from offbeat.cli.top import top
from offbeat.cli.track import track
from offbeat.cli.verify_run import verify_run
from offbeat.errors import OffbeatError
from offbeat.version import __version__

_OF_PATHS = {errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP}
_MOST_SHOWN = 200  # characters of a path

app = typer.Typer(
    cls=HelpGroup,
    rich_markup_mode=None,
    name="offbeat",
    help="Train PyTorch models data-parallel on clusters that are not perfect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(report)
app.command()(serve)
app.command()(top)
app.command()(track)
app.command()(swap)
app.command()(verify_run)
app.command()(simulate)
app.command()(doctor)
app.command()(certs)
app.command()(privacy)
app.add_typer(plan_app, name="plan")
app.add_typer(lab_app, name="lab")
app.add_typer(bench_app, name="bench")
app.add_typer(collective_app, name="collective")
app.add_typer(switch_app, name="switch")
app.add_typer(objects_app, name="objects")
app.add_typer(groups_app, name="groups")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


@app.callback()
def shared(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks for offbeat's own errors, too.")] = False,
) -> None:
    """Options of every command."""
    if debug:
        os.environ["OFFBEAT_DEBUG"] = "1"


def run_app() -> None:
    """Run the command line; errors of offbeat, and paths that cannot be used, end it with a sentence and code 2."""
    try:
        app()
    except (OffbeatError, OSError) as error:
        is_known = isinstance(error, OffbeatError) or error.errno in _OF_PATHS
        if os.environ.get("OFFBEAT_DEBUG") or not is_known:
            raise
        text = str(error) if isinstance(error, OffbeatError) else _about_path(error)
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"offbeat: {text}", style="red", markup=False)
        sys.exit(2)


def _about_path(error: OSError) -> str:
    path = str(error.filename)
    shown = path if len(path) <= _MOST_SHOWN else f"{path[:_MOST_SHOWN]}... ({len(path)} characters)"
    return f"Cannot use the path {shown}: {error.strerror}. Name another one."
