"""Law 5: two runs of the same plan, with the same workers in each step, have the same parameters after each step.

A run that was resumed from a checkpoint is compared in the steps that both have. Where the plan goes by who comes first
(`ASP`, `SSP`, ...), nothing is promised: then it is only said where the runs part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.audit.log_files import find_jobs
from offbeat.audit.replicas import read_worker
from offbeat.errors import HistoryError
from offbeat.history import ModelPrepared, PlanAdopted
from offbeat.plan import Plan
from offbeat.sync import BSP, Hybrid, LocalSGD, RoundRobin

if TYPE_CHECKING:
    import os

    from offbeat.audit.findings import AuditResult
    from offbeat.history import ParametersAfter
    from offbeat.sync import Policy

_Step = tuple[int, int]  # model, step


@dataclass
class ParameterTrace:
    """The digests of the workers of a run after each step.

    Args:
        plans: that it was prepared with, and those that were adopted, as TOML.
        has: by model and step, and by rank; the last, if a step was done again.
    """

    plans: list[str] = field(default_factory=list)
    has: dict[_Step, dict[int, ParametersAfter]] = field(default_factory=dict)


def compare(path: str | os.PathLike[str], against: str | os.PathLike[str], result: AuditResult) -> None:
    """Hold a run against another; what is found goes into `result`.

    Raises:
        HistoryError: if one cannot be read, or the two cannot be compared: they have other plans, or no step in common.
    """
    here, there = _trace(Path(path)), _trace(Path(against))
    if here.plans != there.plans:
        first = next((pair for pair in zip(here.plans, there.plans, strict=False) if pair[0] != pair[1]), None)
        differ = "one of them was swapped for another" if first is None else _difference(*first)
        raise HistoryError(f"Cannot compare {path} with {against}: their plans differ ({differ}). Law 5 is about one.")
    common = sorted(here.has.keys() & there.has.keys())
    if not common:
        raise HistoryError(f"Cannot compare {path} with {against}: they have no step in common.")
    promised = all(_is_deterministic(plan) for plan in here.plans)
    if not promised:
        result.notes.append(
            "Law 5 does not hold for this plan, which depends on the order of arrivals or on the clock: the "
            "comparison only shows where the two runs part."
        )
    for step in common:
        mine, theirs = here.has[step], there.has[step]
        if mine.keys() != theirs.keys():
            result.notes.append(
                f"From step {step[1]} on other workers take part ({_ranks(mine)}; there {_ranks(theirs)}), so that law "
                "5 says nothing of what follows."
            )
            break
        if parted := [rank for rank in sorted(mine) if _differ(mine[rank], theirs[rank])]:
            rank = parted[0]
            text = (
                f"After step {step[1]} rank {rank} has other parameters ({mine[rank].digest:016x}) than in {against} "
                f"({theirs[rank].digest:016x}); this is the first step that differs"
            )
            if mine[rank].samples != theirs[rank].samples:
                text += f". It was computed from {mine[rank].samples:g} samples, there from {theirs[rank].samples:g}"
            if promised:
                result.violated(5, f"{text}.")
            else:
                result.notes.append(f"{text}.")
            break
        result.steps_against += 1
    if promised:
        result.checked.add(5)


def _trace(path: Path) -> ParameterTrace:
    trace = ParameterTrace()
    for job in find_jobs([path]):
        for log in job.workers:
            for has in read_worker(log).has:
                if has.numbers or not has.life:
                    trace.has.setdefault((has.model, has.step), {})[log.header.rank] = has
            if not trace.plans:
                trace.plans = [record.plan for record in log if isinstance(record, ModelPrepared)][:1]
        for log in job.coordinators:
            trace.plans += [record.plan for record in log if isinstance(record, PlanAdopted)]
    if not trace.plans:
        raise HistoryError(f"Cannot compare {path}: there is no worker's history in it.")
    return trace


def _differ(mine: ParametersAfter, theirs: ParametersAfter) -> bool:
    return None not in (mine.digest, theirs.digest) and mine.digest != theirs.digest


def _difference(here: str, there: str) -> str:
    lines = [line for line in here.splitlines() if line not in there.splitlines()]
    others = [line for line in there.splitlines() if line not in here.splitlines()]
    return f"{'; '.join(lines) or 'nothing'} - there {'; '.join(others) or 'nothing'}"


def _ranks(has: dict[int, ParametersAfter]) -> str:
    return f"rank {', '.join(map(str, sorted(has)))}"


def _is_deterministic(text: str) -> bool:
    """Whether nothing depends on who comes first."""
    plan = Plan.from_toml(text)
    return plan.tuning is None and _is_fixed(plan.sync)


def _is_fixed(policy: Policy) -> bool:
    if isinstance(policy, Hybrid):
        return _is_fixed(policy.inner) and _is_fixed(policy.outer)
    if isinstance(policy, RoundRobin):
        return policy.strict and policy.slots in (1, None)
    return isinstance(policy, BSP | LocalSGD) and policy.replicated
