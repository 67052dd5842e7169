"""A worker program: replay a profile. `python -m offbeat.lab.replay`, started by the lab.

The model's parameters have a profile's sizes. Its layers do not compute: each sleeps its share of the forward and of
the backward pass, and in the backward pass emits a real gradient, so that hooks fire layer by layer at the times of a
real backward, on two cores as on eight GPUs. Rules:

* Emitting the gradient is part of a layer's time; oversleeping is made up for by the next layer; hooks, packing and
  waiting come on top, for every system alike.
* Gradients differ by rank and step and can be made again from their seed. Twice, outside of the measured steps, every
  worker compares the mean it received with the mean of what all workers emitted: a replay that sums wrongly fails.
* Where each step applies that mean, each layer's forward pass looks at a parameter of its own: a system that does not
  wait for what it reads fails.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from offbeat import model_profiles
from offbeat.errors import ScenarioError
from offbeat.lab import gradient_check
from offbeat.lab.recorder import Recorder, Work
from offbeat.lab.systems import Bound, bind
from offbeat.straggler_model import Straggler, jitter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LR = 1e-3
_FACTORS = (1.0, 1.25, 0.75, 1.5)
"""A step's gradients are the rank's pattern times one of these, so that consecutive steps differ."""


class SleepPacer:
    """Computation slept away: keeps the sum of all layers' times exact although a sleep is not."""

    def __init__(self, compute_factor: float) -> None:
        self._compute_factor = compute_factor
        self._owed_s = 0.0
        self.scale = 1.0  # of the step at hand

    def layer(self, seconds: float, since_s: float) -> None:
        """Return when `seconds` (on the reference host) have passed since `since_s`, but for what is owed."""
        self._owed_s += seconds * self._compute_factor * self.scale
        time.sleep(max(0.0, since_s + self._owed_s - time.perf_counter()))
        self._owed_s -= time.perf_counter() - since_s


class ReplayLayer(torch.nn.Module):
    """Parameters of the true shapes; the pattern of gradients for them; no function of the input."""

    def __init__(self, layer: model_profiles.TimedLayer, pace: SleepPacer, generator: torch.Generator) -> None:
        super().__init__()
        self.forward_s = layer.forward_s
        self.backward_s = layer.backward_s
        self.pace = pace
        self.factor = 1.0
        self.freshness: gradient_check.FreshnessCheck | None = None
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in layer.shapes)
        self.pattern = [torch.randn(shape, generator=generator) for shape in layer.shapes]

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        output = _Replayed.apply(self, signal, *self.weights)  # type: ignore[no-untyped-call]
        assert isinstance(output, torch.Tensor)
        return output


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: ReplayLayer, signal: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        start_s = time.perf_counter()
        ctx.layer = layer
        if layer.freshness is not None:
            layer.freshness.look(list(layer.weights))
        layer.pace.layer(layer.forward_s, start_s)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        start_s = time.perf_counter()
        layer: ReplayLayer = ctx.layer
        emitted = [pattern * layer.factor for pattern in layer.pattern]
        layer.pace.layer(layer.backward_s, start_s)
        return None, grads[0], *emitted


class ReplayModel(torch.nn.Sequential):
    """A profile's layers, one after the other."""

    def __init__(
        self, layers: Sequence[model_profiles.TimedLayer], *, rank: int, compute_factor: float, sigma: float = 0.0
    ) -> None:
        pace, generator = SleepPacer(compute_factor), gradient_check.patterns(rank)
        super().__init__()
        self._pace, self._sigma, self._rank = pace, sigma, rank
        self._freshness: gradient_check.FreshnessCheck | None = None
        for layer in layers:
            self.add_module(layer.name, ReplayLayer(layer, pace, generator))

    def check_freshness(self, world: int) -> None:
        """Have each layer see that its parameters have all steps in them, of which each applies the workers' mean."""
        named = ((name, parameter) for name, parameter, _ in emitting(self))
        self._freshness = gradient_check.FreshnessCheck(named, world=world, lr=_LR)
        for layer in self:
            assert isinstance(layer, ReplayLayer)
            layer.freshness = self._freshness

    def set_step(self, step: int, work: float = 1.0) -> None:
        """Choose the gradients of a step, and how long it takes.

        Args:
            work: how much it computes, relative to a usual step.
        """
        self._pace.scale = work * jitter(self._sigma, self._rank, step)
        for layer in self:
            assert isinstance(layer, ReplayLayer)
            layer.factor = _FACTORS[step % len(_FACTORS)]
        if self._freshness is not None:
            self._freshness.begin_step(_FACTORS[step % len(_FACTORS)])


def emitting(model: ReplayModel) -> Iterator[tuple[str, torch.nn.Parameter, float]]:
    """Every parameter with its name and the factor of its present gradient."""
    for name, layer in model.named_children():
        assert isinstance(layer, ReplayLayer)
        for index, parameter in enumerate(layer.weights):
            yield f"{name}.weights.{index}", parameter, layer.factor


def averages_gradients(bound: Bound) -> bool:
    """Whether a step leaves the mean gradient in `.grad`; else only the parameters show what was applied."""
    if bound.run is None:
        return True
    plan = bound.run.plan
    return not plan.is_served and all(plan.contributes(step) == "gradient" for step in range(1000))


def main() -> None:
    """Run the work in the environment."""
    work = Work.from_environment()
    if work.replay is None:
        raise ScenarioError("Cannot replay: no workload is given. Start it with `offbeat lab run` (workload).")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    layers = work.replay.layers()
    model = ReplayModel(layers, rank=rank, compute_factor=work.compute_factor, sigma=work.replay.jitter)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    bound = bind(work.system, model, optimizer, bucket_bytes=work.bucket_bytes, loader=loader(work, world))
    compute_s = (work.replay.forward_s + work.replay.backward_s) * work.compute_factor
    if work.replay.profile is None:
        compute_s = sum(layer.forward_s + layer.backward_s for layer in layers) * work.compute_factor
    recorder = Recorder(compute_s=compute_s, gradient_bytes=model_profiles.size_bytes(layers), work=work)
    straggler = Straggler(work.straggle, rank)
    averages = averages_gradients(bound)
    if averages and bound.loader is None and work.tolerance is not None and work.system != "ddp+restarts":
        model.check_freshness(world)
    error, digest = 0.0, ""
    data = ReplayBatches(work, bound)
    # One step more than is measured, for the second check.
    steps = work.warmup_steps + work.steps + 1
    validates = bound.run is not None and bound.run.is_validator  # which ends when the workers do
    loss = functools.partial(_replayed_loss, work.replay.forward_s * work.compute_factor)
    for step in itertools.count() if validates else range(steps):
        if bound.run is not None and validates:
            bound.run.score_by(loss)
        count = data.next()
        _step(model, bound, step, work.replay.work_of(count))
        time.sleep(straggler.lost_s(compute_s))
        if averages and step in (work.warmup_steps - 2, steps - 1):
            shares = data.shares(world)
            error, digest = gradient_check.check(emitting(model), world=world, tolerance=work.tolerance, shares=shares)
        bound.optimizer.step()
        bound.optimizer.zero_grad()
        recorder.step(count)
    if not averages:
        bound.settle()
        error, digest = gradient_check.check_sum(
            emitting(model), data.sums(world), lr=_LR, steps=steps, tolerance=data.tolerance(work.tolerance)
        )
    recorder.finish(digest=digest, gradient_error=error)
    data.close()
    bound.close()


def _replayed_loss(forward_s: float) -> torch.Tensor:
    """Take a forward pass, as what a contribution does to the loss takes a validator."""
    time.sleep(forward_s)
    return torch.zeros(())


class ReplayBatches:
    """The number of samples of each step: from the scenario, or, where batches are tuned, from offbeat.

    Args:
        work: what is replayed.
        bound: by whom it is carried.
    """

    def __init__(self, work: Work, bound: Bound) -> None:
        assert work.replay is not None
        self._batch, self._bound = work.replay.batch, bound
        self._counts: list[int] = []
        self._batches: Iterator[torch.Tensor] | None = None
        if bound.loader is not None:
            self._batches = iter(bound.loader)

    def next(self) -> int:
        """Samples of the next step."""
        count = self._batch
        if self._batches is not None:
            count = len(next(self._batches))
        self._counts.append(count)
        return count

    def shares(self, world: int) -> list[float] | None:
        """The share of each rank in this step; None if they are equal. Collective where they are not."""
        if self._batches is None:
            return None
        counts = [told[-1] for told in self._everyones(world)]
        return [count / sum(counts) for count in counts]

    def sums(self, world: int) -> list[float]:
        """The sum, for each rank, of its steps' factors times its share in each. Collective where batches are tuned."""
        everyones = [self._counts] * world if self._batches is None else self._everyones(world)
        return [
            sum(_FACTORS[step % len(_FACTORS)] * count for step, count in enumerate(counts)) / (world * self._batch)
            for counts in everyones
        ]

    def tolerance(self, tolerance: float | None) -> float | None:
        """The tolerance per step."""
        return (
            tolerance if tolerance is None or self._batches is None else max(tolerance, gradient_check.TUNED_TOLERANCE)
        )

    def close(self) -> None:
        """Leave the loop over the data."""
        self._batches = None

    def _everyones(self, world: int) -> list[list[int]]:
        mine = torch.tensor(self._counts)
        told = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(told, mine)
        return [counts.tolist() for counts in told]


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset that is only a number of samples."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(())


def loader(work: Work, world: int) -> torch.utils.data.DataLoader[torch.Tensor]:
    """More samples than the steps need, so that no epoch ends."""
    assert work.replay is not None
    size = 2 * (work.warmup_steps + work.steps + 1) * work.replay.batch * world
    return torch.utils.data.DataLoader(Samples(size), batch_size=work.replay.batch)


def _step(model: ReplayModel, bound: Bound, step: int, work: float) -> None:
    model.set_step(step, work)
    bound.model(torch.zeros(1, requires_grad=True)).sum().backward()


if __name__ == "__main__":
    main()
