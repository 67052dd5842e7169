"""Attacks: what workers that lie send in place of their own update.

An attack is a frozen description whose `forge` makes a lie. Some only look at the liar's own update, others at those of
all honest workers, which an attacker that reads the network knows: they are the strongest there are, and no lab of real
processes can give them more than the liars' own. Draws come from a generator that is handed in.

    sign flip                 -k u                                        ZenoPS (k = 6; 2 asynchronous), Zeno++ (10)
    gaussian                  N(0, s^2)                                   ZenoPS (s = 1), Zeno (200)
    random direction          k |u| in any direction                      ZenoPS (k = 8)
    bit flip                  -(the update of the first worker)           Zeno
    inner product             -e mean(honest)                             Xie et al. (UAI 2019), "IPM"
    little is enough          mean(honest) - z std(honest)                Baruch et al. (NeurIPS 2019), "ALIE"
    min-max, min-sum          mean(honest) - g std(honest), g as large as distances allow     Shejwalkar (NDSS 2021)
    mimic                     the update of one honest worker             Karimireddy et al. (ICLR 2022)
    line search               mean(honest) - g u, g the worst for a rule that is known     El Mhamdi et al. (ICML 2018)
    label flip                honest, on labels C - 1 - y                 see `flipped_labels`
    zero, inflate, not finite, replay, repeat                             standard

In a job of real processes a liar is not omniscient: it knows no other worker's update, so its own last ones stand for
those of the honest (`offbeat.testing.attacker`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

__all__ = [
    "Attack",
    "BitFlip",
    "Distance",
    "Gaussian",
    "Inflate",
    "InnerProduct",
    "LineSearch",
    "LittleIsEnough",
    "Mimic",
    "NotFinite",
    "RandomDirection",
    "Repeat",
    "SignFlip",
    "StaleUpdate",
    "Zero",
    "flipped_labels",
    "hiding_deviations",
]

Aggregate = Callable[[torch.Tensor], torch.Tensor]
_STEPS = 40  # of the bisections


class Attack(Protocol):
    """The Protocol of an attack."""

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Make a lie.

        Args:
            own: [D] the liar's own update, had it been honest.
            honest_ND: [n, D] those of the honest workers, or of whom the liar knows.
            generator: of random numbers.

        Returns:
            [D].
        """


@dataclass(frozen=True)
class SignFlip:
    """The own update, turned round and multiplied."""

    scale: float = 6.0

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return own * -self.scale


@dataclass(frozen=True)
class Gaussian:
    """Noise of a normal distribution."""

    std: float = 1.0

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self.std * _noise(own, generator)


@dataclass(frozen=True)
class RandomDirection:
    """A random direction, some times as long as the own update."""

    scale: float = 8.0

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = _noise(own, generator)
        lie: torch.Tensor = noise * (self.scale * own.norm() / noise.norm())
        return lie


@dataclass(frozen=True)
class BitFlip:
    """The first honest worker's update, turned round; all liars send the same."""

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return -honest_ND[0]


@dataclass(frozen=True)
class InnerProduct:
    """The mean of the honest, turned round: small, so that it hides, or not."""

    epsilon: float = 0.5

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return -self.epsilon * honest_ND.mean(0)


@dataclass(frozen=True)
class LittleIsEnough:
    """The mean of the honest, moved by so many standard deviations in each coordinate, against the sign of descent.

    Args:
        z: how many; None for as many as leave a majority nearer to the lie than to the mean.
        liars: of all workers, for that.
    """

    z: float | None = None
    liars: int = 1

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        n = len(honest_ND) + self.liars
        z = hiding_deviations(n, self.liars) if self.z is None else self.z
        return honest_ND.mean(0) - z * honest_ND.std(0, correction=0)


def hiding_deviations(n: int, liars: int) -> float:
    """The z of Baruch et al. for so many workers; 0 where there is nobody whom the liars could outvote.

    >>> round(hiding_deviations(50, 12), 2)
    0.34
    """
    supporters = n // 2 + 1 - liars
    honest = n - liars
    return max(0.0, statistics.NormalDist().inv_cdf(min(max((honest - supporters) / honest, 1e-9), 1 - 1e-9)))


@dataclass(frozen=True)
class Distance:
    """The mean of the honest, moved against them by as much as keeps the lie no farther than they are themselves.

    Args:
        measure: "max": from none farther than the two farthest of them; "sum": the squares of the distances to all add
            up to no more than those of the worst of them.
    """

    measure: Literal["max", "sum"] = "max"

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        mean, direction = honest_ND.mean(0), -honest_ND.std(0, correction=0)
        squares = torch.cdist(honest_ND.double(), honest_ND.double()).square()
        allowed = squares.max() if self.measure == "max" else squares.sum(1).max()

        def is_hidden(gamma: float) -> bool:
            away = (honest_ND - (mean + gamma * direction)).double().square().sum(1)
            return bool((away.max() if self.measure == "max" else away.sum()) <= allowed)

        low, high = 0.0, 1.0
        while is_hidden(high) and high < 2.0**20:
            low, high = high, 2 * high
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_hidden(middle) else (low, middle)
        return mean + low * direction


@dataclass(frozen=True)
class Mimic:
    """The update of one honest worker again, so that its data counts for more."""

    worker: int = 0

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return honest_ND[self.worker].clone()


@dataclass(frozen=True)
class LineSearch:
    """The lie, along a line, that takes a rule farthest from the honest mean.

    Args:
        aggregate: what the rule makes of all contributions [n, D]; the attacker knows it.
        liars: how many send the lie.
    """

    aggregate: Aggregate
    liars: int = 1

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        mean = honest_ND.mean(0)

        def lie(gamma: float) -> torch.Tensor:
            return mean - gamma * mean

        def harm(gamma: float) -> float:
            stack = torch.cat((honest_ND, lie(gamma).repeat(self.liars, 1)))
            return float((self.aggregate(stack) - mean).norm())

        best = max((2.0**k for k in range(-4, 11)), key=harm)
        return lie(max((best * factor for factor in (0.6, 0.8, 1.0, 1.25, 1.6)), key=harm))


@dataclass(frozen=True)
class Zero:
    """A zero update, as of a worker that does no work."""

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros_like(own)


@dataclass(frozen=True)
class Inflate:
    """The own update, many times as large."""

    scale: float = 1000.0

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self.scale * own


@dataclass(frozen=True)
class StaleUpdate:
    """An update of some contributions ago once more, where a liar knows its own alone; the oldest if it knows fewer.

    Args:
        age: how many ago.
    """

    age: int = 5

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return honest_ND[max(0, len(honest_ND) - 1 - self.age)].clone()


@dataclass(frozen=True)
class Repeat:
    """The first update that a liar knows of, its own honest one, in place of all later ones.

    Each one agrees with the others' updates and with a trusted reference. The harm is in the number: a worker that
    computes nothing pushes many for each of an honest worker, where none waits for the others (`ASP`).
    """

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return honest_ND[0].clone()


@dataclass(frozen=True)
class NotFinite:
    """An update with values that are no numbers, or infinite, among honest ones."""

    value: float = math.nan
    part: float = 0.01

    def forge(self, own: torch.Tensor, honest_ND: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        lie = own.clone()
        count = max(1, int(self.part * len(own)))
        lie[torch.randperm(len(own), generator=generator)[:count].to(own.device)] = self.value
        return lie


def flipped_labels(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """The labels of a worker that learns the wrong ones: C - 1 - y.

    >>> flipped_labels(torch.tensor([0, 9, 3]), 10)
    tensor([9, 0, 6])
    """
    return classes - 1 - labels


def _noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
