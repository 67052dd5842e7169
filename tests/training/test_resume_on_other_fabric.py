"""A checkpoint that was written on one fabric goes on with another."""

from __future__ import annotations

import itertools
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
    from offbeat.fabric import FabricSpec

SAMPLES, SAVED_AT, EPOCHS = 240, 16, 2  # with two workers an epoch has 12 steps
FABRICS: dict[str, FabricSpec] = {
    "group": offbeat.ProcessGroup(),
    "elastic": offbeat.Elastic(),
    "server": offbeat.ParameterServer(),
}


def train(folder: str, name: str, resumes: bool) -> tuple[list[list[int]], list[str], int]:
    """The samples of each epoch, until all has been saved, or from there on; what was said; the first step."""
    said, path = listen(), Path(folder) / "checkpoint.pt"
    with offbeat.init(offbeat.Plan(fabric=FABRICS[name]), timeout=timedelta(seconds=5)) as run:
        torch.manual_seed(0)
        model = nn.Linear(1, 5)
        data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=10, shuffle=True)
        prepared, optimizer, loader = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), data)
        if resumes:
            checkpoint = torch.load(path, weights_only=True)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            run.load_state_dict(checkpoint["run"])
        used, first = [list[int]() for _ in range(EPOCHS)], run.step
        while run.progress < EPOCHS:
            for (x,) in loader:
                prepared(x / SAMPLES).square().mean().backward()
                if run.has_data:
                    used[min(int(run.progress - 1e-9), EPOCHS - 1)] += x.flatten().int().tolist()
                optimizer.step()
                optimizer.zero_grad()
                if run.step == SAVED_AT and not resumes:
                    run.settle()
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()}
                    if run.rank == 0:
                        torch.save(state, path)
                    return used, said, first
        return used, said, first


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("server", "elastic"),
        ("group", "elastic"),
        *(
            pytest.param(before, after, marks=pytest.mark.slow)
            for before, after in itertools.permutations(FABRICS, 2)
            if (before, after) not in {("server", "elastic"), ("group", "elastic")}
        ),
    ],
)
def test_a_checkpoint_goes_on_with_another_fabric(before: str, after: str, tmp_path: Path) -> None:
    saved = run_workers(2, train, str(tmp_path), before, False)
    resumed = run_workers(2, train, str(tmp_path), after, True)
    assert all(first == SAVED_AT for _, _, first in resumed)
    last = Counter(itertools.chain(*(used[-1] for used, _, _ in resumed)))
    if "group" in (before, after):
        assert sum("epoch 1 begins anew" in text for text in resumed[0][1]) == 1
    else:
        last += Counter(itertools.chain(*(used[-1] for used, _, _ in saved)))
    assert last == Counter(range(SAMPLES))
    assert not any(used[0] for used, _, _ in resumed)
