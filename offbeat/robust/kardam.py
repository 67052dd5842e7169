"""One contribution at a time, by how fast its worker's gradients change. Damaskinos et al., "Asynchronous Byzantine
machine learning (the case of SGD)" (Kardam, ICML 2018), section 3.

    Lipschitz filter   |g - g_before| / |x - x_before| of a worker is at most the (n - f) / n quantile of those of all
    frequency filter   of each 2 f + 1 accepted in a row no f workers have brought more than f

A state and a rule, since it goes by what it has seen: `seen` returns both the verdict and the next state.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.robust.resilient_rule import check_faulty

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class KardamState:
    """The past of a job, as far as it counts.

    Args:
        rates: the last rate of change of each worker.
        accepted: the workers of the last 2 f contributions that were accepted.
    """

    rates: Mapping[int, float] = field(default_factory=dict)
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kardam:
    """The filter of contributions that come one at a time.

    Args:
        faulty: how many workers may bring anything.
        workers: how many there are; more than three times as many.

    Raises:
        PlanError: if there are too few workers.

    >>> state, accepted = Kardam(1, 4).seen(KardamState(), worker=0, change=1.0, moved=0.5)
    >>> accepted, state.rates
    (True, {0: 2.0})
    """

    faulty: int
    workers: int

    def __post_init__(self) -> None:
        check_faulty(self.faulty)
        if self.workers not in WholeNumbers(1):
            raise PlanError(
                f"Cannot tell faulty ones of {self.workers!r} workers: choose a whole number from 1 "
                "- at `plan.rule.workers`."
            )
        if self.workers <= 3 * self.faulty:
            raise PlanError(
                f"Cannot tell {self.faulty!r} faulty workers of {self.workers!r} by Kardam: it takes more than "
                f"{3 * self.faulty}. Use faulty={max(0, (self.workers - 1) // 3)} - at `plan.rule.faulty`."
            )

    def seen(self, state: KardamState, *, worker: int, change: float, moved: float) -> tuple[KardamState, bool]:
        """Judge a contribution.

        Args:
            worker: that brought it.
            change: norm of the difference to its contribution before.
            moved: norm of the difference of the parameters that it has computed both on.

        Returns:
            The next state, and whether it is accepted.
        """
        rate = change / moved if moved > 0 else (0.0 if change == 0 else math.inf)
        known = sorted({**state.rates, worker: rate}.values())
        # At the beginning there are fewer than n; the quantile is of those that there are.
        limit = known[max(0, math.ceil(len(known) * (1 - self.faulty / self.workers)) - 1)]
        recent = (*state.accepted, worker)
        often = sum(count for _, count in Counter(recent).most_common(self.faulty))
        is_accepted = math.isfinite(rate) and rate <= limit and (often <= self.faulty or len(recent) <= self.faulty)
        rates = {**state.rates, worker: rate}
        if not is_accepted:
            return KardamState(rates, state.accepted), False
        return KardamState(rates, recent[max(0, len(recent) - 2 * self.faulty) :]), True
