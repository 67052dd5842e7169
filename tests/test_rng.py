"""Who goes on from a checkpoint draws the same random numbers, wherever it was made."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import offbeat
from offbeat.rng import RngState
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SAMPLES, BATCH, STEPS = 24, 4, 8


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise from each of three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.rand() + torch.rand(())
        return torch.full((3,), float(index)) + noise


class Stream(IterableDataset[torch.Tensor]):
    """The same, in an order that it draws itself, anew in each epoch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return (Augmented()[index] for index in order)


LOADERS: dict[str, Callable[[], DataLoader[torch.Tensor]]] = {
    "shuffled": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "own generator": lambda: DataLoader(
        Augmented(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed())
    ),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "processes": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
}


def train(
    folder: str | Path,
    steps: int,
    *,
    loader: str = "shuffled",
    plan: offbeat.Plan | None = None,
    generators: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[list[float], list[str]]:
    """Go on, until so many steps are made in all, from the checkpoint if there is one; all losses, and what is said.

    It begins with other random numbers than it had if `seed` is another.
    """
    said = listen()
    with offbeat.init(plan or offbeat.Plan()) as run:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
        for seeds in (random.seed, np.random.seed, torch.manual_seed):
            seeds(100 * seed + run.rank)
        data = LOADERS[loader]()
        replica, optimizer, batches = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), data)
        checkpoints = offbeat.Checkpoints(run, folder, generators=generators, model=replica, optimizer=optimizer)
        checkpoints.load()
        losses: list[float] = []
        while run.step < steps:
            for x in batches:
                loss = replica(x.to(device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                checkpoints.save()
                if run.step == steps:
                    break
            losses.append(random.random() + np.random.rand() + torch.rand(()).item())
        return losses, said


def is_seamless(folder: Path, stop: int, **how: Any) -> bool:
    """Whether losses behind a stop in that step are as if there had been none; alone."""
    whole, _ = train(folder / "whole", STEPS, **how)
    first, _ = train(folder / "parts", stop, **how)
    second, said = train(folder / "parts", STEPS, seed=1, **how)
    assert not said
    assert first[:-1] == whole[: len(first) - 1]
    return second == whole[-len(second) :]


@pytest.mark.parametrize("stop", [2, 7])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_job_goes_on_with_the_same_random_numbers(loader: str, stop: int, tmp_path: Path) -> None:
    assert is_seamless(tmp_path, stop, loader=loader)


def test_unless_it_is_asked_not_to(tmp_path: Path) -> None:
    assert not is_seamless(tmp_path, 2, generators=False)
    assert not list(tmp_path.rglob("*.rng"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_as_well(tmp_path: Path) -> None:
    assert is_seamless(tmp_path, 2, device="cuda")


def test_it_goes_on_behind_an_epoch_and_a_second_time(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", 13)
    losses: list[float] = []
    for seed, stop in enumerate((6, 8, 9, 13)):
        losses += train(tmp_path / "parts", stop, seed=seed)[0][:-1]
    assert losses == whole[:-1]


def test_as_many_are_kept_as_checkpoints(tmp_path: Path) -> None:
    train(tmp_path, 4)
    kept = [f"run-00000{step}.{kind}" for step in (3, 4) for kind in ("json", "pt", "rank0.json", "rank0.rng")]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


PLANS = {"all-reduce": offbeat.Plan(), "leased": offbeat.Plan(fabric=offbeat.Elastic())}


def whole_and_parts(world: int, folder: Path, plan: str, between: Callable[[Path], None]) -> list[tuple[bool, str]]:
    """For each worker whether it was seamless, and what it said."""
    whole = run_workers(world, in_part, str(folder / "whole"), STEPS, plan, 0)
    run_workers(world, in_part, str(folder / "parts"), 2, plan, 0)
    between(folder / "parts")
    second = run_workers(world, in_part, str(folder / "parts"), STEPS, plan, 1)
    return [
        (losses == all_[-len(losses) :], "\n".join(said))
        for (losses, said), (all_, _) in zip(second, whole, strict=True)
    ]


def in_part(folder: str, steps: int, plan: str, seed: int) -> tuple[list[float], list[str]]:
    return train(folder, steps, plan=PLANS[plan], seed=seed)


@pytest.mark.parametrize("plan", PLANS)
def test_each_worker_has_its_own(plan: str, tmp_path: Path) -> None:
    assert [seamless for seamless, _ in whole_and_parts(2, tmp_path, plan, lambda folder: None)] == [True, True]


@pytest.mark.slow
def test_who_has_none_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    def between(folder: Path) -> None:
        (folder / "run-000002.rank1.json").unlink()
        path = folder / "run-000002.rank2.rng"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    found = whole_and_parts(3, tmp_path, "all-reduce", between)
    assert (
        "Cannot restore the random numbers of rank 1: they were not saved with run-000002.pt. Their generators stay "
        "as the script has set them." in found[0][1]
    )
    assert "Cannot continue with" not in found[1][1]
    assert (
        "Cannot restore the random numbers of rank 2 from run-000002.rank2.rng, which has other contents than were "
        "written. Its generators stay as the script has set them." in found[2][1]
    )
    assert [seamless for seamless, _ in found] == [False] * 3, "the same parameters come of all of them"


def test_with_more_workers_the_new_ones_begin_anew(tmp_path: Path) -> None:
    run_workers(2, in_part, str(tmp_path), 2, "all-reduce", 0)
    told = [said for _, said in run_workers(3, in_part, str(tmp_path), 4, "all-reduce", 0)]
    (text,) = [text for said in told for text in said if "random numbers" in text]
    assert "random numbers of rank 2: they were not saved with run-000002.pt." in text


def test_numbers_of_a_stretch_with_other_workers_are_not_taken(tmp_path: Path) -> None:
    """What rank 1 left behind is of a job of two, and the checkpoint beside it of a job of one."""
    run_workers(2, in_part, str(tmp_path), 2, "all-reduce", 0)
    train(tmp_path, 4)
    for kind in ("json", "rng"):
        old, new = (next(tmp_path.glob(f"run-*{step}.rank{rank}.{kind}")) for step, rank in ((4, 0), (3, 0)))
        new.with_name(f"run-000004.rank1.{kind}").write_bytes(old.read_bytes())
    (tmp_path / "run-000004.rank1.json").write_bytes(
        (tmp_path / "run-000004.rank0.json").read_bytes().replace(b'"world":1', b'"world":2')
    )
    told = [said for _, said in run_workers(2, in_part, str(tmp_path), 5, "all-reduce", 0)]
    assert any("random numbers of rank 1: they were not saved with run-000004.pt" in text for text in told[0])


# -- the state itself --------------------------------------------------------------------------------------------------


def drawn() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()


def test_what_is_plain_is_the_same_again() -> None:
    drawn()  # of normal numbers two are drawn at a time, and one is kept
    generator = torch.Generator().manual_seed(3)
    plain = RngState.capture([generator]).to_plain()
    first = [drawn(), drawn(), torch.rand(2, generator=generator).tolist()]
    RngState.from_plain(plain, [generator]).restore([generator])
    assert [drawn(), drawn(), torch.rand(2, generator=generator).tolist()] == first


SPOILT: dict[str, tuple[tuple[str, ...], Any]] = {
    "place before": (("numpy", "place"), -1),
    "place behind": (("numpy", "place"), 1 << 40),
    "place of Python's": (("python", "words"), torch.full((625,), (1 << 32) - 1)),
    "few words": (("numpy", "words"), torch.zeros(3, dtype=torch.int64)),
    "large words": (("numpy", "words"), torch.full((624,), 1 << 40)),
    "floats": (("python", "words"), torch.zeros(625)),
    "no tensor": (("python", "words"), [1] * 625),
    "gauss": (("python", "gauss"), "1.0"),
    "no torch": (("cpu",), None),
    "torch of zeros": (("cpu",), torch.zeros(5056, dtype=torch.uint8)),
    "torch cut": (("cpu",), torch.zeros(3, dtype=torch.uint8)),
    "more of its own": (("own",), [torch.get_rng_state()]),
    "own is a number": (("own",), 3),
    "numpy is a number": (("numpy",), 3),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_damaged_is_refused_and_changes_nothing(what: str) -> None:
    path, value = SPOILT[what]
    plain = copy.deepcopy(RngState.capture().to_plain())
    one: Any = plain
    for name in path[:-1]:
        one = one[name]
    one[path[-1]] = value
    before = RngState.capture()
    with pytest.raises(ValueError, match=r"^it(s loaders)? (had|hold)"):
        RngState.from_plain(plain)
    before.restore()
    first = drawn()
    before.restore()
    assert drawn() == first
