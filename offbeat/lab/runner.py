"""Run every row of a scenario, interleaved and repeated, and sum up what was measured.

A B C C B A ... rather than A A B B C C: the machine drifts (temperature, neighbours), and what drifts must hit all rows
alike. All rows drop the same warm-up and run on the very same links. What was measured is handed on after each run, so
that whoever interrupts a long one, or a row that fails, loses nothing else.
"""

from __future__ import annotations

import logging
import secrets
import statistics
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.diagnosis.explain import without_quoted
from offbeat.errors import DisagreementError, OffbeatError, ScenarioError, WorkerLostError
from offbeat.lab import goodput, hardware, launch, link_sampler, lower_bounds, recorder
from offbeat.lab.arc_counters import HEADER_BYTES, ArcCounters
from offbeat.lab.emulated_link import law_of
from offbeat.lab.fault_cost import recoveries
from offbeat.lab.fault_injection import FaultRun
from offbeat.lab.jobs import jobs
from offbeat.lab.network import Network
from offbeat.lab.predictions import known_of, predictions
from offbeat.lab.refusals import refuse
from offbeat.lab.results import ArcUse, LinkUse, LossCurve, RawRun, ResultFile, RowResult, Spread, Staleness
from offbeat.lab.run_result import RunResult
from offbeat.lab.swap_cost import course, handovers, swaps
from offbeat.lab.validator_process import ValidatorProcess
from offbeat.report.records import Records, StepRecord
from offbeat.report.scheduled_steps import scheduled_steps
from offbeat.safe_read import read_file
from offbeat.scheduling import MadeSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.lab.jobs import RowJob
    from offbeat.lab.swap_cost import TimedSwap
    from offbeat.lab.worker_placement import WorkerPlacement
    from offbeat.scenario import Replay, Scenario, TrainingScript

_log = logging.getLogger("offbeat")
_MAX_EVENTS = 20
_OF_NO_FAULT = ("stall", "pace")
"""What a job tells without being asked whether anything was lost."""
_SERVER_TIMEOUT_S = 10.0  # many processes start at once on few cores
_FAULTY_TIMEOUT_S = 5.0  # the default of a job: how soon somebody is missed is what faults are about


class _MetricsRecord(msgspec.Struct):
    """The parts of offbeat's metrics records that a result speaks of."""

    kind: str
    rank: int = 0
    what: str = ""
    text: str = ""
    buckets: list[msgspec.Raw] = []
    staleness: int = 0
    time_s: float = 0.0
    barrier_s: float | None = None


def run(
    scenario: Scenario,
    text: str,
    folder: Path,
    *,
    command: str,
    tell: Callable[[str, int], None],
    keep: Callable[[ResultFile], None] | None = None,
    fail: Callable[[str, OffbeatError], None] | None = None,
) -> ResultFile:
    """Measure every row of a scenario. A row that fails is not run again; the others continue.

    Args:
        text: the scenario as it was written.
        folder: where its file lies; paths in it start there.
        command: the command line, for the record.
        tell: called with the row's name and the repeat before each run.
        keep: called after each run that ended well, with all that was measured so far.
        fail: called with the row's name, and why, when one fails.

    Raises:
        OffbeatError: if the network cannot be built, or every row failed: a worker did, or a system sums wrongly.
    """
    rows = jobs(scenario, folder)
    refuse(scenario)
    with ExitStack() as resources:
        network, measured = None, {}
        if scenario.loopback:
            scratch = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-lab-")))
            places = launch.loopback_places([host.name for host in scenario.topology.hosts])
            if any(job.served for job in rows) and not scenario.servers:
                places += launch.loopback_places(["s0"])
        else:
            network = resources.enter_context(Network(scenario.topology, emulated=scenario.emulated, mtu=scenario.mtu))
            scratch = network.scratch
            places = launch.places(network)
            measured = goodput.ensure(network)
            if scenario.impair is not None:  # not before their rates are known to be what they should be
                law = law_of(scenario.impair)
                for host in scenario.impaired:
                    network.worsen(host, up=law, down=law)
        repeats: dict[str, list[RunResult]] = {job.row.name: [] for job in rows}
        failed: dict[str, OffbeatError] = {}
        for index in range(scenario.run.repeats):
            for number, job in list(enumerate(rows))[:: -1 if index % 2 else 1]:
                name = job.row.name
                if name in failed:
                    continue
                tell(name, index)
                run_folder = scratch / f"{index}-{number}"
                run_folder.mkdir()
                try:
                    repeats[name].append(run_once(job, places, run_folder, index, network))
                except OffbeatError as error:
                    failed[name] = error
                    if fail is not None:
                        fail(name, error)
                else:
                    if keep is not None:
                        keep(_report(scenario, text, command, rows, repeats, measured, failed))
    if not any(repeats.values()):
        raise next(iter(failed.values()))
    report = _report(scenario, text, command, rows, repeats, measured, failed)
    try:
        predicted = predictions(scenario, folder, known_of(scenario, report))
    except ScenarioError as error:  # a fault that cannot be played; what was measured is not to be lost by that
        _log.warning("%s", error)
        return report
    return msgspec.structs.replace(report, simulated=predicted)


def run_once(
    job: RowJob, places: Sequence[WorkerPlacement], folder: Path, index: int, network: Network | None
) -> RunResult:
    """Run one row once, in an empty folder.

    Raises:
        WorkerLostError: if a worker fails that no fault ends, or the validator does.
        ScenarioError: if a worker measured nothing, or a fault never fired.
        DisagreementError: if the replicas are not equal at the end.
    """
    strikes = FaultRun(job, folder, network)
    environment = job.environment(folder / "run") | strikes.environment
    lab = None if network is None else network.lab
    names = {host.name for host in job.scenario.workers.hosts}
    servers = [place for place in places if place.host not in names]
    places = [place for place in places if place.host in names]
    with ExitStack() as resources:
        validator = None
        if job.served:
            is_struck = any(fault.target != "worker" and not fault.stays for fault in job.faults)
            timeout_s = _FAULTY_TIMEOUT_S if job.faults or job.given_up else _SERVER_TIMEOUT_S
            token = secrets.token_hex(32) if job.validated else ""
            shards = launch.Shards(
                servers, folder=folder, timeout_s=timeout_s, lab=lab, is_struck=is_struck, validator_token=token
            )
            environment |= resources.enter_context(shards).environment
            if job.validated:
                own = job.environment(folder / "validator") | shards.environment | job.of_validator(servers[0])
                validator = ValidatorProcess(
                    job.command,
                    place=servers[0],
                    folder=folder,
                    world=len(places),
                    token=token,
                    environment=own,
                    lab=lab,
                )
                resources.enter_context(validator)
        if job.switched:
            namespace, address = (None, "127.0.0.1") if network is None else network.switch
            ports: list[str] = []
            if job.scenario.hosts is not None and job.scenario.hosts.switch == "ebpf":
                hosts = [host.name for host in job.scenario.topology.hosts]
                ports = ["lo"] if network is None else [network.port(host)[1] for host in hosts]
            switch = launch.SwitchProcess(namespace, address, folder=folder, lab=lab, ports=ports)
            environment |= resources.enter_context(switch).environment
            strikes.switch = switch
        workers = resources.enter_context(
            launch.Workers(
                job.command,
                places=places,
                folder=folder,
                environment=environment,
                each=[own | strikes.environment_of(rank) for rank, own in enumerate(job.each(places))],
                lab=lab,
                are_restarted=job.restarts,
            )
        )
        watched = (servers if job.served else places)[0] if servers else None
        watch = None if watched is None or watched.port is None else link_sampler.Sampler(watched.host, *watched.port)
        counters = None if network is None or network.topology.is_star else ArcCounters(network)
        try:
            with strikes, watch or nullcontext(), counters or nullcontext():
                workers.wait(job.scenario.run.timeout_s, strikes.struck, validator=validator)
        except WorkerLostError as error:
            raise WorkerLostError(f"Cannot measure row {job.row.name!r}, repeat {index}: {error}") from None
        lines = [recorder.read(workers.result(rank)) for rank in range(len(places))]
        measured = [
            RawRun.from_lines(lines[rank], row=job.row.name, repeat=index, rank=rank, host=place.host)
            for rank, place in enumerate(places)
            if rank not in strikes.struck
        ]
    digests = {worker.digest: worker.rank for worker in measured}
    if len(digests) > 1:
        way_out = "The system under test broke the replicas apart."
        if not job.is_settled:
            way_out = (
                "With this plan replicas are equal only once they are settled: call bound.settle() in the script, on "
                "every worker, before the digest is made (workload.path). If it does, the system broke them apart."
            )
        raise DisagreementError(
            f"Cannot trust row {job.row.name!r}: at the end of repeat {index} ranks {sorted(digests.values())} hold "
            f"different values where all replicas should be equal. {way_out}"
        )
    told = _told(folder / "run" / "metrics.jsonl")
    events = [note for worker in measured for note in worker.notes if worker.rank == 0]
    # Where the files of this machine lie is of no interest.
    said = [(record, without_quoted(record.text)) for record in told if record.kind == "event"]
    events += [f"rank {record.rank}: {record.what}: {text}" for record, text in said]
    buckets = next((len(record.buckets) for record in told if record.kind == "start" and record.buckets), 0)
    staleness = [record.staleness for record in told if record.kind == "step"]
    spans = [line.span_s for worker in lines for line in worker if isinstance(line, recorder.RunTotals)]
    measured = [_with_told(worker, told, stale=bool(strikes.faults)) for worker in measured]
    measured = _with_block_ends(measured, folder / "run")
    begin_s = max(begin for begin, _ in spans)
    told_swaps = [record for record in told if record.kind == "event" and record.what == "swap"]
    ranks = range(len(places))
    swapped = swaps([[(one.time_s, one.text) for one in told_swaps if one.rank == rank] for rank in ranks])
    named = [] if index else [_named(one, begin_s) for one in swapped]
    events = strikes.events(begin_s) + named + events  # first, as a result keeps only so many
    whole_s = link_sampler.whole_time(spans)
    link = None if watch is None else watch.between(*whole_s)
    span_of = {
        place.host: line.span_s
        for place, worker in zip(places, lines, strict=True)
        for line in worker
        if isinstance(line, recorder.RunTotals)
    }
    arcs = {} if counters is None else counters.between(span_of, whole_s)
    lasting = [(record.time_s, text) for record, text in said if record.what not in _OF_NO_FAULT]
    costs = recoveries(job, index, strikes.fired, lines, lasting)
    # Where something goes wrong, what a step took says nothing of a swap.
    handed_over = [] if strikes.faults else handovers(job.row.name, index, swapped, lines)
    seen_s = whole_s[1] - whole_s[0]
    return RunResult(measured, events, buckets, staleness, link, arcs, seen_s, costs, handed_over, course(lines))


def _named(swapped: TimedSwap, begin_s: float) -> str:
    """Say which policy took over, and when."""
    offset_s = time.time() - time.perf_counter() + begin_s
    return f"swap: {swapped.policy}, {swapped.begin_s - offset_s:.2f} s after the first measured step began"


def _with_told(worker: RawRun, told: Sequence[_MetricsRecord], *, stale: bool) -> RawRun:
    """Add what offbeat tells of each measured step: staleness, if asked for, and time at a barrier, if it is known."""
    steps = [record for record in told if record.kind == "step" and record.rank == worker.rank]
    measured = steps[-len(worker.step_s) :]  # those to warm up come first
    return msgspec.structs.replace(
        worker,
        staleness=[record.staleness for record in measured] if stale else [],
        barrier_s=[round(record.barrier_s, 6) for record in measured if record.barrier_s is not None],
    )


def _with_block_ends(workers: list[RawRun], run_dir: Path) -> list[RawRun]:
    """Add how far blocks ended from where the last schedule predicts it, if gradients went by one."""
    path = run_dir / MadeSchedule.file_name(0)
    if not path.exists():
        return workers
    made, records = read_file(path, MadeSchedule.from_bytes), Records(run_dir / "metrics.jsonl").all()
    steps = [record for record in records if isinstance(record, StepRecord)]
    errors = [
        scheduled_steps(made, [step for step in steps if step.rank == worker.rank]).block_end_error
        for worker in workers
    ]
    return [
        msgspec.structs.replace(worker, block_end_error=None if error is None else round(error, 4))
        for worker, error in zip(workers, errors, strict=True)
    ]


def _told(path: Path) -> list[_MetricsRecord]:
    decoder, told = msgspec.json.Decoder(_MetricsRecord), []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            told.append(decoder.decode(line))
        except msgspec.MsgspecError:
            # A worker that was killed may leave half a line.
            continue
    return told


def _report(
    scenario: Scenario,
    text: str,
    command: str,
    rows: Sequence[RowJob],
    repeats: dict[str, list[RunResult]],
    measured: dict[str, float],
    failed: dict[str, OffbeatError],
) -> ResultFile:
    """The result so far: of the rows that have been run at least once."""
    rows = [job for job in rows if repeats[job.row.name]]
    everything = [worker for job in rows for one in repeats[job.row.name] for worker in one.workers]
    # Where the row that others are to be compared with has not been run yet, or has failed, another takes its place.
    base = next((job for job in rows if job.row.name == scenario.run.baseline), rows[0])
    baseline = {one.index: one for one in repeats[base.row.name]}
    overhead = {}
    for job in rows:
        pairs = [(one, baseline[one.index]) for one in repeats[job.row.name] if one.index in baseline]
        # Only where both send the same, along the same ways, is the difference the system's own.
        is_like = job.tolerance == base.tolerance and job.sends_each_gradient and not job.faults + job.attacks
        if pairs[0][0].buckets and is_like:
            more_s = statistics.median(one.seconds_per_step - other.seconds_per_step for one, other in pairs)
            overhead[job.row.name] = round(more_s * 1e6 / pairs[0][0].buckets, 1)
    handed_over = [cost for job in rows for one in repeats[job.row.name] for cost in one.handovers]
    return ResultFile(
        name=scenario.scenario.name,
        description=scenario.scenario.description,
        scenario=text,
        digest=scenario.digest,
        command=command,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        goodput_mbps=measured,
        overhead_us_per_bucket=overhead,
        rows=[_record(job, repeats[job.row.name], base.row.name, baseline, everything) for job in rows],
        raw=everything,
        bounds={job.row.name: lower_bounds.limit(job, everything)[1] for job in rows},
        recoveries=[cost for job in rows for one in repeats[job.row.name] for cost in one.recoveries],
        handovers=handed_over,
        courses=[
            LossCurve(row=job.row.name, repeat=index, losses=one.losses)
            for job in rows
            for index, one in enumerate(repeats[job.row.name])
            if one.losses and handed_over
        ],
        links=[use for job in rows if (use := _link_use(job, repeats[job.row.name])) is not None],
        arcs=[use for job in rows for use in _arc_uses(job.row.name, repeats[job.row.name])],
        failed={name: without_quoted(str(error)).partition("\n")[0] for name, error in failed.items()},
    )


def _record(
    job: RowJob, runs: Sequence[RunResult], base: str, baseline: Mapping[int, RunResult], everything: Sequence[RawRun]
) -> RowResult:
    scenario = job.scenario
    step = Spread.of([one.seconds_per_step for one in runs])
    bound_s, _ = lower_bounds.limit(job, everything)
    times = [one.time_to(scenario.workload) for one in runs]
    reached = [time_s for time_s in times if time_s is not None]
    metrics = [metric for one in runs if (metric := one.final_metric) is not None]
    ranks = range(len(runs[0].workers))  # places in the list: whom a fault ended is not in it
    stale = [value for one in runs for value in one.staleness] or [0]
    return RowResult(
        scenario=scenario.scenario.name,
        row=job.row.name,
        system=job.row.system,
        plan=job.plan,
        repeats=len(runs),
        seconds_per_step=step,
        samples_per_s=statistics.median(one.samples_per_s for one in runs),
        time_to_target_s=statistics.median(reached) if len(reached) == len(runs) else None,
        final_metric=statistics.median(metrics) if metrics else None,
        bytes_sent_per_worker=[int(statistics.median(one.workers[rank].bytes_sent for one in runs)) for rank in ranks],
        wait_s_per_worker=[statistics.median(sum(one.workers[rank].wait_s) for one in runs) for rank in ranks],
        staleness=Staleness(mean=statistics.fmean(stale), max=max(stale)),
        bound_s=bound_s,
        percent_of_bound=100 * bound_s / step.median,
        ratio_to_baseline=_ratio(runs, baseline, scenario.workload),
        baseline=base,
        events=list(dict.fromkeys(event for one in runs for event in one.events))[:_MAX_EVENTS],
    )


def _link_use(job: RowJob, runs: Sequence[RunResult]) -> LinkUse | None:
    """Measure how evenly a row used its link; None if nobody looked, or it was over before anything could be seen."""
    traffic = [(one.link, one.seconds_per_step) for one in runs if one.link is not None and one.link.received_bytes]
    if not traffic:
        return None
    first = traffic[0][0]
    rate_mbps = job.scenario.topology.uplink(first.host).rate_mbps or 0.0
    figures = [link_sampler.figures(link, rate_mbps=rate_mbps, round_s=round_s) for link, round_s in traffic]
    share, variation, idle_share = (statistics.median(column) for column in zip(*figures, strict=True))
    return LinkUse(
        row=job.row.name,
        host=first.host,
        rate_mbps=rate_mbps,
        repeat=next(index for index, one in enumerate(runs) if one.link is first),
        interval_s=first.interval_s,
        received_bytes=first.received_bytes,
        sent_bytes=first.sent_bytes,
        share=share,
        variation=variation,
        idle_share=idle_share,
    )


def _arc_uses(row: str, runs: Sequence[RunResult]) -> list[ArcUse]:
    """Measure what each direction of each link carried; nothing if nobody looked."""
    uses = []
    for arc in runs[0].arcs:
        sent_bytes, packets = (
            round(statistics.median(column)) for column in zip(*(one.arcs[arc] for one in runs), strict=True)
        )
        rate_mbps = arc.rate_mbps or 0.0
        shares = [one.arcs[arc].sent_bytes * 8e-6 / (rate_mbps * one.seen_s) for one in runs if rate_mbps]
        uses.append(
            ArcUse(
                row=row,
                source=arc.source,
                target=arc.target,
                rate_mbps=rate_mbps,
                sent_bytes=sent_bytes,
                packets=packets,
                payload_bytes=max(0, sent_bytes - HEADER_BYTES * packets),
                share=statistics.median(shares) if shares else 0.0,
            )
        )
    return uses


def _ratio(runs: Sequence[RunResult], baseline: Mapping[int, RunResult], workload: Replay | TrainingScript) -> float:
    pairs = [(one, baseline[one.index]) for one in runs if one.index in baseline]
    times = [(one.time_to(workload), base.time_to(workload)) for one, base in pairs]
    ratios = [mine / base for mine, base in times if mine is not None and base]
    if len(ratios) < len(pairs):
        # No target, or not reached every time: the time per sample is what can be compared.
        ratios = [base.samples_per_s / one.samples_per_s for one, base in pairs]
    return statistics.median(ratios)
