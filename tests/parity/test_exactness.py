"""The weights are those of DistributedDataParallel bit for bit with two workers, and well defined with more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

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


def alone(job: Job) -> dict[str, Any]:
    """The job with offbeat only; the process group is offbeat's own."""
    return jobs.train(job, "offbeat")


def concatenated(job: Job, world: int) -> dict[str, torch.Tensor]:
    """One process, on the batches of all ranks put together."""
    torch.manual_seed(1)
    model = job.model()
    optimizer = job.optimizer(model)
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(world)]
    for _ in range(job.steps):
        batches = [job.batch(generator) for generator in generators]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"module.{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("name", ["mlp-sgd", "transformer-sgd"])
def test_more_workers_agree_repeat_and_match_one_process(name: str, world: int) -> None:
    job = JOBS[name]
    first = run_workers(world, alone, job)
    second = run_workers(world, alone, job)
    expected = concatenated(job, world)
    for key, tensor in first[0]["state"].items():
        assert all(torch.equal(tensor, result["state"][key]) for result in first), f"ranks differ in {key}"
        assert torch.equal(tensor, second[0]["state"][key]), f"two runs differ in {key}"
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-5)


def test_one_process_is_no_place_to_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: with other data on one rank the result is another."""
    job = JOBS["mlp-sgd"]
    torch.manual_seed(0)
    assert not torch.allclose(concatenated(job, 2)["module.0.weight"], concatenated(job, 3)["module.0.weight"])


def one_worker(job: Job) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Plain torch, and offbeat alone, in the same process: other numbers of threads give other bits."""
    assert not dist.is_initialized()
    plain = concatenated(job, 1)
    return plain, jobs.train(job, "offbeat")["state"]


def test_one_worker_has_the_bits_of_plain_torch() -> None:
    ((plain, ours),) = run_workers(1, one_worker, JOBS["cnn-sgd"])
    for key, tensor in plain.items():
        assert torch.equal(tensor, ours[key]), key
