"""Contributions that are judged by the loss on trusted samples: real jobs with a validator, over two shards."""

from __future__ import annotations

import _thread
import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
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
from tests.audit.recorded_runs import rewrite
from tests.training.server_jobs import serve
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

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
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


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
    assert isinstance(twin, nn.Sequential)
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
                state = random.getstate(), np.random.get_state(), torch.get_rng_state()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    buffers = [buffer.clone() for buffer in net.buffers()]
                    here = drawn()
                    random.setstate(state[0])
                    np.random.set_state(state[1])
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
    """Those of updates that are of any worker; the validator may have made a step more than they."""
    log = HistoryLog(folder / "history" / "coordinator.log")
    return [one for one in log if isinstance(one, UpdateJudged) and one.scales]


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
    result = verify(tmp_path / "history")
    assert not result.broken, result.violations
    assert result.rejected == 2 * updates
    rewrite(tmp_path / "history" / "coordinator.log", lower_the_loss_of_a_liar)
    result = verify(tmp_path / "history")
    assert any("Update 2 is judged [0.0, 0.0, 1.0], but Zeno(" in one.what for one in result.violations)


def lower_the_loss_of_a_liar(records: list[Any]) -> None:
    at = next(i for i, one in enumerate(records) if isinstance(one, UpdateJudged) and one.version == 2)
    records[at] = msgspec.structs.replace(records[at], losses=(records[at].losses[0], -9.0, *records[at].losses[2:]))


@pytest.mark.slow
def test_those_that_are_kept_are_averaged_whoever_is_late(tmp_path: Path) -> None:
    """An update is of the first two workers, of which one is left out; the validator counts as none of them."""
    results = run_workers(WORLD, train, tmp_path, plan(KSync(2), Zeno(1)), (), newcomers=1, timeout_s=100)
    assert min(accuracy(one.parameters) for one in results[:WORLD]) > 0.7
    of_two = [sorted(scale for *_, scale in one.scales) for one in judgements(tmp_path) if len(one.scales) >= 2]
    assert len(of_two) >= STEPS // 2
    assert all(scales == [0.0, 1.0] if len(scales) == 2 else scales == [0.0, 0.5, 0.5] for scales in of_two)
    result = verify(tmp_path / "history")
    assert not result.broken, result.violations


def test_a_validator_whose_script_has_no_loss_is_told_what_to_add(tmp_path: Path) -> None:
    results = run_workers(WORLD, train_until_alone, tmp_path, newcomers=1, timeout_s=100)
    assert results[WORLD] == (
        "Cannot judge by Zeno(faulty=2): this validator's script does not say what the loss is. Before "
        "each optimizer.step() call run.score_by(lambda: loss_function(model(x), y)), with the batch at hand."
    )


def train_until_alone(folder: Path) -> str:
    """Train until the validator has had its say; workers would wait for another one for ever."""
    rank = int(os.environ["RANK"])
    if rank >= WORLD:
        error = train(folder, plan(BSP(), Zeno(2)), scores=False).error
        (folder / "told").touch()
        return error
    stop_when(folder / "told")
    try:
        train(folder, plan(BSP(), Zeno(2)))
    except KeyboardInterrupt:
        return ""
    return "it went on without a validator"


def stop_when(there: Path) -> None:
    """Interrupt the training thread once this file is there."""

    def look() -> None:
        while not there.exists():
            time.sleep(0.05)
        _thread.interrupt_main()

    threading.Thread(target=look, daemon=True).start()


@pytest.mark.slow
def test_one_that_is_killed_while_it_scores_is_followed_by_another(tmp_path: Path) -> None:
    """The update waits for the losses, and whoever comes finds them out before it has made any step with the others."""
    results = run_workers(WORLD, train_with_two, tmp_path, newcomers=2, faulty=WORLD, timeout_s=100)
    assert (tmp_path / "killed").exists()
    assert results[WORLD + 1].ended
    assert min(accuracy(results[rank].parameters) for rank in range(WORLD)) > 0.7
    judged = judgements(tmp_path)
    assert [one.version for one in judged] == list(range(1, STEPS + 1)), "each was judged once"
    assert [[scale for *_, scale in one.scales] for one in judged] == [[0.0, 0.0, 1.0]] * STEPS
    result = verify(tmp_path / "history")
    assert not result.broken, result.violations


def train_with_two(folder: Path) -> Trained:
    return train(folder, plan(BSP(), Zeno(2)), kills=WORLD, waits=WORLD + 1)
