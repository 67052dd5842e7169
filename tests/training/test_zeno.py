"""Contributions that are judged by the loss on trusted samples: real jobs with a validator, over two shards."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat import BSP, KSync, LocalSGD, ParameterServer, Plan
from offbeat.audit import verify
from offbeat.engine.loss_scorer import LossScorer
from offbeat.errors import ModelError
from offbeat.history import HistoryLog, UpdateJudged
from offbeat.robust import Zeno
from tests.training.server_jobs import kill, serve
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from offbeat.protocol.loss_scores import ScoreContributions
    from offbeat.sync import Policy

pytestmark = pytest.mark.timeout(120)
WORLD, STEPS, LR = 3, 24, 0.2
LIARS = (0, 1)
SECRET = "v" * 32


class Trained(NamedTuple):
    """What became of one process's model.

    Args:
        parameters: at its end.
        ended: whether its script was ended, with exit code 0.
        buffers: of the last step, and what they have to be.
        drawn: from each generator behind the first step, and what has to be drawn.
        error: that its script ended with.
        said: what people were told.
    """

    parameters: list[torch.Tensor]
    ended: bool
    buffers: tuple[list[torch.Tensor], list[torch.Tensor]]
    drawn: tuple[list[float], list[float]]
    error: str
    said: list[str]


def model() -> nn.Module:
    """Three blocks of 4096 bytes, over two shards; what it computes draws random numbers and keeps statistics."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 130), nn.BatchNorm1d(130), nn.Tanh(), nn.Dropout(0.1), nn.Linear(130, 3)).double()


def batch(rank: int, step: int, count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1000 * rank + step)).double()
    return x, x[:, :3].argmax(1)


def drawn() -> list[float]:
    """One number of each generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002 - the global one


def train(
    folder: Path, plan: Plan, liars: tuple[int, ...] = LIARS, *, scores: bool = True, kills: int = -1, waits: int = -1
) -> Trained:
    """The same script everywhere; the validator has its own data, and no backward.

    Args:
        liars: turn their gradients round, and make them longer.
        scores: whether it says what the loss is.
        kills: the rank of a validator that is killed while it scores for the third time.
        waits: that of one that does not come before.
    """
    said, rank = listen(), int(os.environ["RANK"])
    os.environ["OFFBEAT_HISTORY"] = str(folder / "history")
    if rank >= WORLD:
        del os.environ["OFFBEAT_STORE"], os.environ["OFFBEAT_STORE_PREFIX"], os.environ["OFFBEAT_HISTORY"]
        os.environ.update(OFFBEAT_ROLE="validator", OFFBEAT_VALIDATOR_TOKEN=SECRET)
    serve(folder, 2, validator_token=SECRET, history=str(folder / "history"))
    while rank == waits and not (folder / "killed").exists():
        time.sleep(0.05)
    if rank == kills:
        die_while_scoring(folder)
    net, ended, error, step = model(), False, "", 0
    buffers, twin = list[torch.Tensor](), model()
    first: tuple[list[float], list[float]] = ([], [])
    try:
        with offbeat.init(plan, seed=3, timeout=timedelta(seconds=5)) as run:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            replica, optimizer = run.prepare(net, optimizer)
            for step in range(10**6 if run.is_validator else STEPS):
                x, y = batch(rank, step, 256 if run.is_validator else 32)
                if scores:
                    run.score_by(lambda x=x, y=y: trusted_loss(replica, x, y))  # type: ignore[misc]
                if run.is_validator:
                    with torch.no_grad():
                        replica(x)
                        twin[:2](x) if step == 0 else None
                else:
                    F.cross_entropy(replica(x), y).backward()
                for parameter in net.parameters() if rank in liars else ():
                    assert parameter.grad is not None
                    parameter.grad.mul_(-6)
                state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    buffers = [buffer.clone() for buffer in net.buffers()]
                    here = drawn()
                    random.setstate(state[0])
                    np.random.set_state(state[1])  # noqa: NPY002
                    torch.set_rng_state(state[2])
                    first = here, drawn()
            run.settle()
    except SystemExit as stop:
        ended = stop.code in (None, 0)
    except ModelError as caught:
        error = str(caught)
    parameters = [parameter.detach().clone() for parameter in net.parameters()]
    return Trained(parameters, ended, (buffers, list(twin.buffers())), first, error, said)


def trusted_loss(replica: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss, which draws from every generator."""
    drawn()
    return F.cross_entropy(replica(x), y)


def die_while_scoring(folder: Path) -> None:
    """Have this validator killed between two contributions that it fetches for the third update."""
    fetch = LossScorer._fetch

    def dying(scorer: LossScorer, asked: ScoreContributions, push: tuple[int, int] | None, landing: object) -> bool:
        if asked.version == 3 and push == asked.contributions[1]:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return fetch(scorer, asked, push, landing)  # type: ignore[arg-type]

    LossScorer._fetch = dying  # type: ignore[method-assign, assignment]


def accuracy(parameters: list[torch.Tensor]) -> float:
    net = model().train()  # with the statistics of the batch: those in the buffers are each worker's own
    for parameter, value in zip(net.parameters(), parameters, strict=True):
        parameter.data.copy_(value)
    x, y = batch(99, 0, 500)
    return float((net(x).argmax(1) == y).double().mean())


def judgements(folder: Path) -> list[UpdateJudged]:
    return [one for one in HistoryLog(folder / "history" / "coordinator.log") if isinstance(one, UpdateJudged)]


def plan(policy: Policy, rule: Zeno | None) -> Plan:
    return Plan(sync=policy, fabric=ParameterServer(block_bytes=4096), validator=rule)


@pytest.mark.parametrize("policy", [BSP(), LocalSGD(3)], ids=repr)
def test_most_workers_lie_and_the_model_learns(policy: Policy, tmp_path: Path) -> None:
    """The one that does not lie makes every update; the validator's buffers and generators are as if it did nothing."""
    results = run_workers(WORLD, train, tmp_path, plan(policy, Zeno(2)), newcomers=1, timeout_s=100)
    assert [one.ended for one in results] == [False] * WORLD + [True]
    assert min(accuracy(one.parameters) for one in results[:WORLD]) > 0.7
    judged = judgements(tmp_path)
    updates = STEPS if policy == BSP() else STEPS // 3
    assert [one.version for one in judged] == list(range(1, updates + 1))
    assert [[scale for *_, scale in one.scales] for one in judged] == [[0.0, 0.0, 1.0]] * updates
    assert all(len(one.losses) == 4 and len(one.squares) == 3 for one in judged)
    for got, expected in zip(*results[WORLD].buffers, strict=True):
        assert torch.equal(got, expected)
    assert results[WORLD].drawn[0] == results[WORLD].drawn[1]
    result = verify([tmp_path / "history"])
    assert result.ok, result.violations
    assert (result.judged, result.rejected) == (updates, 2 * updates)
