"""The audit of any job that can be made: no false alarm without a fault or with one, and no planted fault is missed."""

from __future__ import annotations

import random
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from offbeat.audit import verify
from offbeat.history import HistoryEnded, HistoryLog
from tests.audit.planted_faults import PLANTS, plant
from tests.audit.random_jobs import RandomJob, random_job, record

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.audit import AuditResult

pytestmark = pytest.mark.timeout(170)
FEW = (2, 1002, 1053)
MANY = sorted({*range(60)} - {*FEW})


def audited(job: RandomJob, folder: Path) -> AuditResult:
    """Audit a job that is over, once its server has recorded everything."""
    history, deadline_s = folder / "history", time.monotonic() + 10
    while job.plan.is_served and time.monotonic() < deadline_s and not _has_ended(history):
        time.sleep(0.05)
    return verify(history)


def _has_ended(history: Path) -> bool:
    last = max(history.glob("coordinator*.log"), key=lambda path: HistoryLog(path).header.began_s)
    return isinstance(list(HistoryLog(last))[-1], HistoryEnded)


def told(job: RandomJob, result: AuditResult) -> str:
    """Write out an audit's findings, for people who read a failed test."""
    laws = [f"law {one.law}: {one.what}" for one in result.violations]
    return "\n".join([repr(job), *laws])


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)])
def test_a_healthy_job_holds_and_what_is_planted_is_found(tmp_path: Path, seed: int) -> None:
    job = random_job(seed, has_fault=False)
    assert not any(record(job, tmp_path)), job
    result = audited(job, tmp_path)
    assert result.holds, told(job, result)
    draw, changes = random.Random(seed), []
    for name in PLANTS:
        copy = shutil.copytree(tmp_path / "history", tmp_path / name)
        if change := plant(copy, name, draw):
            changes.append(change)
            assert not verify(copy).holds, f"{job} {change}"
    assert changes or job.plan.is_tabled, "something can be planted in any history"


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)])
def test_a_job_with_a_fault_holds(tmp_path: Path, seed: int) -> None:
    job = random_job(seed, has_fault=True)
    record(job, tmp_path)
    result = audited(job, tmp_path)
    assert result.holds, told(job, result)
