"""A race to a metric: every worker trains on its share of the samples, and rank 0's model is evaluated now and then.

What a workload brings is a `Task`: model, data, loss and metric. What is raced with is the scenario's choice.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import itertools
import os
import statistics
import time
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from offbeat.errors import ScenarioError
from offbeat.lab.peer_checkpoint import Snapshots
from offbeat.lab.recorder import Recorder, Work, alone_s, begun
from offbeat.lab.systems import bind
from offbeat.straggler_model import Straggler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Optimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class Task(Protocol):
    """What is learnt. `samples` are there to train on, and `trusted` ones behind them, on which a validator trains and
    no worker; `note` says what they are.
    """

    model: torch.nn.Module
    samples: int
    trusted: int
    note: str

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Of the samples of these indices, [B] int64."""
        ...

    def metric(self, model: torch.nn.Module) -> float:
        """How well the model does on what it was not trained on."""
        ...


def options(description: str | None, *, batch: int, every: int) -> argparse.ArgumentParser:
    """What every race can be told on its command line; a workload adds its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--batch", type=int, default=batch, help="samples of a worker's step")
    parser.add_argument("--every", type=int, default=every, help="steps between two evaluations")
    parser.add_argument("--compute-s", type=float, default=0.0, help="stretch each step's computation to so long")
    return parser


def run(task: Task, optimizer: Optimizer, asked: argparse.Namespace, work: Work) -> None:
    """Train as the lab asks, and record it."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model, twin = task.model, copy.deepcopy(task.model)
    least_s = asked.compute_s * work.compute_factor
    # Who is started again does not measure that once more: the job is waiting.
    began = begun()
    compute_s = max(least_s, _alone_s(task, twin, optimizer, asked.batch)) if began is None else began.compute_s
    bound = bind(work.system, model, optimizer(model.parameters()), bucket_bytes=work.bucket_bytes)
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    kept = Snapshots(model, bound.optimizer, work)
    done = kept.load()
    recorder = Recorder(compute_s=compute_s, gradient_bytes=gradient_bytes, work=work, done=done)
    recorder.note(task.note)
    straggler = Straggler(work.straggle, rank)
    validates = bound.run is not None and bound.run.is_validator
    if validates:
        share = trusted(task, asked.batch)
    else:
        # Who has joined later has a rank beyond those of the beginning, and is alone in its own.
        share = shares(task.samples, batch=asked.batch, rank=rank % world, world=world)
    # Where a server holds the parameters, backward waits for nobody.
    waits = bound.run is None or not bound.run.plan.is_served
    tries = 15 if began is None else 3
    backward_s = _backward_s(task, twin, asked.batch, tries) if waits and least_s else 0.0
    snapshots = []
    for _ in range(done):
        next(share)
    # A validator's loop has no end: it is ended with the job.
    for index in itertools.count() if validates else range(done, work.warmup_steps + work.steps):
        # Many workers on few cores: each computes for as long as a machine of its own would. What is waited for others
        # in backward is no computing, so there the rest of the time comes before it.
        began_s = time.perf_counter()
        indices = next(share)
        loss = task.loss(bound.model, indices)
        if not waits:
            loss.backward()
        time.sleep(max(0.0, began_s + least_s - backward_s - time.perf_counter()))
        time.sleep(straggler.lost_s(compute_s))
        if waits:
            loss.backward()
        if validates and bound.run is not None:
            bound.run.score_by(functools.partial(task.loss, bound.model, indices))
        bound.optimizer.step()
        bound.optimizer.zero_grad()
        recorder.step(asked.batch, loss.item())
        kept.save(index + 1)
        # Evaluated at the end: a worker that evaluates while the others train would be a straggler.
        if (rank == 0 or bound.averages_replicas) and (index + 1) % asked.every == 0:
            snapshots.append((recorder.moment, bound.common_state(model)))
    states = [state for _, state in snapshots]
    if bound.averages_replicas:
        states = bound.mean_of(model, states)
    snapshots = [(moment, state) for (moment, _), state in zip(snapshots, states, strict=True)]
    bound.settle()
    if bound.run is not None:
        recorder.waited()
    snapshots.append((recorder.moment, model.state_dict()))
    for moment, state in snapshots if rank == 0 else ():
        twin.load_state_dict(state)
        recorder.metric(task.metric(twin), moment)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    recorder.finish(digest=digest)
    bound.close()


def shares(samples: int, *, batch: int, rank: int, world: int) -> Iterator[torch.Tensor]:
    """This worker's indices [batch], step by step: the same order of samples for every system, each once an epoch."""
    generator = torch.Generator().manual_seed(1)
    while True:
        order = torch.randperm(samples, generator=generator)
        for start in range(0, samples - batch * world + 1, batch * world):
            yield order[start + rank * batch : start + (rank + 1) * batch]


def trusted(task: Task, batch: int) -> Iterator[torch.Tensor]:
    """A validator's indices [batch], step by step.

    Raises:
        ScenarioError: if there are not so many samples for it.
    """
    if task.trusted < batch:
        raise ScenarioError(
            f"Cannot validate with {task.trusted} trusted samples: a batch has {batch}. Have workers leave some to the "
            'validator, such as "--trusted", "1000" (workload.args).'
        )
    return (task.samples + indices for indices in shares(task.trusted, batch=batch, rank=0, world=1))


def _backward_s(task: Task, twin: torch.nn.Module, batch: int, tries: int) -> float:
    """Median seconds of a backward that communicates with nobody, while the other workers are in theirs."""
    times = []
    for _ in range(tries):
        loss = task.loss(twin, torch.arange(batch))
        if dist.is_initialized():
            dist.barrier()
        began_s = time.perf_counter()
        loss.backward()
        times.append(time.perf_counter() - began_s)
    twin.zero_grad()
    return statistics.median(times)


def _alone_s(task: Task, twin: torch.nn.Module, optimizer: Optimizer, batch: int) -> float:
    """What a step takes without the others. The twin's parameters are overwritten before it is evaluated."""
    alone = optimizer(twin.parameters())

    def step() -> None:
        task.loss(twin, torch.arange(batch)).backward()
        alone.step()
        alone.zero_grad()

    return alone_s(step)
