"""The loader of a validator goes round and round its own data."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader, TensorDataset

from offbeat.loading.endless_loader import EndlessLoader


def test_it_begins_anew_where_the_data_ends() -> None:
    given: list[int] = []

    def on_batch(*, real: bool, source: int, samples: int, weight: float) -> Any:
        assert (real, source, weight) == (True, 0, 1.0) or samples == 1
        given.append(samples)
        return mock.Mock()

    data = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2)
    control = mock.Mock(world=1, rank=0)
    loader = EndlessLoader(data, control=control, on_batch=on_batch, put_back=lambda draws: 0)
    assert len(loader) == 3
    seen = [x.tolist() for (x,) in itertools.islice(loader, 7)]
    assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0], [0.0, 1.0], [2.0, 3.0], [4.0], [0.0, 1.0]]
    assert given == [2, 2, 1, 2, 2, 1, 2]
    assert loader.progress == 3, "a loop that is left counts as done"
