"""The Gaussian mechanism: a contribution of bounded norm, and noise in proportion to the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers
from offbeat.privacy.accounting import epsilon_of

_DEVIATIONS = 2.0  # standard deviations of the noise that an honest contribution is forgiven: one in 40 has more


@dataclass(frozen=True)
class GaussianMechanism:
    """A bound on what can be learnt about a worker from its contributions: each is clipped, and noise added.

    All blocks of a model together, be it a gradient or the change of several steps, are clipped to an L2 norm of
    `max_norm`, and N(0, (noise max_norm)^2) is added to each element, at the worker.

    Args:
        max_norm: that a contribution has at most, before noise is added.
        noise: its standard deviation, in units of `max_norm`.
        delta: at which `epsilon` is told: the odds, about, that it does not hold.

    Raises:
        PlanError: if `max_norm` or `noise` is not above 0 and finite, or `delta` not between 0 and 1.

    >>> mechanism = GaussianMechanism(max_norm=1.0, noise=20.0)
    >>> [round(mechanism.epsilon(count), 2) for count in (1, 100, 400)]
    [0.16, 1.99, 4.38]
    """

    max_norm: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.max_norm not in RealNumbers(above=0):
            raise PlanError(
                f"Cannot clip contributions to a norm of {self.max_norm!r}: nothing would be left, or nothing clipped. "
                "Use a number above 0, such as the median of their norms - at `plan.privacy.max_norm`."
            )
        if self.noise not in RealNumbers(above=0):
            raise PlanError(
                f"Cannot hide contributions by noise={self.noise!r}: without noise nothing is hidden. Use a number "
                "above 0, such as 1.0, or privacy=None - at `plan.privacy.noise`."
            )
        if self.delta not in RealNumbers(above=0, below=1):
            raise PlanError(
                f"Cannot tell epsilon at delta={self.delta!r}: it is a probability. Use one far below 1 / samples, "
                "such as 1e-5 - at `plan.privacy.delta`."
            )

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise in each element."""
        return self.noise * self.max_norm

    def epsilon(self, contributions: int, *, replaced: bool = False) -> float:
        """The epsilon that so many contributions of one worker spend together, at `delta`.

        Args:
            replaced: compare with the worker having other data, and not with its contributions being zero. Two
                contributions may be 2 `max_norm` apart, and one and zero `max_norm`.
        """
        return epsilon_of((2 if replaced else 1) * math.sqrt(contributions) / self.noise, self.delta)

    def most_energy(self, elements: int) -> float:
        """The part of the square of an honest contribution's norm that may be the noise in so many elements.

        |u + n|^2 - |u|^2 = |n|^2 + 2 <u, n> has the mean m d^2 and the variance 2 m d^4 + 4 |u|^2 d^2, d the deviation.
        """
        square = self.deviation**2
        spread = math.sqrt(2 * elements * square**2 + 4 * self.max_norm**2 * square)
        return elements * square + _DEVIATIONS * spread if elements else 0.0

    @property
    def most_turn(self) -> float:
        """The part of an honest contribution's inner product with a unit vector that may be against it, by noise."""
        return _DEVIATIONS * self.deviation
