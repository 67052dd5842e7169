"""`offbeat.Checkpoints`: the newest whole one is gone on from, whatever became of the others."""

from __future__ import annotations

import copy
import os
import signal
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import ModelError
from tests.workers import listen, run_workers

STEPS = 4


def train(folder: Path, steps: int, *, every: int = 1, keep: int = 2) -> tuple[bool, list[float], int]:
    """Train for so many steps more; whether a checkpoint was there, the losses, and the last step."""
    with offbeat.init() as run:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        data = DataLoader(TensorDataset(torch.randn(96, 3)), batch_size=4, shuffle=True)
        replica, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        checkpoints = offbeat.Checkpoints(run, folder, keep=keep, model=replica, optimizer=optimizer, schedule=schedule)
        was_there = checkpoints.load()
        losses: list[float] = []
        for (x,) in loader:
            loss = replica(x).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if run.step % every == 0:
                checkpoints.save()
            if len(losses) == steps:
                break
        return was_there, losses, run.step


def damage(path: Path, how: str) -> None:
    """Do to a checkpoint what disks and people do."""
    data = bytearray(path.read_bytes())
    if how == "cut short":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a bit":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif how == "gone":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.with_suffix(".json").write_bytes(b"{")


def test_what_goes_on_from_a_checkpoint_is_what_was_never_interrupted(tmp_path: Path) -> None:
    _, whole, _ = train(tmp_path / "whole", 2 * STEPS)
    assert train(tmp_path / "parts", STEPS) == (False, whole[:STEPS], STEPS)
    assert train(tmp_path / "parts", STEPS) == (True, whole[STEPS:], 2 * STEPS)


def test_one_of_before_random_generators_were_kept_is_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, whole, _ = train(tmp_path / "whole", 2 * STEPS)
    train(tmp_path / "parts", STEPS)
    for path in (tmp_path / "parts").iterdir():
        if "rank" in path.name:
            path.unlink()
        elif path.suffix == ".json":
            path.write_bytes(path.read_bytes().replace(b',"world":1', b""))
    assert train(tmp_path / "parts", STEPS) == (True, whole[STEPS:], 2 * STEPS)
    assert "random numbers of rank 0: they were not saved with run-000004.pt." in caplog.text


@pytest.mark.parametrize("how", ["cut short", "empty", "a bit", "gone", "a folder", "seal"])
def test_one_that_is_damaged_is_passed_over_and_named(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, whole, _ = train(tmp_path / "whole", 2 * STEPS)
    train(tmp_path / "parts", STEPS)
    damage(tmp_path / "parts/run-000004.pt", how)
    assert train(tmp_path / "parts", STEPS) == (True, whole[STEPS - 1 : -1], 2 * STEPS - 1)
    assert "Cannot resume from run-000004.pt, which" in caplog.text
    assert "Resuming from run-000003.pt." in caplog.text
    assert train(tmp_path / "parts", 1)[1] == whole[-1:], "what was damaged does not count as the newest any more"


def test_if_all_are_damaged_it_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    train(tmp_path, STEPS)
    for path in tmp_path.glob("*.pt"):
        damage(path, "cut short")
    there = sorted(tmp_path.iterdir())
    with pytest.raises(
        ModelError, match=r"run-000004.pt, which has \d+ bytes, not \d+; run-000003.pt, which.* Move them"
    ):
        train(tmp_path, STEPS)
    assert sorted(tmp_path.iterdir()) == there


def killed_at(folder: str, wanted: str) -> None:
    """Train a step more, and be killed in the middle of what the thread that writes does."""
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if target.suffix == wanted and target.stem == "run-000005":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, target)

    Path.replace = replace  # type: ignore[assignment, method-assign]
    train(Path(folder), 1)


@pytest.mark.parametrize("moment", ["before the file", "before the seal"])
def test_a_job_that_is_killed_while_it_writes_leaves_the_one_before(moment: str, tmp_path: Path) -> None:
    """It ends in the middle of what it does; nothing is cleaned up."""
    train(tmp_path, STEPS)
    run_workers(1, killed_at, str(tmp_path), ".pt" if moment == "before the file" else ".json", faulty=0)
    assert (tmp_path / "run-000005.json.part").exists()
    was_there, _, step = train(tmp_path, 1)
    assert (was_there, step) == (True, STEPS + 1)


def test_one_that_is_written_again_and_not_to_its_end_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise KeyboardInterrupt
        return real(path, target)

    with offbeat.init() as run:
        model = nn.Linear(3, 1)
        replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        checkpoints = offbeat.Checkpoints(run, tmp_path, generators=False, model=replica)
        checkpoints.save()
        checkpoints.wait()
        nn.init.ones_(model.weight)
        monkeypatch.setattr(Path, "replace", replace)
        checkpoints.save()
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
        assert not checkpoints.load(), "and the one before is gone"


def test_on_a_full_disk_training_goes_on_and_the_last_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, STEPS)
    there = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(states: object, file: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", full)
    assert train(tmp_path, STEPS)[2] == 2 * STEPS
    assert "run-000005.pt: No space left on device. Training continues" in caplog.text
    assert caplog.text.count("Cannot write the checkpoint") == 1, "not of each file, nor at each step"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == there


@pytest.mark.parametrize("told_by", ["the context", "the file system"])
def test_what_a_full_disk_makes_torch_say_is_said_as_what_it_is_until_there_is_room(
    told_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, disk = torch.save, {"has room": False}
    enforce = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2048 vs 1942")

    def save(states: object, file: BinaryIO) -> None:
        if disk["has room"]:
            return real(states, file)
        if told_by == "the file system":
            raise enforce
        try:
            raise OSError(28, os.strerror(28))
        finally:
            raise enforce

    def statvfs(path: object) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 9, 9, 0, 9, 9, 9, 0, 255))

    monkeypatch.setattr(torch, "save", save)
    if told_by == "the file system":
        monkeypatch.setattr(os, "statvfs", statvfs)
    with offbeat.init() as run:
        model, _ = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        checkpoints = offbeat.Checkpoints(run, tmp_path, model=model)
        said = list[int]()
        for disk["has room"] in (False, False, True, False):
            checkpoints.save()
            checkpoints.wait()
            said.append(caplog.text.count("run-000000.pt: No space left on device. Training continues"))
    assert said == [1, 1, 1, 2]
    assert "enforce" not in caplog.text


def test_what_is_saved_is_what_was_there_and_the_training_goes_on_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written when the parameters have changed; the next checkpoint, and the end, wait for it."""
    real, order, may_write = torch.save, list[str](), threading.Event()

    def slow(states: object, file: BinaryIO) -> None:
        if ".pt" in file.name:
            assert may_write.wait(20)
            order.append(file.name.rpartition("/")[2])
        real(states, file)

    def let_it() -> None:
        order.append("may")
        may_write.set()

    monkeypatch.setattr(torch, "save", slow)
    with offbeat.init() as run:
        model = nn.Linear(3, 1)
        shared = {"one": model.weight.detach(), "another": model.weight.detach()}
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        checkpoints = offbeat.Checkpoints(run, tmp_path, model=replica, optimizer=optimizer, shared=Holder(shared))

        def step() -> None:
            replica(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        step()
        saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
        first = checkpoints.save()
        assert first == tmp_path / "run-000001.pt"
        step()
        assert not first.exists(), "nobody has waited for it"
        assert not model.weight.equal(saved["model"]["weight"])
        threading.Timer(0.3, let_it).start()
        second = checkpoints.save()
        assert order[:2] == ["may", "run-000001.pt.part"], "one at a time"
        assert first.exists()
        held = torch.load(first)
        assert torch.equal(held["model"]["weight"], saved["model"]["weight"])
        buffers = [one["state"][0]["momentum_buffer"] for one in (held["optimizer"], saved["optimizer"])]
        assert torch.equal(*buffers)
        assert held["shared"]["one"].data_ptr() == held["shared"]["another"].data_ptr(), "stays one"
        checkpoints.wait()
        assert second is not None
        assert second.exists()
        third = checkpoints.save()
    assert third is not None
    assert third.with_suffix(".json").exists(), "the end of a run waits"


class Holder:
    """A part with this state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_what_fails_for_another_reason_is_raised_at_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(states: object, file: object) -> None:
        raise MemoryError("no room for a copy")

    with offbeat.init() as run:
        model, optimizer = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        graph = (net.weight * 2).sum()  # is not a leaf
        checkpoints = offbeat.Checkpoints(run, tmp_path, model=model, optimizer=optimizer, loss=Holder({"last": graph}))
        monkeypatch.setattr(torch, "save", fail)
        checkpoints.save()
        with pytest.raises(MemoryError, match="no room"):
            checkpoints.save()
        checkpoints.save()
    assert f"Cannot write the last checkpoint to {tmp_path}: no room for a copy." in caplog.text
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize(("keep", "kept"), [(2, [3, 4]), (3, [2, 3, 4])])
def test_so_many_are_kept(keep: int, kept: list[int], tmp_path: Path) -> None:
    train(tmp_path, STEPS, keep=keep)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [f"run-{step:06d}.pt" for step in kept]


def anew(folder: Path, steps: int) -> list[str]:
    """Train for so many steps without a look at what is there; the checkpoints that are there then."""
    with offbeat.init() as run:
        net = nn.Linear(3, 1)
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        checkpoints = offbeat.Checkpoints(run, folder, model=model, optimizer=optimizer)
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            checkpoints.save()
        checkpoints.wait()
        return sorted(path.name for path in folder.iterdir() if path.suffix in (".pt", ".rng"))


def files(*steps: int) -> list[str]:
    return sorted(name for step in steps for name in (f"run-{step:06d}.pt", f"run-{step:06d}.rank0.rng"))


def test_what_a_run_saves_is_not_removed_for_later_steps_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 6, keep=3)
    there = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert anew(tmp_path, 1) == files(1, 4, 5, 6)
    assert anew(tmp_path, 3) == files(2, 3, 4, 5, 6), "what is earlier, of others, is old"
    assert {path: path.read_bytes() for path in there} == there
    assert caplog.text.count("up to run-000006.pt") == 2, "once in each run"
    assert "the newest would be loaded next time. Use another folder, or remove them." in caplog.text
    assert anew(tmp_path, 5) == files(4, 5, 6), "one that is written anew is the run's own"
    assert anew(tmp_path, 8) == files(7, 8)


def test_what_cannot_be_checkpoints_is_refused(tmp_path: Path) -> None:
    with offbeat.init() as run:
        model = nn.Linear(3, 1)
        with pytest.raises(ValueError, match="Keep at least 2"):
            offbeat.Checkpoints(run, tmp_path, keep=1, model=model)
        with pytest.raises(ValueError, match="without parts"):
            offbeat.Checkpoints(run, tmp_path)


def test_other_parts_are_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path, STEPS)
    with offbeat.init() as run:
        model, optimizer = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(ModelError, match="holds model, optimizer, run, schedule, and this script saves model, run"):
            offbeat.Checkpoints(run, tmp_path, model=model).load()
        assert optimizer.param_groups[0]["lr"] == 0.1


def resumed(folder: str, kind: str) -> str:
    """Load a checkpoint of `nn.Linear(3, 1)` into another model; why that is refused."""
    net = {
        "shape": nn.Linear(5, 1),
        "lacking": nn.Linear(3, 1, bias=False),
        "strange": nn.Sequential(nn.Linear(3, 1)),
    }[kind]
    with offbeat.init() as run:
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        checkpoints = offbeat.Checkpoints(run, folder, model=model, optimizer=optimizer)
        with pytest.raises(ModelError) as refused:
            checkpoints.load()
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("shape", "its weight has shape [1, 3], and here it has [1, 5]"),
        ("lacking", "it has bias, which is not here"),
        ("strange", "it has no 0.weight, which is here"),
    ],
)
def test_one_of_another_model_is_refused_in_a_sentence(kind: str, why: str, tmp_path: Path) -> None:
    anew(tmp_path, 1)
    assert resumed(str(tmp_path), kind) == (
        f"Cannot resume from {tmp_path}/run-000001.pt: it was written with another model: {why}. "
        "Resume with the model that it was written with, or use another folder."
    )


def test_one_of_another_model_is_refused_by_every_worker(tmp_path: Path) -> None:
    anew(tmp_path, 1)
    told = run_workers(2, resumed, str(tmp_path), "shape")
    assert all("its weight has shape [1, 3], and here it has [1, 5]" in one for one in told)


def test_one_of_another_optimizer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    anew(tmp_path, 1)
    with offbeat.init() as run:
        net = nn.Linear(3, 1)
        groups: list[dict[str, Any]] = [{"params": [net.weight]}, {"params": [net.bias]}]
        model, optimizer = run.prepare(net, torch.optim.SGD(groups, lr=0.1))
        with pytest.raises(
            ModelError, match="another optimizer: loaded state dict has a different number of parameter"
        ):
            offbeat.Checkpoints(run, tmp_path, model=model, optimizer=optimizer).load()


def together(folder: str, steps: int) -> tuple[list[str], list[str]]:
    """One of several workers: its parameters after each step, and what it told."""
    told = listen()
    with offbeat.init() as run:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        data = DataLoader(TensorDataset(torch.randn(96, 3)), batch_size=4, shuffle=True)
        replica, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        checkpoints = offbeat.Checkpoints(run, folder, model=replica, optimizer=optimizer)
        checkpoints.load()
        weights: list[str] = []
        for (x,) in loader:
            replica(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(str(model.weight.tolist()))
            checkpoints.save()
            if len(weights) == steps:
                break
        return weights, told


def test_of_several_workers_one_writes_and_all_load(tmp_path: Path) -> None:
    whole = run_workers(2, together, str(tmp_path / "whole"), 2 * STEPS)
    first = run_workers(2, together, str(tmp_path / "parts"), STEPS)
    damage(tmp_path / "parts/run-000004.pt", "a bit")
    second = run_workers(2, together, str(tmp_path / "parts"), STEPS + 1)
    for rank in range(2):
        assert first[rank][0] == whole[rank][0][:STEPS]
        assert second[rank][0] == whole[rank][0][STEPS - 1 :]
    said = [text for _, told in second for text in told if "Resuming from run-000003.pt" in text]
    assert len(said) == 1, "by the first worker alone"
