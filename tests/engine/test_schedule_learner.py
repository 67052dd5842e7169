"""The profile that a scheduler plans from is of the slowest worker, and of what was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from torch import nn

from offbeat.engine.pass_clock import PassClock
from offbeat.engine.schedule_learner import Measured, ScheduleLearner, fitted
from offbeat.engine.schedule_monitor import agreed, to_text
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


class OnDevices(nn.Module):
    """One parameter on the CPU, and as many as are told on other devices."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.empty(2, device=device) for device in devices)


def told(*devices: str) -> str:
    """What a worker with parameters on these tells of its steps, when the schedule is to be made anew."""
    watching = learner(OnDevices(*devices))
    times = [0.01] * len(devices)
    found = watching.profile([Measured(times, times, 0.02, 0.04, [0.1, 0.2, 0.3], 0.0)])
    watching.close()
    return to_text(found)


def test_workers_whose_devices_have_other_names_have_the_same_gradients() -> None:
    """Of several workers on one host each has a GPU of its own."""
    both = agreed({0: told("cpu", "cpu", "meta"), 1: told("meta", "meta", "cpu")})
    assert [one.kind for one in both.gradients] == ["torch.float32 device 0"] * 2 + ["torch.float32 device 1"]


def test_gradients_on_two_devices_are_not_those_of_one() -> None:
    with pytest.raises(DisagreementError, match="rank 1 has 2 gradients that are not those of rank 0"):
        agreed({0: told("cpu", "meta"), 1: told("cpu", "cpu")})


class Instant:
    """A communicator whose exchanges take no time."""

    def start(self, payload: object) -> object:
        return payload

    def wait(self, started: object, what: str) -> None:
        pass


def watched() -> ScheduleLearner:
    """A learner that has seen enough."""
    model, clock = network(), SetClock()
    watching = learner(model, clock)
    for _ in range(7):
        watching.forward_begins()
        model(torch.ones(1, 4))
        watching.backward_begins()
        for name in ("1.weight", "1.bias", "0.weight", "0.bias"):
            clock.now += 0.01
            watching.complete(name)
        watching.backward_ends()
    return watching


GOOD = measured([0.0] * 4)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (b"", "rank 1 has told cannot be read .*Run the same offbeat on all workers"),
        (b'{"ready_s":[0.1]}', "rank 1 has told cannot be read"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, exchanges_s=[0.1])), "rank 1 has told 1 exchanges"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, gap_s=-1.0)), "rank 1 has told a time of -1.0 s"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, needed_s=[-3.0] * 4)), "rank 1 has told a time of -3.0 s"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, ready_s=[float("nan")] * 4)), "cannot be read"),
        (msgspec.json.encode(measured([0.0] * 3)), "do not have the same gradients"),
    ],
)
def test_a_worker_that_tells_what_cannot_be_is_named(theirs: bytes, why: str) -> None:
    watching = watched()
    control = SimpleNamespace(texts=lambda question, mine: {0: mine, 1: theirs.decode()})
    with pytest.raises(DisagreementError, match=why):
        watching.agree(Instant(), control)  # type: ignore[arg-type]
    watching.close()


@pytest.mark.parametrize("seconds", [[0.0, 0.0, 0.0], [3.0, 2.0, 1.0], [1e-9, 1e-9, 1e-9]])
def test_a_clock_that_stands_or_steps_back_makes_no_nonsense(seconds: list[float]) -> None:
    latency_s, bandwidth = fitted([1 << 16, 1 << 18, 1 << 20], seconds)
    assert latency_s >= 0
    assert 0 < bandwidth < float("inf")
