"""`offbeat run`: start local workers, stream what they say, and end them all when one is lost."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.launch import Job, Launch
from offbeat.cli.plan import read_plan
from offbeat.errors import PlanError


def run(
    script: Annotated[Path, typer.Argument(help="A training script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="How many local workers to start.")] = 2,
    plan: Annotated[Path | None, typer.Option(help="A plan as TOML; the default plan if left out.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Explain every wait longer than this many seconds.")] = 5.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where metrics, trace and report go; a new folder under runs/ if left out.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks for offbeat's own errors, too.")] = False,
) -> None:
    """Start SCRIPT on local workers. The same script runs under torchrun unchanged."""
    from offbeat.plan import Plan

    if not script.is_file():
        raise PlanError(f"Cannot run {script}: there is no such file.")
    chosen = Plan() if plan is None else read_plan(plan)
    folder = run_dir or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{script.stem}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.toml").write_text(chosen.to_toml())
    job = Job(
        script=script,
        arguments=tuple(arguments or ()),
        workers=workers,
        plan=chosen.to_toml(),
        timeout_s=timeout,
        run_dir=folder.resolve(),
        debug=debug,
    )
    raise typer.Exit(Launch(job).run())
