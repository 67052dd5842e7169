"""What is proved of runs without a server, and what is found where it was tampered with."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import offbeat
from offbeat.audit import AuditResult, verify
from offbeat.audit.exchanges import check_exchanges
from offbeat.audit.replicas import WorkerHistory
from offbeat.control import ByProgress
from offbeat.fabric import Elastic
from offbeat.history import HistoryLog, HistoryWriter, ParametersAfter, WorkersAdmitted
from offbeat.sync import BSP, KSync, LocalSGD
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORLD, STEPS = 3, 12


def train(folder: Path, plan: offbeat.Plan, swap: tuple[int, Any] | None = None, dies: int | None = None) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    with offbeat.init(plan, history=folder) as run:
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(STEPS):
            if run.rank == 1 and step == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if swap is not None and step == swap[0] and run.rank == 0:
                run.swap(sync=swap[1])
            model(torch.randn(2 + run.rank, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BSP(), LocalSGD(4), LocalSGD(3, after=2)], ids=repr)
def test_what_all_gave_is_in_the_means_once(tmp_path: Path, policy: BSP | LocalSGD) -> None:
    run_workers(WORLD, train, tmp_path, offbeat.Plan(sync=policy))
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert result.checked == {1, 2, 3}
    exchanges = sum(policy.contributes(step) is not None for step in range(STEPS))
    assert result.applied == result.releases == WORLD * exchanges
    alone = policy.every - 1 if isinstance(policy, LocalSGD) else 0
    assert (result.lead, result.bound) == (alone, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        LocalSGD(4, delay=1),
        LocalSGD(4, delay=1, after=3),
        LocalSGD(4, fragments=2),
        LocalSGD(4, delay=1, fragments=2),
    ],
    ids=repr,
)
def test_what_all_gave_to_averages_that_come_later_is_in_them_once(tmp_path: Path, policy: LocalSGD) -> None:
    run_workers(WORLD, train, tmp_path, offbeat.Plan(sync=policy))
    result = verify(tmp_path)
    assert result.holds, result.violations
    # Replicas are equal in ordinary steps, and after settle, which is not recorded.
    assert result.checked == ({1, 2, 3} if policy.after else {2, 3})
    assert result.compared == WORLD * policy.after
    applied = sum(policy.contributes(step) is not None for step in range(STEPS)) - policy.delay
    assert result.applied == result.releases == WORLD * applied
    assert (result.lead, result.bound) == (policy.interval - 1, policy.interval - 1)


def test_fragments_without_parameters_are_no_lead(tmp_path: Path) -> None:
    run_workers(WORLD, train, tmp_path, offbeat.Plan(sync=LocalSGD(4, fragments=4)))  # of a model of two parameters
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert (result.lead, result.bound) == (0, 0)
    assert result.applied == WORLD * STEPS // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("controller", "swap"),
    [
        (None, (3, LocalSGD(4))),
        (None, (4, LocalSGD(4))),  # averages are not where they would be if it had held from the beginning on
        (ByProgress((BSP(), LocalSGD(4)), at=(0.25,), steps=STEPS), None),
    ],
)
def test_policies_that_are_swapped_are_known(tmp_path: Path, controller: Any, swap: tuple[int, Any] | None) -> None:
    run_workers(WORLD, train, tmp_path, offbeat.Plan(controller=controller), swap)
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert (result.lead, result.bound) == (3, 3)
    assert result.compared == result.hashes


def test_who_is_killed_may_have_given_what_it_did_not_record(tmp_path: Path) -> None:
    run_workers(WORLD, train, tmp_path, offbeat.Plan(fabric=Elastic()), None, 5, faulty=1)
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert {2, 3} <= result.checked
    assert result.applied + result.unrecorded >= 2 * STEPS + 4


def leave_early(folder: Path) -> None:
    """Rank 1 leaves while its second average is on its way."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    with offbeat.init(offbeat.Plan(sync=LocalSGD(2, delay=1), fabric=Elastic()), history=folder) as run:
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(5 if run.rank == 1 else STEPS):
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_worker_that_leaves_is_in_the_average_that_was_on_its_way(tmp_path: Path) -> None:
    run_workers(WORLD, leave_early, tmp_path)
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert result.unrecorded == 1


def train_in_buckets(folder: Path, dies: int) -> None:
    """Rank 1 is killed within a backward, after others have its gradient of the last layer."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    with offbeat.init(offbeat.Plan(fabric=Elastic(), bucket_bytes=300), history=folder) as run:
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def die(grad: torch.Tensor) -> torch.Tensor:
            if run.rank == 1 and run.step == dies:
                time.sleep(0.5)  # until the bucket that is on its way has arrived
                os.kill(os.getpid(), signal.SIGKILL)
            return grad

        next(net.parameters()).register_hook(die)
        for _ in range(STEPS):
            model(torch.randn(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_worker_that_is_killed_between_two_buckets_is_in_some_sums(tmp_path: Path) -> None:
    run_workers(WORLD, train_in_buckets, tmp_path, 5, faulty=1)
    result = verify(tmp_path)
    (record,) = [
        record
        for record in HistoryLog(next(tmp_path.glob("worker-0*.log")))
        if isinstance(record, ParametersAfter) and record.step == 5
    ]
    assert set(record.weights[1:]) == {2.0, 3.0}, "the worker was killed between two buckets"
    assert result.holds, result.violations
    assert result.unrecorded == 1


def tampered(folder: Path, change: Callable[[ParametersAfter], ParametersAfter | None]) -> AuditResult:
    """The result where rank 1 had recorded something else."""
    log = HistoryLog(next(folder.glob("worker-1*.log")))
    records = list(log)
    log.path.unlink()
    writer = HistoryWriter(folder, "worker-1", kind="worker", job=log.header.job, rank=1)
    for record in records[:-1]:
        changed = change(record) if isinstance(record, ParametersAfter) else record
        if changed is not None:
            writer.append(changed)
    writer.close()
    return verify(folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history")
    run_workers(WORLD, train, folder, offbeat.Plan())
    return folder


def _with(has: ParametersAfter, weights: tuple[float, ...]) -> ParametersAfter:
    return ParametersAfter(has.model, has.step, has.at_s, has.digest, has.samples, weights=weights)


@pytest.mark.parametrize(
    ("change", "law", "says"),
    [
        (lambda has: _with(has, (2.0, 3.0)) if has.step == 4 else has, 2, "a weight of 4 was given, and of 3 the mean"),
        (lambda has: _with(has, (0.0, 3.0)) if has.step == 4 else has, 2, "only 2 was given: something counts twice"),
        (lambda has: _with(has, (1.0, 2.0)) if has.step == 4 else has, 2, "the workers' means differ: weights of 2"),
        (lambda has: None if has.step == 4 else has, 2, "only 2 was given: something counts twice"),
        (lambda has: _with(has, ()) if has.step == 4 else has, 3, "has made 1 steps without the others, behind"),
        (lambda has: _with(has, ()) if has.step in (4, 5) else has, 3, "has made 2 steps without the others, behind"),
    ],
)
def test_what_is_not_so_is_found(
    recorded: Path, tmp_path: Path, change: Callable[[ParametersAfter], ParametersAfter | None], law: int, says: str
) -> None:
    for log in recorded.glob("*.log"):
        (tmp_path / log.name).write_bytes(log.read_bytes())
    assert verify(tmp_path).holds
    result = tampered(tmp_path, change)
    assert any(one.law == law and says in one.what for one in result.violations), result.violations


def test_a_history_that_is_not_there_is_said_to_be_missing(recorded: Path, tmp_path: Path) -> None:
    for log in recorded.glob("worker-[02]*.log"):
        (tmp_path / log.name).write_bytes(log.read_bytes())
    result = verify(tmp_path)
    assert result.holds
    assert result.checked == {1}
    assert "The history of rank 1 is not there: what was exchanged cannot be added up." in result.notes


def test_who_joined_and_kept_no_history_is_missing_too(recorded: Path, tmp_path: Path) -> None:
    for file in recorded.glob("*.log"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    log = HistoryLog(next(tmp_path.glob("worker-0*.log")))
    records = list(log)
    log.path.unlink()
    writer = HistoryWriter(tmp_path, "worker-0", kind="worker", job=log.header.job, rank=0)
    for record in (*records[:4], WorkersAdmitted((3,)), *records[4:-1]):
        writer.append(record)
    writer.close()
    result = verify(tmp_path)
    assert result.checked == {1}
    assert "The history of rank 3 is not there: what was exchanged cannot be added up." in result.notes


def summed(given: list[list[float]], sums: list[list[float]]) -> AuditResult:
    """The findings where three workers say that they gave this to each bucket of a step, and that this came of it."""
    result = AuditResult()
    histories = []
    for rank in range(WORLD):
        has = ParametersAfter(0, 0, 0.0, None, 1.0, weights=(1.0, *sums[rank]), given=tuple(given[rank]))
        histories.append(WorkerHistory(rank, "", {0: KSync(2)}, [has], world=WORLD, is_whole=True))
    check_exchanges(histories, result)
    return result


def test_sums_of_some_are_added_up_bucket_by_bucket() -> None:
    result = summed([[1, 0], [1, 1], [0, 1]], [[2, 2]] * 3)
    assert result.holds, result.violations
    assert (result.applied, result.dropped) == (3, 0)
    result = summed([[1, 1], [1, 1], [0, 0]], [[2, 2]] * 3)
    assert result.holds, result.violations
    assert (result.applied, result.dropped) == (2, 1)


@pytest.mark.parametrize(
    ("given", "sums", "law", "says"),
    [
        ([[1, 0], [1, 1], [0, 0]], [[2, 2]] * 3, 2, "something counts twice"),
        ([[1, 1], [1, 1], [0, 1]], [[2, 2]] * 3, 2, "a weight of 3 was given, and of 2 the mean was made"),
        ([[1, 1], [1, 1], [0, 0]], [[2, 2], [2, 2], [2, 3]], 2, "means differ"),
        ([[1, 0], [1, 1], [0, 0]], [[2, 1]] * 3, 3, r"made of 1 contributions, and KSync\(k=2"),
        ([[1], [1], [0, 0]], [[2], [2], [2, 2]], 2, "different numbers of buckets"),
    ],
)
def test_sums_that_do_not_add_up_are_found(
    given: list[list[float]], sums: list[list[float]], law: int, says: str
) -> None:
    violations = summed(given, sums).violations
    assert {one.law for one in violations} >= {law}
    assert any(re.search(says, one.what) for one in violations), violations
