"""`offbeat simulate`: what a scenario would measure, in virtual time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.lab import ScenarioFile, check_writable, drawn, read_scenario
from offbeat.errors import ScenarioError

if TYPE_CHECKING:
    from offbeat.lab.results import ResultFile
    from offbeat.scenario import Scenario
    from offbeat.sim import Known, Prediction

_MOST_BYTES = 1 << 30
_Result = Annotated[
    Path | None,
    typer.Option(
        metavar="RESULT.json",
        help="A result of `offbeat lab run` that says how long steps compute: needed if the scenario runs a script, "
        "not if it replays a model's layers.",
        show_default=False,
    ),
]


def simulate(
    scenario: ScenarioFile,
    like: _Result = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Instead of the scenario's hosts.count.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Instead of the scenario's run.steps.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the predictions.", show_default=False)] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put them into the result that --like names, beside what was measured.")
    ] = False,
) -> None:
    """Predict every row of a scenario without running it. Needs no root; a minute takes milliseconds."""
    import msgspec

    from offbeat.lab import results
    from offbeat.lab.predictions import predictions

    parsed, _ = read_scenario(scenario)
    check_writable(json)
    measured = None if like is None else _read_result(like)
    if write and (measured is None or like is None or measured.digest != parsed.digest or workers or steps):
        raise ScenarioError(
            f"Cannot write predictions beside a measurement: {_why_not(measured, parsed.digest)}. Use --write with "
            "--like RESULT.json of this very scenario, and without --workers and --steps."
        )
    known = _known(parsed, scenario, measured)
    if workers is not None:
        if parsed.hosts is None:
            raise ScenarioError(
                "Cannot simulate another number of workers: the scenario has a table for each. Use [hosts] with a "
                "count (hosts.count)."
            )
        parsed = msgspec.structs.replace(parsed, hosts=msgspec.structs.replace(parsed.hosts, count=workers))
        known = known.for_workers(workers)
    began_s = time.perf_counter()
    predicted = predictions(parsed, scenario.parent, known, steps=steps)
    took_s = time.perf_counter() - began_s
    if not predicted:
        raise ScenarioError(
            f"Cannot simulate {parsed.scenario.name}: none of its rows is modelled. Measure it: "
            f"offbeat lab run {scenario} --json RESULT.json."
        )
    typer.echo(_shown(parsed.scenario.name, predicted, measured, parsed.run.baseline), nl=False)
    played_s = sum(one.simulated_s for one in predicted)
    for line in _costs(parsed, predicted):
        typer.echo(line)
    left_out = [row.name for row in parsed.row if row.name not in {one.row for one in predicted}]
    if left_out:
        typer.echo(f"not modelled: {', '.join(left_out)}")
    typer.echo(f"{played_s:.0f} s of training in {took_s:.2f} s")
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(predicted), indent=1))
    if write and measured is not None and like is not None:
        results.write(msgspec.structs.replace(measured, simulated=predicted), like)


def _known(parsed: Scenario, path: Path, measured: ResultFile | None) -> Known:
    """The known facts about the steps; if a result is missing that lies where results of such scenarios do, name it.

    Raises:
        ScenarioError: if they are not known.
    """
    from offbeat.lab.predictions import known_of

    try:
        return known_of(parsed, measured)
    except ScenarioError as error:
        result = Path(os.path.normpath(path.parent / ".." / "results" / f"{parsed.scenario.name}.json"))
        if measured is not None or not result.is_file():
            raise
        raise ScenarioError(f"{error} There is one: --like {result}.") from error


def _why_not(measured: ResultFile | None, digest: str) -> str:
    if measured is None:
        return "no result is named"
    return "the result is of another scenario" if measured.digest != digest else "another number of them was asked for"


def _read_result(path: Path) -> ResultFile:
    import msgspec

    from offbeat import toml_reader
    from offbeat.lab import results

    way_out = "Name a file that `offbeat lab run` wrote (--like)."
    text = toml_reader.read_bytes(path, "result", way_out, ScenarioError, _MOST_BYTES)
    try:
        return results.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ScenarioError(f"Cannot read the result {path}: {error}. {way_out}") from error


def _costs(parsed: Scenario, predicted: list[Prediction]) -> list[str]:
    """Say what each fault costs each row, a line for each."""
    lines = []
    for one in predicted:
        if any(not fault.stays for fault in parsed.fault) and not one.faults:
            lines.append(f"{one.row}: no fault strikes this row")
        for fault, cost_s in zip(one.faults, one.others_s, strict=True):
            cost = "no step of another ends behind it"
            if cost_s is not None:
                cost = f"the others' longest step takes {cost_s:.2f} s more than usual"
            lines.append(f"{one.row}: {fault}: {cost}")
    return lines


def _shown(title: str, predicted: list[Prediction], measured: ResultFile | None, baseline: str) -> str:
    from rich.console import Console

    base = next((one for one in predicted if one.row == baseline), None)
    found = {} if measured is None else {row.row: row.seconds_per_step.median for row in measured.rows}
    headings = ["row", "ms per step", "samples/s", f"x {baseline}", "waits", "stale, mean/max"]
    headings += ["measured ms", "error"] if found else []
    rows = []
    for one in predicted:
        cells = [one.row, f"{one.seconds_per_step * 1e3:.4g}", f"{one.samples_per_s:.4g}"]
        cells += [f"{base.samples_per_s / one.samples_per_s:.3f}" if base else ""]
        cells += [f"{one.wait_share:.0%}", f"{one.staleness:.1f}/{one.most_stale}"]
        if found:
            step_s = found.get(one.row)
            cells += (
                ["", ""] if step_s is None else [f"{step_s * 1e3:.4g}", f"{one.seconds_per_step / step_s - 1:+.1%}"]
            )
        rows.append(cells)
    console = Console(width=max(80, Console().width))
    with console.capture() as capture:
        console.print(drawn(f"{title}, simulated", headings, rows), crop=False)
    return capture.get()
