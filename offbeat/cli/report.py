"""`offbeat report`: the trace and the page of a run, made from its records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.errors import HistoryError, PlanError, ScenarioError
from offbeat.report import Records
from offbeat.report.compare import ComparedRun, comparison, figures
from offbeat.report.formatting import listed
from offbeat.report.html_report import page
from offbeat.report.nonfinite import nonfinite
from offbeat.report.outcome import Stall, ending, read_stalls
from offbeat.report.records import EndRecord, EventRecord, StartRecord, StepRecord
from offbeat.report.trace import trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.audit.rejections import RankJudgements
    from offbeat.report.records import Record

_METRICS = "metrics.jsonl"


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders that `offbeat run` left.", show_default=False)],
    output: Annotated[Path, typer.Option(help="File for the comparison of several runs.", dir_okay=False)] = Path(
        "comparison.html"
    ),
) -> None:
    """Write trace.json (for Perfetto) and report.html from a run's metrics.jsonl; of several runs, compare them."""
    if len(run_dirs) > 1:
        _compare(run_dirs, output)
        return
    written = write_report(run_dirs[0])
    for line in conclusion(run_dirs[0]):
        typer.echo(line, err=True)  # what is written can be piped on
    for path in written:
        typer.echo(path)


def _compare(run_dirs: Sequence[Path], output: Path) -> None:
    runs, left_out = [], []
    for folder in run_dirs:
        if not folder.exists():
            raise ScenarioError(f"Cannot compare {folder}: it is not there. Name folders that `offbeat run` left.")
        records = _read(folder).all() if (folder / _METRICS).is_file() else []
        if any(isinstance(record, StepRecord) for record in records):
            runs.append(ComparedRun(folder.resolve().name, records, _plan_of(folder)))
        else:
            left_out.append(str(folder))
    if not runs:
        raise ScenarioError(
            f"Cannot compare {listed(left_out)}: no step of any was recorded. Name folders of runs that have trained."
        )
    if left_out:
        typer.echo(f"Left out, as no step of it was recorded: {', '.join(left_out)}.", err=True)
    try:
        output.write_text(comparison(runs))
    except OSError as error:
        raise ScenarioError(f"Cannot write {output}: {error.strerror}. Name another file with --output.") from error
    table = Table("", *(run.name for run in runs), box=box.SIMPLE_HEAD)
    for figure in figures(runs):
        cells = zip(figure.shown, figure.ratios, strict=True)
        table.add_row(figure.name, *(f"{shown} ({ratio})" if ratio else shown for shown, ratio in cells))
    Console(stderr=True, highlight=False).print(table)
    typer.echo(output)


def _read(run_dir: Path) -> Records:
    metrics = run_dir / _METRICS
    if not metrics.is_file():
        why = "it has no metrics.jsonl" if run_dir.exists() else "there is no such folder"
        raise ScenarioError(f"Cannot report on {run_dir}: {why}. Give a folder that `offbeat run` left.")
    return Records(metrics)


def _plan_of(run_dir: Path) -> str:
    plan = run_dir / "plan.toml"
    return plan.read_text(errors="replace") if plan.is_file() else ""


def write_report(run_dir: Path, exit_codes: Mapping[int, int] | None = None) -> list[Path]:
    """Write trace.json and report.html into the run's folder, and return their paths.

    Args:
        exit_codes: of workers, by rank, as whoever started them knows them.

    Raises:
        ScenarioError: if the folder has no records, or cannot be written.
    """
    reader = _read(run_dir)
    records = reader.all()
    if not records:
        size_bytes = (run_dir / _METRICS).stat().st_size
        why = (
            "its metrics.jsonl is empty, because no worker prepared a model. Call run.prepare in the script"
            if size_bytes == 0
            else f"its metrics.jsonl holds {size_bytes} bytes but no whole record. Give a file that offbeat wrote"
        )
        raise ScenarioError(f"Cannot report on {run_dir}: {why}.")
    judged, unknown = _judged(run_dir)
    text = page(
        records,
        title=run_dir.resolve().name,
        plan=_plan_of(run_dir),
        damaged=reader.damaged,
        stalls=_stalls(run_dir, records),
        notes=[*_earlier(reader.earlier), *unknown],
        exit_codes=exit_codes,
        judged=judged,
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


def conclusion(run_dir: Path, exit_codes: Mapping[int, int] | None = None) -> list[str]:
    """The sentences below a run's final table: how it ended, and what else people should know.

    Args:
        exit_codes: as of `write_report`.
    """
    reader = Records(run_dir / _METRICS)
    records = reader.all()
    how = ending(records, _stalls(run_dir, records), exit_codes)
    lines = [*how.lines, nonfinite(records), *_earlier(reader.earlier)]
    return [line for line in lines if line]


def no_step(run_dir: Path, skip_bytes: int = 0) -> str:
    """Say why there is neither table nor report, in one sentence.

    Args:
        skip_bytes: of metrics.jsonl; what earlier runs wrote.
    """
    records = Records(run_dir / _METRICS, skip_bytes).all()
    if any(isinstance(record, StartRecord) for record in records):
        return "No step was recorded: the run ended before the first exchange of gradients was complete."
    if errors := [record.error for record in records if isinstance(record, EndRecord) and record.error]:
        return f"No step was recorded: it ended before, with {errors[0].splitlines()[0]}"
    if any(isinstance(record, EndRecord) for record in records):
        return "No step was recorded: no worker prepared a model. Call run.prepare in the script."
    if any(isinstance(record, EventRecord) and record.what == "interrupted" for record in records):
        return "No step was recorded: the job was stopped before any worker reached run.prepare."
    return "No step was recorded: no worker got as far as run.prepare, or the script does not use offbeat."


def _judged(run_dir: Path) -> tuple[dict[int, RankJudgements], list[str]]:
    """Count whose contributions were judged and rejected, as the history has it; or why that is not known."""
    if not re.search(r"^\[(rule|validator)\]$", _plan_of(run_dir), re.MULTILINE):  # so that torch need not be loaded
        return {}, []
    from offbeat.audit import rejections
    from offbeat.plan import Plan

    try:
        rule = Plan.from_toml(_plan_of(run_dir)).judging_rule
        if rule is None or not rule.judges_model:
            return {}, []
        return rejections(run_dir), []
    except PlanError:  # of a part that is not offbeat's own, or not any more
        return {}, []
    except HistoryError as error:
        return {}, [f"Whose contributions the rule has rejected is not known. {error}"]


def _stalls(run_dir: Path, records: Sequence[Record]) -> list[Stall]:
    began_s = min((record.time_s for record in records if isinstance(record, StartRecord)), default=0.0)
    return read_stalls(run_dir, since_s=began_s)


def _earlier(runs: int) -> list[str]:
    if not runs:
        return []
    which = "an earlier run" if runs == 1 else f"{runs} earlier runs"
    return [f"The folder holds {which}, too: only the newest is shown."]
