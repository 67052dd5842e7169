"""Recorded jobs of random plans, with at most one fault; made from a seed, so that each can be made again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.codec import (
    GRBS,
    QSGD,
    Carry,
    Cast,
    Dense,
    ErrorFeedback,
    ErrorReset,
    FixedPoint,
    LookAhead,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)
from offbeat.control import ByProgress, WaitThreshold
from offbeat.errors import OffbeatError, PlanError
from offbeat.fabric import Elastic, ObjectStore, ParameterServer, ProcessGroup, Routed, Switch
from offbeat.fault_spec import Fault
from offbeat.plan import Plan
from offbeat.privacy import GaussianMechanism
from offbeat.robust import CentredClipping, GeometricMedian, MeaMed, Median, TrimmedMean
from offbeat.scheduling import FIFO, Credit, MergedGradient, Priority, Prophet, ReduceScatterGather
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, OuterSGD, RoundRobin
from offbeat.testing.faults import FaultInjector
from tests.switch.local_switch import served_switch
from tests.training.server_jobs import serve, wait_for_snapshot
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from offbeat.control import Controller
    from offbeat.fabric import FabricSpec
    from offbeat.sync import Policy

STEPS, BATCH = 12, 2
TIMEOUT = timedelta(seconds=15)  # starting takes long on a busy machine
_STRUCK = 5  # the step in which a fault strikes
_NOWHERE = "127.0.0.1:1"  # of a switch, until there is one
_POLICIES: tuple[Policy, ...] = (
    BSP(),
    ASP(),
    SSP(0),
    SSP(2),
    DSSP(1, 3),
    KSync(1),
    KSync(2),
    KSync(2, "carry"),
    KSync(1, wait_s=0.05),
    RoundRobin(),
    RoundRobin(strict=True),
    RoundRobin(slots=2),
    Hybrid(BSP(), ASP(), groups=1),
)
_FABRICS: tuple[FabricSpec, ...] = (
    ProcessGroup(),
    Routed(),
    ObjectStore(),
    Elastic(),
    Elastic(over=Routed()),
    ParameterServer(),
    Switch(_NOWHERE),
)
_CODECS = (
    Cast("bf16"),
    GRBS(2),
    QSGD(8),
    RandomK(0.5),
    FixedPoint(),
    PowerSGD(1),
    Carry(GRBS(2)),
    LookAhead(GRBS(2)),
    ErrorReset(every=4),
    ErrorReset(step=GRBS(2), every=4),
    ErrorFeedback(GRBS(2)),
    ErrorFeedback(TopK(0.25)),
    ErrorFeedback(Sign()),
)
_SCHEDULERS = (FIFO(), Priority(), Credit(), MergedGradient(), Prophet(), ReduceScatterGather())
_RULES = (Median(), TrimmedMean(1), GeometricMedian(), CentredClipping(), MeaMed(1))
_OF_WORKERS = ("sigkill", "sigstop", "slow", "gil", "forward", "backward", "leave")
_OF_GRADIENTS = ("nan", "stale")  # before they are exchanged
_OF_LINKS = ("cut", "flip", "duplicate", "reorder", "replay", "lost-reply")
BETWEEN_BUCKETS = "killed between buckets"


@dataclass(frozen=True)
class RandomJob:
    """A job.

    Args:
        fault: that strikes, in words; "" for none.
        swap: the policy that rank 0 asks for in the middle; None for none.
        settles: the step after which all settle; -1 for none.
        loads: the step after which all return to where they were three steps before; -1 for none.
        accumulates: whether each step is of two backward passes.
        loader: whether batches come from a prepared loader.
        models: how many are prepared.
        shards: of a server.
    """

    seed: int
    plan: Plan
    world: int
    fault: str = ""
    swap: Policy | None = None
    settles: int = -1
    loads: int = -1
    accumulates: bool = False
    loader: bool = False
    models: int = 1
    shards: int = 1

    @property
    def faults(self) -> list[Fault]:
        """The faults that strike at their own step."""
        if self.fault in ("", BETWEEN_BUCKETS):
            return []
        kind, _, target = self.fault.partition(" of the ")
        of = {"target": target} if target else {}
        return [Fault(worker=1, step=_STRUCK, kind=kind, seconds=0.7, **of)]  # type: ignore[arg-type]


def random_job(seed: int, *, has_fault: bool) -> RandomJob:
    """Make a job of any plan that can be made."""
    draw = random.Random(seed)
    fabric: FabricSpec = draw.choice(_FABRICS)
    if isinstance(fabric, ParameterServer):
        fabric = ParameterServer(block_bytes=4096, patience_s=draw.choice((1.0, 30.0)))
    while True:
        with contextlib.suppress(PlanError):
            return _drawn(seed, draw, fabric, has_fault=has_fault)


def _drawn(seed: int, draw: random.Random, fabric: FabricSpec, *, has_fault: bool) -> RandomJob:
    world, sync, is_served = draw.choice((2, 3, 3)), _policy(draw), isinstance(fabric, ParameterServer)
    plan = Plan(
        sync=sync,
        fabric=fabric,
        codec=draw.choice(_CODECS) if draw.random() < 0.5 else Dense(),
        bucket_bytes=draw.choice((64, 25 << 20)),
        nonfinite=draw.choice(("pass", "pass", "skip", "raise")),
        keeps=draw.choice(("local_batch", "global_batch")),
        tuning=offbeat.BatchTuning() if draw.random() < 0.1 else None,
        scheduling=draw.choice(_SCHEDULERS) if draw.random() < 0.25 else None,
        controller=_controller(draw, sync) if draw.random() < 0.15 else None,
        rule=draw.choice(_RULES) if is_served and draw.random() < 0.3 else None,
        privacy=GaussianMechanism() if is_served and draw.random() < 0.15 else None,
    )
    plan.check_world(world)
    swap = _policy(draw) if plan.controller is None and draw.random() < 0.25 else None
    if swap is not None:
        dataclasses.replace(plan, sync=swap).check_world(world)
    of_server = (*_OF_LINKS, "sigkill of the server", "sigkill of the coordinator") if is_served else ()
    of_gradients = _OF_GRADIENTS if is_served or plan.steps_locally else ()
    fault = draw.choice((*_OF_WORKERS, BETWEEN_BUCKETS, *of_gradients, *of_server)) if has_fault else ""
    return RandomJob(
        seed=seed,
        plan=plan,
        world=world,
        fault=fault,
        swap=swap,
        settles=draw.randrange(STEPS) if draw.random() < 0.3 else -1,
        loads=6 if draw.random() < 0.2 else -1,
        accumulates=draw.random() < 0.2,
        loader=draw.random() < 0.4,
        models=draw.choice((1, 1, 1, 2)),
        shards=draw.choice((1, 1, 2)),
    )


def _policy(draw: random.Random) -> Policy:
    if draw.random() < 0.6:
        return draw.choice(_POLICIES)
    every = draw.randint(1, 5)
    return LocalSGD(
        every,
        after=draw.randint(0, 4),
        outer=OuterSGD() if draw.random() < 0.2 else None,
        delay=draw.randint(0, 1),
        fragments=draw.choice([parts for parts in range(1, every + 1) if every % parts == 0]),
        policy=draw.choice((None, None, ASP(), SSP(1))),
    )


def _controller(draw: random.Random, sync: Policy) -> Controller:
    other = _policy(draw)
    if draw.random() < 0.3:
        return WaitThreshold(tight=sync, loose=other, window_s=0.2, least_s=0.2)
    return ByProgress((sync, other), at=(0.5,), steps=STEPS)


def record(job: RandomJob, folder: Path) -> list[str]:
    """Run a job, whose history is then in the folder; what each worker that was not struck ended with, "" for well."""
    with served_switch(timeout=TIMEOUT) if isinstance(job.plan.fabric, Switch) else contextlib.nullcontext("") as where:
        if where:
            job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, fabric=Switch(where)))
        return run_workers(job.world, _train, job, folder, timeout_s=100, faulty=1 if job.fault else None)


def _train(job: RandomJob, folder: Path) -> str:
    history = str(folder / "history")
    if job.plan.is_served:
        snapshots = {"snapshots": str(folder / "server"), "restarts": 3, "every": 2} if "of the" in job.fault else {}
        serve(folder, job.shards, history=history, **snapshots)
    rank = int(os.environ["RANK"])
    injector = FaultInjector(job.faults, folder / "faults.log", rank)
    try:
        with offbeat.init(job.plan, history=history, timeout=TIMEOUT) as run:
            _Training(job, run, folder).run()
    except (OffbeatError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del injector
    return ""


class _Training:
    """One worker's script."""

    def __init__(self, job: RandomJob, run: offbeat.Run, folder: Path) -> None:
        self._job, self._run, self._folder = job, run, folder
        torch.manual_seed(0)
        self._nets = [
            nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Linear(300, 4), nn.Linear(4, 2))
            for _ in range(job.models)
        ]
        if job.plan.has_quorum or job.plan.is_tabled:  # which refuse buffers that follow each batch
            self._nets = [
                nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 4), nn.Linear(4, 2)) for _ in range(job.models)
            ]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5) for net in self._nets]
        self._pairs: list[tuple[nn.Module, Any]] = []
        self._batches: Iterable[Sequence[torch.Tensor]] = [(torch.randn(BATCH + run.rank, 6),) for _ in range(STEPS)]
        for net, optimizer in zip(self._nets, optimizers, strict=True):
            if job.loader and not self._pairs:
                data = TensorDataset(torch.randn(STEPS * BATCH * run.world, 6))
                model, optimizer, self._batches = run.prepare(net, optimizer, DataLoader(data, batch_size=BATCH))
            else:
                model, optimizer = run.prepare(net, optimizer)
            self._pairs.append((model, optimizer))
        self._saved: dict[str, Any] = {}
        if job.fault == BETWEEN_BUCKETS and run.rank == 1:
            next(self._nets[0].parameters()).register_hook(self._die)

    def _die(self, grad: torch.Tensor) -> torch.Tensor:
        if self._run.step == _STRUCK:
            time.sleep(0.3)  # until the bucket that is on its way has arrived
            os.kill(os.getpid(), signal.SIGKILL)
        return grad

    def run(self) -> None:
        job, run = self._job, self._run
        for step, (batch,) in enumerate(self._batches):
            if step == STEPS // 2 and job.swap is not None and run.rank == 0:
                with contextlib.suppress(PlanError):
                    run.swap(sync=job.swap)
            if step == _STRUCK and "of the" in job.fault and run.rank == 1:
                wait_for_snapshot(self._folder / "server")
            for model, optimizer in self._pairs:
                self._step(model, optimizer, batch)
            if step == job.loads - 3:
                self._save()
            if step == job.loads:
                run.settle()
                self._load()
            if step == job.settles:
                run.settle()
        run.settle()

    def _step(self, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
        if self._job.accumulates:
            with self._run.no_sync():
                model(batch).square().mean().backward()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def _save(self) -> None:
        self._run.settle()  # so that all save the same
        self._saved = {
            "run": self._run.state_dict(),
            "models": [{k: v.clone() for k, v in net.state_dict().items()} for net in self._nets],
        }

    def _load(self) -> None:
        for net, state in zip(self._nets, self._saved["models"], strict=True):
            net.load_state_dict(state)
        self._run.load_state_dict(self._saved["run"])
