"""A schedule is made anew, on all workers at the same step, where what it was made from has changed."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.engine.schedule_learner import _SIZES as SIZES
from offbeat.engine.schedule_learner import Measured, ScheduleLearner
from offbeat.engine.schedule_monitor import ScheduleMonitor, StepTaken
from offbeat.errors import DisagreementError
from offbeat.payload import Sum
from offbeat.report.records import Records
from offbeat.report.scheduled_steps import scheduled_steps
from offbeat.report.trace import trace
from offbeat.safe_read import read_file
from offbeat.scheduling import BackwardProfile, MadeSchedule, Prophet, ReduceScatterGather, Schedule, play
from tests.engine.test_schedule_monitor import taken
from tests.workers import run_workers

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

LAYERS, WIDTH = 6, 256
FORWARD_S, BACKWARD_S = 0.01, 0.025  # of a layer: long beside what a busy machine adds
FAST, SLOW = 20e6, 6.4e6  # bytes in a second
LATENCY_S = 0.0005


class LateReply:
    """A reply that is there at a certain time. A `Pending`."""

    def __init__(self, pending: Any, at_s: float) -> None:
        self._pending, self._at_s, self.sent_bytes = pending, at_s, pending.sent_bytes

    def done(self) -> bool:
        return time.monotonic() >= self._at_s and self._pending.done()

    def wait(self, timeout: timedelta) -> bool:
        left_s = self._at_s - time.monotonic()
        if left_s > timeout.total_seconds():
            time.sleep(timeout.total_seconds())
            return False
        time.sleep(max(0.0, left_s))
        return bool(self._pending.wait(timeout))

    def result(self) -> Any:
        return self._pending.result()


class LateScattered(LateReply):
    """The first round of a sum in two, over a slow link. A `Scattered`."""

    def __init__(self, link: SlowFabric, scattered: Any, size_bytes: float) -> None:
        super().__init__(scattered, link.done_s(size_bytes))
        self._link, self._size_bytes = link, size_bytes

    def all_gather(self) -> LateReply:
        return LateReply(self._pending.all_gather(), self._link.done_s(self._size_bytes))


class SlowFabric:
    """A fabric over a link that carries one sum after the other, at a rate that a test sets."""

    def __init__(self, fabric: Any) -> None:
        self._fabric, self.bandwidth, self._free_s = fabric, FAST, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)

    def start(self, payload: Any) -> Any:
        pending = self._fabric.start(payload)
        if not isinstance(payload, Sum):
            return pending
        return LateReply(pending, self.done_s(payload.tensor.numel() * payload.tensor.itemsize))

    def reduce_scatter(self, payload: Sum) -> LateScattered:
        half_bytes = payload.tensor.numel() * payload.tensor.itemsize / 2
        return LateScattered(self, self._fabric.reduce_scatter(payload), half_bytes)

    def done_s(self, size_bytes: float) -> float:
        """The time when the link has carried so much more."""
        self._free_s = max(time.monotonic(), self._free_s) + size_bytes / self.bandwidth
        return self._free_s


class Computes(torch.autograd.Function):
    """Takes as long as a layer would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return grad


class SlowLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Computes.apply(super().forward(x)).tanh()  # type: ignore[no-any-return, no-untyped-call]


class FastLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class KnownTimes:
    """The clock of a job whose link and layers are as a test says: what is measured is read off a timeline.

    How busy the machine is has no part in it, and nobody sleeps.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer, self.bandwidth = reducer, FAST
        known, step_taken, note = self, ScheduleMonitor.step_taken, ScheduleMonitor.gradient_is_complete

        def measured(self: ScheduleLearner, exchanges_s: list[float], gap_s: float) -> Measured:
            passes = LAYERS * FORWARD_S, LAYERS * BACKWARD_S
            began_s = [layer * FORWARD_S for layer in range(LAYERS)]
            exchanges_s = [LATENCY_S + size / known.bandwidth for size in SIZES]
            return Measured([known.ready_s(layer) for layer in range(LAYERS)], began_s, *passes, exchanges_s, LATENCY_S)

        def taken_(self: ScheduleMonitor, step: StepTaken) -> None:
            real = dataclasses.replace(known._reducer._profile, bandwidth=known.bandwidth)
            at_s = taken(real, known._reducer.schedule)
            step_taken(self, at_s._replace(samples=step.samples, workers=step.workers))

        def complete(self: ScheduleMonitor, name: str, since_s: float) -> None:
            note(self, name, known.ready_s(int(name[0])))

        # In this process, which is of one test.
        ScheduleLearner._measured = measured  # type: ignore[method-assign]
        ScheduleMonitor.step_taken = taken_  # type: ignore[method-assign]
        ScheduleMonitor.gradient_is_complete = complete  # type: ignore[method-assign]

    @staticmethod
    def ready_s(layer: int) -> float:
        """The time at which a layer's gradient is complete, since backward began."""
        return (LAYERS - layer) * BACKWARD_S


class ScheduledJob:
    """A job with a schedule, over a link that a test can make slower.

    Args:
        is_real: whether layers compute, and the link carries blocks, for as long as is measured; else nothing takes any
            time, and `KnownTimes` says what is measured.
    """

    def __init__(self, run: offbeat.Run, *, is_real: bool = True) -> None:
        torch.manual_seed(2)
        self.run = run
        layer = SlowLayer if is_real else FastLayer
        self.net = nn.Sequential(*(layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.replica, self.optimizer = run.prepare(self.net, torch.optim.SGD(self.net.parameters(), lr=0.01))
        synchronizer: Any = run._session.models.synchronizers[0]
        self.reducer = synchronizer._gradients
        self.link: Any = SlowFabric(self.reducer.communicator._fabric) if is_real else KnownTimes(self.reducer)
        if is_real:
            self.reducer.communicator._fabric = self.reducer._carrier._fabric = self.link
        self._generator = torch.Generator().manual_seed(run.rank)

    def step(self) -> None:
        x = torch.randn(4, WIDTH, generator=self._generator)
        self.replica(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps_until(self, is_so: Any, most: int) -> int:
        """The steps that it takes until something is so on this worker; all make as many."""
        for count in range(most):
            if self.run.mean(float(is_so())) == 1.0:
                return count
            self.step()
        return most

    @property
    def weights(self) -> float:
        return float(sum(p.double().sum() for p in self.net.state_dict().values()))


PLAN = offbeat.Plan(scheduling=Prophet(least_bytes=1 << 14))


def slowed_down(run_dir: Path, is_real: bool) -> tuple[Schedule, Schedule, int, float, float]:
    """The schedules before and after, the steps that it took, the bandwidth that was found, and the weights."""
    with offbeat.init(PLAN, run_dir=run_dir) as run:
        job = ScheduledJob(run, is_real=is_real)
        job.steps_until(lambda: job.reducer.is_ahead, 12)
        for _ in range(3):
            job.step()
        before: Schedule = job.reducer.schedule
        job.link.bandwidth = SLOW
        took = job.steps_until(lambda: job.reducer.schedule != before, 60)
        job.step()
        job.run.synchronize()
        after: Schedule = job.reducer.schedule
        return before, after, took, job.reducer._monitor.link.bandwidth, job.weights


def test_a_link_that_slows_down_has_the_schedule_made_anew(tmp_path: Path) -> None:
    first, second = run_workers(2, slowed_down, tmp_path, False)
    before, after, took, bandwidth, weights = first
    assert (before, after, weights) == (second[0], second[1], second[4])
    assert 5 <= took <= 8, "five steps in a row, each seen with the next one, and what says so travels with one"
    assert bandwidth == pytest.approx(SLOW, rel=0.1)
    made = read_file(tmp_path / "schedule.json", MadeSchedule.from_bytes)
    assert "the link carries" in made.why
    assert made.schedule == after == PLAN.scheduling.schedule(made.profile)  # type: ignore[union-attr]
    assert made.profile.bandwidth == pytest.approx(SLOW, rel=0.1)
    assert play(made.profile, after).step_s < 0.98 * play(made.profile, before).step_s
    events = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "scheduled anew" in line]
    assert len(events) == 2, "each worker records it once"


@pytest.mark.slow
def test_a_link_that_really_slows_down_is_measured_to(tmp_path: Path) -> None:
    for before, after, took, bandwidth, _ in run_workers(2, slowed_down, tmp_path, True, timeout_s=120):
        assert after != before
        assert 5 <= took < 30
        assert bandwidth < 1.2 * SLOW


def slowed_in_two_rounds(run_dir: Path) -> tuple[float, float]:
    """What the link carries, as a worker finds it before and after it is slowed down."""
    with offbeat.init(offbeat.Plan(scheduling=ReduceScatterGather(1 << 18)), run_dir=run_dir) as run:
        job = ScheduledJob(run)
        job.steps_until(lambda: job.reducer.is_ahead, 12)
        for _ in range(6):
            job.step()
        before = job.reducer._monitor.link.bandwidth
        job.link.bandwidth = SLOW
        took = job.steps_until(lambda: job.reducer._monitor.link.bandwidth < 1.2 * SLOW, 20)
        assert took < 20
        return before, job.reducer._monitor.link.bandwidth


@pytest.mark.slow
def test_both_rounds_say_what_the_link_carries_and_are_shown_as_they_were_measured(tmp_path: Path) -> None:
    for before, after in run_workers(2, slowed_in_two_rounds, tmp_path, timeout_s=120):
        assert 0.7 * FAST < before < 1.2 * FAST
        assert 0.8 * SLOW < after < 1.2 * SLOW
    made = read_file(tmp_path / "schedule.json", MadeSchedule.from_bytes)
    records = Records(tmp_path / "metrics.jsonl").all()
    rounds = scheduled_steps(made, records).blocks
    assert len(rounds) == 2 * len(made.schedule.blocks) == 2 * LAYERS
    done = [one.measured_done_s or 0.0 for one in rounds]
    assert all(0 < earlier < later for earlier, later in itertools.pairwise(done)), "one after the other"
    backward_s = LAYERS * BACKWARD_S
    assert done[0] < backward_s < min(one.measured_issued_s or 0.0 for one in rounds[LAYERS:])
    shown = {event["name"].partition(",")[2] for event in trace(records)["traceEvents"] if "block 1" in event["name"]}
    assert {" reduced", " gathered"} <= shown


def of_another_mind() -> str:
    with offbeat.init(PLAN) as run:
        job = ScheduledJob(run, is_real=False)
        if run.rank == 1:
            usual = Prophet.schedule

            def other(self: Prophet, profile: BackwardProfile) -> Schedule:
                made = usual(self, profile)
                return Schedule((made.blocks[0], made.blocks[2], made.blocks[1], *made.blocks[3:]), made.after)

            Prophet.schedule = other  # type: ignore[method-assign]
        try:
            for _ in range(12):
                job.step()
        except DisagreementError as error:
            return str(error)
        return ""


def test_workers_whose_schedules_differ_are_told_the_first_block() -> None:
    for text in run_workers(2, of_another_mind, timeout_s=120):
        assert text.startswith("The schedule of gradients differs between workers: rank 1 against rank 0.")
        assert "'block 2: behind" in text


def resumed() -> tuple[bool, bool]:
    """Whether a run that goes on from a checkpoint has the same schedule and profile, and watches its steps."""
    with offbeat.init(PLAN) as run:
        job = ScheduledJob(run, is_real=False)
        job.steps_until(lambda: job.reducer.is_ahead, 12)
        state = run.state_dict()
        schedule, profile = job.reducer.schedule, job.reducer._profile
        run.load_state_dict(state)
        for _ in range(4):
            job.step()
        run.synchronize()
        monitor = job.reducer._monitor
        is_same = job.reducer.schedule == schedule and job.reducer._profile == profile
        return is_same, monitor is not None and monitor.profile == profile


def test_a_run_that_goes_on_is_watched_too() -> None:
    assert run_workers(2, resumed, timeout_s=120) == [(True, True)] * 2
