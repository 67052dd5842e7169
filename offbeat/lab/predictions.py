"""The simulator's predictions of a scenario, beside what was measured."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from offbeat.errors import ScenarioError
from offbeat.lab.jobs import jobs
from offbeat.scenario import Replay, Scenario

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.lab.results import ResultFile
    from offbeat.sim import Known, Prediction


def predictions(scenario: Scenario, folder: Path, known: Known, *, steps: int | None = None) -> list[Prediction]:
    """Simulate every row that can be; without one switch for all, those whose workers sum up among themselves.

    Args:
        folder: where the scenario's file lies.
        known: what its steps compute and send (`known_of`).
        steps: instead of the scenario's.

    Raises:
        ScenarioError: if a plan cannot be used, or a fault cannot be played.
    """
    from offbeat.plan import Plan
    from offbeat.sim import fits_network, is_modelled, predict

    rows = [(job, Plan.from_toml(job.toml) if job.toml else None) for job in jobs(scenario, folder)]
    return [
        predict(scenario, job.row, plan, known, steps=steps, faults=job.faults)
        for job, plan in rows
        if is_modelled(job.row, scenario.workload, plan)
        and not job.given_up
        and fits_network(scenario, plan, job.faults)
    ]


def known_of(scenario: Scenario, measured: ResultFile | None) -> Known:
    """The known facts about the steps: from a replay's own text; of a script, from a result.

    Raises:
        ScenarioError: if there is no such result, or it is of another workload or number of workers.
    """
    from offbeat.sim import Known

    if isinstance(scenario.workload, Replay) or measured is None:
        return Known.of(scenario)
    theirs = Scenario.from_toml(measured.scenario)
    world = len(scenario.workers.hosts)
    if theirs.workload != scenario.workload or len(theirs.workers.hosts) != world:
        raise ScenarioError(
            f"Cannot learn from the result of {measured.name} how long steps compute: it has "
            f"{'another workload' if theirs.workload != scenario.workload else 'another number of workers'}. Name a "
            "result of this scenario, or of one that differs in links, luck and rows only (workload)."
        )
    if not all(any(raw.rank == rank for raw in measured.raw) for rank in range(world)):
        raise ScenarioError(
            f"Cannot learn from the result of {measured.name} how long steps compute: not every worker of it has come "
            "to an end. Measure it again (workload)."
        )
    computing_s = [
        statistics.median(raw.compute_s for raw in measured.raw if raw.rank == rank) for rank in range(world)
    ]
    first = measured.raw[0]
    return Known(computing_s, max(raw.gradient_bytes for raw in measured.raw), round(first.samples / len(first.step_s)))


def errors(report: ResultFile) -> dict[str, float]:
    """The part of the measured seconds per step by which each row's prediction is off; above 0 if it is too slow.

    A row that failed is predicted all the same, and not compared.
    """
    measured = {row.row: row.seconds_per_step.median for row in report.rows}
    known = [one for one in report.simulated if one.row in measured]
    return {one.row: one.seconds_per_step / measured[one.row] - 1 for one in known}
