"""`offbeat run`: start local workers, stream what they say, and end them all when one is lost."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from offbeat.cli.join_target import look_for
from offbeat.cli.launch import Launch, LaunchSpec
from offbeat.cli.live_table import LiveView, final_table
from offbeat.cli.nodes import NodeGroup, NodeSpec, load_quietly
from offbeat.cli.plan import read_plan
from offbeat.cli.report import conclusion, no_step, write_report
from offbeat.cli.timeout import check_timeout
from offbeat.errors import PlanError, ScenarioError
from offbeat.report import Records
from offbeat.wire.messages import MAX_WORLD

STORE_BYTES = 1 << 20  # more than the workers of a long job write when some are lost, and others come
_FALLOC_FL_KEEP_SIZE = 1


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A training script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, max=MAX_WORLD, help="Local workers to start.")] = 2,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            "--nnodes",
            min=1,
            max=MAX_WORLD,
            help="Machines of the job: start `offbeat run` on each, with the same script and plan.",
        ),
    ] = 1,
    node_rank: Annotated[
        int | None,
        typer.Option(help="With --nodes: the number of this machine. Node 0 keeps the place where all meet."),
    ] = None,
    master_addr: Annotated[
        str,
        typer.Option(help="With --nodes: an address of node 0 that every machine reaches.", show_default=False),
    ] = "",
    master_port: Annotated[
        int, typer.Option(min=1, max=65535, help="With --nodes: the port of node 0 at which the machines meet.")
    ] = 29500,
    plan: Annotated[Path | None, typer.Option(help="A plan as TOML; the default plan if left out.")] = None,
    sync: Annotated[
        str,
        typer.Option(
            help="The policy that decides when workers wait, such as 'SSP(4)', instead of the plan's.",
            show_default=False,
        ),
    ] = "",
    codec: Annotated[
        str, typer.Option(help="The codec, such as 'Cast(\"bf16\")', instead of the plan's.", show_default=False)
    ] = "",
    fabric: Annotated[
        str,
        typer.Option(help="The fabric, such as 'ParameterServer()', instead of the plan's.", show_default=False),
    ] = "",
    controller: Annotated[
        str,
        typer.Option(
            help="The controller that swaps policies while training, such as 'WaitThreshold()', instead of the plan's.",
            show_default=False,
        ),
    ] = "",
    scheduling: Annotated[
        str,
        typer.Option(
            help="The scheduler that decides in what order gradients are sent, such as 'Prophet()', instead of the "
            "plan's.",
            show_default=False,
        ),
    ] = "",
    tuning: Annotated[
        str,
        typer.Option(
            help="How batches follow the machines' speed, such as 'BatchTuning()', instead of the plan's.",
            show_default=False,
        ),
    ] = "",
    rule: Annotated[
        str,
        typer.Option(
            help="What a server makes of contributions some of which may lie, such as 'Median()', instead of the "
            "plan's.",
            show_default=False,
        ),
    ] = "",
    validating_rule: Annotated[
        str,
        typer.Option(
            help="The rule by which a server judges contributions beside those of validators, such as 'ZenoPS()', "
            "instead of the plan's validator.",
            show_default=False,
        ),
    ] = "",
    privacy: Annotated[
        str,
        typer.Option(
            help="How each worker clips and noises what it contributes, such as 'GaussianMechanism()', instead of the "
            "plan's.",
            show_default=False,
        ),
    ] = "",
    bucket_bytes: Annotated[
        int | None, typer.Option(help="Bytes of a bucket of gradients, instead of the plan's.", show_default=False)
    ] = None,
    nonfinite: Annotated[
        str, typer.Option(help="pass, raise or skip gradients that hold NaN or Inf, instead of the plan's.")
    ] = "",
    keeps: Annotated[
        str, typer.Option(help="local_batch or global_batch stays when workers come and go, instead of the plan's.")
    ] = "",
    too_few: Annotated[
        str, typer.Option(help="skip, hold or raise where too few take part for the rule, instead of the plan's.")
    ] = "",
    refine: Annotated[
        bool,
        typer.Option(
            "--refine",
            help="Have --sync and the other parts replace those of the plan that SCRIPT passes to offbeat.init().",
        ),
    ] = False,
    servers: Annotated[
        int,
        typer.Option(min=0, max=64, help="Shards of a parameter server to start beside the workers; 0: see the plan."),
    ] = 0,
    join: Annotated[
        str,
        typer.Option(
            help="Have the workers join a job that trains: its run folder, or host:port of the first shard of its "
            "server. Without a server its plan has to say fabric = Elastic().",
            show_default=False,
        ),
    ] = "",
    validator: Annotated[
        bool,
        typer.Option(
            "--validator",
            help="Run SCRIPT, on data that is trusted, as a validator of the job at --job, whose plan has one: what "
            "its workers contribute is judged beside it, and it moves the model never itself.",
        ),
    ] = False,
    job_place: Annotated[
        str,
        typer.Option(
            "--job",
            help="With --validator: the job's run folder, or host:port of the first shard of its server.",
            show_default=False,
        ),
    ] = "",
    timeout: Annotated[
        float, typer.Option(callback=check_timeout, help="Explain every wait longer than this many seconds.")
    ] = 5.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for metrics, trace and report; a new one under runs/ if left out.")
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Record in its folder history/ what `offbeat verify-run` checks.")
    ] = False,
    hash_every: Annotated[
        int, typer.Option(min=1, help="With --history: hash the parameters after every so many steps.")
    ] = 1,
    check_freshness: Annotated[
        bool,
        typer.Option(
            "--check-freshness",
            help="To debug a script whose plan has a scheduler: end with an error where it uses a parameter before the "
            "optimizer's last step is in it. Slow.",
        ),
    ] = False,
) -> None:
    """Start SCRIPT on local workers. The same script runs under torchrun unchanged.

    The exit code is that of the worker that was lost first; 2 if offbeat refused the model, the plan or the data, or
    the workers disagreed; 76 if a worker left while the others still needed it; 78 if several workers trained to the
    end, and no model was prepared. With a parameter server, or on Elastic() or Switch(), the others continue without a
    lost worker, and the exit code is 0 if one of them ends well; but 2 if offbeat refused what a worker did.

    With --nodes it starts its part of a job on each of several machines, and the exit code is that of this machine's
    workers.

    Each of several workers gets its share of this machine's cores as torch threads, unless OMP_NUM_THREADS or
    MKL_NUM_THREADS is set, or the script calls torch.set_num_threads.
    """
    spec = NodeSpec.of(nodes, node_rank, master_addr, master_port)
    if spec is not None:
        load_quietly()
    from offbeat.cli.part_syntax import read_part
    from offbeat.plan import Plan, toml_of

    if not script.is_file():
        found = "it is no regular file" if script.exists() else "there is no such file"
        raise PlanError(f"Cannot run {script}: {found}. Give the path of a Python script.")
    given = {
        "sync": sync,
        "codec": codec,
        "fabric": fabric,
        "controller": controller,
        "scheduling": scheduling,
        "tuning": tuning,
        "rule": rule,
        "validator": validating_rule,
        "privacy": privacy,
    }
    parts: dict[str, Any] = {room: read_part(room, text) for room, text in given.items() if text}
    values = {"bucket_bytes": bucket_bytes, "nonfinite": nonfinite, "keeps": keeps, "too_few": too_few}
    parts |= {name: value for name, value in values.items() if value not in ("", None)}
    if refine and (plan is not None or not parts):
        raise PlanError(
            "Cannot refine the plan of the script: --refine takes the parts to replace, such as --sync 'SSP(4)', and "
            "no --plan."
        )
    if spec is not None and servers:
        raise PlanError(
            "Cannot start servers for several machines: those of --servers listen on this machine's loopback. Start "
            "`offbeat serve` on one machine and name it in OFFBEAT_SERVERS on all, or leave out --servers: "
            "fabric = ParameterServer() starts one beside the first worker."
        )
    if spec is not None and (join or validator):
        raise PlanError("Cannot join a job from several machines at once: leave out --nodes, and join from each.")
    joining = None
    if validator != bool(job_place) or (validator and join):
        raise PlanError("Cannot validate without a job: give --validator and --job together, and no --join.")
    if join or validator:
        if servers:
            raise PlanError("Cannot start servers for a job that is joined: it has its own. Leave out --servers.")
        if validator and getattr(context.get_parameter_source("workers"), "name", "") == "DEFAULT":
            workers = 1
        joining = look_for(join or job_place, workers, validates=validator)
    if plan is not None:
        chosen = read_plan(plan, **parts)
    else:
        chosen = Plan() if joining is None else joining.plan
        if not refine:  # else they need only go together with the rest of the script's plan
            chosen = dataclasses.replace(chosen, **parts)
    folder = run_dir or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{script.stem}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.toml").write_text(chosen.to_toml())
    except OSError as error:
        raise PlanError(f"Cannot write to {folder}: {error.strerror}. Choose another folder with --run-dir.") from error
    console = Console(highlight=False, soft_wrap=True)
    group = None
    if spec is not None:
        group = NodeGroup(spec, lambda text: console.print(text, style="yellow", markup=False))
        group.meet(workers, chosen.to_toml(), timeout)
        console.print(group.told(workers), style="dim", markup=False)
    job = LaunchSpec(
        script=script,
        arguments=tuple(arguments or ()),
        workers=workers,
        plan=chosen.to_toml(),
        servers=servers,
        timeout_s=timeout,
        run_dir=folder.resolve(),
        joining=joining,
        nodes=group,
        history=folder.resolve() / "history" if history else None if joining is None else joining.history,
        hash_every=hash_every,
        store=_store(folder.resolve()) if chosen.has_elastic_group and joining is None and group is None else None,
        check_freshness=check_freshness,
        parts=toml_of(parts) if refine else "",
    )
    metrics = folder / "metrics.jsonl"
    first = next((one.first_rank for one in (joining, group) if one is not None), 0)
    if joining is not None:
        console.print(joining.told(workers), style="dim", markup=False)
    with LiveView(console, metrics, range(first, first + workers)) as view:
        launch = Launch(job, console, view.update)
        code = launch.run()
    try:
        _conclude(folder, console, view.skip_bytes, launch)
    except (OSError, ScenarioError) as error:  # such as a full disk: what was trained is trained
        why = f"Cannot write the report: {error.strerror}." if isinstance(error, OSError) else str(error)
        console.print(f"{why} `offbeat report {folder}` tries again.", markup=False)
    if code and not launch.has_said_why and (strayed := _strayed(context, job.arguments)):
        console.print(
            f"{strayed} stands after the script and was passed to it. Options of `offbeat run` stand before it: "
            f"offbeat run {strayed} ... {script}",
            markup=False,
        )
    raise typer.Exit(code)


def _strayed(context: typer.Context, arguments: tuple[str, ...]) -> str:
    """The first argument of the script that is an option of ours; empty if none is."""
    ours = {option for parameter in context.command.params for option in parameter.opts if option.startswith("-")}
    return next((name for one in arguments if (name := one.partition("=")[0]) in ours), "")


def _store(folder: Path) -> Path:
    """A file for the workers to meet in, for this user only: what proves that one may speak to them is in it.

    Others may join them, and outlive them and this process: so it lies in the run's folder.

    Raises:
        PlanError: if it cannot be made.
    """
    store = folder / "store"
    try:
        for left in (store, folder / "store.json", *(folder / "newcomers").glob("rank-*")):
            left.unlink(missing_ok=True)
        fd = os.open(store, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        _reserve(fd)
        os.close(fd)
    except OSError as error:
        raise PlanError(f"Cannot write to {folder}: {error.strerror}. Choose another folder with --run-dir.") from error
    return store


def _reserve(fd: int) -> None:
    """Keep room on the disk behind a file's end, where the file system can: what is appended later is not lost.

    Nobody can read past an entry that a full disk has cut in half: whoever reads the store waits for the rest.
    """
    ctypes.CDLL(None).fallocate64(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(STORE_BYTES))


def _conclude(folder: Path, console: Console, skip_bytes: int, launch: Launch) -> None:
    """Say what was done, how it ended, and where it can be looked at."""
    table = final_table(Records(folder / "metrics.jsonl", skip_bytes))
    if table is None:
        why = "No step was recorded." if launch.has_said_why else no_step(folder, skip_bytes)
        console.print(why, style="dim", markup=False)
        return
    console.print(table)
    for line in conclusion(folder, launch.exit_codes):
        console.print(line, markup=False)
    for path in write_report(folder, launch.exit_codes):
        console.print(f"wrote {path}", style="dim", markup=False)
