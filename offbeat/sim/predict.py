"""Predictions of what a row of a scenario would measure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from offbeat import model_profiles
from offbeat.errors import ScenarioError
from offbeat.float_sum import add_up
from offbeat.scenario import Replay
from offbeat.sim import allreduce, cross_iteration, early_push
from offbeat.sim.compute_time import ComputeTimes
from offbeat.sim.disturbances import SERVER
from offbeat.sim.early_push import EarlyParts, SimulatedEarlyPush
from offbeat.sim.fault_cost import others_s
from offbeat.sim.faults import Faults, check
from offbeat.sim.links import Links
from offbeat.sim.message_sizes import buckets, narrowing
from offbeat.sim.parameter_server import SimulatedServer
from offbeat.sync import BSP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.fabric import Routed
    from offbeat.fault_spec import Fault
    from offbeat.plan import Plan
    from offbeat.scenario import Row, Scenario, TrainingScript
    from offbeat.sim.result import SimResult

_PEERS = {"ddp": 1.0, "ddp+bf16": 0.5}


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prediction of a row; compare with `offbeat.lab.results.RowResult`.

    Args:
        seconds_per_step: mean over the steps that count, and the workers.
        samples_per_s: of all workers together.
        wait_share: part of their time that workers do not compute.
        staleness: mean of it, and `most_stale` the maximum.
        simulated_s: virtual seconds until the last worker had done its last step.
        others_s: for each fault that struck and is over at some time, in order of time, as `offbeat.lab.fault_cost` has
            it: how much longer than usual the longest step took of a worker that it did not strike; None if none of
            them ended a step behind it.
        faults: what these were, in words.
    """

    row: str
    seconds_per_step: float
    samples_per_s: float
    wait_share: float
    staleness: float = 0.0
    most_stale: int = 0
    simulated_s: float = 0.0
    others_s: list[float | None] = []
    faults: list[str] = []


@dataclass(frozen=True)
class Known:
    """The facts that a scenario does not give of a script, and one measurement does.

    Args:
        compute_s: mean computation of a step of each worker, by rank, without bad luck.
        gradient_bytes: of a step, in float32.
        batch: samples of a worker's step.
    """

    compute_s: Sequence[float]
    gradient_bytes: float
    batch: int

    @classmethod
    def of(cls, scenario: Scenario) -> Known:
        """The facts that a replay gives of itself.

        Raises:
            ScenarioError: if it is a script.
        """
        workload = scenario.workload
        if not isinstance(workload, Replay):
            raise ScenarioError(
                f"Cannot simulate the script {workload.path}: how long its steps compute, and how many bytes its "
                "gradients have, is not in the scenario. Name a result that was measured with it: --like RESULT.json "
                "(workload.path)."
            )
        layers = workload.layers()
        compute_s = add_up(layer.forward_s + layer.backward_s for layer in layers)
        factors = [host.compute_factor for host in scenario.workers.hosts]
        return cls([compute_s * factor for factor in factors], model_profiles.size_bytes(layers), workload.batch)

    def for_workers(self, count: int) -> Known:
        """The same for another number of workers, which are like these in turn."""
        return Known(
            [self.compute_s[rank % len(self.compute_s)] for rank in range(count)], self.gradient_bytes, self.batch
        )


def is_modelled(row: Row, workload: Replay | TrainingScript | None = None, plan: Plan | None = None) -> bool:
    """Whether a row's system is, its policies are known before it is run, and so are, for a schedule, its gradients."""
    is_scheduled = isinstance(row.plan, dict) and "scheduling" in row.plan
    if is_scheduled and workload is not None and not isinstance(workload, Replay):
        return False
    if plan is not None and plan.is_served and plan.scheduling is not None and early_push.objection(plan):
        return False
    if plan is not None and _sums_in_stores(plan):
        return False
    return not row.swap and (row.system == "offbeat" or row.system in _PEERS)


def predict(
    scenario: Scenario,
    row: Row,
    plan: Plan | None,
    known: Known,
    *,
    steps: int | None = None,
    faults: Sequence[Fault] | None = None,
) -> Prediction:
    """Play a row of a scenario in virtual time.

    Args:
        plan: of the row; None for a peer.
        known: what each step computes and sends.
        steps: of each worker, behind those for warming up; None for as many as the scenario says.
        faults: those that strike this row; None for all of the scenario.

    Raises:
        ScenarioError: if the row's system is not modelled, or a fault cannot be played.
    """
    if not is_modelled(row):
        raise ScenarioError(
            f"Cannot simulate row {row.name!r}: only offbeat without [[row.swap]] and {' and '.join(_PEERS)} are "
            "modelled (row.system)."
        )
    if plan is not None and _sums_in_stores(plan):
        raise ScenarioError(
            f"Cannot simulate row {row.name!r}: sums by {plan.fabric!r} begin with the workers that are there, which "
            "is not modelled. Measure it with `offbeat lab run` (row.plan)."
        )
    struck = scenario.fault if faults is None else faults
    for fault in struck:
        check(fault, elastic=plan is not None and plan.has_elastic_group)
    dropped = scenario.run.warmup_steps
    count = dropped + (scenario.run.steps if steps is None else steps)
    played = _played(scenario, row, plan, known, count, struck)
    ranks = [rank for rank in range(len(known.compute_s)) if rank not in played.ended]
    step_s = [played.step_s[rank][dropped:] for rank in ranks]
    samples = [played.samples[rank][dropped:] for rank in ranks]
    waited_s = [played.waited_s[rank][dropped:] for rank in ranks]
    stale = [one for rank in ranks for one in played.staleness[rank][dropped:]] or [0]
    return Prediction(
        row=row.name,
        seconds_per_step=statistics.fmean(itertools.chain(*step_s)),
        samples_per_s=add_up(add_up(counts) / add_up(times) for counts, times in zip(samples, step_s, strict=True)),
        wait_share=add_up(map(add_up, waited_s)) / add_up(map(add_up, step_s)),
        staleness=statistics.fmean(stale),
        most_stale=max(stale),
        simulated_s=max(add_up(played.step_s[rank]) for rank in ranks),
        others_s=others_s(played, dropped),
        faults=[fault.words for _, fault in played.struck if not fault.stays],
    )


def _played(
    scenario: Scenario, row: Row, plan: Plan | None, known: Known, steps: int, struck: Sequence[Fault]
) -> SimResult:
    compute_times = [ComputeTimes(scenario, rank, compute_s) for rank, compute_s in enumerate(known.compute_s)]
    links = Links.of(scenario)
    faults = Faults(
        struck,
        sleeps=isinstance(scenario.workload, Replay),
        there_and_back_s=2 * links.to_worker_s + links.queue_s,
        part_of=functools.partial(_parts, msgspec.structs.replace(scenario, fault=list(struck))),
    )
    if plan is not None and plan.is_tabled:  # to the clock a table is a server, where the links meet
        from offbeat.fabric import ParameterServer

        plan, links = dataclasses.replace(plan, fabric=ParameterServer()), links.meeting_at_switch
    if plan is not None and plan.is_served:
        kind: Callable[..., SimulatedServer] = SimulatedServer
        if plan.scheduling is not None:
            kind = functools.partial(SimulatedEarlyPush, parts=_early_parts(scenario, plan, links, struck))
        return kind(
            plan,
            compute_times,
            links,
            size_bytes=narrowing(plan, known.gradient_bytes, len(compute_times)) * known.gradient_bytes,
            pull_bytes=known.gradient_bytes,
            steps=steps,
            batch=known.batch,
            faults=faults,
        ).play()
    if plan is not None and plan.scheduling is not None and not plan.barrier_reason and len(compute_times) > 1:
        return cross_iteration.play(
            msgspec.structs.replace(scenario, fault=list(struck)),
            plan.scheduling,
            compute_times,
            narrow=narrowing(plan, known.gradient_bytes, len(compute_times)),
            steps=steps,
            batch=known.batch,
        )
    return allreduce.play(
        compute_times,
        links,
        buckets=buckets(scenario, row, plan, known.gradient_bytes, _PEERS.get(row.system, 1.0)),
        policy=BSP() if plan is None else plan.cadence,
        steps=steps,
        batch=known.batch,
        tune=None if plan is None else plan.tuning,
        faults=faults,
        controller=None if plan is None else plan.controller,
        sum_s=_sum_time(scenario, plan, links),
        kept_steps=math.inf if plan is None else _kept_steps(plan, known.gradient_bytes),
    )


def _sum_time(scenario: Scenario, plan: Plan | None, links: Links) -> allreduce.SumTime:
    """The time of a sum over the fabric of a plan; None for a peer, which sums around a ring."""
    if len(scenario.workers.hosts) == 1:
        return allreduce.ring_s
    if plan is not None and plan.fabric.offers.holds == "switch":
        return allreduce.switch_s
    if plan is not None and (paths := _paths_of(plan)) is not None:
        from offbeat.sim.routed_sums import RoutedSums

        return RoutedSums(scenario.workers, paths.method, links.slowest, rounds=paths.grouped)
    if not scenario.workers.is_star:
        from offbeat.sim.routed_sums import ring_on

        return ring_on(scenario.workers, links.slowest)
    return allreduce.ring_s


def _paths_of(plan: Plan) -> Routed | None:
    """The fabric that plans paths, if sums go along such."""
    from offbeat.fabric import Elastic, Routed

    carrier = plan.fabric.over if isinstance(plan.fabric, Elastic) else plan.fabric
    return carrier if isinstance(carrier, Routed) else None


def _sums_in_stores(plan: Plan) -> bool:
    """Whether stores of objects make the sums of a plan."""
    from offbeat.fabric import ObjectStore

    return isinstance(plan.fabric, ObjectStore)


def fits_network(scenario: Scenario, plan: Plan | None, faults: Sequence[Fault]) -> bool:
    """Whether a row can be simulated on the scenario's network.

    Where hosts do not hang on one switch, that is so if workers sum up among themselves, and nothing goes wrong.
    """
    if scenario.topology.is_star:
        is_routed = plan is not None and _paths_of(plan) is not None
        return not (is_routed and any(fault.stays for fault in faults))  # sums go by other paths then
    sums = plan is None or (plan.fabric.offers.holds == "workers" and plan.scheduling is None)
    return sums and not (faults or scenario.servers or scenario.impair)


def _early_parts(scenario: Scenario, plan: Plan, links: Links, struck: Sequence[Fault]) -> EarlyParts:
    """The parts in which contributions are pushed early.

    Raises:
        ScenarioError: if a row with early pushes is not modelled with this plan, these faults or this workload.
    """
    from offbeat.fabric import Served

    assert plan.scheduling is not None
    assert isinstance(plan.fabric, Served), "checked when the plan was made"
    if why := early_push.objection(plan):
        raise ScenarioError(why)
    if not all(fault.stays for fault in struck):
        raise ScenarioError(
            f'Cannot simulate {plan.scheduling!r} with {plan.fabric!r} and faults other than "rate". Leave them out '
            "(fault)."
        )
    return EarlyParts.of(scenario, plan.scheduling, plan.fabric, links)


def _parts(scenario: Scenario, fault: Fault) -> dict[int, float]:
    """The part of its first rate that each link has which a fault gives another one, by rank or `SERVER`."""
    first, now = Links.of(scenario), Links.of(scenario.at(fault.step + 1))
    ranks = {host.name: rank for rank, host in enumerate(scenario.workers.hosts)}
    return {
        ranks.get(name, SERVER): now.worker[ranks[name]] / first.worker[ranks[name]]
        if name in ranks
        else now.servers / first.servers
        for name in scenario.linked(fault)
    }


def _kept_steps(plan: Plan, gradient_bytes: float) -> float:
    """Steps of which a switch keeps the sums for workers that come too late for them."""
    from offbeat.fabric import Switch

    if not plan.has_quorum or not isinstance(plan.fabric, Switch):
        return math.inf
    chunks = math.ceil(gradient_bytes / 4 / plan.fabric.values)
    return plan.fabric.slots_for_late / (chunks + math.ceil(chunks / plan.fabric.values))
