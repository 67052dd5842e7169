"""A worker that is told to end leaves a server in order: what it gave counts, and nobody misses it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.run.open_sessions import drain
from offbeat.sync import BSP, RoundRobin
from tests.workers import listen, run_workers

SAMPLES, AT = 300, 7


def train(folder: str, policy: offbeat.sync.Policy) -> tuple[int, list[str]]:
    """One epoch; rank 1 leaves behind step `AT`. Steps that were made, and what was said."""
    said, here = listen(), Path(folder)
    plan = offbeat.Plan(sync=policy, fabric=offbeat.ParameterServer())
    with offbeat.init(plan, timeout=timedelta(seconds=3)) as run:
        torch.manual_seed(0)
        model, used = nn.Linear(1, 5), list[int]()
        data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=10, shuffle=True)
        prepared, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), data)
        for (x,) in loader:
            prepared(x / SAMPLES).square().mean().backward()
            used += x.flatten().int().tolist()
            (here / f"used-{run.rank}").write_text(json.dumps(used))
            if (run.rank, run.step) == (1, AT):
                assert drain()  # as a SIGTERM does
            optimizer.step()
            optimizer.zero_grad()
        return run.step, said


@pytest.mark.parametrize("policy", [BSP(), RoundRobin()], ids=lambda policy: type(policy).__name__)
def test_who_leaves_is_not_missed_and_what_it_gave_counts_once(policy: offbeat.sync.Policy, tmp_path: Path) -> None:
    results = run_workers(3, train, str(tmp_path), policy, faulty=1)
    assert sum(results[rank][0] for rank in (0, 2)) + AT + 1 == SAMPLES / 10
    assert not [text for rank in (0, 2) for text in results[rank][1] if "ank 1 " in text]
    used = [json.loads((tmp_path / f"used-{rank}").read_text()) for rank in range(3)]
    assert len(used[1]) == 10 * (AT + 1)
    assert Counter(itertools.chain(*used)) == Counter(range(SAMPLES))
