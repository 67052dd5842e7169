"""`offbeat report`: the trace and the page of a run, made from its records."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated

import msgspec
import typer

from offbeat.errors import ScenarioError
from offbeat.report import Records
from offbeat.report.page import page
from offbeat.report.trace import trace


def report(
    run_dir: Annotated[Path, typer.Argument(help="A folder that `offbeat run` left.", show_default=False)],
) -> None:
    """Write trace.json (for Perfetto) and report.html from a run's metrics.jsonl."""
    for path in write_report(run_dir):
        typer.echo(path)


def write_report(run_dir: Path) -> list[Path]:
    """Write trace.json and report.html into the run's folder, and return their paths.

    Raises:
        ScenarioError: if the folder has no records, or cannot be written.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise ScenarioError(
            f"Cannot report on {run_dir}: it has no metrics.jsonl. Give a folder that `offbeat run` left."
        )
    reader = Records(metrics)
    records = reader.all()
    if not records:
        size_bytes = metrics.stat().st_size
        why = (
            "its metrics.jsonl is empty, because no worker prepared a model. Call run.prepare in the script"
            if size_bytes == 0
            else f"its metrics.jsonl holds {size_bytes} bytes but no whole record. Give a file that offbeat wrote"
        )
        raise ScenarioError(f"Cannot report on {run_dir}: {why}.")
    plan = run_dir / "plan.toml"
    text = page(
        records,
        title=run_dir.resolve().name,
        plan=plan.read_text() if plan.is_file() else "",
        damaged=reader.damaged,
    )
    written = []
    for name, data in (("trace.json", msgspec.json.encode(trace(records))), ("report.html", text.encode())):
        path = run_dir / name
        try:
            path.write_bytes(data)
        except OSError as error:
            raise ScenarioError(f"Cannot write {path}: {error.strerror}. Make room, or make it writable.") from error
        written.append(path)
    return written
