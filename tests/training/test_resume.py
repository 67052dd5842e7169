"""A checkpoint goes on with other workers and on another fabric than made it: the position in the data carries over."""

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

SAMPLES, BATCH, EPOCHS = 240, 10, 2
FABRICS: dict[str, FabricSpec] = {
    "group": offbeat.ProcessGroup(),
    "elastic": offbeat.Elastic(),
    "server": offbeat.ParameterServer(),
}
FAST = {
    ("server", 2, "elastic", 2),
    ("group", 2, "elastic", 2),
    ("group", 2, "group", 3),
    ("elastic", 4, "elastic", 2),
    ("elastic", 2, "server", 3),
}
ALL = [
    (before, workers_before, after, workers_after)
    for before, after in itertools.product(FABRICS, FABRICS)
    for workers_before, workers_after in [(2, 2), (2, 3), (4, 2)]
    if (before, workers_before) != (after, workers_after)
]


def train(folder: str, fabric: str, stop: int | None) -> tuple[list[list[int]], list[str], int]:
    """Train from the checkpoint if there is one, and until `stop`, where one is written.

    Returns the samples of each epoch, what was said, and the first step.
    """
    said, path = listen(), Path(folder) / "checkpoint.pt"
    resumes = path.exists()
    with offbeat.init(offbeat.Plan(fabric=FABRICS[fabric]), timeout=timedelta(seconds=5)) as run:
        torch.manual_seed(0)
        model = nn.Linear(1, 5)
        data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=BATCH, shuffle=True)
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
                if run.step == stop:
                    run.settle()
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()}
                    if run.rank == 0:
                        torch.save(state, path)
                    run.settle()  # nobody leaves before all have theirs
                    return used, said, first
        return used, said, first


@pytest.mark.parametrize(
    ("before", "workers_before", "after", "workers_after"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in ALL],
)
def test_a_checkpoint_goes_on(before: str, workers_before: int, after: str, workers_after: int, tmp_path: Path) -> None:
    saved_at = SAMPLES * 3 // (2 * BATCH * workers_before)  # in the middle of epoch 1
    saved = run_workers(workers_before, train, str(tmp_path), before, saved_at)
    resumed = run_workers(workers_after, train, str(tmp_path), after, None)
    assert all(first == saved_at for _, _, first in resumed)
    assert not any(used[0] for used, _, _ in resumed)
    last, said = (
        Counter(itertools.chain(*(used[-1] for used, _, _ in resumed))),
        [s for _, one, _ in resumed for s in one],
    )
    is_dealt_otherwise = (before == "group") is not (after == "group")
    if not is_dealt_otherwise:
        last += Counter(itertools.chain(*(used[-1] for used, _, _ in saved)))
    assert last == Counter(range(SAMPLES))
    assert sum("epoch 1 begins anew" in text for text in said) == is_dealt_otherwise
    told = [text for text in said if text.startswith("The checkpoint was made by")]
    assert len(told) == (workers_before != workers_after and not is_dealt_otherwise)
    assert all("the position in the data carries over" in text and "the learning rate" in text for text in told)
