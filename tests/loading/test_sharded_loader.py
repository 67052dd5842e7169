"""The prepared loader: equally long everywhere, resumed anywhere, and honest about what does not count."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import offbeat
from offbeat.errors import ModelError
from tests.workers import listen, run_workers


def prepared(run: offbeat.Run, loader: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).view(-1, 1))


# -- lengths -------------------------------------------------------------------------------------------------------


def lengths() -> dict[str, Any]:
    with offbeat.init() as run:
        _, _, loader = prepared(run, DataLoader(numbers(21), batch_size=2))  # 11 and 10 samples: 6 and 5 batches
        before = len(loader)
        counts = [run.has_data for _ in loader]
        return {"len": [before, len(loader)], "counts": counts}


def test_every_worker_goes_through_as_many_batches_as_len_says() -> None:
    """So a schedule made from len(loader) is the same everywhere; and who repeats a batch can know it."""
    first, second = run_workers(2, lengths)
    assert first["len"] == second["len"] == [6, 6]
    assert first["counts"] == [True] * 6
    assert second["counts"] == [True] * 5 + [False]


# -- what offbeat cannot deal out ---------------------------------------------------------------------------------


def refusals() -> list[str]:
    told, data = [], numbers(20)
    with offbeat.init() as run:
        for sampler in (
            RandomSampler(data, replacement=True),
            RandomSampler(data, num_samples=10),
            SequentialSampler(range(5)),
        ):
            try:
                prepared(run, DataLoader(data, batch_size=2, sampler=sampler))
            except ModelError as error:
                told.append(str(error))
    return told


def test_a_sampler_that_draws_otherwise_is_refused() -> None:
    for told in run_workers(2, refusals):
        assert [text[:64] for text in told] == [
            "Cannot split a loader whose RandomSampler draws with replacement",
            "Cannot split a loader whose RandomSampler draws 10 of 20: offbea",
            "Cannot split a loader whose SequentialSampler draws 5 of 20: off",
        ]


def sizes_of_batches() -> tuple[list[int], list[float]]:
    data, progress = numbers(21), []
    with offbeat.init() as run:
        batches = BatchSampler(SequentialSampler(data), 4, drop_last=False)
        _, _, loader = prepared(run, DataLoader(data, batch_sampler=batches))
        sizes = [len(x) for (x,) in loader]
        for _ in loader:
            progress += [run.progress for _ in loader]
            progress.append(run.progress)
        return sizes, progress


def test_a_batch_sampler_keeps_its_size_and_loops_may_be_nested() -> None:
    for rank, (sizes, progress) in enumerate(run_workers(2, sizes_of_batches)):
        assert sizes == [[4, 4, 3], [4, 4, 2]][rank]
        assert progress == sorted(progress), "never back"


# -- going on where a checkpoint was taken -------------------------------------------------------------------------


def drawn(seed: int, state: dict[str, Any] | None, most: int) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Batches of up to two epochs, and the state after each."""
    batches, states = [], []
    with offbeat.init(seed=seed) as run:
        _, _, loader = prepared(run, DataLoader(numbers(18), batch_size=2, shuffle=True))
        if state:
            run.load_state_dict(state)
        for _ in range(2):
            for (batch,) in loader:
                batches.append(batch.flatten().tolist())
                states.append(run.state_dict())
                if len(batches) == most:
                    return batches, states
    return batches, states


def resume() -> None:
    whole, states = drawn(7, None, 10)
    assert len({tuple(batch) for batch in whole}) > 5, "shuffled anew in the second epoch"
    for at in (0, 2, 4, 6):  # the first epoch has batches 0 to 4
        rest, _ = drawn(99, states[at], 10 - at - 1)
        assert rest == whole[at + 1 :], f"resumed behind batch {at}, with another seed given to init"


def test_a_checkpoint_within_an_epoch_loses_nothing_and_repeats_nothing() -> None:
    run_workers(2, resume)


def leave_early() -> list[dict[str, int]]:
    states = []
    with offbeat.init() as run:
        _, _, loader = prepared(run, [torch.zeros(1, 1)] * 4)
        for epoch in range(2):
            for index, _ in enumerate(loader):
                if index == 1:
                    break
            states.append(run.state_dict()["loaders"][0])
            assert states[-1]["epoch"] == epoch + 1
    return states


def test_an_epoch_left_early_is_done() -> None:
    assert leave_early() == [{"epoch": epoch, "batch": 0, "usual": -1.0, "world": 1} for epoch in (1, 2)]


def left_with_padding() -> float:
    """Rank 1 leaves its loop with a batch that does not count, and then computes one that does."""
    with offbeat.init() as run:
        replica, _, loader = prepared(run, [torch.full((2, 1), 1.0 + run.rank)] * (2 - run.rank))
        for number, _ in enumerate(loader):
            if number == 1:
                break
        for x in loader:
            replica(x).sum().backward()
            return float(replica.module.weight.grad)
    raise AssertionError("the loader has batches")


def test_a_batch_that_was_not_computed_does_not_weigh() -> None:
    assert run_workers(2, left_with_padding) == [3.0, 3.0]


# -- data that is not dealt out ------------------------------------------------------------------------------------


def resumed_in_the_padding() -> tuple[list[float], list[float]]:
    """Rank 0 has three batches, rank 1 six, nobody knows how many; a checkpoint is taken behind the fourth."""
    rank = int(os.environ["RANK"])
    mine = [torch.full((2 + rank, 1), 1.0)] * (3 + 3 * rank)

    def go(state: Any, first: int) -> tuple[Any, Any]:
        at_four = None
        with offbeat.init() as run:
            replica, optimizer, loader = prepared(run, (x for x in mine))
            if state is not None:
                replica.module.load_state_dict(state[0])
                run.load_state_dict(state[1])
            for index, x in enumerate(loader, first):
                replica(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if index == 3:
                    at_four = copy.deepcopy([replica.module.state_dict(), run.state_dict()])
            return at_four, [p.item() for p in replica.parameters()]

    state, whole = go(None, 0)
    return whole, go(state, 4)[1]


def test_a_loader_without_a_length_is_resumed_where_one_worker_has_no_data_left() -> None:
    for whole, resumed in run_workers(2, resumed_in_the_padding):
        assert whole == resumed


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, rank: int, world: int) -> None:
        self.mine = [torch.tensor([float(i)]) for i in range(12)][rank::world]

    def __iter__(self) -> Any:
        return iter(self.mine)


def warnings(sharded: bool) -> list[str]:
    heard = listen()
    with offbeat.init() as run:
        data = Numbers(run.rank, run.world) if sharded else Numbers(0, 1)
        _, _, loader = prepared(run, DataLoader(data, batch_size=2))
        for _ in range(2):
            list(loader)
    return heard


def test_the_same_data_everywhere_is_said_once() -> None:
    first, second = run_workers(2, warnings, False)
    assert len(first) == 1
    assert "All 2 workers drew the same first batch" in first[0]
    assert second == []


def test_sharded_data_is_not_warned_of() -> None:
    assert run_workers(2, warnings, True) == [[], []]


# -- batches that do not count -------------------------------------------------------------------------------------


def gradients(how: str) -> list[float]:
    """Worker r draws batches that are all r + 1; worker 0 has three, worker 1 one. The gradient of y = w x is x."""
    rank = int(os.environ["RANK"])
    data = [torch.full((1, 1), rank + 1.0) for _ in range(3 if rank == 0 else 1)]
    model, seen = nn.Linear(1, 1, bias=False), []
    with offbeat.init() as run:
        replica, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data)
        if how == "two models":
            other = nn.Linear(1, 1)
            _, _, loader = run.prepare(other, torch.optim.SGD(other.parameters(), lr=0.0), loader)
        batches = list(loader) if how == "all first" else loader
        for x in batches:
            for _ in range(2 if how == "two backwards" else 1):
                model.zero_grad()
                loss = replica(x).sum()
                if how == "regulariser":
                    loss = loss + 0 * model.weight.sum() + model.weight.sum() * x.sum()
                loss.backward()
                assert model.weight.grad is not None
                seen.append(model.weight.grad.item())
    return seen


def test_repeated_batches_never_count() -> None:
    assert run_workers(2, gradients, "plain") == [[1.5, 1.0, 1.0]] * 2


def test_nor_in_a_second_backward() -> None:
    assert run_workers(2, gradients, "two backwards") == [[1.5, 1.5, 1.0, 1.0, 1.0, 1.0]] * 2


def test_nor_past_the_output() -> None:
    assert run_workers(2, gradients, "regulariser") == [[3.0, 2.0, 2.0]] * 2


def test_nor_with_a_loader_prepared_with_two_models() -> None:
    assert run_workers(2, gradients, "two models") == [[1.5, 1.0, 1.0]] * 2


def all_first() -> str:
    try:
        gradients("all first")
    except ModelError as error:
        return str(error)
    except offbeat.errors.OffbeatError:
        return "another was lost"
    return "nothing was said"


def test_batches_drawn_ahead_are_refused_where_it_matters() -> None:
    first, second = run_workers(2, all_first)
    assert first == "another was lost"
    assert "Cannot tell which batch is trained: 3 were drawn before this forward pass" in second


def accumulated() -> float:
    """Worker 1's second batch is a repetition; its regulariser must not count inside no_sync either."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(1, 1, bias=False)
    data = [torch.ones(1, 1)] * (2 - rank)
    with offbeat.init() as run:
        replica, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data)
        batches = iter(loader)
        x = next(batches)
        with run.no_sync():
            (replica(x).sum() + model.weight.sum()).backward()
        x = next(batches)
        (replica(x).sum() + model.weight.sum()).backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()


def test_accumulation_with_a_repeated_batch() -> None:
    """Three real batches of gradient 2 each, two per exchange and worker: their mean, times two."""
    assert run_workers(2, accumulated) == [4.0, 4.0]
