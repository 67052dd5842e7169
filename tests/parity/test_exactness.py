"""With two workers the weights are those of DistributedDataParallel, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.parity import jobs
from tests.parity.jobs import Job
from tests.workers import run_workers

JOBS = {
    "mlp-sgd": Job(jobs.MLP, jobs.vectors),
    "mlp-adamw": Job(jobs.MLP, jobs.vectors, jobs.adamw),
    "cnn-sgd": Job(jobs.CNN, jobs.images),
    "cnn-adamw": Job(jobs.CNN, jobs.images, jobs.adamw),
    "transformer-sgd": Job(jobs.Transformer, jobs.sentences),
    "transformer-adamw": Job(jobs.Transformer, jobs.sentences, jobs.adamw),
}


@pytest.mark.parametrize("name", JOBS)
def test_two_workers_have_the_bits_of_ddp(name: str) -> None:
    results = run_workers(2, jobs.both, JOBS[name])
    ddp, ours = results[0]
    assert list(ddp["state"]) == list(ours["state"])
    for key, tensor in ddp["state"].items():
        assert torch.equal(tensor, ours["state"][key]), key
    assert all(torch.equal(a, b) for a, b in zip(ddp["losses"], ours["losses"], strict=True))
    for _, other in results[1:]:
        for key, tensor in other["state"].items():
            assert torch.equal(tensor, ours["state"][key]), f"ranks differ in {key}"


def test_the_model_is_trained_at_all() -> None:
    (_, ours), _ = run_workers(2, jobs.both, JOBS["mlp-sgd"])
    torch.manual_seed(1)
    fresh = jobs.MLP().state_dict()
    assert all(not torch.equal(fresh[key.removeprefix("module.")], t) for key, t in ours["state"].items())
