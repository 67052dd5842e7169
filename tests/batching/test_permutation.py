"""The order of an epoch is a permutation, a good one, and the same for ever."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.batching.permutation import shuffled


def order(samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return [int(index) for index in shuffled(np.arange(samples), samples=samples, seed=seed, epoch=epoch)]


@pytest.mark.parametrize("samples", [*range(1, 30), 255, 256, 257, 4096, 9999, 65_537])
def test_every_sample_comes_once(samples: int) -> None:
    assert sorted(order(samples, seed=samples)) == list(range(samples))


def test_it_is_the_same_for_ever() -> None:
    """Checkpoints depend on it: whoever changes these numbers gives the permutation a new name in its key."""
    assert order(10) == [2, 5, 1, 3, 0, 9, 4, 6, 8, 7]
    assert order(10, seed=-(2**70), epoch=3) == [6, 7, 0, 3, 2, 8, 1, 4, 9, 5]
    far = shuffled(np.arange(10**9 - 3, 10**9), samples=10**9, seed=1, epoch=2)
    assert far.tolist() == [852994834, 725303279, 968572521]
    digest = hashlib.sha256(np.array(order(50_000, seed=7, epoch=1), dtype="<i8").tobytes()).hexdigest()
    assert digest == "5812a1dbdcef11c325d42bc6cba380a544d51b80e9da617d9949d7af33ccbe92"


def as_described(position: int, samples: int, seed: int, epoch: int) -> int:
    """The recipe in the module's docstring, step by step, without numpy."""
    stream = hashlib.shake_256(f"offbeat order 1 {seed} {epoch}".encode()).digest(128)
    keys = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, 128, 8)]
    rows = next(a for a in itertools.count(2, 2) if a * a >= samples)
    columns = math.ceil(samples / rows)

    def mixed(value: int) -> int:
        value %= 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    cell = position
    while True:
        row, column = divmod(cell, columns)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                row = (row + mixed(column + key)) % rows
            else:
                column = (column + mixed(row + key)) % columns
        cell = row * columns + column
        if cell < samples:
            return cell


@pytest.mark.parametrize("samples", [1, 2, 9, 1000, 123_457])
def test_it_is_made_as_described(samples: int) -> None:
    positions = np.arange(max(0, samples - 300), samples)
    made = shuffled(positions, samples=samples, seed=11, epoch=4)
    assert made.tolist() == [as_described(int(position), samples, 11, 4) for position in positions]


@given(st.integers(1, 2**62), st.integers(), st.integers(0, 2**40), st.data())
@settings(max_examples=60, derandomize=True)
def test_any_part_can_be_had_by_itself(samples: int, seed: int, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, samples - 1))
    positions = np.arange(start, min(samples, start + 20))
    whole = shuffled(positions, samples=samples, seed=seed, epoch=epoch)
    assert whole.dtype == np.int64
    assert len(set(whole.tolist())) == len(positions)
    assert whole.min() >= 0
    assert whole.max() < samples
    single = [shuffled(positions[i : i + 1], samples=samples, seed=seed, epoch=epoch)[0] for i in range(len(positions))]
    assert whole.tolist() == single


def test_positions_are_left_as_they_are() -> None:
    positions = np.arange(50)
    shuffled(positions, samples=50, seed=0, epoch=0)
    assert positions.tolist() == list(range(50))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [2, 3, 5, 6])
def test_all_orders_of_few_samples_are_as_likely(samples: int) -> None:
    """Chi-square against equal likelihood; five standard deviations are never reached by chance."""
    epochs, orders = 1500, math.factorial(samples)
    counts = Counter(tuple(order(samples, seed=3, epoch=epoch)) for epoch in range(epochs))
    expected = epochs / orders
    off = sum((counts[one] - expected) ** 2 / expected for one in itertools.permutations(range(samples)))
    assert abs(off - (orders - 1)) < 5 * math.sqrt(2 * (orders - 1))


@pytest.mark.parametrize("samples", [97, 1000, 20_000])
def test_neighbours_and_epochs_know_nothing_of_each_other(samples: int) -> None:
    epochs, bins = 60, 32
    steps, same, before = np.zeros(bins), 0, np.full(samples, -1)
    for epoch in range(epochs):
        now = np.array(order(samples, seed=5, epoch=epoch))
        steps += np.bincount((np.diff(now) % samples) * bins // samples, minlength=bins)
        same += int((now == before).sum())
        before = now
    # A step is any but 0, each as likely.
    width = np.bincount(np.arange(1, samples) * bins // samples, minlength=bins) / (samples - 1)
    expected = width * steps.sum()
    assert ((steps - expected) ** 2 / expected).sum() < bins - 1 + 5 * math.sqrt(2 * (bins - 1))
    assert abs(same - (epochs - 1)) < 5 * math.sqrt(epochs), "a sample is where it was about once per epoch"
