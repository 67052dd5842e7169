"""Training past `prepare` is wrong though nothing fails: it is said in the first steps."""

from __future__ import annotations

import copy
import io
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import ModelError
from offbeat.loading.loader_check import LoaderCheck
from offbeat.run.open_sessions import trained_unprepared
from tests.cli.commands import TRAIN, script
from tests.cli.commands import offbeat as run_command
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(24, 3)), batch_size=2, shuffle=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_turn(*jobs: Callable[[], None]) -> list[list[str]]:
    """What each job was told, one after the other in this worker."""
    path = f"file://{os.environ['OFFBEAT_STORE']}"
    dist.init_process_group("gloo", init_method=path, rank=int(os.environ["RANK"]), world_size=2)
    told, found = listen(), []
    for job in jobs:
        told.clear()
        job()
        found.append(list(told))
    dist.destroy_process_group()
    return found


# -- no model is prepared ------------------------------------------------------------------------------------------


def without_prepare() -> tuple[list[list[str]], bool]:
    def trains(steps: int) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.init():
            for _ in range(steps):
                step(model, optimizer, torch.ones(4, 3))

    def warms_up() -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.init() as run:
            for _ in range(4):
                step(model, optimizer, torch.ones(4, 3))
            replica, optimizer = run.prepare(model, optimizer)
            other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
            for _ in range(4):
                step(replica, optimizer, torch.ones(4, 3))
                other.step()

    told = in_turn(lambda: trains(2), warms_up)
    assert not trained_unprepared()
    os.environ["OFFBEAT_STORE"] += "-2"
    return told + in_turn(lambda: trains(3)), trained_unprepared()


def test_steps_without_a_prepared_model_are_told_of() -> None:
    for (calibrates, warms_up, trains), unprepared in run_workers(2, without_prepare):
        assert unprepared
        assert not calibrates
        assert len(warms_up) == 1, "it is said before it is prepared, and not afterwards"
        assert trains == [
            "3 steps were made, and no model is prepared: each of the 2 workers trains a model of its own. Call model, "
            "optimizer, loader = run.prepare(model, optimizer, loader) before the loop."
        ]


def test_who_is_alone_may_train_without_prepare() -> None:
    told = listen()
    with offbeat.init():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            step(model, optimizer, torch.ones(4, 3))
    assert not told
    assert not trained_unprepared()


@pytest.mark.slow
def test_the_job_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    text = "\n".join(line for line in TRAIN.splitlines() if "prepare" not in line)
    text = text.replace("for step", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor step")
    slow = text + "\nif run.rank == 0:\n    import time\n    run.close()\n    time.sleep(3)\n    print('evaluated')\n"
    code, output = run_command("run", script(tmp_path, slow), folder=tmp_path)
    assert code == 78, output
    assert "[0] 3 steps were made, and no model is prepared" in output
    assert "[1] 3 steps were made, and no model is prepared" in output
    assert "[0] evaluated" in output, "nobody is ended because another was sooner"
    assert "no worker prepared a model" in output.splitlines()[-1]


# -- the loop goes over the loader that was given ------------------------------------------------------------------


def wrapped(loader: Iterable[Any]) -> Iterator[Any]:
    """As progress bars and frameworks do."""
    yield from loader


def loops() -> list[list[str]]:
    def trains(given: Iterable[Any], over: str) -> None:
        model = nn.Linear(3, 2)
        with offbeat.init() as run:
            replica, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
            for (x,) in wrapped(given if over == "given" else loader):
                step(replica, optimizer, x)
                with torch.no_grad():
                    for (y,) in given if over == "prepared" else ():
                        replica(y)
            if over == "given":
                assert run.progress == 0

    batches = [(torch.ones(2, 3),)] * 5
    return in_turn(
        lambda: trains(data(), "given"),
        lambda: trains(data(), "prepared"),
        lambda: trains(batches, "given"),
        lambda: trains(batches, "prepared"),
    )


def test_a_loop_over_the_loader_that_was_given_is_told_of() -> None:
    for dataloader, evaluation, batches, same in run_workers(2, loops):
        assert len(dataloader) == 1
        assert dataloader[0].startswith(
            "3 steps are made, and the loader that run.prepare returned was never drawn from; the one it was given, "
            "the DataLoader over TensorDataset of 24 samples, was: each worker goes through all of its data, and "
            "run.progress stays 0. Loop over what is returned: "
        )
        assert not [text for text in evaluation if "never drawn from" in text]
        assert "the one it was given, a list, was: batches count alike" in batches[0]
        assert not [text for text in same if "never drawn from" in text]


def test_of_a_loader_that_is_not_drawn_from_no_more_is_said_than_is_known() -> None:
    told: list[str] = []
    check = LoaderCheck(told.append)
    check.prepared(data(), is_dealt=True)
    for _ in range(9):
        check.stepped()
    assert [text.partition(":")[0] for text in told] == [
        "3 steps are made, and the loader that run.prepare returned was never drawn from"
    ]


def test_one_that_was_drawn_from_may_rest() -> None:
    told: list[str] = []
    check = LoaderCheck(told.append)
    check.prepared(given := data(), is_dealt=True)
    check.drawn()
    for _ in zip(given, range(9), strict=False):
        check.stepped()
    assert not told


# -- a replica without a run ---------------------------------------------------------------------------------------


def copies() -> list[list[str]]:
    def trains(make: Callable[[nn.Module], nn.Module]) -> None:
        model = nn.Linear(3, 2)
        with offbeat.init() as run:
            replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            mine = make(replica)
            with torch.no_grad():
                mine(torch.ones(4, 3))
            mine.eval()(torch.ones(4, 3))
            mine.train()
            for _ in range(2):
                mine(torch.ones(4, 3))

    def saved(replica: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(replica, file)
        file.seek(0)
        loaded: nn.Module = torch.load(file, weights_only=False)
        return loaded

    def frozen(replica: nn.Module) -> nn.Module:
        return copy.deepcopy(replica).requires_grad_(False)

    return in_turn(lambda: trains(saved), lambda: trains(copy.deepcopy), lambda: trains(frozen))


def test_a_replica_that_was_saved_whole_says_that_it_trains_alone() -> None:
    for saved, copied, frozen in run_workers(2, copies):
        assert not frozen
        for told in (saved, copied):
            assert len(told) == 1
            assert told[0].startswith("A copy of a replica of Linear trains alone: it was copied, or saved whole")


def test_a_copy_of_a_replica_is_prepared_by_its_module() -> None:
    model = nn.Linear(3, 2)
    told = listen()
    with offbeat.init() as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        mine = copy.deepcopy(replica)
        mine(torch.ones(4, 3))
        with pytest.raises(ModelError, match=r"it is a wrapper without a run. Prepare its .module"):
            run.prepare(mine, optimizer)
    assert not told, "there is no other worker"
