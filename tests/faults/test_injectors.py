"""Every fault of a worker fires at its step, is written down before, and does what it says."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import ScenarioError
from offbeat.fault_spec import AGE, Fault, read_fired, unfired
from offbeat.testing.faults import FaultInjector, assert_fired
from offbeat.testing.faults.in_process import Injected
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

STEP, STEPS = 3, 6
SHORT_S = 0.4


def fault(kind: str, **table: Any) -> Fault:
    return Fault(worker=0, step=STEP, kind=kind, seconds=SHORT_S, **table)  # type: ignore[arg-type]


class Training:
    """A worker alone, whose step number k has the gradient k + 1."""

    def __init__(self, log: Path, *faults: Fault) -> None:
        self.script = FaultInjector(faults, log, 0)
        self.run = offbeat.init()
        self.weight = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.weight.weight)
        self.model, self.optimizer = self.run.prepare(self.weight, torch.optim.SGD(self.weight.parameters(), lr=1.0))
        self.done = 0

    def step(self) -> float:
        """By how much the parameter moved."""
        before = self.weight.weight.item()
        self.model(torch.full((1, 1), self.done + 1.0)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return before - self.weight.weight.item()


def trained(log: Path, kind: str) -> list[float]:
    """By how much each step moved the parameter."""
    training = Training(log, fault(kind) if kind != "stale" else Fault(worker=0, step=AGE + 2, kind="stale"))
    return [training.step() for _ in range(AGE + 4)]


@pytest.mark.parametrize("kind", ["nan", "inf", "huge", "stale"])
def test_a_gradient_is_another(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    (moved,) = run_workers(1, trained, log, kind)
    assert [one.fault.kind for one in read_fired(log)] == [kind]
    if kind == "stale":
        assert moved == [*range(1, AGE + 3), 3.0, AGE + 4]
        return
    assert moved[:STEP] == [1.0, 2.0, 3.0]
    expected = {"nan": math.isnan(moved[STEP]), "inf": moved[STEP] == math.inf, "huge": moved[STEP] > 9e29}
    assert expected[kind]


def ended(log: Path, done: Path, kind: str) -> None:
    training = Training(log, fault(kind))
    for _ in range(STEPS):
        training.step()
        done.write_text(str(training.done))


@pytest.mark.parametrize("kind", ["sigkill", "sigterm"])
def test_who_is_killed_does_not_take_that_step(tmp_path: Path, kind: str) -> None:
    log, done = tmp_path / "log", tmp_path / "done"
    assert run_workers(1, ended, log, done, kind, faulty=0) == [None]
    deadline_s = time.monotonic() + 5
    while unfired([fault(kind)], log) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (fired,) = read_fired(log)
    assert fired.pid > 0
    assert done.read_text() == str(STEP)


def stopped(log: Path, kind: str) -> tuple[list[float], float]:
    """How long each step took, and the longest that another thread did not run."""
    training, ticks, over = Training(log, fault(kind)), [time.monotonic()], threading.Event()

    def tick() -> None:
        while not over.wait(0.005):
            ticks.append(time.monotonic())
        ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    took_s = []
    for _ in range(STEPS):
        began_s = time.monotonic()
        training.step()
        took_s.append(time.monotonic() - began_s)
    over.set()
    thread.join()
    return took_s, max(after - before for before, after in itertools.pairwise(ticks))


@pytest.mark.parametrize("kind", ["sigstop", "gil"])
def test_all_its_threads_stand_still_in_that_step(tmp_path: Path, kind: str) -> None:
    ((took_s, gap_s),) = run_workers(1, stopped, tmp_path / "log", kind)
    assert_fired([fault(kind)], tmp_path / "log")
    assert max(range(STEPS), key=took_s.__getitem__) == STEP
    assert took_s[STEP] > 0.9 * SHORT_S
    assert gap_s > 0.9 * SHORT_S


def slowed(log: Path) -> float:
    """Which part of the time this process ran."""
    training = Training(log, Fault(worker=0, step=STEP, kind="slow", seconds=1.0, factor=5.0))
    for _ in range(STEP + 1):
        training.step()
    began_s, before_s = time.monotonic(), time.process_time()
    while time.monotonic() < began_s + 0.8:
        pass
    return (time.process_time() - before_s) / (time.monotonic() - began_s)


def test_who_is_slow_runs_in_a_part_of_the_time(tmp_path: Path) -> None:
    (share,) = run_workers(1, slowed, tmp_path / "log")
    assert_fired([fault("slow")], tmp_path / "log")
    assert share < 0.4


def without_disk(log: Path, file: Path) -> tuple[str, str]:
    training = Training(log, fault("disk"))
    for _ in range(STEP + 1):
        training.step()
    said, deadline_s = "", time.monotonic() + 5
    while not said and time.monotonic() < deadline_s:
        said = _write(file)
    while _write(file) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return said, _write(file)


def _write(file: Path) -> str:
    try:
        file.write_text("x" * 100)
    except OSError as error:
        return str(error.strerror)
    return ""


def test_a_full_disk_takes_nothing_for_a_while(tmp_path: Path) -> None:
    assert run_workers(1, without_disk, tmp_path / "log", tmp_path / "file") == [("File too large", "")]
    assert_fired([fault("disk")], tmp_path / "log")


def raised(log: Path, kind: str) -> tuple[int, str]:
    training = Training(log, fault(kind))
    loader = DataLoader(TensorDataset(torch.ones(STEPS, 1)))
    try:
        for _ in loader:
            training.step()
    except Injected as error:
        return training.done, str(error)
    return training.done, ""


@pytest.mark.parametrize(
    ("kind", "where"), [("forward", "forward"), ("backward", "a hook of backward"), ("loader", "the data")]
)
def test_an_exception_comes_from_where_it_was_asked_for(tmp_path: Path, kind: str, where: str) -> None:
    assert run_workers(1, raised, tmp_path / "log", kind) == [(STEP, f"a fault in {where}, as was asked for")]
    assert_fired([fault(kind)], tmp_path / "log")


def left(log: Path) -> tuple[int, object]:
    training = Training(log, fault("leave"))
    try:
        for _ in range(STEPS):
            training.step()
    except SystemExit as stop:
        return training.done, stop.code
    return training.done, "stays"


def test_who_leaves_ends_well(tmp_path: Path) -> None:
    assert run_workers(1, left, tmp_path / "log") == [(STEP, 0)]


def jumped(log: Path) -> float:
    training = Training(log, fault("clock"))
    apart_s = time.time() - time.monotonic()
    for _ in range(STEP + 1):
        training.step()
    return time.time() - time.monotonic() - apart_s


def test_the_wall_clock_jumps_by_an_hour(tmp_path: Path) -> None:
    (by_s,) = run_workers(1, jumped, tmp_path / "log")
    assert by_s == pytest.approx(3600, abs=5)


# -- when --------------------------------------------------------------------------------------------------------------


def counted(log: Path) -> list[int]:
    """The steps behind a worker when a fault fires: of the model in the job, not of others."""
    twin = torch.nn.Linear(1, 1)
    alone = torch.optim.SGD(twin.parameters(), lr=1.0)

    def step_alone() -> None:
        twin(torch.ones(1, 1)).sum().backward()
        alone.step()

    for _ in range(STEPS):  # before there is a job
        step_alone()
    training, counts = Training(log, fault("clock")), []
    for _ in range(STEPS):
        training.step()
        step_alone()
        counts.append(len(read_fired(log)))
    return counts


def test_only_steps_of_the_job_count(tmp_path: Path) -> None:
    assert run_workers(1, counted, tmp_path / "log") == [[0] * STEP + [1] * (STEPS - STEP)]


def again(log: Path) -> int:
    for _ in range(2):  # a process that was started anew
        training = Training(log, fault("clock"))
        for _ in range(STEPS):
            training.step()
        training.run.close()
    return len(read_fired(log))


def test_what_has_fired_does_not_fire_again(tmp_path: Path) -> None:
    assert run_workers(1, again, tmp_path / "log") == [1]


def test_a_fault_of_another_worker_is_none_of_ours(tmp_path: Path) -> None:
    assert run_workers(1, others, tmp_path / "log") == [STEPS]
    with pytest.raises(AssertionError, match="never fired: sigkill of worker 1 at its step 3"):
        assert_fired([Fault(worker=1, step=STEP, kind="sigkill")], tmp_path / "log")


def others(log: Path) -> int:
    training = Training(log, Fault(worker=1, step=STEP, kind="sigkill"))
    for _ in range(STEPS):
        training.step()
    return training.done


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "gil", "target": "server"}, "Cannot have 'gil' strike the server"),
        ({"kind": "forward", "step": 0}, "Cannot have 'forward' strike at step 0"),
    ],
)
def test_what_cannot_strike_is_refused(tmp_path: Path, table: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        FaultInjector([Fault(**{"worker": 0, "step": 1, **table})], tmp_path / "log", 0)


def test_half_a_line_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b'{"number":0,"fau')
    assert read_fired(log) == []
    assert os.path.getsize(log)


def test_links_of_the_lab_are_struck_by_the_lab_alone(tmp_path: Path) -> None:
    rate = Fault(worker=0, step=STEP, kind="rate", to_mbps=10.0)
    with pytest.raises(ScenarioError, match=r"Cannot have rate of 10 Mbit/s at the link of worker 0 .* the lab's\."):
        FaultInjector([rate], tmp_path / "log", 0)
