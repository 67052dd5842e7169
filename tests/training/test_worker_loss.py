"""All-reduce that goes on without the workers it loses: what is left is equal, and right, and soon on its way."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.collective import HalvingDoubling
from offbeat.errors import WorkerLostError
from tests.training.server_jobs import serve, told
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from offbeat.batching import Keeps
    from offbeat.codec import Codec

WORLD = 4


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count(
    lost: int, at: int, steps: int, fabric: offbeat.Elastic | None = None
) -> tuple[list[float], float, list[str]]:
    """Each gradient is 1 + rank: the mean tells who took part. Returns all moves, the longest step, what was said."""
    said = listen()
    run = offbeat.init(offbeat.Plan(fabric=fabric or offbeat.Elastic()), timeout=timedelta(seconds=3))
    model = nn.Linear(300, 300, bias=False)
    nn.init.zeros_(model.weight)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    moves, worst = [], 0.0
    for step in range(steps):
        before, began_s = model.weight.detach().clone(), time.monotonic()
        prepared(torch.ones(1, 300)).sum().mul(1.0 + run.rank).backward()
        if (run.rank, step) == (lost, at):
            kill()
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, time.monotonic() - began_s)
        (moved,) = (before - model.weight.detach()).unique().tolist()
        moves.append(moved)
    run.close()
    return moves, worst, said


def keep(codec: Codec, sync: offbeat.BSP | offbeat.LocalSGD, folder: Path, served: bool) -> list[str]:
    """Rank 2 is killed once it has said a while what it has not sent; what the others are told."""
    said = listen()
    if served:
        serve(folder)
    fabric = offbeat.ParameterServer() if served else offbeat.Elastic()
    plan = offbeat.Plan(codec=codec, sync=sync, fabric=fabric)
    with offbeat.init(plan, timeout=timedelta(seconds=3), run_dir=folder) as run:
        model = nn.Linear(300, 300, bias=False)
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        began_s, killed = time.monotonic(), folder / "killed"
        while not killed.exists() or time.time() - killed.stat().st_mtime < 3:
            (prepared(torch.randn(4, 300)) ** 2).mean().backward()
            if run.rank == 2 and time.monotonic() - began_s > 3:
                killed.touch()
                kill()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "sync", "served"),
    [
        (offbeat.ErrorFeedback(offbeat.TopK(0.01)), offbeat.BSP(), False),
        (offbeat.ErrorFeedback(offbeat.TopK(0.01)), offbeat.BSP(), True),
        (offbeat.Carry(offbeat.GRBS(4)), offbeat.LocalSGD(4), True),
    ],
    ids=["elastic", "server", "offset"],
)
def test_what_a_lost_worker_had_not_sent_is_said(
    codec: Codec, sync: offbeat.BSP | offbeat.LocalSGD, served: bool, tmp_path: Path
) -> None:
    said, *_ = run_workers(3, keep, codec, sync, tmp_path, served, faulty=2)
    text = " ".join(told(tmp_path, 0) if served else said)
    found = re.search(r"What it had computed and not sent, of norm ([0-9.e+-]+), is lost with it\.", text)
    assert found is not None, text
    assert float(found[1]) > 0


@pytest.mark.parametrize(
    ("lost", "fabric"),
    [
        (0, offbeat.Elastic()),
        (2, offbeat.Elastic()),
        (0, offbeat.Elastic(over=offbeat.Routed(HalvingDoubling()))),
        (2, offbeat.Elastic(over=offbeat.Routed())),
    ],
    ids=repr,
)
def test_a_worker_that_is_killed_is_left_out_of_the_mean(lost: int, fabric: offbeat.Elastic) -> None:
    results = run_workers(WORLD, count, lost, 3, 8, fabric, faulty=lost)
    left = [rank for rank in range(WORLD) if rank != lost]
    before, after = sum(1.0 + rank for rank in range(WORLD)) / WORLD, sum(1.0 + rank for rank in left) / len(left)
    for rank in left:
        moves, worst_s, said = results[rank]
        assert moves[:4] == [before] * 4  # it died behind its part of step 3
        assert moves[4:] == pytest.approx([after] * 4)
        assert worst_s < 1.5, worst_s
        said_of = [text for text in said if f"Rank {lost} died" in text and ", continue, " in text]
        assert len(said_of) == (rank == left[0]), said


SAMPLES = 600


def use(
    folder: str, lost: int, at: int, keeps: Keeps, epochs: int, num_workers: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Which samples this worker's steps used, by epoch, and the sizes of its batches; the lost one writes them down."""
    plan = offbeat.Plan(fabric=offbeat.Elastic(), keeps=keeps)
    run = offbeat.init(plan, timeout=timedelta(seconds=3))
    model = nn.Linear(1, 1)
    samples = TensorDataset(torch.arange(SAMPLES).float()[:, None])
    data = DataLoader(samples, batch_size=10, shuffle=True, num_workers=num_workers)
    prepared, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9), data)
    used, sizes, step = [list[int]() for _ in range(epochs)], [], 0
    for epoch in range(epochs):
        for (x,) in loader:
            prepared(x).sum().backward()  # whoever is lost behind this has taken part in it
            if run.has_data:
                used[epoch] += x.flatten().int().tolist()
                sizes.append(len(x))
            optimizer.step()
            optimizer.zero_grad()
            if (run.rank, step) == (lost, at):
                (Path(folder) / "used").write_text(json.dumps(used[0]))
                kill()
            step += 1
    run.close()
    return used, sizes


@pytest.mark.parametrize("keeps", ["local_batch", "global_batch"])
def test_what_a_lost_worker_has_not_used_goes_to_the_others(keeps: Keeps, tmp_path: Path) -> None:
    results = run_workers(WORLD, use, str(tmp_path), 1, 6, keeps, 2, faulty=1)
    left = [results[rank] for rank in (0, 2, 3)]
    first = Counter(json.loads((tmp_path / "used").read_text()))
    for used, _ in left:
        first += Counter(used[0])
    assert first == Counter(range(SAMPLES))  # each once: what had been dealt to it and was in no step, too
    assert Counter(itertools.chain(*(used[1] for used, _ in left))) == Counter(range(SAMPLES))
    later = Counter(sum(sizes) for sizes in zip(*(sizes[-12:-6] for _, sizes in left), strict=True))
    assert set(later) == {30 if keeps == "local_batch" else 40}


@pytest.mark.slow
def test_what_it_had_loaded_ahead_goes_to_the_others_too(tmp_path: Path) -> None:
    results = run_workers(3, use, str(tmp_path), 1, 6, "local_batch", 2, 2, faulty=1)
    for epoch in range(2):
        seen = Counter(itertools.chain(*(results[rank][0][epoch] for rank in (0, 2))))
        seen += Counter(json.loads((tmp_path / "used").read_text())) if epoch == 0 else Counter()
        assert seen == Counter(range(SAMPLES))


def step_alone(lost: int, at: int, steps: int) -> tuple[list[float], str, list[str]]:
    """With local steps: parameters after each, of which every fourth is an average; one worker raises."""
    said = listen()
    plan = offbeat.Plan(sync=offbeat.LocalSGD(4), fabric=offbeat.Elastic())
    with offbeat.init(plan, timeout=timedelta(seconds=3)) as run:
        model = nn.Linear(200, 1, bias=False)
        nn.init.zeros_(model.weight)
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        values = []
        for step in range(steps):
            prepared(torch.ones(1, 200)).sum().mul(1.0 + run.rank).backward()
            if (run.rank, step) == (lost, at):
                raise ValueError("the disk of this worker is gone")
            optimizer.step()
            optimizer.zero_grad()
            values.append(float(model.weight.detach()[0, 0]))
        found = run.mean(float(run.rank))
    return values, f"{found:g}", said


def test_averages_of_local_steps_go_on_without_a_worker_that_raised() -> None:
    results = run_workers(3, step_alone, 1, 9, 16, faulty=1)
    for rank in (0, 2):
        values, mean, said = results[rank]
        assert values[3] == -4 * 2.0  # the mean of 1, 2 and 3
        assert values[7] == -8 * 2.0
        assert values[11] == values[7] - 4 * 2.0  # of 1 and 3: what it had stepped by itself since is gone with it
        assert mean == "1"
        told = [text for text in said if "Rank 1 raised an exception" in text]
        assert [("the disk of this worker is gone" in text) for text in told] == [True] * (rank == 0)


def lose_the_store(port: int) -> str:
    """As if each process was started by hand: the store is in rank 0, which is killed; what the others are told."""
    del os.environ["OFFBEAT_STORE"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        count(lost=0, at=3, steps=8)
    except WorkerLostError as error:
        return "".join(traceback.format_exception(error))
    return ""


def test_a_store_that_ends_with_the_first_worker_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for text in run_workers(3, lose_the_store, port, faulty=0)[1:]:
        assert "the store in which the workers met cannot be reached any more" in text
        assert "frame #" not in text
