"""What cannot be loaded is refused in a sentence; what differs between workers is named; the rest carries over."""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import DisagreementError, ModelError
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES = 96


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def prepared(run: offbeat.Run, batch: int = 4) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(1, 2)
    data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=batch, shuffle=True)
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9), data)


def train(parts: tuple[Any, torch.optim.Optimizer, Any], run: offbeat.Run, stop: int | None = None) -> Iterator[int]:
    """One loop, or its first `stop` batches; the samples that this worker used."""
    model, optimizer, loader = parts
    for number, (x,) in enumerate(loader, 1):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.has_data:
            yield from x.flatten().int().tolist()
        if number == stop:
            return


def within(value: Any, *path: Any) -> Callable[[dict[str, Any]], Any]:
    """A state in which that value is at `path`."""

    def spoil(state: dict[str, Any]) -> Any:
        one: Any = state
        for key in path[:-1]:
            one = one[key]
        one[path[-1]] = value
        return state

    return spoil


NAN, HUGE = float("nan"), 10**30
SPOILT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no dict": (lambda _: None, "it is a NoneType, not a dict"),
    "no plan": (within(None, "plan"), "its plan is a NoneType"),
    "models are a number": (within(7, "models"), "its models are a int"),
    "a model is a text": (within("x", "models", 0), "Cannot load this state: "),
    "seed NaN": (within(NAN, "seed"), "its seed is nan"),
    "seed huge": (within(HUGE, "seed"), "its seed is 1000"),
    "step NaN": (within(NAN, "models", 0, "step"), "its step is nan"),
    "step negative": (within(-1, "models", 0, "step"), "its step is -1"),
    "step huge": (within(HUGE, "models", 0, "step"), "its step is 1000"),
    "step is a text": (within("3", "models", 0, "step"), "its step is '3'"),
    "steps since the average": (within([9, 9, 0], "models", 0, "steps"), "9 steps since the last average"),
    "two steps": (within([1, 1], "models", 0, "steps"), "not 3 numbers"),
    "weight infinite": (within(float("inf"), "models", 0, "share", "drawn", 2), "weight of what was drawn is inf"),
    "ahead": (within(-4, "models", 0, "ahead"), "its steps ahead is -4"),
    "anchor of another model": (
        within(torch.zeros(5), "models", 0, "local", "bias", "anchor"),
        "anchor of bias is [5]",
    ),
    "anchor is one number": (within(0.0, "models", 0, "local", "bias", "anchor"), "anchor of bias is 0.0"),
    "order is a number": (within(3, "models", 0, "reducer", "layout", "order"), "its order of gradients is 3"),
    "order of numbers": (within([3, 4], "models", 0, "reducer", "layout", "order"), "not a list of texts"),
    "no version": (within(None, "models", 0, "reducer", "layout", "version"), "version of the layout is None"),
    "gradients NaN": (within(NAN, "models", 0, "reducer", "layout", "expected", "bias"), "gradients of bias is nan"),
    "epoch NaN": (within(NAN, "loaders", 0, "epoch"), "its epoch is nan"),
    "epoch negative": (within(-1, "loaders", 0, "epoch"), "its epoch is -1"),
    "batch negative": (within(-1, "loaders", 0, "batch"), "its batches of the epoch is -1"),
    "batch huge": (within(HUGE, "loaders", 0, "batch"), "its batches of the epoch is 1000"),
    "no workers": (within(0, "loaders", 0, "world"), "its number of workers is 0"),
    "usual NaN": (within(NAN, "loaders", 0, "usual"), "samples of a usual batch is nan"),
}


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    with offbeat.init(offbeat.Plan(sync=offbeat.LocalSGD(4))) as run:
        parts = prepared(run)
        assert len(list(train(parts, run, stop=3))) == 12
        return run.state_dict()


@pytest.mark.parametrize("what", SPOILT)
def test_a_damaged_state_is_refused_in_a_sentence(what: str, saved: dict[str, Any]) -> None:
    spoil, reason = SPOILT[what]
    with offbeat.init(offbeat.Plan(sync=offbeat.LocalSGD(4))) as run:
        parts = prepared(run)
        with pytest.raises(ModelError) as caught:
            run.load_state_dict(spoil(copy.deepcopy(saved)))
        text = str(caught.value)
        assert text.startswith("Cannot load this state: ")
        assert reason in text
        run.load_state_dict(saved)  # and the right one is not
        assert run.step == 3
        assert len(list(train(parts, run))) == SAMPLES


def test_a_place_behind_the_end_does_not_go_on_for_ever() -> None:
    with offbeat.init() as run:
        parts = prepared(run)
        state = run.state_dict()
        run.load_state_dict(within(1 << 60, "loaders", 0, "batch")(state))
        assert not list(train(parts, run))
        assert len(list(train(parts, run))) == SAMPLES


# -- workers that do not load the same ---------------------------------------------------------------------------------


def loads(fabric: str, what: str) -> str:
    """Rank 1 loads something else than the others; what each is told."""
    plan = offbeat.Plan(fabric=offbeat.Elastic()) if fabric == "elastic" else offbeat.Plan()
    with offbeat.init(plan) as run:
        parts = prepared(run)
        list(train(parts, run, stop=3))
        state = run.state_dict()
        if run.rank == 1 and what == "step":
            state["models"][0]["step"] += 2
        if run.rank == 1 and what == "weight":
            with torch.no_grad():
                parts[0].module.weight += 1
        with pytest.raises(DisagreementError) as caught:
            run.load_state_dict(state)
        return str(caught.value)


@pytest.mark.parametrize(
    ("fabric", "what"), [("gloo", "weight"), ("elastic", "step"), slow("gloo", "step"), slow("elastic", "weight")]
)
def test_who_loads_another_checkpoint_is_named(fabric: str, what: str) -> None:
    for text in run_workers(3, loads, fabric, what):
        assert "The checkpoint differs between workers: rank 1 against rank 0" in text
        assert f"rank 1 has '{what} " in text


# -- where the data is -------------------------------------------------------------------------------------------------


def part(state: dict[str, Any] | None, batch: int, stop: int | None) -> tuple[list[int], dict[str, Any], list[str]]:
    said = listen()
    with offbeat.init() as run:
        parts = prepared(run, batch)
        if state is not None:
            run.load_state_dict(state)
        used = []
        if stop is None:
            return list(train(parts, run)), {}, said
        for sample in train(parts, run):
            used.append(sample)
            if len(used) == stop * batch:
                return used, run.state_dict(), said
    raise AssertionError


@pytest.mark.parametrize(("before", "after"), [((2, 4), (2, 6)), slow((3, 4), (2, 2)), slow((2, 4), (3, 3))])
def test_with_other_batches_each_sample_is_used(before: tuple[int, int], after: tuple[int, int]) -> None:
    first = run_workers(before[0], part, None, before[1], 3)
    second = run_workers(after[0], part, first[0][1], after[1], None)
    seen = Counter(sample for used, _, _ in [*first, *second] for sample in used)
    assert set(seen) == set(range(SAMPLES))
    (text,) = [text for _, _, said in second for text in said if "The checkpoint was made by" in text]
    assert f"with batches of {before[1]}, and this run has {after[0]} with {after[1]}" in text
    twice = sum(seen.values()) - SAMPLES
    assert (f"but for {twice} samples that come twice" in text) is (twice > 0)


@pytest.mark.parametrize(("before", "after"), [(1, 2), slow(2, 1)])
def test_who_was_or_is_alone_begins_the_epoch_anew(before: int, after: int) -> None:
    first = run_workers(before, part, None, 4, 3)
    second = run_workers(after, part, first[0][1], 4, None)
    assert Counter(sample for used, _, _ in second for sample in used) == Counter(range(SAMPLES))
    assert [text for _, _, said in second for text in said if "epoch 0 begins anew" in text]


def in_other_data() -> str:
    with offbeat.init() as run:
        prepared(run)
        with pytest.raises(ModelError) as caught:
            run.load_state_dict(within(SAMPLES + 1, "loaders", 0, "samples")(run.state_dict()))
        return str(caught.value)


def test_a_place_in_other_data_is_refused() -> None:
    for text in run_workers(2, in_other_data):
        assert f"with {SAMPLES} samples: the checkpoint was made with {SAMPLES + 1}" in text
