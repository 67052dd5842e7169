"""Batch sizes with which all workers take equally long.

Worker i takes ``f_i + s_i b_i`` for a batch of b_i, where f_i is what a step costs whatever the batch: computation and
transfer. With the sum of all batches fixed at G, nobody waits for anybody if all take

    T = (G + sum_i f_i / s_i) / sum_i (1 / s_i)            b_i = (T - f_i) / s_i

A worker whose b_i is outside of its bounds is fixed at the bound and taken out of both sums and of G, and the rest is
solved again; in each pass only those beyond the bound that is missed by more, all together, since the others may come
back inside. The result is exact: no split has a smaller longest cycle. (The problem, without the bounds, is that of
Chen et al., "Semi-dynamic load balancing", SoCC 2020.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.float_sum import add_up

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class CycleCost:
    """The cost of a worker's batch, and the bounds of its size.

    Args:
        fixed_s: whatever the batch.
        per_sample_s: above 0.
        least, most: bounds of the batch.
    """

    fixed_s: float
    per_sample_s: float
    least: int
    most: int

    def cycle_s(self, batch: float) -> float:
        """Seconds that the worker takes for a batch."""
        return self.fixed_s + self.per_sample_s * batch


def shares(costs: Sequence[CycleCost], total: int) -> list[float]:
    """Parts of `total`, not rounded, with the smallest possible longest cycle.

    The sum is `total` if the bounds allow it; else it is the nearest they do.

    >>> shares([CycleCost(0.0, 1.0, 1, 99), CycleCost(0.0, 2.0, 1, 99)], 30)
    [20.0, 10.0]
    """
    if total <= sum(cost.least for cost in costs):
        return [float(cost.least) for cost in costs]
    if total >= sum(cost.most for cost in costs):
        return [float(cost.most) for cost in costs]
    fixed: dict[int, float] = {}
    while True:
        free = [i for i in range(len(costs)) if i not in fixed]
        rest = total - sum(fixed.values())
        even_s = (rest + add_up(costs[i].fixed_s / costs[i].per_sample_s for i in free)) / add_up(
            1 / costs[i].per_sample_s for i in free
        )
        wanted = {i: (even_s - costs[i].fixed_s) / costs[i].per_sample_s for i in free}
        low = {i: costs[i].least - b for i, b in wanted.items() if b < costs[i].least}
        high = {i: b - costs[i].most for i, b in wanted.items() if b > costs[i].most}
        if not low and not high:
            return [fixed.get(i, wanted.get(i, 0.0)) for i in range(len(costs))]
        if sum(low.values()) >= sum(high.values()):
            fixed.update((i, float(costs[i].least)) for i in low)
        else:
            fixed.update((i, float(costs[i].most)) for i in high)
        if len(fixed) == len(costs):  # the two sums were equal but for rounding
            return [fixed[i] for i in range(len(costs))]


def split(costs: Sequence[CycleCost], total: int) -> list[int]:
    """The same in whole samples, and the sum exactly: none has a smaller longest cycle.

    Rounded down, and then by largest remainder, each remainder weighed by what a sample costs its worker: the next
    sample goes where the cycle is shortest with it. Where a worker's `fixed_s` is some 10^15 times its `per_sample_s`,
    shares are wrong by whole samples; what is too much is then taken from where the cycle is longest.

    >>> split([CycleCost(0.0, 1.0, 1, 99), CycleCost(0.0, 2.0, 1, 99), CycleCost(1.0, 1.0, 1, 8)], 30)
    [15, 7, 8]
    """
    batches = [int(share) for share in shares(costs, total)]
    batches = [min(max(b, cost.least), cost.most) for b, cost in zip(batches, costs, strict=True)]
    left = max(min(total, sum(cost.most for cost in costs)), sum(cost.least for cost in costs)) - sum(batches)
    for _ in range(-left):
        i = max((i for i, b in enumerate(batches) if b > costs[i].least), key=lambda i: costs[i].cycle_s(batches[i]))
        batches[i] -= 1
    queue = [(cost.cycle_s(b + 1), i) for i, (cost, b) in enumerate(zip(costs, batches, strict=True)) if b < cost.most]
    heapq.heapify(queue)
    for _ in range(left):
        _, i = heapq.heappop(queue)
        batches[i] += 1
        if batches[i] < costs[i].most:
            heapq.heappush(queue, (costs[i].cycle_s(batches[i] + 1), i))
    return batches
