"""Averages that are applied an interval later, or of a part of the model: nothing is lost, whatever comes between."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.codec import Cast
from offbeat.errors import ModelError
from offbeat.sync import LocalSGD, OuterSGD
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.codec import Codec

WORLD = 3
DELAYED = LocalSGD(4, delay=1, fragments=2)


class Known(nn.Module):
    """Its gradients are what it is called with: steps of 1 add them up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given[:5] @ self.first + given[5:] @ self.second

    @property
    def moved(self) -> torch.Tensor:
        return -torch.cat([self.first, self.second]).detach()


def emitted(rank: int, step: int) -> torch.Tensor:
    return torch.randn(10, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)


def see_anchors(policy: LocalSGD) -> tuple[torch.Tensor, dict[str, torch.Tensor], bool]:
    model = Known()
    with offbeat.init(offbeat.Plan(sync=policy)) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(7):
            replica(emitted(run.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        one = run._session.models.synchronizers[0]
        anchors = {name: anchor.clone() for name, anchor in one.anchors.items()}
        before = model.moved
        run.settle()
        return before, anchors, all(torch.equal(one.anchors.get(n, p), p) for n, p in model.named_parameters())


@pytest.mark.parametrize("policy", [LocalSGD(3), LocalSGD(3, delay=1), DELAYED], ids=repr)
def test_what_all_have_in_common_is_known_while_nothing_is_settled(policy: LocalSGD) -> None:
    (first, anchors, settled), (second, others, also) = run_workers(2, see_anchors, policy)
    assert not torch.equal(first, second)
    assert set(anchors) == (set() if policy.loss_class == "local" else {"first", "second"})
    assert all(torch.equal(anchors[name], others[name]) for name in anchors)
    assert settled
    assert also


def add_up(policy: LocalSGD, codec: Codec, steps: int, settles: tuple[int, ...]) -> torch.Tensor:
    """All that was given, as it is in the parameters in the end."""
    model = Known()
    with offbeat.init(offbeat.Plan(sync=policy, codec=codec)) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(steps):
            replica(emitted(run.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in settles:
                run.settle()
        run.settle()
        return model.moved


@pytest.mark.slow
@pytest.mark.parametrize("policy", [LocalSGD(3, delay=1), LocalSGD(4, fragments=2), DELAYED], ids=repr)
@pytest.mark.parametrize("settles", [(), (3, 4, 8)], ids=["to the end", "settled now and then"])
def test_what_all_have_done_is_in_the_parameters_once(policy: LocalSGD, settles: tuple[int, ...]) -> None:
    results = run_workers(WORLD, add_up, policy, offbeat.Dense(), 13, settles)
    expected = sum(emitted(rank, step) for rank in range(WORLD) for step in range(13)) / WORLD
    for moved in results:
        assert torch.equal(moved, results[0])
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)


def test_in_16_bits_it_is_lost_to_rounding_alone() -> None:
    results = run_workers(WORLD, add_up, DELAYED, Cast("bf16"), 13, ())
    expected = sum(emitted(rank, step) for rank in range(WORLD) for step in range(13)) / WORLD
    for moved in results:
        assert torch.equal(moved, results[0])
        torch.testing.assert_close(moved, expected, rtol=0.02, atol=0.1)


# -- what does not count ---------------------------------------------------------------------------------------------


def poison(at: int) -> tuple[list[float], list[str]]:
    """The change of rank 1 is NaN from step `at` on; each other step moves by -1."""
    told, model = listen(), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    values = []
    with offbeat.init(offbeat.Plan(sync=LocalSGD(2, delay=1), nonfinite="skip")) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(8):
            replica(torch.ones(1, 1)).sum().backward()
            if (run.rank, step) == (1, at):
                model.weight.data.fill_(float("nan"))
            optimizer.step()
            optimizer.zero_grad()
            values.append(float(model.weight.detach()))
        run.settle()
        return [*values, float(model.weight.detach())], told


def test_a_change_that_is_nan_is_given_up_and_its_worker_goes_on() -> None:
    (first, _), (second, told) = run_workers(2, poison, 2)
    assert first[-1] == second[-1] == -8.0, "of steps 2 and 3 rank 0's count for both"
    assert second[2:4] == pytest.approx([float("nan"), -2.0], nan_ok=True), "back where the anchor is"
    assert [text for text in told if "NaN" in text] == [
        "step 3: the change of weight holds NaN or Inf on this worker; it is left out."
    ]


def uneven() -> float:
    """Rank 1 has a third of the batches."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    data = [torch.ones(1, 1).double()] * (6 if rank == 0 else 2)
    with offbeat.init(offbeat.Plan(sync=LocalSGD(3, delay=1))) as run:
        replica, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), data)
        for x in loader:
            (replica(x) * (1.0 if rank == 0 else -1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
    return float(model.weight.detach())


def test_who_has_less_data_counts_less() -> None:
    # Of the first three steps rank 1 makes two, of the next none: (3 * -3 + 2 * 2) / 5, and then -3.
    for value in run_workers(2, uneven):
        assert value == pytest.approx((3 * -3 + 2 * 2) / 5 - 3)


# -- buffers ---------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """A buffer that each worker moves by its own rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, by: float) -> torch.Tensor:
        self.seen = self.seen + by  # another tensor each time
        return self.weight.sum()


def count_seen() -> tuple[list[float], float]:
    model, seen = Counts(), []
    with offbeat.init(offbeat.Plan(sync=LocalSGD(4, delay=1, fragments=2))) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(8):
            replica(1.0 + run.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(model.seen))
        run.settle()
        return seen, float(model.seen)


def test_buffers_travel_with_the_last_fragment() -> None:
    (first, settled), (second, other) = run_workers(2, count_seen)
    assert first == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    # Sent behind step 3, and taken over behind step 5.
    assert second == [2.0, 4.0, 6.0, 8.0, 10.0, 4.0, 6.0, 8.0]
    assert settled == other == 8.0


def resume_with_buffers(stop: int) -> bool:
    """Stop while an average is on its way, with BatchNorm statistics."""

    def go(state: Any, first: int, last: int | None) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        plan = offbeat.Plan(sync=LocalSGD(4, outer=OuterSGD(), delay=1, fragments=2))
        with offbeat.init(plan) as run:
            replica, optimizer = run.prepare(net, optimizer)
            if state is not None:
                net.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
                run.load_state_dict(state[2])
            for step in range(12)[first:last]:
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + run.rank))
                replica(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            saved = copy.deepcopy([net.state_dict(), optimizer.state_dict(), run.state_dict()])
            run.settle()
            return [*saved, copy.deepcopy(net.state_dict())]

    whole = go(None, 0, None)
    resumed = go(go(None, 0, stop)[:3], stop, None)
    return all(torch.equal(tensor, resumed[i][name]) for i in (0, 3) for name, tensor in whole[i].items())


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 5, 7])
def test_what_is_on_its_way_is_in_a_checkpoint(stop: int) -> None:
    assert run_workers(2, resume_with_buffers, stop) == [True] * 2


def resume_otherwise(policy: LocalSGD) -> tuple[str, float]:
    """With other fragments than the state was written with."""
    states: list[Any] = []
    for plan in (offbeat.Plan(sync=LocalSGD(4, delay=1, fragments=2)), offbeat.Plan(sync=policy)):
        model = Known()
        with offbeat.init(plan) as run:
            replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            if states:
                model.load_state_dict(states[0])
                try:
                    run.load_state_dict(states[1])
                except ModelError as error:
                    return str(error), 0.0
            for _ in range(3):
                replica(torch.ones(10, dtype=torch.float64)).backward()
                optimizer.step()
                optimizer.zero_grad()
            states += copy.deepcopy([model.state_dict(), run.state_dict()])
            run.settle()
    return "", float(model.moved.mean())


@pytest.mark.slow
@pytest.mark.parametrize("policy", [LocalSGD(4, delay=1), LocalSGD(2), LocalSGD(2, fragments=2)], ids=repr)
def test_a_checkpoint_of_other_fragments_is_refused_or_loses_nothing(policy: LocalSGD) -> None:
    for refusal, moved in run_workers(2, resume_otherwise, policy):
        if policy.fragments == 1:
            assert "a part is on its way to an average" in refusal
            assert "run.settle()" in refusal
        else:
            assert (refusal, moved) == ("", 6.0)


# -- workers that go -------------------------------------------------------------------------------------------------


def die(folder: str, lost: int) -> list[float]:
    """One is killed when it has sent an average that no other has; steps of each are of its rank and one more."""
    sent = Path(folder) / "sent"
    model = nn.Linear(50, 1, bias=False)
    nn.init.zeros_(model.weight)
    with offbeat.init(offbeat.Plan(sync=LocalSGD(2, delay=1), fabric=offbeat.Elastic()), timeout=3.0) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        values = []
        for step in range(8):
            while run.rank != lost and step == 3 and not sent.exists():
                time.sleep(0.01)
            replica(torch.ones(1, 50)).sum().mul(1.0 + run.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (run.rank, step) == (lost, 3):
                sent.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            values.append(float(model.weight.detach()[0, 0]))
        run.settle()
        return [*values, float(model.weight.detach()[0, 0])]


@pytest.mark.parametrize("lost", [0, 1])
def test_an_average_on_its_way_goes_on_without_a_worker_that_is_killed(lost: int, tmp_path: Path) -> None:
    results = run_workers(3, die, str(tmp_path), lost, faulty=lost)
    left = [rank for rank in range(3) if rank != lost]
    mean = sum(1.0 + rank for rank in left) / 2
    for rank in left:
        assert results[rank][-1] == pytest.approx(-2 * 2.0 - 6 * mean), "steps 0 and 1 are of all three"
        # Behind step 5 it has the mean of all that was sent by step 3, and its own two steps.
        assert results[rank][5] == pytest.approx(-2 * 2.0 - 2 * mean - 2 * (1.0 + rank))


def leave_unsettled(fabric: Any) -> tuple[bool, list[str]]:
    """The run ends while an average is on its way, of which rank 1 has been far behind."""
    told, model = listen(), nn.Linear(300, 300)
    with offbeat.init(offbeat.Plan(sync=LocalSGD(2, delay=1), fabric=fabric)) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            time.sleep(0.1 * run.rank)
            replica(torch.ones(1, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return bool(torch.isfinite(model.weight).all()), told


@pytest.mark.parametrize("fabric", [offbeat.ProcessGroup(), offbeat.Elastic()], ids=repr)
def test_a_run_may_end_with_an_average_on_its_way(fabric: Any) -> None:
    assert run_workers(2, leave_unsettled, fabric) == [(True, [])] * 2


# -- what it is for --------------------------------------------------------------------------------------------------


def wait(policy: LocalSGD) -> float:
    """Seconds that rank 0 waits for rank 1, which is late in one interval and early in the next."""
    model = nn.Linear(10, 1)
    with offbeat.init(offbeat.Plan(sync=policy)) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before_s = 0.0
        for step in range(16):
            if step == 4:
                before_s = run._session.waiter.waited_s
            late = (step // 2) % 2 == run.rank
            time.sleep(0.15 if late else 0.0)
            replica(torch.ones(1, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        waited_s = run._session.waiter.waited_s - before_s
        run.settle()
        return waited_s


@pytest.mark.slow
def test_who_is_late_in_turns_is_waited_for_without_a_delay_alone() -> None:
    (at_once, *_), (delayed, *_) = (sorted(run_workers(2, wait, LocalSGD(2, delay=delay))) for delay in (0, 1))
    assert at_once > 0.6, "0.3 s in each second interval of six"
    assert delayed < at_once / 2


@pytest.mark.parametrize("make", [lambda: LocalSGD(8, delay=1), lambda: LocalSGD(8, delay=1, fragments=4)])
def test_it_is_a_policy_as_any_other(make: Callable[[], LocalSGD]) -> None:
    policy = make()
    assert offbeat.Plan(sync=policy).digest != offbeat.Plan(sync=LocalSGD(8)).digest
    assert eval(repr(policy)) == policy
