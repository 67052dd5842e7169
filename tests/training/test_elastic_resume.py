"""A checkpoint resumed with other workers than made it: the position in the data carries over, and that is said."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fabric import FabricSpec

FABRICS: dict[str, Callable[[], FabricSpec]] = {"gloo": offbeat.ProcessGroup, "elastic": offbeat.Elastic}
SAMPLES, BATCH = 640, 8


def train(folder: str, fabric: str, stop: int | None) -> tuple[list[int], list[str]]:
    """Samples of the first epoch that this worker used, from the checkpoint if there is one; and what was said."""
    said, path, used = listen(), Path(folder) / "state.pt", list[int]()
    loads = path.exists()
    with offbeat.init(offbeat.Plan(fabric=FABRICS[fabric]())) as run:
        data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=BATCH, shuffle=True)
        model = nn.Linear(1, 1)
        prepared, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9), data)
        if loads:
            run.load_state_dict(torch.load(path, weights_only=True))
        for step, (x,) in enumerate(loader, 1):
            prepared(x).sum().backward()
            used += x.flatten().int().tolist() if run.has_data else []
            optimizer.step()
            optimizer.zero_grad()
            if step == stop:
                if os.environ["RANK"] == "0":
                    torch.save(run.state_dict(), path)
                break
    return used, said


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_the_place_in_the_data_carries_over(fabric: str, before: int, after: int, tmp_path: Path) -> None:
    first = run_workers(before, train, str(tmp_path), fabric, 6)
    second = run_workers(after, train, str(tmp_path), fabric, None)
    seen = Counter(sample for used, _ in [*first, *second] for sample in used)
    assert seen == Counter(range(SAMPLES))
    (text,) = [text for _, said in second for text in said if "The checkpoint was made by" in text]
    assert "the position in the data carries over" in text
    assert "the learning rate" in text
