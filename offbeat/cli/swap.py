"""`offbeat swap`: have another synchronization policy decide in a job that trains."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.job_address import (
    Authority,
    Certificate,
    JobName,
    JobPlace,
    Key,
    TokenFile,
    find,
    given,
    is_without_server,
)
from offbeat.cli.operator_client import ask_coordinator
from offbeat.errors import NetworkError, PlanError
from offbeat.wire import swap_request

_PATIENCE_S = 30.0  # for all workers to say what they make of it
_LOOK_S = 0.1
_QUIET_S = 2.0  # then people are told what is waited for


def swap(
    policy: Annotated[str, typer.Argument(help="As Python, such as 'SSP(4)' or ASP.", show_default=False)],
    job: JobPlace,
    fabric: Annotated[
        str,
        typer.Option(
            help="The fabric from then on, such as 'ParameterServer()' or ProcessGroup; as now if left out.",
            show_default=False,
        ),
    ] = "",
    job_name: JobName = "",
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
) -> None:
    """Swap the policy of a job that trains.

    All workers are asked; if all can go by it, it holds for all at once, and nothing that is on its way is lost. If one
    cannot, nothing changes, and the exit code is 2. If the plan has a controller, it stops: nothing swaps back. A job
    without a parameter server is asked through its run folder, and acts on it behind its next exchange. With
    --fabric all workers move to a server, or leave theirs, at their next sync point.
    """
    import tomli_w

    from offbeat.cli.part_syntax import read_part
    from offbeat.plan import table_of
    from offbeat.protocol.plan_swap import SwapPlan, SwapResult

    parts = {"sync": table_of(read_part("sync", policy))}
    if fabric:
        parts["fabric"] = table_of(read_part("fabric", fabric))
    part = tomli_w.dumps(parts)
    if is_without_server(job):
        typer.echo(_swap_by_folder(Path(job), part))
        return
    if Path(job).is_dir() and not (Path(job) / "server.json").exists():
        raise NetworkError(
            f"Cannot swap the policy of the job in {job}: it has neither metrics.jsonl nor server.json. Either it "
            "has not reached run.prepare yet: ask again when it trains; or this is not the folder of a run."
        )
    target = find(job, given(job_name, token_file, certificate, key, authority))
    request = ask_coordinator(
        target,
        SwapPlan(0, part),
        SwapResult,
        patience_s=_PATIENCE_S,
        ended="The job has ended; nothing was swapped.",
        silent=f"Cannot tell whether the policy was swapped: the server has not answered for {_PATIENCE_S:g} s, as "
        "some worker has not. `offbeat top` shows which one, and the policy.",
    )
    said = asyncio.run(request)
    if said.refusal:
        raise PlanError(said.refusal)
    typer.echo(said.text)


def _swap_by_folder(folder: Path, part: str) -> str:
    """Post the request to a job without a server, and return its reply.

    Raises:
        PlanError: if it refuses.
        NetworkError: if it does not answer, or begins with a server that it has not reached yet.
    """
    from offbeat.report.records import has_ended

    if _is_before_its_server(folder):
        raise NetworkError(
            f"Cannot swap the policy of the job in {folder} yet: it begins with a server, and has not reached "
            "offbeat.init. Ask again when it trains: the server will be asked."
        )
    request = swap_request.post(folder, part)
    told_s = time.monotonic() + _QUIET_S
    deadline_s = time.monotonic() + _PATIENCE_S
    try:
        while (reply := swap_request.answered(folder, request)) is None:
            if has_ended(folder / "metrics.jsonl"):
                raise NetworkError(f"Cannot swap the policy of the job in {folder}: it has ended.")
            if swap_request.is_posted(folder, request) and not is_without_server(str(folder)):
                raise NetworkError(
                    f"Cannot swap the policy of the job in {folder}: all workers have moved to a server before "
                    "they read this. Ask again: the server will be asked."
                )
            if time.monotonic() > told_s:
                told_s = math.inf
                typer.echo("asked; the workers take it up behind their next exchange", err=True)
            if time.monotonic() > deadline_s:
                raise NetworkError(
                    f"Cannot swap the policy of the job in {folder}: it has not answered for {_PATIENCE_S:g} s. It has "
                    "ended, or its workers have exchanged nothing since, and take nothing up until they do."
                )
            time.sleep(_LOOK_S)
    finally:
        swap_request.withdraw(folder, request)
    if reply.refusal:
        raise PlanError(reply.refusal)
    return reply.text


def _is_before_its_server(folder: Path) -> bool:
    """Whether a job whose plan has a server has made no step yet; one that has, and has none, has left it."""
    from offbeat.plan import Plan
    from offbeat.report.records import Records, StepRecord

    try:
        plan = Plan.from_toml((folder / "plan.toml").read_text())
    except (OSError, UnicodeDecodeError, PlanError):
        return False
    records = Records(folder / "metrics.jsonl").all()
    return plan.is_served and not any(isinstance(record, StepRecord) for record in records)
