"""A stall is explained on every rank that waits: who, where, why; within the timeout, and never a bare one."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import DisagreementError, WorkerLostError
from tests.cli.commands import TRAIN, script
from tests.cli.commands import offbeat as offbeat_command
from tests.workers import run_workers

CULPRIT = 1
TIMEOUT_S = 2.0
FAULT_S = 3.0  # longer than the timeout, so that the report comes while the fault lasts


class Reports(logging.Handler):
    """What a rank was told, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append((time.monotonic(), record.getMessage()))


def sleeps() -> None:
    time.sleep(FAULT_S)


def computes() -> None:
    end_s = time.monotonic() + FAULT_S
    while time.monotonic() < end_s:
        sum(range(1000))


def raises() -> None:
    raise RuntimeError("the disk is full")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    # Somebody has to wake it again, or the others would wait for ever.
    if os.fork() == 0:
        time.sleep(FAULT_S)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def holds_the_gil() -> None:
    # sum() over a C iterator never lets go; counted out to last as long as the fault should, on a busy machine longer.
    began_s = time.thread_time()
    sum(itertools.repeat(0, 10**7))
    rate = 10**7 / (time.thread_time() - began_s)
    sum(itertools.repeat(0, int(rate * FAULT_S)))


def leaves() -> None:
    raise SystemExit(0)


FAULTS = {f.__name__: f for f in (sleeps, computes, raises, is_killed, is_stopped, holds_the_gil, leaves)}


def train(fault: str, folder: str, world: int) -> dict[str, Any]:
    """Six steps; at the third the culprit has its fault. Returns what this rank was told."""
    rank = int(os.environ["RANK"])
    told = Reports()
    logging.getLogger("offbeat").addHandler(told)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    error, began_s = "", 0.0
    with offbeat.init(timeout=timedelta(seconds=TIMEOUT_S), run_dir=folder) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            for step in range(6):
                if rank == CULPRIT and step == 2:
                    FAULTS[fault]()
                began_s = time.monotonic()
                replica(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except WorkerLostError as lost:
            error = str(lost)
            stall = Path(folder) / f"stall-rank{rank}.json"
            return {"error": error, "took_s": time.monotonic() - began_s, "stall": json.loads(stall.read_text())}
        stall = Path(folder) / f"stall-rank{rank}.json"
        return {
            "error": "",
            "told": [text for _, text in told.texts],
            "stall": json.loads(stall.read_text()) if stall.exists() else None,
            "steps": run.step,
        }


@pytest.mark.parametrize(
    ("fault", "reason", "says"),
    [
        ("sleeps", "sleeping", "sleeping: it uses no processor"),
        ("computes", "computing", "% of a core)"),
        ("is_stopped", "paused", "paused (SIGSTOP)"),
        ("holds_the_gil", "gil", "held the GIL"),
    ],
)
def test_who_is_late_is_named_and_waited_for(fault: str, reason: str, says: str, tmp_path: Path) -> None:
    results = run_workers(3, train, fault, str(tmp_path), 3)
    for rank in (0, 2):
        told = [text for text in results[rank]["told"] if "has waited" in text]
        assert told, f"rank {rank} was told nothing"
        first = told[0]
        assert f"rank {CULPRIT} on " in first
        assert any(says in text for text in told), told
        assert "step 2: " in first
        assert "all-reduce of bucket 1/1 (2.bias … 0.weight)" in first
        assert "arrived: 0 2" in first
        waited_s = float(first.partition("has waited ")[2].partition(" s")[0])
        assert waited_s <= TIMEOUT_S
        stall = results[rank]["stall"]
        assert [(c["rank"], c["reason"]) for c in stall["culprits"]] == [(CULPRIT, reason)]
        assert not stall["fatal"]
        assert results[rank]["steps"] == 6, "the culprit came, so the run went on"
    if fault == "sleeps":
        assert "in sleeps" in results[0]["told"][0], "the culprit's stack is shown"


@pytest.mark.parametrize(
    ("fault", "reason", "says"),
    [
        ("raises", "raised", "RuntimeError: the disk is full"),
        ("is_killed", "dead", "died"),
        ("leaves", "done", "is done after 2 steps"),
    ],
)
def test_who_cannot_come_is_named_and_ends_the_wait(fault: str, reason: str, says: str, tmp_path: Path) -> None:
    results = run_workers(3, train, fault, str(tmp_path), 3, faulty=CULPRIT)
    for rank in (0, 2):
        assert f"rank {CULPRIT} on " in results[rank]["error"]
        assert says in results[rank]["error"]
        assert [(c["rank"], c["reason"]) for c in results[rank]["stall"]["culprits"]] == [(CULPRIT, reason)]
        assert results[rank]["took_s"] < TIMEOUT_S + 1


def test_the_culprit_may_be_rank_0(tmp_path: Path) -> None:
    """Rank 0's sentinel holds the hub, and outlives it."""
    results = run_workers(3, train_with_culprit_0, str(tmp_path), faulty=0)
    for rank in (1, 2):
        assert "rank 0 on " in results[rank]["error"]
        assert [(c["rank"], c["reason"]) for c in results[rank]["stall"]["culprits"]] == [(0, "dead")]


def train_with_culprit_0(folder: str) -> dict[str, Any]:
    global CULPRIT
    CULPRIT = 0
    return train("is_killed", folder, 3)


# -- disagreement ----------------------------------------------------------------------------------------------


def unequal(what: str, folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = [torch.randn(3, 4) for _ in range(5 - (rank == CULPRIT and what == "one batch fewer"))]
    loader: Any = data
    with offbeat.init(timeout=timedelta(seconds=TIMEOUT_S), run_dir=folder) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if what == "skips a step, prepared loader":
            replica, optimizer, loader = run.prepare(model, optimizer, data)
        else:
            replica, optimizer = run.prepare(model, optimizer)
        try:
            for step, x in enumerate(loader):
                if rank == CULPRIT and step == 2 and what.startswith("skips a step"):
                    continue
                replica(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except (WorkerLostError, DisagreementError) as error:
            return {"error": str(error), "step": run.step}
    return {"error": "", "step": run.step}


@pytest.mark.parametrize("what", ["skips a step", "one batch fewer"])
def test_a_rank_with_fewer_steps_is_named(what: str, tmp_path: Path) -> None:
    """Without a prepared loader nobody can know before the end; then the waiting ranks say who is done."""
    results = run_workers(3, unequal, what, str(tmp_path), faulty=CULPRIT)
    for rank in (0, 2):
        assert results[rank]["step"] == 4
        assert f"rank {CULPRIT} on " in results[rank]["error"]
        assert "is done after 4 steps" in results[rank]["error"]


def test_a_skipped_step_is_noticed_at_once_with_a_prepared_loader(tmp_path: Path) -> None:
    for result in run_workers(3, unequal, "skips a step, prepared loader", str(tmp_path)):
        assert result["step"] == 2, "the exchange in which the ranks came together with different batches"
        assert "rank 1 is at batch 4, the others at batch 3" in result["error"]


def test_one_batch_fewer_is_no_fault_with_a_prepared_loader(tmp_path: Path) -> None:
    results = run_workers(3, fewer_but_prepared, str(tmp_path))
    assert results == [5, 5, 5]


def fewer_but_prepared(folder: str) -> int:
    rank = int(os.environ["RANK"])
    model = nn.Linear(4, 2)
    with offbeat.init(timeout=timedelta(seconds=TIMEOUT_S), run_dir=folder) as run:
        data = [torch.randn(3, 4) for _ in range(5 - (rank == CULPRIT))]
        replica, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for x in loader:
            replica(x).sum().backward()
            optimizer.step()
        return run.step


def elsewhere(folder: str) -> str:
    """One rank waits for a mean that the others do not ask for."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(4, 2)
    with offbeat.init(timeout=timedelta(seconds=TIMEOUT_S), run_dir=folder) as run:
        replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            for step in range(4):
                if rank == CULPRIT and step == 2:
                    run.mean(1.0)
                replica(torch.randn(3, 4)).sum().backward()
        except WorkerLostError as error:
            return str(error)
    return ""


def test_ranks_that_wait_for_different_things(tmp_path: Path) -> None:
    results = run_workers(3, elsewhere, str(tmp_path))
    for rank in (0, 2):
        assert f"rank {CULPRIT} on " in results[rank]
        assert "the mean over all workers" in results[rank]
        assert "disagree about the step" in results[rank]
    assert "rank 0 on " in results[CULPRIT]


# -- before the first step -------------------------------------------------------------------------------------


def late_to_init(where: str, folder: str) -> list[str]:
    rank = int(os.environ["RANK"])
    told = Reports()
    logging.getLogger("offbeat").addHandler(told)
    if rank == CULPRIT and where == "init":
        time.sleep(FAULT_S)
    with offbeat.init(timeout=timedelta(seconds=TIMEOUT_S), run_dir=folder) as run:
        if rank == CULPRIT and where == "prepare":
            time.sleep(FAULT_S)
        model = nn.Linear(4, 2)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [text for _, text in told.texts]


# All but one have loaded what they need when that one begins to.
LATE = """
import os, signal, subprocess, time
from pathlib import Path
if os.environ["RANK"] == "1":
    while not (Path("here-0").exists() and Path("here-2").exists()):
        time.sleep(0.02)
    ends_s = time.monotonic() + 7
    PAUSE
    while time.monotonic() < ends_s:
        pass
else:
    import torch, offbeat
    Path(f"here-{os.environ['RANK']}").touch()
"""
STOPS = "subprocess.Popen(['bash', '-c', f'sleep 7; kill -CONT {os.getpid()}']); os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.slow
@pytest.mark.parametrize(("pause", "says"), [("pass", ""), (STOPS, "yet: rank 1. Rank 1 is paused (SIGSTOP).")])
def test_who_is_known_to_be_starting_is_no_stall(pause: str, says: str, tmp_path: Path) -> None:
    path = script(tmp_path, LATE.replace("PAUSE", pause) + TRAIN)
    code, output = offbeat_command("run", "--workers", 3, path, folder=tmp_path)
    assert code == 0, output
    assert says in output
    assert ("has waited" in output) == bool(says)


@pytest.mark.parametrize(
    ("where", "says"),
    [("init", "call offbeat.init(): not here yet: rank 1."), ("prepare", "the comparison of the model")],
)
def test_a_stall_before_the_first_step_is_explained(where: str, says: str, tmp_path: Path) -> None:
    results = run_workers(3, late_to_init, where, str(tmp_path))
    for rank in (0, 2):
        assert any(says in text and f"rank {CULPRIT}" in text for text in results[rank]), results[rank]
