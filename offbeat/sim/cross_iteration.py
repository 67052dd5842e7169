"""Workers that all hold the parameters, and exchange gradients behind the next forward pass, too, by a schedule.

The schedule is made by the plan's own scheduler, from a profile of what the scenario says: layers one after the other,
the slowest machine, a ring over the slowest link. The first steps, in which workers learn that profile, are not played:
they are steps to warm up. What a worker loses to bad luck, which comes behind its backward pass, holds all up. Where a
link gets another rate all go by the old schedule for a few steps, and then by the one that they would make now.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from offbeat.errors import ScenarioError
from offbeat.float_sum import add_up
from offbeat.scenario import Replay
from offbeat.scheduling import BackwardProfile, GradientTimes
from offbeat.scheduling import play as play_step
from offbeat.sim.allreduce import ring_s
from offbeat.sim.links import Links
from offbeat.sim.result import SimResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.scenario import Scenario
    from offbeat.scheduling import Scheduler
    from offbeat.sim.compute_time import ComputeTimes

_BLOCK_S = 0.0002  # that a block takes beyond its latency and its bytes: Python, on both threads
_PHASE_S = 0.0006  # of each of a ring's phases, however small what is sent: measured, two workers to a core
_STEP_S = 0.002  # of a step beyond what is computed and sent, as in `allreduce`
_NOTICED = 6  # steps until a schedule follows another rate: five that are off, and the vote


def play(
    scenario: Scenario,
    scheduler: Scheduler,
    compute_times: Sequence[ComputeTimes],
    *,
    narrow: float,
    steps: int,
    batch: int,
) -> SimResult:
    """Play so many steps of all workers.

    Args:
        narrow: bytes on the wire for each byte of a gradient.
        batch: samples of a worker's step.

    Raises:
        ScenarioError: if it is not known when which gradient is complete, or a fault strikes that is no other rate.
    """
    if not isinstance(scenario.workload, Replay):
        raise ScenarioError(
            f"Cannot simulate {scheduler!r} for the script {scenario.workload.path}: when which of its gradients is "
            "complete is not known. Replay a profile (workload.kind)."
        )
    if not all(fault.stays for fault in scenario.fault):
        raise ScenarioError(f'Cannot simulate {scheduler!r} with faults other than "rate". Leave them out (fault).')
    workload, world = scenario.workload, len(compute_times)
    changes = {fault.step + 1 for fault in scenario.fault}
    profiles = {step: profile_of(workload, world, Links.of(scenario.at(step)), narrow) for step in (0, *changes)}
    schedules = {step + _NOTICED * (step > 0): scheduler.schedule(made) for step, made in profiles.items()}
    profile, schedule = profiles[0], schedules[0]
    nominal_s = profile.backward_s + profile.forward_s
    played, clock_s = SimResult.of(world), 0.0
    for step in range(steps):
        profile, schedule = profiles.get(step, profile), schedules.get(step, schedule)
        took = [times.next_s() for times in compute_times]
        slowest = max(computing_s for computing_s, _ in took) / nominal_s
        lost_s = max(lost_s for _, lost_s in took)
        step_s = play_step(scaled(profile, slowest), schedule).step_s + lost_s + _STEP_S
        for rank, times in enumerate(took):
            played.step_s[rank].append(step_s)
            played.samples[rank].append(batch)
            played.waited_s[rank].append(step_s - add_up(times))
        clock_s += step_s
        played.struck.extend((clock_s, fault) for fault in scenario.fault if fault.step == step)
    return played


def profile_of(workload: Replay, world: int, links: Links, narrow: float = 1.0) -> BackwardProfile:
    """The profile of a replay, on a machine with a factor of 1.

    Args:
        narrow: bytes on the wire for each byte of a gradient.
    """
    layers = workload.layers()
    backward_s = at_s = add_up(layer.backward_s for layer in layers)
    gradients = []
    for layer in layers:
        for index, shape in enumerate(layer.shapes):
            numel = 1
            for size in shape:
                numel *= size
            is_last = index == len(layer.shapes) - 1
            forward_s = layer.forward_s if is_last else 0.0
            gradients.append(GradientTimes(f"{layer.name}.{index}", numel, 4, "float32 cpu", at_s, forward_s))
        at_s -= layer.backward_s
    empty_s = ring_s(0.0, world, links.slowest, links.to_worker_s)
    byte_s = (ring_s(1e6 * narrow, world, links.slowest, links.to_worker_s) - empty_s) / 1e6
    bandwidth = 1 / byte_s if byte_s else float("inf")
    gap_s = 2 * (world - 1) * _PHASE_S
    return BackwardProfile(tuple(gradients), backward_s, empty_s + _BLOCK_S, bandwidth, gap_s)


def scaled(profile: BackwardProfile, factor: float) -> BackwardProfile:
    """The profile of a step that computes so much longer."""
    gradients = tuple(
        GradientTimes(one.name, one.numel, one.itemsize, one.kind, factor * one.ready_s, factor * one.forward_s)
        for one in profile.gradients
    )
    return dataclasses.replace(profile, gradients=gradients, backward_s=factor * profile.backward_s)
