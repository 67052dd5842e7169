"""Did the system that was measured sum rightly? A replay's gradients can be made again, so it is known what is right.

Each rank emits the same pattern in every step, times the step's factor. A system that leaves the mean gradient in
`.grad` is compared with the mean; one that does not, with what plain SGD makes of all that was emitted: it adds up, so
the order in which a policy applies contributions does not matter.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from offbeat.errors import NumericsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Batches that follow the machines are weighed against those that the others have at that moment, which nobody else
# knows afterwards; their sum is constant, but while they change.
TUNED_TOLERANCE = 0.05

Emitting = tuple[str, torch.nn.Parameter, float]  # name, parameter, the step's factor


def patterns(rank: int) -> torch.Generator:
    """The generator of a rank's patterns, in order of its parameters."""
    return torch.Generator().manual_seed(20_000 + rank)


def check(
    parameters: Iterable[Emitting], *, world: int, tolerance: float | None, shares: Sequence[float] | None = None
) -> tuple[float, str]:
    """Compare every `.grad` with the mean of what all ranks emitted; return (largest error, digest of the gradients).

    Args:
        shares: of each rank in the step, adding up to 1; equal if None.

    Raises:
        NumericsError: if an element is off by more than `tolerance` (None: any error will do), or is not finite.
    """
    generators = [patterns(rank) for rank in range(world)]
    shares = shares or [1 / world] * world
    digest = hashlib.sha256()
    worst = 0.0
    for name, parameter, factor in parameters:
        if parameter.grad is None:
            raise NumericsError(f"Cannot trust this run: {name} got no gradient. The system that carries it lost it.")
        expected = factor * _weighed(parameter, generators, shares)
        error = (parameter.grad.double() - expected).abs().max().item()
        allowed = float("inf") if tolerance is None else tolerance
        if not error <= allowed or error == float("inf"):
            raise NumericsError(
                f"Cannot trust this run: the mean gradient of {name} is wrong by {error:.3g}, at most {allowed:g} can "
                "be rounding or loss by design. The system that carries it sums wrongly."
            )
        worst = max(worst, error)
        digest.update(parameter.grad.contiguous().numpy().tobytes())
    return worst, digest.hexdigest()


def check_sum(
    parameters: Iterable[Emitting], sums: Sequence[float], *, lr: float, steps: int, tolerance: float | None
) -> tuple[float, str]:
    """Compare the parameters, which began at 0, with what plain SGD makes of all that was emitted.

    Args:
        sums: for each rank, the sum of its steps' factors times its share in each.
        steps: of each rank.
        tolerance: in units of one step.

    Raises:
        NumericsError: if a parameter is off by more: each gradient counts exactly once.
    """
    generators = [patterns(rank) for rank in range(len(sums))]
    digest, worst = hashlib.sha256(), 0.0
    for name, parameter, _ in parameters:
        expected = -lr * _weighed(parameter, generators, sums)
        error = (parameter.detach().double() - expected).abs().max().item() / lr
        # What is off by one lost or doubled contribution is off by some 1/world.
        if tolerance is not None and not error <= steps * tolerance:
            raise NumericsError(
                f"Cannot trust this run: {name} is off by {error:.3g} steps after {steps}. A contribution was lost, "
                "applied twice, or wrongly weighed."
            )
        worst = max(worst, error)
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return worst, digest.hexdigest()


class FreshnessCheck:
    """The check that a layer's forward pass has parameters with all steps in them: what never waits would be fast.

    Each step one element of one parameter of the layer is looked at, where a step changes much.

    Args:
        parameters: all, by name and in order, which began at 0.
        world: number of workers, of whose gradients each step applies the mean.
        lr: of plain SGD.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], *, world: int, lr: float) -> None:
        generators = [patterns(rank) for rank in range(world)]
        self._lr = lr
        self._applied = 0.0  # sum of the factors of all steps so far
        self._last = 0.0
        self._steps = 0
        self._probes: dict[int, tuple[str, int, float]] = {}  # by id: name, an element, and its mean pattern
        for name, parameter in parameters:
            mean = _weighed(parameter, generators, [1 / world] * world).reshape(-1)
            element = int(mean.abs().argmax())
            self._probes[id(parameter)] = (name, element, mean[element].item())

    def begin_step(self, factor: float) -> None:
        """A step begins whose gradients have this factor."""
        self._applied, self._last = self._applied + self._last, factor
        self._steps += 1

    def look(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """See that one of these, each step another one, has all steps before this one in it.

        Raises:
            NumericsError: if it has not.
        """
        if self._steps < 2 or not parameters:  # a tied layer has none of its own
            return
        parameter = parameters[self._steps % len(parameters)]
        name, element, mean = self._probes[id(parameter)]
        found, expected = parameter.detach().reshape(-1)[element].item(), -self._lr * self._applied * mean
        # No step changes it by less than this, and rounding by more.
        if abs(found - expected) > self._lr * abs(mean) / 4:
            raise NumericsError(
                f"Cannot trust this run: in step {self._steps - 1} the forward pass read {name} as {found:.6g}, and "
                f"with all steps before it is {expected:.6g}. The system that carries it does not wait for its sums."
            )


def _weighed(parameter: torch.Tensor, generators: Sequence[torch.Generator], weights: Sequence[float]) -> torch.Tensor:
    total = torch.zeros(parameter.shape, dtype=torch.float64)
    for generator, weight in zip(generators, weights, strict=True):
        total += torch.randn(parameter.shape, generator=generator).double() * weight
    return total
