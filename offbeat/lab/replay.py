"""A worker program: replay a profile. `python -m offbeat.lab.replay`, started by the lab.

The model's parameters have a profile's sizes. Its layers do not compute: each sleeps its share of the forward and of
the backward pass, and in the backward pass emits a real gradient, so that hooks fire layer by layer at the times of a
real backward, on two cores as on eight GPUs. Rules:

* Emitting the gradient is part of a layer's time; oversleeping is made up for by the next layer; hooks, packing and
  waiting come on top, for every system alike.
* Gradients differ by rank and step and can be made again from their seed. Twice, outside of the measured steps, every
  worker compares the mean it received with the mean of what all workers emitted: a replay that sums wrongly fails.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import NumericsError, ScenarioError
from offbeat.lab import profiles
from offbeat.lab.peers import Bound, bind
from offbeat.lab.recorder import Recorder, Work
from offbeat.lab.straggler import Straggler, jitter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LR = 1e-3
_FACTORS = (1.0, 1.25, 0.75, 1.5)
"""A step's gradients are the rank's pattern times one of these, so that consecutive steps differ."""


class Pace:
    """Computation slept away: keeps the sum of all layers' times exact although a sleep is not."""

    def __init__(self, compute_factor: float) -> None:
        self._compute_factor = compute_factor
        self._owed_s = 0.0
        self.jitter = 1.0

    def layer(self, seconds: float, since_s: float) -> None:
        """Return when `seconds` (on the reference host) have passed since `since_s`, but for what is owed."""
        self._owed_s += seconds * self._compute_factor * self.jitter
        time.sleep(max(0.0, since_s + self._owed_s - time.perf_counter()))
        self._owed_s -= time.perf_counter() - since_s


class ReplayLayer(torch.nn.Module):
    """Parameters of the true shapes; the pattern of gradients for them; no function of the input."""

    def __init__(self, layer: profiles.TimedLayer, pace: Pace, generator: torch.Generator) -> None:
        super().__init__()
        self.forward_s = layer.forward_s
        self.backward_s = layer.backward_s
        self.pace = pace
        self.factor = 1.0
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
        self, layers: Sequence[profiles.TimedLayer], *, rank: int, compute_factor: float, sigma: float = 0.0
    ) -> None:
        pace, generator = Pace(compute_factor), _generator(rank)
        super().__init__()
        self._pace, self._sigma, self._rank = pace, sigma, rank
        for layer in layers:
            self.add_module(layer.name, ReplayLayer(layer, pace, generator))

    def set_step(self, step: int) -> None:
        """Choose the gradients of a step, and how long it takes."""
        self._pace.jitter = jitter(self._sigma, self._rank, step)
        for layer in self:
            assert isinstance(layer, ReplayLayer)
            layer.factor = _FACTORS[step % len(_FACTORS)]


def check(model: ReplayModel, *, world: int, tolerance: float | None) -> tuple[float, str]:
    """Compare every `.grad` with the mean of what all ranks emitted; return (largest error, digest of the gradients).

    Raises:
        NumericsError: if an element is off by more than `tolerance` (None: any error will do), or is not finite.
    """
    generators = [_generator(rank) for rank in range(world)]
    digest = hashlib.sha256()
    worst = 0.0
    for name, parameter, factor in _parameters(model):
        emitted = [torch.randn(parameter.shape, generator=g).double() * factor for g in generators]
        if parameter.grad is None:
            raise NumericsError(f"Cannot trust this run: {name} got no gradient. The system that carries it lost it.")
        error = (parameter.grad.double() - torch.stack(emitted).mean(0)).abs().max().item()
        allowed = float("inf") if tolerance is None else tolerance
        if not error <= allowed or error == float("inf"):
            raise NumericsError(
                f"Cannot trust this run: the mean gradient of {name} is wrong by {error:.3g}, at most {allowed:g} can "
                "be rounding or loss by design. The system that carries it sums wrongly."
            )
        worst = max(worst, error)
        digest.update(parameter.grad.contiguous().numpy().tobytes())
    return worst, digest.hexdigest()


def averages_gradients(bound: Bound) -> bool:
    """Whether a step leaves the mean gradient in `.grad`; else only the parameters show what was applied."""
    if bound.run is None:
        return True
    plan = bound.run.plan
    return plan.fabric.offers.served is False and all(plan.sync.contributes(step) == "gradient" for step in range(1000))


def check_sum(model: ReplayModel, *, steps: int, world: int, work: Work) -> tuple[float, str]:
    """Compare the parameters with what plain SGD makes of all that was emitted: each gradient applied exactly once.

    Plain SGD adds up, so the order in which a policy applies contributions does not matter.

    Raises:
        NumericsError: if a parameter is off, in units of one step, by more than the work's tolerance.
    """
    generators = [_generator(rank) for rank in range(world)]
    factor = sum(_FACTORS[step % len(_FACTORS)] for step in range(steps))
    digest, worst = hashlib.sha256(), 0.0
    for name, parameter, _ in _parameters(model):
        emitted = [torch.randn(parameter.shape, generator=g).double() for g in generators]
        expected = -_LR * factor * torch.stack(emitted).mean(0)
        error = (parameter.detach().double() - expected).abs().max().item() / _LR
        # What is off by one lost or doubled contribution is off by some 1/world.
        if work.tolerance is not None and not error <= steps * work.tolerance:
            raise NumericsError(
                f"Cannot trust this run: {name} is off by {error:.3g} steps after {steps}. A contribution was lost, "
                "applied twice, or wrongly weighed."
            )
        worst = max(worst, error)
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return worst, digest.hexdigest()


def main() -> None:
    """Run the work in the environment."""
    work = Work.from_environment()
    if work.replay is None:
        raise ScenarioError("Cannot replay: no workload is given. Start it with `offbeat lab run` (workload).")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    layers = profiles.timed(work.replay)
    model = ReplayModel(layers, rank=rank, compute_factor=work.compute_factor, sigma=work.replay.jitter)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    bound = bind(work.system, model, optimizer, bucket_bytes=work.bucket_bytes)
    compute_s = (work.replay.forward_s + work.replay.backward_s) * work.compute_factor
    if work.replay.profile is None:
        compute_s = sum(layer.forward_s + layer.backward_s for layer in layers) * work.compute_factor
    recorder = Recorder(compute_s=compute_s, gradient_bytes=profiles.size_bytes(layers), work=work)
    straggler = Straggler(work.straggle, rank)
    averages = averages_gradients(bound)
    error, digest = 0.0, ""
    # One step more than is measured, for the second check.
    for step in range(work.warmup_steps + work.steps + 1):
        _step(model, bound, step)
        straggler.pause(compute_s)
        if averages and step in (work.warmup_steps - 2, work.warmup_steps + work.steps):
            error, digest = check(model, world=world, tolerance=work.tolerance)
        bound.optimizer.step()
        bound.optimizer.zero_grad()
        recorder.step(work.replay.batch)
    if not averages:
        assert bound.run is not None
        bound.run.settle()
        error, digest = check_sum(model, steps=work.warmup_steps + work.steps + 1, world=world, work=work)
    recorder.finish(digest=digest, gradient_error=error)
    bound.close()


def _step(model: ReplayModel, bound: Bound, step: int) -> None:
    model.set_step(step)
    bound.model(torch.zeros(1, requires_grad=True)).sum().backward()


def _generator(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(20_000 + rank)


def _parameters(model: ReplayModel) -> Iterator[tuple[str, torch.nn.Parameter, float]]:
    for name, layer in model.named_children():
        assert isinstance(layer, ReplayLayer)
        for index, parameter in enumerate(layer.weights):
            yield f"{name}.weights.{index}", parameter, layer.factor


if __name__ == "__main__":
    main()
