"""The source of a leased loader's batches: decides which samples this worker computes next, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from offbeat.batching import Lease, Leases


@dataclass(frozen=True)
class Batch:
    """The samples that a worker computes next.

    Args:
        lease: its samples; None if it has none, and only keeps up with the others.
        weight: relative to the other workers' batches of the same round; 0 without a lease.
        first: lowest rank that has data in this round.
        mark: the source's own, by which it finds back to this batch.
    """

    lease: Lease | None
    weight: float = 1.0
    first: int = 0
    mark: Any = None


class BatchSource(Protocol):
    """The Protocol of a loader's batch source.

    1) `next` for each batch, as far ahead as the loader loads; 2) `drawn` when it is given out to the loop, in the same
    order; 3) `ended` behind the last of an epoch, or `give_back` for those not given out when the loop is left early,
    and once more, before the next `next`, for those that were, and from which nothing was computed.
    """

    @property
    def leases(self) -> Leases:
        """The description of how the dataset is leased."""

    @property
    def progress(self) -> float:
        """Epochs that all workers together had been dealt, when this one was dealt what the loop has; never less."""

    def next(self) -> Batch | None:
        """Take this worker's next batch; None at the end of its epoch."""

    def drawn(self, batch: Batch) -> None:
        """The loop has the batch."""

    def ended(self) -> None:
        """The loop has gone through the epoch."""

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Return batches that were asked for and are not used; the last ones that were asked for, in order."""

    def out_of_memory(self) -> None:
        """Handle that there was no memory for the batch at hand: others compute it, and later ones are smaller."""

    def lost(self, ranks: Iterable[int], *, unused: int) -> None:
        """Give to others what these workers, which are gone, had for the last `unused` batches that the loop has: it is
        in no step.
        """

    def explain(self) -> str:
        """Say which worker paces the rounds and why, in a sentence; "" if somebody else knows."""

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any], *, seed: int) -> None:
        """Go on where `state` was taken, in a run of that seed. Collective."""
