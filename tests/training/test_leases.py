"""Data that is leased, and batches that follow the machines, in real processes."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import offbeat
from offbeat.batching import BatchTuning
from offbeat.errors import DisagreementError, ModelError
from offbeat.fabric import ParameterServer, ProcessGroup
from offbeat.sync import ASP, BSP, SSP, LocalSGD, Policy, RoundRobin
from tests.training.server_jobs import serve
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

SERVER = ParameterServer(block_bytes=4096)
SAMPLES = 101


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def prepared(run: offbeat.Run, *, batch: int = 4, size: int = SAMPLES, width: int = 0, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1)) if width else nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.5)
    loader = DataLoader(Numbers(size), batch_size=batch, shuffle=True, **options)
    return run.prepare(model, optimizer, loader)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- every sample once -------------------------------------------------------------------------------------------------


def epochs(policy: Policy, count: int, num_workers: int) -> tuple[list[list[int]], int]:
    """What this worker computed in each epoch, and what it takes for an epoch's length."""
    rank = int(os.environ["RANK"])
    seen: list[list[int]] = []
    with offbeat.init(offbeat.Plan(sync=policy, fabric=SERVER)) as run:
        model, optimizer, loader = prepared(run, num_workers=num_workers)
        for _ in range(count):
            seen.append([])
            for x in loader:
                seen[-1] += x.flatten().int().tolist()
                time.sleep(0.02 * rank)
                train(model, optimizer, x)
        return seen, len(loader)


def test_who_is_fast_computes_more() -> None:
    results = run_workers(3, epochs, ASP(), 3, 0)
    assert_each_epoch_has_every_sample_once(results, 3)
    took = [sum(map(len, of_worker)) for of_worker, _ in results]
    assert took[0] > took[2]


def test_each_epoch_has_every_sample_once_with_processes_that_load() -> None:
    assert_each_epoch_has_every_sample_once(run_workers(3, epochs, ASP(), 2, 2), 2)


def assert_each_epoch_has_every_sample_once(results: list[tuple[list[list[int]], int]], count: int) -> None:
    for epoch in range(count):
        seen = Counter(itertools.chain.from_iterable(of_worker[epoch] for of_worker, _ in results))
        assert seen == Counter(range(SAMPLES)), f"epoch {epoch}"
    assert {length for _, length in results} == {9}


def with_a_victim(folder: str) -> None:
    """Worker 1 is killed holding a batch."""
    rank = int(os.environ["RANK"])
    with offbeat.init(offbeat.Plan(sync=ASP(), fabric=SERVER)) as run, open(Path(folder) / str(rank), "w") as file:
        model, optimizer, loader = prepared(run)
        for epoch in range(3):
            for number, x in enumerate(loader):
                if rank == 1 and epoch == 1 and number == 2:
                    file.write("killed\n")
                    file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                train(model, optimizer, x)
                for index in x.flatten().int().tolist():
                    file.write(f"{index}\n")
                file.flush()
                time.sleep(0.05)  # so that the loss is noticed while there is something left to compute


def test_what_a_killed_worker_held_is_computed_by_others(tmp_path: Path) -> None:
    run_workers(3, with_a_victim, str(tmp_path), faulty=1)
    told = {rank: (tmp_path / str(rank)).read_text().split() for rank in range(3)}
    assert told[1].pop() == "killed", "the fault fired"
    seen = Counter(int(index) for lines in told.values() for index in lines)
    assert set(seen) == set(range(SAMPLES))
    assert set(seen.values()) == {3}, "each sample once in each of 3 epochs"


def leaves_early(num_workers: int) -> list[int]:
    seen = []
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        model, optimizer, loader = prepared(run, num_workers=num_workers)
        for last in (2, 100):
            for number, x in enumerate(loader):
                train(model, optimizer, x)
                seen += x.flatten().int().tolist()
                if number == last:
                    break
        return seen


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loop_that_is_left_goes_on_in_the_same_epoch(num_workers: int) -> None:
    seen = Counter(itertools.chain.from_iterable(run_workers(2, leaves_early, num_workers)))
    assert seen == Counter(range(SAMPLES))


def leaves_with_a_batch(plan: offbeat.Plan, forward: bool, num_workers: int) -> list[int]:
    """What counts in an epoch through which there are many loops, each left with a batch of which nothing is used."""
    seen: list[int] = []
    with offbeat.init(plan) as run:
        model, optimizer, loader = prepared(run, num_workers=num_workers)
        over = False
        while not over:
            over = True
            for number, x in enumerate(loader):
                if number == 3:
                    over = False
                    if forward:
                        model(x)
                    break
                train(model, optimizer, x)
                seen += x.flatten().int().tolist() if run.has_data else []
        return seen


@pytest.mark.parametrize(
    ("plan", "forward", "num_workers"),
    [
        (offbeat.Plan(sync=ASP(), fabric=SERVER), False, 0),
        (offbeat.Plan(sync=LocalSGD(2), fabric=SERVER), True, 0),
        (offbeat.Plan(tuning=BatchTuning()), True, 0),
        pytest.param(offbeat.Plan(tuning=BatchTuning()), False, 1, marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_a_loop_was_left_with_is_computed_all_the_same(
    plan: offbeat.Plan, forward: bool, num_workers: int
) -> None:
    results = run_workers(2, leaves_with_a_batch, plan, forward, num_workers)
    seen = Counter(itertools.chain.from_iterable(results))
    assert seen == Counter(range(SAMPLES))


def computes_what_it_left_with() -> list[int]:
    """An iterator of its own for every batch, and a step outside of the loop."""
    seen: list[int] = []
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        model, optimizer, loader = prepared(run, size=40)
        for _ in range(5):
            x = next(iter(loader))
            train(model, optimizer, x)
            seen += x.flatten().int().tolist()
        return seen


def test_a_batch_that_is_computed_behind_its_loop_is_not_dealt_again() -> None:
    seen = Counter(itertools.chain.from_iterable(run_workers(2, computes_what_it_left_with)))
    assert seen == Counter(range(40))


def progress_of(plan: offbeat.Plan) -> tuple[list[float], list[float], int]:
    """How far the data is at each batch of two epochs, behind each, and how many steps that took."""
    rank, at_batches, behind = int(os.environ["RANK"]), [], []
    with offbeat.init(plan) as run:
        model, optimizer, loader = prepared(run)
        assert run.progress == 0.0
        for _ in range(2):
            for x in loader:
                at_batches.append(run.progress)
                train(model, optimizer, x)
                time.sleep(0.01 * rank)
            behind.append(run.progress)
        return at_batches, behind, run.step


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [offbeat.Plan(), offbeat.Plan(tuning=BatchTuning()), offbeat.Plan(sync=ASP(), fabric=SERVER)],
    ids=["dealt out", "tuned", "served"],
)
def test_progress_is_that_of_all_workers_together(plan: offbeat.Plan) -> None:
    results = run_workers(2, progress_of, plan)
    for at_batches, behind, steps in results:
        assert behind == [1.0, 2.0]
        assert at_batches == sorted(at_batches), "never back"
        assert len(at_batches) == steps
        assert 0 < at_batches[0] <= 4 * 4 / SAMPLES
        assert at_batches[-1] <= 2.0
    (first, _, steps), (other, _, of_other) = results
    if plan.fabric == SERVER:
        assert steps > of_other, "who is slow makes fewer steps"
    else:
        assert first == other


class Normalizes(nn.Module):
    """Refuses, in training, a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = self.last(self.norm(x))
        return last


def normalized(plan: offbeat.Plan) -> list[list[int]]:
    """Batches of two epochs in which batches are as small as may be."""
    rank, seen = int(os.environ["RANK"]), list[list[int]]()
    with offbeat.init(plan) as run:
        model = Normalizes()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        replica, optimizer, loader = run.prepare(model, optimizer, DataLoader(Numbers(45), batch_size=2, shuffle=True))
        for _ in range(2):
            for x in loader:
                if run.has_data:
                    seen.append(x.flatten().int().tolist())
                time.sleep(0.005 * len(x) * rank)
                train(replica, optimizer, x)
        return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        offbeat.Plan(tuning=BatchTuning()),
        offbeat.Plan(fabric=SERVER, tuning=BatchTuning()),
        offbeat.Plan(sync=ASP(), fabric=SERVER),
    ],
    ids=["tuned", "served and tuned", "served"],
)
def test_a_model_with_batchnorm_is_never_given_one_sample(plan: offbeat.Plan) -> None:
    batches = list(itertools.chain.from_iterable(run_workers(2, normalized, plan)))
    assert min(map(len, batches)) >= 2
    assert set(Counter(itertools.chain.from_iterable(batches)).values()) == {2}, "each sample once in each epoch"


def odd_loops() -> list[str]:
    """What is said of loaders that are used otherwise than for one training loop after the other."""
    told = []
    with offbeat.init(offbeat.Plan(sync=SSP(4), fabric=SERVER)) as run:
        model, optimizer, loader = prepared(run, num_workers=1)
        peek = iter(loader)
        next(peek)
        seen = Counter[int]()
        for x in loader:
            train(model, optimizer, x)
            seen.update(x.flatten().int().tolist())
        try:
            next(peek)
        except ModelError as error:
            told.append(str(error))
        _, _, other = prepared(run, batch=1, size=5000)
        try:
            for _ in range(2 * run.world):
                for _ in other:  # as if to evaluate
                    pass
        except ModelError as error:
            told.append(str(error))
        run.settle()
        return [*told, " ".join(map(str, seen.elements()))]


@pytest.mark.slow
def test_two_loops_at_a_time_and_endless_ones_are_ended_in_a_sentence() -> None:
    results = run_workers(2, odd_loops)
    for twice, endless, _ in results:
        assert re.match("Cannot continue loop 1 over this loader: loop 2 has begun since", twice)
        assert re.match("Cannot draw another batch: 4096 were drawn since", endless)
    seen = Counter(int(index) for *_, of_worker in results for index in of_worker.split())
    assert seen == Counter(range(SAMPLES)), "what was only peeked at is dealt again"


def odd_loaders() -> list[Any]:
    data, told = Numbers(10), list[Any]()
    with offbeat.init(offbeat.Plan(sync=ASP(), fabric=SERVER)) as run:
        for loader in (
            DataLoader(data, batch_size=11, drop_last=True),
            DataLoader(Numbers(0), batch_size=2),
            DataLoader(data, batch_size=None),
            DataLoader(data, batch_sampler=[[0, 1], [2]]),
            DataLoader(Numbers(1), batch_size=2),
            DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=True)),
        ):
            model = nn.Linear(1, 1)
            try:
                _, _, one = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6), loader)
                told.append(sorted(len(x) for x in one))
                run.settle()  # who left before the other has all would leave it what was never brought
            except ModelError as error:
                told.append(str(error))
    return told


def test_other_loaders_work_or_are_refused_in_a_sentence() -> None:
    first, second = run_workers(2, odd_loaders)
    assert first[:4] == second[:4]
    assert [text.partition(":")[0] for text in first[:4]] == [
        "Cannot prepare a loader without batches",
        "Cannot lease 0 samples",
        "Cannot lease batches of a loader without batches",
        "Cannot split a loader with list",
    ]
    assert sorted(first[4] + second[4]) == [1], "one sample for two workers"
    assert sorted(first[5] + second[5]) == [3, 3, 3]


# -- a fixed order is deterministic ------------------------------------------------------------------------------------


def hashes(policy: Policy, seed: int, folder: Path | None = None) -> list[str]:
    """The parameters after each own step; every run is jittered in its own way.

    Args:
        folder: of a server of two shards; None for the usual one.
    """
    chance = random.Random(f"{seed} {os.environ['RANK']}")
    told = []
    if folder is not None:
        serve(folder, 2)
    with offbeat.init(offbeat.Plan(sync=policy, fabric=SERVER)) as run:
        model, optimizer, loader = prepared(run, batch=3, width=2000)
        for _ in range(2):
            for x in loader:
                time.sleep(chance.uniform(0, 0.02))
                train(model, optimizer, x)
                told.append(
                    hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
                )
    return told


@pytest.mark.slow
def test_strict_turns_are_bit_identical_from_run_to_run(tmp_path: Path) -> None:
    """With seven blocks, whether one shard holds them or two."""
    strict = RoundRobin(strict=True)
    first = run_workers(3, hashes, strict, 1)
    assert run_workers(3, hashes, strict, 2, tmp_path) == first


@pytest.mark.slow
def test_without_an_order_they_are_not() -> None:
    assert run_workers(3, hashes, ASP(), 1) != run_workers(3, hashes, ASP(), 2)


# -- batches follow the machines ---------------------------------------------------------------------------------------


def tuned(plan: offbeat.Plan, samples: int) -> tuple[list[int], str]:
    """Worker 1 takes three times as long for a sample; the sizes of this worker's batches."""
    rank = int(os.environ["RANK"])
    sizes = []
    with offbeat.init(plan) as run:
        model, optimizer, loader = prepared(run, batch=8, size=samples)
        for x in loader:
            sizes.append(len(x) if run.has_data else 0)
            time.sleep(0.001 * len(x) * (3 if rank == 1 else 1))
            train(model, optimizer, x)
        told = run._session.data.loaders[0].explain() or str(run._session.server and look(run))
        return sizes, told


def look(run: offbeat.Run) -> str:
    from datetime import timedelta

    assert run._session.server is not None
    answer = run._session.server.client.look()
    answer.wait(timedelta(seconds=5))
    return answer.value[0].pace


PLANS: dict[str, Callable[[], offbeat.Plan]] = {
    "all-reduce": lambda: offbeat.Plan(fabric=ProcessGroup(), tuning=BatchTuning()),
    "bsp": lambda: offbeat.Plan(fabric=SERVER, tuning=BatchTuning()),
    "round-robin": lambda: offbeat.Plan(sync=RoundRobin(), fabric=SERVER, tuning=BatchTuning()),
}


@pytest.mark.parametrize("name", PLANS)
def test_batches_follow_the_machines(name: str) -> None:
    (fast, told), (slow, _) = run_workers(2, tuned, PLANS[name](), 1000)
    assert sum(fast) + sum(slow) == 1000, "every sample once"
    usual = [Counter(sizes[len(sizes) // 2 : -1]).most_common(1)[0][0] for sizes in (fast, slow)]
    assert usual[0] >= 2 * usual[1], f"{usual}: batches follow the speeds of 3 to 1"
    if name != "round-robin":
        rounds = [a + b for a, b in zip(fast, slow, strict=False)]
        assert set(rounds[:-2]) == {16}, "the global batch stays what it was"
    assert "Worker" in told
    assert "paces the rounds" in told


def resumed(folder: str, stop: int | None) -> list[int]:
    """Batches with tuning on the process group; with `stop`, saved there, and loaded in a new run."""
    rank, path, seen = int(os.environ["RANK"]), Path(folder) / os.environ["RANK"], list[int]()
    plan = offbeat.Plan(tuning=BatchTuning())
    for part in range(1 if stop is None else 2):
        with offbeat.init(plan) as run:
            model, optimizer, loader = prepared(run)
            if part == 1:
                state = torch.load(path, weights_only=True)
                run.load_state_dict(state)
            for number, x in enumerate(loader):
                train(model, optimizer, x)
                seen += x.flatten().int().tolist() if run.has_data else []
                if part == 0 and number == stop:
                    torch.save(run.state_dict(), path)
                    break
    assert rank in (0, 1)
    return seen


def test_a_checkpoint_knows_the_place_in_leased_data(tmp_path: Path) -> None:
    seen = Counter(itertools.chain.from_iterable(run_workers(2, resumed, str(tmp_path), 5)))
    assert seen == Counter(range(SAMPLES))


def out_of_memory_between_averages() -> list[int]:
    """The last of four batches does not fit; three steps have been taken from those before."""
    seen = []
    with offbeat.init(offbeat.Plan(sync=LocalSGD(8), fabric=SERVER)) as run:
        model, optimizer, loader = prepared(run, batch=4, size=64)
        for number, x in enumerate(loader):
            if run.rank == 0 and number == 3:
                run.out_of_memory()
                continue
            seen += x.flatten().int().tolist()
            train(model, optimizer, x)
    return seen


def test_what_local_steps_have_used_is_not_computed_again() -> None:
    seen = Counter(itertools.chain.from_iterable(run_workers(2, out_of_memory_between_averages)))
    assert seen == Counter(range(64))


# -- refused -----------------------------------------------------------------------------------------------------------


def other_data() -> None:
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        prepared(run, size=SAMPLES + run.rank)


def test_other_data_is_refused() -> None:
    from tests.workers import WorkerFailed

    with pytest.raises(WorkerFailed, match=r"102 samples|101 samples") as caught:
        run_workers(2, other_data)
    assert DisagreementError.__name__ in str(caught.value)


def untunable() -> list[str]:
    told = []
    with offbeat.init(offbeat.Plan(tuning=BatchTuning())) as run:
        model = nn.Linear(1, 1)
        with pytest.raises(ModelError) as caught:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.zeros(1, 1)])
        told.append(str(caught.value))
        with pytest.raises(ModelError) as caught:
            run.out_of_memory()
        told.append(str(caught.value))
    return told


def test_batches_that_cannot_be_tuned_are_refused() -> None:
    for first, second in run_workers(2, untunable):
        assert first.startswith("Cannot tune the batches of this loader")
        assert second.startswith("Cannot leave out a batch that others cannot be given")


def out_of_memory(folder: str) -> tuple[list[int], list[int], list[int]]:
    """Batches above 5 do not fit into this worker's memory."""
    seen, sizes, trained = [], [], []
    with offbeat.init(offbeat.Plan(sync=BSP(), fabric=SERVER, tuning=BatchTuning()), run_dir=folder) as run:
        model, optimizer, loader = prepared(run, batch=8, size=200)
        for x in loader:
            sizes.append(len(x))
            if run.rank == 0 and len(x) > 5:
                run.out_of_memory()
                continue
            seen += x.flatten().int().tolist()
            trained.append(len(x))
            train(model, optimizer, x)
    return seen, sizes, trained


def test_a_batch_that_does_not_fit_is_computed_by_others(tmp_path: Path) -> None:
    results = run_workers(2, out_of_memory, str(tmp_path))
    seen = Counter(itertools.chain.from_iterable(of_worker for of_worker, _, _ in results))
    assert seen == Counter(range(200))
    records = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    for rank, (_, _, trained) in enumerate(results):
        steps = [(r["weight"], r["samples"]) for r in records if r["kind"] == "step" and r["rank"] == rank]
        assert steps == [(count, count) for count in trained], "what was given up weighs nothing"
    small = results[0][1]
    assert max(small) > 5, "the fault fired"
    assert max(small[3:]) <= 5
