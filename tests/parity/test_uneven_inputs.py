"""Workers with different numbers of batches: who has none left takes part with weight 0."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join

import offbeat
from offbeat.audit import verify
from tests.parity import jobs
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

BATCHES = (7, 4, 5)  # of ranks 0, 1, 2


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [jobs.vectors(generator) for _ in range(BATCHES[rank])]


def train_both() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=3)
    try:
        return {system: train(system, rank) for system in ("ddp", "offbeat")}
    finally:
        dist.destroy_process_group()


def train(system: str, rank: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = jobs.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 0
    with contextlib.ExitStack() as stack:
        loader: Any = batches(rank)
        if system == "ddp":
            replica: nn.Module = nn.parallel.DistributedDataParallel(model)
            # By default DDP's join goes on dividing by the number of workers at the start.
            stack.enter_context(Join([replica], divide_by_initial_world_size=False))  # type: ignore[list-item]
        else:
            run = stack.enter_context(offbeat.init())
            replica, optimizer, loader = run.prepare(model, optimizer, loader)
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return {"state": {n: t.clone() for n, t in model.state_dict().items()}, "steps": steps}


def test_weights_are_those_of_ddp_with_join() -> None:
    results = run_workers(3, train_both)
    for result in results:
        assert result["offbeat"]["steps"] == max(BATCHES), "every worker's loop is as long as the longest"
        for name, tensor in results[0]["ddp"]["state"].items():
            # Not to the bit: DDP divides by another count in each phase, offbeat multiplies by 1/N and corrects.
            torch.testing.assert_close(result["offbeat"]["state"][name], tensor, atol=1e-6, rtol=1e-5)
            assert torch.equal(result["offbeat"]["state"][name], results[0]["offbeat"]["state"][name])


def train_with_join(folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=3)
    try:
        return {
            f"{system} {by_all}": join(system, by_all, rank, f"{folder}/{by_all}")
            for system in ("ddp", "offbeat")
            for by_all in (False, True)
        }
    finally:
        dist.destroy_process_group()


def join(system: str, by_all: bool, rank: int, history: str) -> dict[str, Any]:
    """Two epochs within `join`, without a prepared loader, clipped; then a step with what the optimizer has."""
    torch.manual_seed(1)
    model = jobs.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    told = listen()
    with contextlib.ExitStack() as stack:
        if system == "ddp":
            replica: Any = nn.parallel.DistributedDataParallel(model)
        else:
            run = stack.enter_context(offbeat.init(history=history))
            replica, optimizer = run.prepare(model, optimizer)
        steps, states = 0, []
        for _ in range(2):
            with replica.join(divide_by_initial_world_size=by_all):
                for x, y in batches(rank):
                    F.cross_entropy(replica(x), y).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
            states.append({n: t.clone() for n, t in model.state_dict().items()})
        momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
        exchanges = run.step if system == "offbeat" else 2 * max(BATCHES)
    return {"states": states, "momentum": momentum, "steps": steps, "exchanges": exchanges, "told": list(told)}


def test_join_lets_workers_make_different_numbers_of_steps(tmp_path: Path) -> None:
    results = run_workers(3, train_with_join, str(tmp_path))
    for rank, result in enumerate(results):
        for by_all in (False, True):
            ours, theirs = result[f"offbeat {by_all}"], results[0][f"ddp {by_all}"]
            assert ours["steps"] == 2 * BATCHES[rank]
            assert ours["exchanges"] == 2 * max(BATCHES)
            for name, tensor in theirs["states"][0].items():  # then DDP's optimizers have come apart
                torch.testing.assert_close(ours["states"][0][name], tensor, atol=1e-6, rtol=1e-5)
            first = results[0][f"offbeat {by_all}"]
            for mine, its in zip(ours["states"], first["states"], strict=True):
                assert all(torch.equal(mine[name], its[name]) for name in mine)
            assert all(torch.equal(a, b) for a, b in zip(ours["momentum"], first["momentum"], strict=True))
    by = [text for result in results for text in result["offbeat False"]["told"] if "before the others" in text]
    assert by == [
        "Rank 1 is done before the others, which continue: sums of gradients are divided by the number of those that "
        "have one."
    ]
    for by_all in (False, True):
        verdict = verify(tmp_path / str(by_all))
        assert not verdict.violations
        assert verdict.hashes == 2 * sum(BATCHES), "who is done has no parameters that others have, and says so"


def accumulates_with_join() -> tuple[list[str], torch.Tensor]:
    """One worker is done in the middle of an accumulation."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(20, 5)
    told = listen()
    with offbeat.init() as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        with replica.join():
            for number, (x, _) in enumerate(batches(rank)[: 3 + rank]):
                with contextlib.nullcontext() if number % 2 else run.no_sync():
                    replica(x).sum().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return list(told), model.weight.detach().clone()


def test_a_gradient_that_join_leaves_out_is_told_of() -> None:
    (first, weight), (_, other) = run_workers(2, accumulates_with_join)
    assert "Rank 0 is done in the middle of an accumulation: what it has accumulated is in no step." in first[-1]
    assert torch.equal(weight, other)


def refused_joins() -> list[str]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=2)
    said = []
    for plan, options in (
        (offbeat.Plan(), {"throw_on_early_termination": True}),
        (offbeat.Plan(sync=offbeat.LocalSGD(2)), {}),
        (offbeat.Plan(), {"enable": False}),
    ):
        model = nn.Linear(20, 5)
        run = offbeat.init(plan)
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        try:
            with replica.join(**options):
                for x, _ in batches(rank)[: 2 if options.get("enable", True) and rank else 3]:
                    replica(x).sum().backward()
                    optimizer.step()
            said.append(f"{run.step} steps")
            run.close()
        except offbeat.errors.OffbeatError as error:
            said.append(str(error))
            with contextlib.suppress(offbeat.errors.OffbeatError):
                run.close()
    return said


def test_joins_that_are_refused() -> None:
    for early, local, off in run_workers(2, refused_joins):
        assert early.startswith("Rank 1 is done before the others, and throw_on_early_termination is set")
        assert local.startswith("Cannot join uneven inputs under LocalSGD(every=2")
        assert off == "3 steps"


def join_batchnorm() -> dict[str, torch.Tensor]:
    """Two models in turn, on workers that come and go; who is done first would broadcast its buffers."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    models = [jobs.CNN(), jobs.CNN()]
    generator = torch.Generator().manual_seed(100 + rank)
    data = [jobs.images(generator) for _ in range(2 * rank)]
    with offbeat.init(offbeat.Plan(fabric=offbeat.Elastic())) as run:
        pairs = [run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01)) for model in models]
        with pairs[0][0].join(), pairs[1][0].join():
            for x, y in data:
                for replica, optimizer in pairs:
                    F.cross_entropy(replica(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        steps = torch.tensor([float(optimizer.state[p]["step"]) for r, optimizer in pairs for p in r.parameters()])
    states = {f"{i}.{n}": t.clone() for i, model in enumerate(models) for n, t in model.state_dict().items()}
    return {**states, "steps": steps}


def test_who_has_no_input_at_all_ends_with_what_the_others_have() -> None:
    first, second = run_workers(2, join_batchnorm)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert first["0.1.num_batches_tracked"] == 2
    assert set(first["steps"].tolist()) == {2.0}


class Endless(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Nobody can know its length beforehand."""

    def __iter__(self) -> Any:
        return iter(batches(int(os.environ["RANK"])))


def train_without_length() -> dict[str, Any]:
    torch.manual_seed(1)
    model = jobs.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with offbeat.init() as run:
        replica, optimizer, loader = run.prepare(
            model, optimizer, torch.utils.data.DataLoader(Endless(), batch_size=None)
        )
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_loader_without_length_gives_the_same() -> None:
    known = run_workers(3, train_both)[0]["offbeat"]["state"]
    unknown = run_workers(3, train_without_length)
    for name, tensor in known.items():
        assert all(torch.equal(tensor, state[name]) for state in unknown), name


def train_batchnorm() -> dict[str, torch.Tensor]:
    """Padding must not disturb the buffers either."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    model = jobs.CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(100 + rank)
    data = [jobs.images(generator) for _ in range(2 + rank)]
    with offbeat.init() as run:
        replica, optimizer, loader = run.prepare(model, optimizer, data)
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_buffers_come_from_a_worker_with_data() -> None:
    first, second = run_workers(2, train_batchnorm)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert first["1.num_batches_tracked"] == 3
