"""The result of an exchange beside the mean; whoever has called for the step gets it, and nobody else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class ExchangeResult:
    """The findings of one exchange.

    Args:
        weights: this worker's, and the sums over all workers that came with the buckets.
        given: of this worker's, what is in the sum of each bucket, where a sum may be of some workers; `weights` has
            one for each bucket then.
        vote_requested: whether a worker wants all to vote behind it; the same on all of them.
        step_times: seconds of each step since the exchange before, by rank; empty where nobody wants to know.
        staleness: updates between the parameters that this worker has computed on and its own update, at a server.
        dropped: whether what this worker brought is not in the parameters.
        spans: when each bucket was issued and done, in clock seconds.
        barrier_s: seconds of it in which this worker waited for the policy to let it go on; None where that is not told
            apart from the transfer.
        resent: packets that were sent again.
        lead: steps that this worker was ahead of the slowest when it went on; None where nobody tells.
    """

    weights: tuple[float, ...] = ()
    given: tuple[float, ...] = ()
    vote_requested: bool = False
    step_times: Mapping[int, Sequence[float]] = field(default_factory=dict)
    staleness: int = 0
    dropped: bool = False
    spans: tuple[tuple[float, float], ...] = ()
    barrier_s: float | None = None
    resent: int = 0
    lead: int | None = None

    def after(self, earlier: ExchangeResult | None) -> ExchangeResult:
        """Make this the result of a step that had an `earlier` exchange, too."""
        if earlier is None:
            return self
        times = self.step_times or earlier.step_times
        return dataclasses.replace(self, vote_requested=self.vote_requested or earlier.vote_requested, step_times=times)
