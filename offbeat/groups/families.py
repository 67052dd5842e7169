"""The losses of generalised linear models: of a row, by its margin, the product of features and coefficients.

Each is a `Family`: the loss and its first two derivatives by the margin, all elementwise, of any shape. A constant that
depends on the target alone is left out of the loss.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import softplus


class Family(Protocol):
    """The Protocol of a loss that is convex in the margin."""

    name: str

    def losses(self, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row."""

    def slopes(self, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the derivative of each row's loss by its margin."""

    def curvatures(self, margins: torch.Tensor) -> torch.Tensor:
        """Return the second derivative; no target has a part in it."""

    def means(self, margins: torch.Tensor) -> torch.Tensor:
        """Return the mean of the target that each margin stands for."""


class GaussianFamily:
    """Least squares: half of the squared difference."""

    name = "linear"

    def losses(self, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (margins - target).square_().mul_(0.5)

    def slopes(self, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return margins - target

    def curvatures(self, margins: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(margins)

    def means(self, margins: torch.Tensor) -> torch.Tensor:
        return margins


class BernoulliFamily:
    """Logistic regression: the log loss of targets that are 0 or 1."""

    name = "logistic"

    def losses(self, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return softplus(margins) - margins * target

    def slopes(self, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(margins).sub_(target)

    def curvatures(self, margins: torch.Tensor) -> torch.Tensor:
        mean = torch.sigmoid(margins)
        return mean * (1 - mean)

    def means(self, margins: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(margins)


class PoissonFamily:
    """Poisson regression with the logarithm as link: for targets that are 0 or greater."""

    name = "poisson"

    def losses(self, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.exp(margins) - margins * target

    def slopes(self, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.exp(margins).sub_(target)

    def curvatures(self, margins: torch.Tensor) -> torch.Tensor:
        return torch.exp(margins)

    def means(self, margins: torch.Tensor) -> torch.Tensor:
        return torch.exp(margins)
