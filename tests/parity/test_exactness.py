"""The weights are those of DistributedDataParallel bit for bit with two workers, and well defined with more."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parity import jobs
from tests.parity.jobs import Job
from tests.parity.test_drop_in import assert_same
from tests.workers import run_workers

JOBS = {
    "mlp-sgd": Job(jobs.MLP, jobs.vectors),
    "mlp-adamw": Job(jobs.MLP, jobs.vectors, jobs.adamw),
    "cnn-sgd": Job(jobs.CNN, jobs.images),
    "cnn-adamw": Job(jobs.CNN, jobs.images, jobs.adamw),
    "transformer-sgd": Job(jobs.Transformer, jobs.sentences),
    "transformer-adamw": Job(jobs.Transformer, jobs.sentences, jobs.adamw),
}


def test_two_workers_have_the_bits_of_ddp() -> None:
    results = run_workers(2, jobs.all_of, JOBS)
    for name in JOBS:
        assert_same(name, [result[name] for result in results])


def test_the_model_is_trained_at_all() -> None:
    (_, ours), _ = run_workers(2, jobs.both, JOBS["mlp-sgd"])
    torch.manual_seed(1)
    fresh = jobs.MLP().state_dict()
    assert all(not torch.equal(fresh[key.removeprefix("module.")], t) for key, t in ours["state"].items())


def alone(names: tuple[str, ...]) -> dict[str, Any]:
    """The jobs with offbeat only; the process group is offbeat's own."""
    return {name: jobs.train(JOBS[name], "offbeat")["state"] for name in names}


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


def assert_as_one_process(states: list[dict[str, torch.Tensor]], job: Job) -> None:
    """All ranks have the same bits, and they are those of one process but for the order of sums."""
    expected = concatenated(job, len(states))
    for key, tensor in states[0].items():
        assert all(torch.equal(tensor, state[key]) for state in states), f"ranks differ in {key}"
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world", [3, 4])
def test_more_workers_agree_repeat_and_match_one_process(world: int) -> None:
    names = ("mlp-sgd", "transformer-sgd")
    first, second = (run_workers(world, alone, names) for _ in range(2))
    for name in names:
        assert_as_one_process([states[name] for states in first], JOBS[name])
        for key, tensor in first[0][name].items():
            assert torch.equal(tensor, second[0][name][key]), f"two runs differ in {key}"


def with_other_data() -> Any:
    """The last rank leaves out a batch."""
    job, drawn = JOBS["mlp-sgd"], itertools.count()

    def batch(generator: torch.Generator) -> Any:
        if os.environ["RANK"] == "2" and next(drawn) == 20:
            job.batch(generator)
        return job.batch(generator)

    return jobs.train(dataclasses.replace(job, batch=batch), "offbeat")["state"]


def test_one_process_is_no_place_to_hide() -> None:
    """The check above can fail: with other data on one rank the result is another, and ranks are still equal."""
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_as_one_process(run_workers(3, with_other_data), JOBS["mlp-sgd"])


def one_worker(job: Job) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Plain torch, and offbeat alone, in the same process: other numbers of threads give other bits."""
    assert not dist.is_initialized()
    plain = concatenated(job, 1)
    return plain, jobs.train(job, "offbeat")["state"]


def test_one_worker_has_the_bits_of_plain_torch() -> None:
    ((plain, ours),) = run_workers(1, one_worker, JOBS["cnn-sgd"])
    for key, tensor in plain.items():
        assert torch.equal(tensor, ours[key]), key
