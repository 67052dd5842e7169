"""Checkpoints of a served job: stop and resume is the same as not to stop."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import ModelError
from offbeat.fabric import ParameterServer
from offbeat.server.optimizer_checkpoint import from_bytes, to_bytes
from offbeat.sync import BSP, Policy
from tests.audit.test_real_jobs import ended, recorded
from tests.parity import jobs
from tests.training.server_jobs import Counter as Counting
from tests.training.server_jobs import join, kept, kill, serve, told, wait_for_snapshot
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
}


class Training:
    """A served job between two steps."""

    def __init__(self, kind: str, block_bytes: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        plan = offbeat.Plan(sync=BSP(), fabric=ParameterServer(block_bytes=block_bytes))
        self.run = offbeat.init(plan)
        model = jobs.MLP()
        self.model, self.optimizer = self.run.prepare(model, OPTIMIZERS[kind](model.parameters()))

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            chance = torch.Generator().manual_seed(100 * step + self.run.rank)
            x, y = torch.randn(4, 20, generator=chance), torch.randint(0, 5, (4,), generator=chance)
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.module.state_dict().items()}


def resume(kind: str) -> bool:
    """Five steps; or two, another server with other blocks and another model to begin with, and three more."""
    whole = Training(kind, 4096)
    whole.train(0, 5)
    expected = whole.parameters
    whole.run.close()
    half = Training(kind, 4096)
    half.train(0, 2)
    checkpoint: dict[str, Any] = {"model": half.parameters, "run": half.run.state_dict()}
    half.run.close()
    rest = Training(kind, 8192, seed=1)
    rest.model.module.load_state_dict(checkpoint["model"])
    rest.run.load_state_dict(checkpoint["run"])
    assert rest.run.step == 2
    rest.train(2, 5)
    result = rest.parameters
    rest.run.close()
    return all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["adamw", pytest.param("momentum", marks=pytest.mark.slow)])
def test_stop_and_resume_is_the_same_as_not_to_stop(kind: str) -> None:
    assert run_workers(2, resume, kind, timeout_s=190) == [True, True]


def test_states_survive_the_way_through_bytes() -> None:
    states = {"a": {"step": torch.tensor(3.0), "mean": torch.randn(7)}}
    data = to_bytes(states)
    again = from_bytes(data)
    assert torch.equal(again["a"]["mean"], states["a"]["mean"])
    assert again["a"]["step"].ndim == 0
    for at in (5, len(data) // 2, len(data) - 5):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(ModelError, match="Cannot load the optimizer's state from this checkpoint"):
            from_bytes(bytes(damaged))


def dcp_round_trip(folder: str) -> tuple[int, bool]:
    """`Run` is Stateful; DCP reads into what a fresh run says of itself."""
    one = Training("adam", 4096)
    one.train(0, 2)
    save({"model": one.model.state_dict(), "run": one.run}, checkpoint_id=folder)
    one.train(2, 4)
    expected = one.parameters
    one.run.close()
    two = Training("adam", 4096, seed=1)
    state: dict[str, Any] = {"model": two.model.state_dict(), "run": two.run}
    load(state, checkpoint_id=folder)
    two.train(2, 4)
    result, step = two.parameters, two.run.step
    two.run.close()
    return step, all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.timeout(200)
def test_distributed_checkpoint(tmp_path: Path) -> None:
    assert run_workers(2, dcp_round_trip, str(tmp_path / "checkpoint"), timeout_s=190) == [(4, True), (4, True)]


# -- the place in leased data ------------------------------------------------------------------------------------------


def data_of(run: offbeat.Run, kind: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(50, 20), torch.arange(50) % 5
    model = jobs.MLP()
    loader = DataLoader(TensorDataset(torch.arange(50), x, y), batch_size=4, shuffle=True)
    replica, optimizer, prepared = run.prepare(model, OPTIMIZERS[kind](model.parameters()), loader)
    return replica, optimizer, prepared


def go_through(parts: Any, epochs: int, stop: int | None = None) -> list[int]:
    """Train for so many epochs, or until batch `stop`; which samples were drawn."""
    model, optimizer, loader = parts
    seen: list[int] = []
    for _ in range(epochs):
        for number, (index, x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += index.tolist()
            if number == stop:
                return seen
    return seen


def resume_in_data(policy: Policy, kind: str) -> tuple[bool, list[int]]:
    plan = offbeat.Plan(sync=policy, fabric=ParameterServer(block_bytes=4096))
    with offbeat.init(plan, seed=3) as run:
        parts = data_of(run, kind)
        go_through(parts, 2)
        run.settle()
        expected = {name: tensor.clone() for name, tensor in parts[0].module.state_dict().items()}
    with offbeat.init(plan, seed=3) as run:
        parts = data_of(run, kind)
        seen = go_through(parts, 1, stop=2)
        run.settle()
        checkpoint = {"model": {k: v.clone() for k, v in parts[0].module.state_dict().items()}, "run": run.state_dict()}
        run.settle()  # nobody goes before all have it
    with offbeat.init(plan, seed=4) as run:
        parts = data_of(run, kind)
        parts[0].module.load_state_dict(checkpoint["model"])
        run.load_state_dict(checkpoint["run"])
        seen += go_through(parts, 2)
        run.settle()
        result = parts[0].module.state_dict()
    return all(torch.equal(result[name], expected[name]) for name in expected), seen


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_leased_data_goes_on_where_it_was() -> None:
    """BSP: to the bit; and every sample twice in two epochs, the order of the first seed."""
    results = run_workers(2, resume_in_data, BSP(), "momentum", timeout_s=190)
    assert Counter(itertools.chain.from_iterable(seen for _, seen in results)) == dict.fromkeys(range(50), 2)
    assert [same for same, _ in results] == [True, True]


def other_data(kind: str) -> str:
    with offbeat.init(offbeat.Plan(fabric=ParameterServer())) as run:
        data_of(run, kind)
        state = run.state_dict()
        for loader in state["loaders"]:
            loader["place"] = loader["place"].replace(b'"samples":50', b'"samples":51')
        with pytest.raises(ModelError) as caught:
            run.load_state_dict(state)
        return str(caught.value)


def with_another_plan() -> list[str]:
    served, replicated = offbeat.Plan(fabric=ParameterServer()), offbeat.Plan()
    with offbeat.init(served) as run:
        data_of(run, "adam")
        state = run.state_dict()
    said = listen()
    with offbeat.init(replicated) as run:
        data_of(run, "adam")
        run.load_state_dict(state)
    return said


def test_data_that_is_dealt_out_otherwise_begins_its_epoch_anew() -> None:
    """Trained on in test_resume.py."""
    first, second = run_workers(2, with_another_plan)
    assert sum(text.endswith("epoch 0 begins anew.") for text in first) == 1
    assert not any(text.endswith("begins anew.") for text in second)  # rank 0 tells for all


def test_a_place_in_other_data_is_refused() -> None:
    for text in run_workers(2, other_data, "adam", timeout_s=45):
        assert "the checkpoint was made with 51" in text


# -- what cannot be loaded ---------------------------------------------------------------------------------------------


def damaged(state: dict[str, Any]) -> None:
    served = bytearray(state["models"][0]["server"])
    served[len(served) // 2] ^= 1
    state["models"][0]["server"] = bytes(served)


def of_another_optimizer(state: dict[str, Any]) -> None:
    states = from_bytes(state["models"][0]["server"])
    for name, state_of in states.items():
        states[name] = {"momentum_buffer": state_of["exp_avg"]}
    state["models"][0]["server"] = to_bytes(states)


def of_another_model(state: dict[str, Any]) -> None:
    states = from_bytes(state["models"][0]["server"])
    state["models"][0]["server"] = to_bytes({f"other.{name}": kept for name, kept in states.items()})


def without_models(state: dict[str, Any]) -> None:
    state["models"] = []


WRONG: list[tuple[int, Callable[[dict[str, Any]], None], str]] = [
    (0, damaged, "Cannot load the optimizer's state from this checkpoint: "),
    (0, of_another_optimizer, "Cannot take over momentum_buffer "),
    (0, of_another_model, "no parameter that is trained here has that name"),
    (0, without_models, "it has 0 models, this run 1"),
    (1, without_models, "it has 0 models, this run 1"),
]


def load_wrong_ones() -> tuple[list[str], bool]:
    """What each is refused with; and whether the right one is loaded after all of them, and training goes on."""
    training = Training("adam", 4096)
    training.train(0, 2)
    model, state = training.parameters, training.run.state_dict()
    training.train(2, 4)
    expected, said = training.parameters, []
    for rank, spoil, _ in WRONG:
        own = copy.deepcopy(state)
        if training.run.rank == rank:
            spoil(own)
        with pytest.raises(ModelError) as caught:
            training.run.load_state_dict(own)
        said.append(str(caught.value))
        assert all(torch.equal(now, expected[name]) for name, now in training.parameters.items()), "as if nobody had"
    training.model.module.load_state_dict(model)
    training.run.load_state_dict(state)
    training.train(2, 4)
    result = training.parameters
    training.run.close()
    return said, all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.timeout(100)
def test_what_one_worker_cannot_load_none_does() -> None:
    results = run_workers(2, load_wrong_ones, timeout_s=90)
    for rank, (said, goes_on) in enumerate(results):
        assert goes_on
        for (culprit, spoil, reason), text in zip(WRONG, said, strict=True):
            assert reason in text, spoil.__name__
            elsewhere = f"Cannot load this state, because one of the workers cannot. Rank {culprit}: Cannot "
            assert text.startswith(elsewhere) is (rank != culprit)


def load_without_rank_0() -> str:
    training = Training("adam", 4096)
    training.train(0, 1)
    state = training.run.state_dict()
    if training.run.rank == 0:
        os._exit(1)  # as of a script that cannot read its checkpoint
    with pytest.raises(ModelError) as caught:
        training.run.load_state_dict(state)
    return str(caught.value)


def test_a_checkpoint_that_nobody_brings_is_not_loaded() -> None:
    _, said = run_workers(2, load_without_rank_0, timeout_s=55, faulty=0)
    assert said.endswith("Rank 0, which brings it to the server, is gone.")


def load_while_the_server_is_killed(folder: Path) -> float:
    """Rank 0 waits for the others to load, too; then the server is killed, and comes back."""
    keepers = serve(folder, 2, snapshots=str(folder / "server"), every=2, restarts=5)
    with join(BSP(), folder, 120.0) as run:
        counter = Counting(run)
        for step in range(8):
            counter.step()
            if step == 2:
                weight, state = counter.model.weight.detach().clone(), run.state_dict()
        if run.rank:
            wait_for_snapshot(folder / "server")
            while not (folder / "killed").exists():
                time.sleep(0.01)
        else:
            wait_for_snapshot(folder / "server")

            def kill_one() -> None:
                kill(kept(keepers[1]))
                (folder / "killed").touch()

            threading.Timer(0.5, kill_one).start()
        with torch.no_grad():
            counter.model.weight.copy_(weight)
        run.load_state_dict(state)
        for _ in range(4):
            counter.step()
        run.settle()
        return counter.count


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_server_that_is_killed_while_one_waits_for_the_others_to_load(tmp_path: Path) -> None:
    counts = run_workers(2, load_while_the_server_is_killed, tmp_path, timeout_s=190)
    assert any("The parameter server was restarted" in text for text in told(tmp_path, 0)), "the fault was injected"
    assert counts == [7.0, 7.0], "three steps before, and four after"


def load_and_train_on(folder: Path) -> list[str]:
    """Rank 1 cannot load it; all go on as they were, and what was recorded is in order."""
    os.environ["OFFBEAT_HISTORY"] = str(folder / "history")
    serve(folder, history=str(folder / "history"))
    said = listen()
    with join(BSP(), folder) as run:
        counter = Counting(run)
        for step in range(6):
            counter.step()
            if step == 2:
                weight, state = counter.model.weight.detach().clone(), run.state_dict()
        own = copy.deepcopy(state)
        if run.rank:
            damaged(own)
        with pytest.raises(ModelError):
            run.load_state_dict(own)
        assert counter.count == 6, "the server keeps what it has"
        counter.step()
        with torch.no_grad():
            counter.model.weight.copy_(weight)
        for group in counter.optimizer.param_groups:
            group["lr"] = 0.5
        run.load_state_dict(state)  # all go back, and on with half the rate
        for _ in range(4):
            counter.step()
        run.settle()
        assert counter.count == 5
    return said


def test_a_load_that_is_refused_leaves_everything_as_it_was(tmp_path: Path) -> None:
    results = run_workers(2, load_and_train_on, tmp_path)
    assert not [text for said in results for text in said if "other hyper-parameters" in text]
    verdict = recorded(tmp_path)
    assert verdict.holds, ended(verdict)
    assert verdict.replaced == 1
