"""Steps that do not take the same time: a little jitter always, much longer now and then, as on shared machines.

The lab waits so long, the simulator counts so long: the same luck for every system that is compared, and in both.
"""

from __future__ import annotations

import math
import random
from typing import Annotated

import msgspec


class StragglerLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each step of each worker, with `probability`, takes U(`low`, `high`) times its mean computation longer."""

    probability: Annotated[float, msgspec.Meta(gt=0, le=1)]
    low: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.5
    high: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 2.0


class Straggler:
    """One worker's bad luck, step by step.

    Args:
        straggle: the law; None for no bad luck.
        rank: of the worker, so that each has its own.
    """

    def __init__(self, straggle: StragglerLaw | None, rank: int) -> None:
        self._straggle = straggle
        self._chance = random.Random(f"straggler {rank}")

    def lost_s(self, compute_s: float) -> float:
        """Draw the seconds that the next step takes longer.

        Args:
            compute_s: what a step takes on average.
        """
        law = self._straggle
        if law is not None and self._chance.random() < law.probability:
            return compute_s * self._chance.uniform(law.low, law.high)
        return 0.0


def jitter(sigma: float, rank: int, step: int) -> float:
    """Draw the factor by which a worker's step computes longer or shorter: log-normal, of mean 1.

    Args:
        sigma: deviation of its logarithm; 0 for no jitter.
    """
    return math.exp(random.Random(f"jitter {rank} {step}").gauss(-sigma * sigma / 2, sigma))
