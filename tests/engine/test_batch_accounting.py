"""What counts of the batches that were drawn."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.engine.batch_accounting import BatchAccount, BatchCounts
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from types import FrameType

    from _typeshed import TraceFunction


def drawn(*sizes: int) -> BatchAccount:
    share = BatchAccount()
    for size in sizes:
        share.draw(real=True, source=0, samples=size)
    return share


def test_what_is_given_up_weighs_nothing() -> None:
    share = drawn(64)
    share.give_up()
    share.draw(real=True, source=0, samples=32)
    assert share.samples == 32
    share.exchanged()
    assert share.samples == 32, "a second exchange with the same batch"


def test_what_a_step_of_its_own_used_is_not_given_up() -> None:
    share = drawn(64)
    share.stepped()
    share.draw(real=True, source=0, samples=32)
    share.give_up()
    assert share.samples == 64


def test_a_step_that_was_left_out_after_its_backward_weighs_nothing() -> None:
    share = drawn(64)
    share.backward()
    share.draw(real=True, source=0, samples=32)
    share.cleared()
    assert share.samples == 32
    assert share.weight == 1.0


def test_what_is_put_back_weighs_nothing() -> None:
    share = BatchAccount()
    share.draw(real=True, source=0, weight=1.0, samples=4)
    share.computed()
    share.draw(real=False, source=0, weight=0.0)
    assert share.uncomputed == 1
    share.put_back(BatchCounts(1))
    assert (share.weight, share.samples, share.uncomputed) == (1.0, 4, 0)
    share.forward()  # of the batch before: it is the only one


def test_of_several_batches_it_cannot_be_told_which_is_trained_if_one_does_not_count() -> None:
    share = drawn(4)
    share.draw(real=False, source=0, weight=0.0)
    with pytest.raises(ModelError, match="2 were drawn before this forward pass"):
        share.forward()


def test_a_batch_that_is_computed_a_second_time_weighs_once() -> None:
    share = drawn(64)
    share.backward()  # such as a generator's, through this model
    share.cleared()
    assert share.samples == 64


def test_what_a_step_of_its_own_used_is_not_counted_again_when_gradients_are_cleared() -> None:
    share = drawn(64)
    share.backward()
    share.draw(real=True, source=0, samples=32)  # ahead of the step
    share.stepped()
    share.draw(real=True, source=0, samples=16)
    share.cleared()
    assert share.samples == 64 + 32 + 16


def test_what_is_on_its_way_is_in_no_step() -> None:
    share = drawn(4, 4)
    share.sent()
    assert share.unlanded == 2
    share.exchanged()
    assert share.unlanded == 2
    share.draw(real=True, source=0, samples=4)
    assert share.unlanded == 3
    share.landed()
    assert share.unlanded == 1
    share.exchanged()
    assert share.unlanded == 0


def test_what_is_on_its_way_is_counted_once_whenever_another_thread_looks() -> None:
    """Looked at between any two lines of the thread that trains."""
    share, seen = drawn(4), list[int]()

    def look(frame: FrameType, event: str, argument: Any) -> TraceFunction:
        sys.settrace(None)
        seen.append(share.unlanded)
        sys.settrace(look)
        return look

    sys.settrace(look)
    try:
        share.sent()
        share.exchanged()
        sys.settrace(None)
    finally:
        sys.settrace(None)
    assert len(seen) > 5
    assert set(seen) == {1}
