"""Workers that join a job without a server while it trains: equal to the bit, and no sample is lost or counted twice."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from offbeat.pacing import Keeps

WORLD, SAMPLES, EPOCHS = 4, 4000, 2


def wait_for(path: Path) -> None:
    """Whoever is to join does so once the others are there."""
    deadline_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} never came"
        time.sleep(0.01)


def digest(*modules: nn.Module) -> str:
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def train(
    folder: str, at: int, keeps: Keeps, num_workers: int
) -> tuple[dict[int, str], list[list[int]], dict[int, int], list[str]]:
    """Digests by step, samples used by epoch, sizes of batches by step, what was said; the others join at a step."""
    said = listen()
    run_started = Path(folder) / "began"
    newcomer = int(__import__("os").environ["RANK"]) >= WORLD
    if newcomer:
        wait_for(run_started)
    run = offbeat.init(offbeat.Plan(fabric=offbeat.Elastic(), keeps=keeps), timeout=timedelta(seconds=3))
    torch.manual_seed(run.rank)
    model = nn.Sequential(nn.Linear(1, 20), nn.BatchNorm1d(20), nn.Linear(20, 1))
    data = DataLoader(
        TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=10, shuffle=True, num_workers=num_workers
    )
    prepared, optimizer, loader = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), data)
    digests, sizes, used = {}, {}, [list[int]() for _ in range(EPOCHS)]
    while run.progress < EPOCHS:
        epoch = int(run.progress)
        for (x,) in loader:
            prepared(x / SAMPLES).square().mean().backward()
            if run.has_data:
                used[epoch] += x.flatten().int().tolist()
                sizes[run.step] = len(x)
            optimizer.step()
            optimizer.zero_grad()
            digests[run.step] = digest(model)
            if run.rank == 0 and run.step == at:
                run_started.touch()
            time.sleep(0.02)
    run.close()
    return digests, used, sizes, said


@pytest.mark.parametrize(("keeps", "num_workers"), [("local_batch", 0), ("global_batch", 2)])
def test_who_joins_is_equal_to_the_bit_and_takes_its_share(keeps: Keeps, num_workers: int, tmp_path: Path) -> None:
    results = run_workers(WORLD, train, str(tmp_path), 3, keeps, num_workers, newcomers=1)
    *_, (theirs, their_used, their_sizes, _) = results
    first = min(theirs)
    assert 3 < first < max(theirs) - 20
    for digests, *_ in results[:WORLD]:
        assert {step: digests[step] for step in theirs} == theirs
        assert max(digests) == max(theirs)
    for epoch in range(EPOCHS):
        assert Counter(itertools.chain(*(used[epoch] for _, used, _, _ in results))) == Counter(range(SAMPLES))
    assert sum(len(one) for one in their_used) > 100
    step = max(their_sizes) - 10
    together = sum(sizes[step] for _, _, sizes, _ in results)
    assert together == (50 if keeps == "local_batch" else 40)
    told = [text for text in results[0][3] if "Rank 4 has joined at step" in text]
    assert len(told) == 1
    assert "5 workers take part" in told[0]
