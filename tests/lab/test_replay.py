"""Replays: gradients come at the times of a real backward, in its order, and a wrong sum is found."""

from __future__ import annotations

import math
import statistics
import time

import pytest
import torch

from offbeat.errors import NumericsError
from offbeat.lab import gradient_check
from offbeat.lab.replay import ReplayModel, SleepPacer, emitting
from offbeat.model_profiles import TimedLayer
from offbeat.scenario import Replay
from offbeat.straggler_model import jitter

LAYERS = [
    TimedLayer("first", ((4, 3), (4,)), 0.01, 0.03),
    TimedLayer("second", ((5,),), 0.02, 0.06),
    TimedLayer("third", ((2, 2), ()), 0.0, 0.02),
]
FORWARD_S, BACKWARD_S = 0.03, 0.11


def models(world: int = 1, compute_factor: float = 1.0) -> list[ReplayModel]:
    return [ReplayModel(LAYERS, rank=rank, compute_factor=compute_factor) for rank in range(world)]


def run(model: ReplayModel, step: int) -> None:
    model.set_step(step)
    model(torch.zeros(1, requires_grad=True)).sum().backward()


def check(model: ReplayModel, *, world: int, tolerance: float | None) -> tuple[float, str]:
    return gradient_check.check(emitting(model), world=world, tolerance=tolerance)


def averaged(world: int, step: int) -> ReplayModel:
    """The first rank's model after a step whose gradients were averaged rightly, by hand."""
    ranks = models(world, compute_factor=0.01)
    for model in ranks:
        run(model, step)
    for same in zip(*(model.parameters() for model in ranks), strict=True):
        grads = [parameter.grad for parameter in same]
        assert all(grad is not None for grad in grads)
        same[0].grad = torch.stack([grad for grad in grads if grad is not None]).mean(0)
    return ranks[0]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_hooks_fire_layer_by_layer_at_their_times(factor: float) -> None:
    (model,) = models(compute_factor=factor)
    fired: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append((name, time.perf_counter())))
    model.set_step(0)
    start_s = time.perf_counter()
    loss = model(torch.zeros(1, requires_grad=True)).sum()
    forward_s = time.perf_counter() - start_s
    loss.backward()
    layers = [name.split(".")[0] for name, _ in fired]
    assert layers == ["third", "third", "second", "first", "first"]
    assert forward_s >= FORWARD_S * factor * 0.99
    # No earlier than the layers behind it allow, by the longest; how much later is the machine's affair. From the very
    # start: what the forward pass overslept is taken off the backward pass.
    times = {name.split(".")[0]: at_s - start_s for name, at_s in fired}
    assert times["third"] >= (FORWARD_S + 0.02) * factor * 0.99
    assert times["second"] >= (FORWARD_S + 0.08) * factor * 0.95
    assert times["first"] >= (FORWARD_S + BACKWARD_S) * factor * 0.95


def test_oversleeping_is_made_up_for() -> None:
    """A layer that took 0.15 s too long leaves the next ones shorter; the sum is what it should be."""
    pace = SleepPacer(1.0)
    start_s = time.perf_counter()
    time.sleep(0.2)
    pace.layer(0.05, start_s)
    for _ in range(5):
        pace.layer(0.05, time.perf_counter())
    taken_s = time.perf_counter() - start_s
    assert taken_s >= 0.2999
    assert taken_s < 0.42, "the 0.15 s were not made up for"


def test_consecutive_steps_and_ranks_have_their_own_gradients() -> None:
    first, second = models(2, compute_factor=0.01)
    run(first, 0)
    run(second, 0)
    one = [parameter.grad.clone() for parameter in first.parameters() if parameter.grad is not None]
    other = [parameter.grad for parameter in second.parameters() if parameter.grad is not None]
    assert len(one) == len(other) == 5
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    first.zero_grad()
    run(first, 1)
    later = [parameter.grad for parameter in first.parameters() if parameter.grad is not None]
    assert not any(torch.equal(a, b) for a, b in zip(one, later, strict=True))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_right_mean_passes(world: int) -> None:
    error, digest = check(averaged(world, 3), world=world, tolerance=1e-5)
    assert error < 1e-6
    assert len(digest) == 64


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda grad: grad + 1e-3, "first.weights.0"),
        (lambda grad: grad * 4, "first.weights.0"),  # a sum where a mean should be
        (lambda grad: grad * 0, "first.weights.0"),
        (lambda grad: grad * float("nan"), "first.weights.0"),
    ],
)
def test_a_wrong_mean_is_found(spoil: object, name: str) -> None:
    assert callable(spoil)
    model = averaged(4, 0)
    parameter = next(model.parameters())
    parameter.grad = spoil(parameter.grad)
    with pytest.raises(NumericsError, match=f"the mean gradient of {name} is wrong by"):
        check(model, world=4, tolerance=1e-5)


def test_the_gradient_of_another_step_is_found() -> None:
    model = averaged(2, 0)
    model.set_step(1)
    with pytest.raises(NumericsError, match="is wrong by"):
        check(model, world=2, tolerance=1e-5)


def test_one_that_was_not_averaged_is_found() -> None:
    first, _ = models(2, compute_factor=0.01)
    run(first, 0)
    with pytest.raises(NumericsError, match="is wrong by"):
        check(first, world=2, tolerance=1e-5)


def test_a_lost_gradient_is_found() -> None:
    model = averaged(2, 0)
    model.get_parameter("second.weights.0").grad = None
    with pytest.raises(NumericsError, match=r"second\.weights\.0 got no gradient"):
        check(model, world=2, tolerance=1e-5)


def test_lossy_systems_must_still_be_finite() -> None:
    model = averaged(2, 0)
    parameter = next(model.parameters())
    assert parameter.grad is not None
    parameter.grad += 100
    assert check(model, world=2, tolerance=None)[0] > 99
    parameter.grad[0, 0] = float("inf")
    with pytest.raises(NumericsError, match="is wrong by inf"):
        check(model, world=2, tolerance=None)
    parameter.grad[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="is wrong by nan"):
        check(model, world=2, tolerance=None)


def test_jitter_is_each_steps_own_and_the_same_for_every_row() -> None:
    drawn = [jitter(0.3, rank, step) for rank in range(4) for step in range(2000)]
    assert drawn == [jitter(0.3, rank, step) for rank in range(4) for step in range(2000)]
    assert len(set(drawn)) == len(drawn)
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(0.3, rel=0.05)
    assert jitter(0.0, 1, 2) == 1.0


def test_a_replay_takes_as_long_as_its_jitter_says() -> None:
    # Which steps are among the longest and the shortest is known beforehand.
    factors = [jitter(0.5, 3, step) for step in range(40)]
    order = sorted(range(40), key=factors.__getitem__)
    model = ReplayModel(LAYERS, rank=3, compute_factor=1.0, sigma=0.5)
    for step in (order[0], order[-1]):
        start_s = time.perf_counter()
        run(model, step)
        wanted_s = (FORWARD_S + BACKWARD_S) * factors[step]
        assert wanted_s * 0.97 <= time.perf_counter() - start_s <= wanted_s + 0.1
    assert factors[order[-1]] > 2 * factors[order[0]]


# -- what a server made of it ------------------------------------------------------------------------------------------


def trained(counts: list[list[int]], batch: int, lr: float = 0.1) -> ReplayModel:
    """The first rank's model after plain SGD with every rank's gradient of every step, by hand."""
    ranks = models(len(counts), compute_factor=0.0)
    with torch.no_grad():
        for step in range(len(counts[0])):
            for model, own in zip(ranks, counts, strict=True):
                model.set_step(step)
                patterns: list[torch.Tensor] = [p for layer in model for p in layer.pattern]  # type: ignore[union-attr]
                for parameter, pattern, (_, _, factor) in zip(
                    ranks[0].parameters(), patterns, emitting(model), strict=True
                ):
                    parameter.sub_(pattern, alpha=lr * factor * own[step] / (batch * len(counts)))
    return ranks[0]


def sums(counts: list[list[int]], batch: int) -> list[float]:
    factors = [1.0, 1.25, 0.75, 1.5]
    return [sum(factors[i % 4] * n for i, n in enumerate(own)) / (batch * len(counts)) for own in counts]


def test_what_a_server_applied_is_known_from_the_parameters() -> None:
    counts = [[8, 8, 10, 9, 10], [8, 8, 6, 7, 6]]
    error, _ = gradient_check.check_sum(emitting(trained(counts, 8)), sums(counts, 8), lr=0.1, steps=5, tolerance=1e-5)
    assert error < 1e-5


@pytest.mark.parametrize("change", [-8, 8], ids=["lost", "twice"])
def test_one_contribution_too_few_or_too_many_is_found(change: int) -> None:
    counts = [[8] * 5, [8] * 5]
    spoilt = [[8, 8, 8 + change, 8, 8], [8] * 5]
    with pytest.raises(NumericsError, match="A contribution was lost, applied twice, or wrongly weighed"):
        gradient_check.check_sum(emitting(trained(spoilt, 8)), sums(counts, 8), lr=0.1, steps=5, tolerance=1e-3)


def test_a_smaller_batch_takes_less_but_for_what_every_step_takes() -> None:
    replay = Replay(batch=32, fixed=0.1)
    assert [replay.work_of(count) for count in (32, 16)] == [1.0, pytest.approx(0.55)]
    (model,) = models()
    model.set_step(0, replay.work_of(16))
    start_s = time.perf_counter()
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert 0.55 * (FORWARD_S + BACKWARD_S) * 0.97 <= time.perf_counter() - start_s <= 0.2
