"""A worker that leaves in order: what it gave counts once, and the others go on, whatever they ask each other for."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.audit import verify
from offbeat.run.open_sessions import drain
from offbeat.sync import RoundRobin
from tests.workers import listen, run_workers

SAMPLES, AT = 600, 7
PLANS = {
    "elastic": offbeat.Plan(fabric=offbeat.Elastic()),
    "server": offbeat.Plan(fabric=offbeat.ParameterServer()),
    "turns at a server": offbeat.Plan(sync=RoundRobin(), fabric=offbeat.ParameterServer()),
}


def train(folder: str, plan: str, how: str) -> tuple[dict[int, str], list[str]]:
    """One epoch; rank 1 leaves at step `AT`. Digests after each step, and what was said."""
    said, here = listen(), Path(folder)
    run = offbeat.init(PLANS[plan], timeout=timedelta(seconds=3), history=here / "history")
    torch.manual_seed(0)
    model, digests, used = nn.Linear(1, 5), dict[int, str](), list[int]()
    data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=10, shuffle=True)
    prepared, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), data)
    for (x,) in loader:
        prepared(x / SAMPLES).square().mean().backward()
        used += x.flatten().int().tolist() if run.has_data else []
        (here / f"used-{run.rank}").write_text(json.dumps(used))
        if (run.rank, run.step) == (1, AT):
            if how == "before its step":
                break
            assert drain()  # as a SIGTERM does
        optimizer.step()
        optimizer.zero_grad()
        digests[run.step] = hashlib.sha256(
            b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        ).hexdigest()
        if how == "in an evaluation" and run.step % 2:
            with torch.no_grad():
                run.mean(float(prepared(torch.ones(1, 1)).sum()))
        if plan == "elastic":
            run.mean(float(run.has_data))  # behind each step
    run.close()
    return digests, said


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ("elastic", "before its step"),
        pytest.param("elastic", "behind its step", marks=pytest.mark.slow),
        ("elastic", "in an evaluation"),
        ("server", "behind its step"),
        ("turns at a server", "behind its step"),
    ],
)
def test_who_leaves_stops_nobody_and_what_it_gave_counts_once(plan: str, how: str, tmp_path: Path) -> None:
    results = run_workers(3, train, str(tmp_path), plan, how, faulty=1)
    (first, said), (second, also_said) = results[0], results[2]
    if plan == "elastic":
        assert first == second
        assert len(first) > AT + 10
        told = f"was asked to leave, and left cleanly behind its step {AT}."
        end = "is done, and takes no further part." if how == "before its step" else told
        assert sum(f"Rank 1 {end}" in text for text in said) == 1, said
    else:
        assert not [text for text in (*said, *also_said) if "ank 1 " in text], "nobody misses it"
        assert len(first) + len(second) + AT + 1 == SAMPLES / 10
    used = [json.loads((tmp_path / f"used-{rank}").read_text()) for rank in range(3)]
    assert Counter(itertools.chain(*used)) == Counter(range(SAMPLES))
    verdict = verify(tmp_path / "history")
    assert verdict.holds, verdict.violations
    if plan == "elastic":
        assert {1, 2, 3} <= verdict.checked


def outlast(folder: str) -> float:
    """Rank 0 leaves at step 3, and once it has gone rank 1 is killed; of the last the longest step."""
    gone = Path(folder) / "gone"
    run = offbeat.init(offbeat.Plan(fabric=offbeat.Elastic()), timeout=timedelta(seconds=2))
    model, worst_s, alone = nn.Linear(4, 1, bias=False), 0.0, 0
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    while (run.rank, run.step) != (0, 3) and alone < 3:
        before, began_s = model.weight.detach().clone(), time.monotonic()
        prepared(torch.ones(1, 4)).sum().mul(1.0 + run.rank).backward()
        if run.rank == 1 and gone.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        worst_s = max(worst_s, time.monotonic() - began_s)
        alone += (before - model.weight.detach()).mean().item() == pytest.approx(3.0, abs=0.01)
    run.close()
    gone.touch()
    return worst_s


def test_who_is_lost_after_the_first_worker_was_done_is_missed_as_soon(tmp_path: Path) -> None:
    """What watches the workers had been beside the first."""
    assert run_workers(3, outlast, str(tmp_path), faulty=1)[2] < 2
