"""The computing times of all workers, for a controller: sent in the tail of an exchange.

    times = [ rank 0: a step, a step, ... | rank 1: ... | ... ]     seconds

Each worker writes into its own place, and zeros stand in the others: the sum is what all have said, and costs no
message. Of steps of the workers' own each has an element; if they are too many, the first one has several of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.float_sum import add_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST = 64  # steps that are told one by one


class StepTimes:
    """The computing times for one model. Call order, in each exchange: `write`, then `read`.

    Args:
        rank: of this worker.
        ranks: how many have a place.
        own: returns seconds of each of this worker's steps since it was called last.
        are_told: whether anybody wants to know; the same on all workers, as is `ranks`.
    """

    def __init__(self, rank: int, ranks: int, own: Callable[[], Sequence[float]], *, are_told: bool) -> None:
        self.ranks, self.are_told = ranks, are_told
        self._rank, self._own = rank, own

    def room(self, every: int = 1) -> int:
        """Elements that they take, in exchanges of so many steps."""
        return self.ranks * min(every, _MOST) if self.are_told else 0

    def forget(self) -> None:
        """Tell nothing of what was before."""
        self._own()

    def write(self, place: torch.Tensor) -> None:
        """Write this worker's own.

        Args:
            place: [ranks * steps] zeros.
        """
        steps = len(place) // self.ranks
        if self._rank < self.ranks:
            own = folded(self._own(), steps)
            begin = self._rank * steps
            place[begin : begin + len(own)] = torch.tensor(own, dtype=place.dtype)

    def read(self, place: torch.Tensor) -> dict[int, list[float]]:
        """Read what the workers have written, by rank; who has written nothing is not in it.

        Args:
            place: [ranks * steps] the sum over all that took part; empty if nobody wants to know.
        """
        said, steps = place.tolist(), len(place) // max(1, self.ranks)
        each = {rank: said[rank * steps : (rank + 1) * steps] for rank in range(self.ranks)}
        return {rank: own for rank, own in each.items() if any(own)}  # nobody computes nothing


def folded(own: Sequence[float], steps: int) -> list[float]:
    """The same in so many elements at most; if it is more, the first has the sum of those that are too many.

    >>> folded([1.0, 2.0, 3.0], 2)
    [3.0, 3.0]
    """
    more = max(0, len(own) - steps)
    return [add_up(own[: more + 1]), *own[more + 1 :]] if more else list(own)
