"""Models of scikit-learn's handwritten digits for the applications of objects: one to learn, many to vote."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BATCH, WIDTH = 32, 1664
_HELD_OUT, _QUERY = 360, 32_768
_VOTER_STEPS, _NOISE = 150, 0.3


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 real images of 64 grey values, and what they show; the first ones are held out."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of the labels that have the highest score."""
    return float((scores.argmax(1) == labels).float().mean())


class Learner:
    """A perceptron of 5.7 million parameters in one vector, and the gradient of a batch.

    Args:
        seed: of the batches; all have the same weights at first.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(0)
        self._net = nn.Sequential(
            nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10),
        )  # fmt: skip
        self._images, self._labels = digits()
        self._generator = torch.Generator().manual_seed(seed)

    def weights(self) -> torch.Tensor:
        """All parameters."""
        return parameters_to_vector(self._net.parameters()).detach().clone()

    def optimizer(self, weights: torch.Tensor) -> torch.optim.Optimizer:
        """Return what changes such a vector by its gradient."""
        return torch.optim.Adam([weights], lr=3e-4)

    def gradient(self, weights: torch.Tensor) -> torch.Tensor:
        """The gradient of the next batch at these weights."""
        vector_to_parameters(weights, self._net.parameters())
        chosen = torch.randint(_HELD_OUT, len(self._labels), (BATCH,), generator=self._generator)
        self._net.zero_grad()
        F.cross_entropy(self._net(self._images[chosen]), self._labels[chosen]).backward()
        return parameters_to_vector([one.grad for one in self._net.parameters() if one.grad is not None])

    def loss(self, weights: torch.Tensor) -> float:
        """The loss at these weights on what is held out."""
        vector_to_parameters(weights, self._net.parameters())
        with torch.no_grad():
            return F.cross_entropy(self._net(self._images[:_HELD_OUT]), self._labels[:_HELD_OUT]).item()


class Voter:
    """A small model, trained here on a sample of its own.

    Args:
        seed: of the sample and the first weights.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        images, labels = digits()
        optimizer = torch.optim.Adam(self._net.parameters(), lr=1e-2)
        for _ in range(_VOTER_STEPS):
            chosen = torch.randint(_HELD_OUT, len(labels), (BATCH,))
            optimizer.zero_grad()
            F.cross_entropy(self._net(images[chosen]), labels[chosen]).backward()
            optimizer.step()

    @torch.no_grad()
    def answer(self, images: torch.Tensor) -> torch.Tensor:
        """How sure it is of each class, for each image."""
        scores: torch.Tensor = self._net(images)
        return scores.softmax(1)


def query(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """8 MiB of images that were held out, with noise, and what they show."""
    generator = torch.Generator().manual_seed(number)
    images, labels = digits()
    chosen = torch.randint(0, _HELD_OUT, (_QUERY,), generator=generator)
    return images[chosen] + _NOISE * torch.randn(_QUERY, 64, generator=generator), labels[chosen]
