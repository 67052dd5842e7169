"""The profile that a scheduler plans from is of the slowest worker, and of what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from offbeat.engine.pass_clock import PassClock
from offbeat.engine.schedule_learner import Measured, ScheduleLearner, fitted
from offbeat.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Callable


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now


def learner(model: nn.Module | None = None, clock: SetClock | None = None) -> ScheduleLearner:
    model = model or network()
    return ScheduleLearner(model, dict(model.named_parameters()), (clock or SetClock()).now_s)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def measured(
    ready_s: list[float], exchanges_s: tuple[float, float, float] = (0.065536, 0.262144, 1.048576), gap_s: float = 0.0
) -> Measured:
    return Measured(ready_s, [0.0, 0.0, 0.01, 0.01], 0.02, 0.04, list(exchanges_s), gap_s)


def test_of_times_the_latest_counts_and_of_links_the_slowest() -> None:
    fast, slow = measured([0.04, 0.04, 0.02, 0.02]), measured([0.03, 0.03, 0.03, 0.03], (0.14, 0.53, 2.1), gap_s=0.004)
    with_both = learner()
    profile = with_both.profile([fast, slow])
    with_both.close()
    by_name = {one.name: one.ready_s for one in profile.gradients}
    assert by_name == {"0.weight": 0.04, "0.bias": 0.04, "1.weight": 0.03, "1.bias": 0.03}
    assert profile.bandwidth == pytest.approx(5e5, rel=0.02)
    assert profile.gap_s == 0.004
    assert profile.forward_s == pytest.approx(0.02)


def test_backward_is_over_before_its_gradients_are_waited_for() -> None:
    model, clock, x = network(), SetClock(), torch.ones(1, 4)
    watching = learner(model, clock)
    for _ in range(7):
        watching.forward_begins()
        model(x)
        watching.backward_begins()
        for name in ("1.weight", "1.bias", "0.weight", "0.bias"):
            clock.now += 0.01
            watching.complete(name)
        watching.backward_ends()
        clock.now += 1.0  # the exchange
    assert watching.is_done
    assert watching.lacking == []
    assert watching._backward_s == pytest.approx([0.04] * 5)
    watching.close()


class DeviceClock(PassClock):
    """A device that comes to what it was told only when it is waited for, a second for each mark."""

    def __init__(self, device: torch.device, now_s: Callable[[], float]) -> None:
        super().__init__(device, now_s)
        self.told = self.reached = 0

    def mark(self) -> int:
        self.told += 1
        return self.told

    def settle(self) -> None:
        self.reached = self.told

    def between_s(self, earlier: int, later: int) -> float:
        assert max(earlier, later) <= self.reached, "the device has not come to it"
        return float(later - earlier)


def test_times_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has said all long before: what counts is when the device comes to it."""
    monkeypatch.setattr("offbeat.engine.schedule_learner.PassClock", DeviceClock)
    model, x = network(), torch.ones(1, 4)
    watching = learner(model)
    for _ in range(7):
        watching.forward_begins()
        model(x)
        watching.backward_begins()
        for name in ("1.weight", "1.bias", "0.weight", "0.bias"):
            watching.complete(name)
        watching.backward_ends()
    found = watching.profile([watching.measured(0.0, 1e9)])
    watching.close()
    # Marks of a pass: it begins, the model, its first layer, its second, and backward begins.
    assert found.forward_s == 2.0, "from the first that is needed on"
    assert [one.name for one in found.gradients] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert {one.name: one.ready_s for one in found.gradients} == {
        "1.weight": 1.0, "1.bias": 2.0, "0.weight": 3.0, "0.bias": 4.0,
    }  # fmt: skip
    assert found.backward_s == 5.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_event_on_cuda_is_where_the_device_is() -> None:
    clock = PassClock(torch.device("cuda", 0), lambda: 0.0)
    began = clock.mark()
    torch.cuda._sleep(100_000_000)
    ended = clock.mark()
    clock.settle()
    assert clock.between_s(began, ended) > 0.01


def test_workers_with_other_gradients_make_no_schedule() -> None:
    watching = learner()
    with pytest.raises(DisagreementError, match="do not have the same gradients"):
        watching.profile([measured([0.0] * 4), measured([0.0] * 3)])
    watching.close()


@pytest.mark.parametrize("seconds", [[0.0, 0.0, 0.0], [3.0, 2.0, 1.0], [1e-9, 1e-9, 1e-9]])
def test_a_clock_that_stands_or_steps_back_makes_no_nonsense(seconds: list[float]) -> None:
    latency_s, bandwidth = fitted([1 << 16, 1 << 18, 1 << 20], seconds)
    assert latency_s >= 0
    assert 0 < bandwidth < float("inf")
