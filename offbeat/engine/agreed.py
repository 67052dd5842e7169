"""Batches that all workers work out alike: each keeps the same books, so nobody has to deal them out.

For fabrics on which every step is everybody's. Now and then the workers tell each other how long their steps took; from
that each computes all batches of the next steps, and takes its own. The books are a function of what was told, so they
are equal everywhere, bit for bit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from offbeat.engine.source import Batch
from offbeat.errors import ModelError
from offbeat.pacing import Lease, Pool, Tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.engine.control import Control
    from offbeat.pacing import BatchTuning, Leases

# Steps between two exchanges of times: each is a collective of its own, and plans need no more.
_TOLD_EVERY = 5
_MOST_TOLD = 256

_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]


class Timing(NamedTuple):
    """One step of one worker."""

    samples: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    compute_s: _Seconds
    wait_s: _Seconds


_timings = msgspec.json.Decoder(Annotated[tuple[Timing, ...], msgspec.Meta(max_length=_MOST_TOLD)]).decode


@dataclass(frozen=True)
class Books:
    """What every worker knows; immutable.

    Args:
        over: ranks that have nothing more in this epoch, while others do.
    """

    pool: Pool
    tuning: Tuning
    round: int = 0
    over: frozenset[int] = frozenset()


class Mark(NamedTuple):
    """What was known before a batch was taken, and after."""

    before: Books
    after: Books


class AgreedSource:
    """One loader's.

    Args:
        leases: how the dataset is dealt out.
        tune: how batches follow the machines.
        batch: samples of a worker's batch on average.
        least: samples of any batch.
        control: how the workers tell each other.
        take_timings: this worker's steps since the last call.
    """

    def __init__(
        self,
        leases: Leases,
        tune: BatchTuning,
        *,
        batch: int,
        least: int = 1,
        control: Control,
        take_timings: Callable[[], Sequence[Timing]],
    ) -> None:
        self.leases = leases
        self._tune, self._control, self._take_timings = tune, control, take_timings
        self._total, self._least = batch * control.world, least
        pool, tuning = leases.init(), tune.init(self._total, together=True, floor=least)
        for rank in range(control.world):
            pool, tuning = leases.join(pool, rank), tune.join(tuning, rank)
        self._books = Books(pool, tuning)
        self._at = self._books  # behind the last batch that the loop has
        self.progress = 0.0

    def next(self) -> Batch | None:
        """This worker's part of the next step. Collective."""
        if self._books.round % _TOLD_EVERY == 0:
            self._tell()
        books, pool, parts = self._books, self._books.pool, dict[int, Lease]()
        tuning, counts = self._tune.plan(books.tuning, books.round)
        for rank in range(self._control.world):
            if rank not in books.over:
                count = min(counts[rank], self.leases.samples)
                pool, deal = self.leases.take(pool, rank, count, now_s=0.0, least=self._least)
                if isinstance(deal, Lease):
                    parts[rank] = deal
        if not parts:
            self._books = Books(pool, tuning, books.round)
            return None
        # All compute this step together, and nobody can be lost without the job.
        pool, _ = self.leases.acknowledge(pool, tuple(pool.held))
        over = frozenset(range(self._control.world)) - parts.keys()
        self._books = Books(pool, tuning, books.round + 1, over)
        mark = Mark(books, self._books)
        mine = parts.get(self._control.rank)
        mean = sum(lease.count for lease in parts.values()) / len(parts)
        return Batch(mine, 0.0 if mine is None else mine.count / mean, min(parts), mark)

    def drawn(self, batch: Batch) -> None:
        """The loop has it."""
        self._at = batch.mark.after
        self.progress = max(self.progress, self._reached())

    def ended(self) -> None:
        """The next epoch begins."""
        self._at = self._books
        self.progress = max(self.progress, self._reached())

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Go back to before the first of these; all workers leave the loop at the same batch."""
        if batches:
            before = batches[0].mark.before
            self._books = dataclasses.replace(before, tuning=self._books.tuning, round=self._books.round)
            self._at = self._books

    def crowded(self) -> None:
        """Not here.

        Raises:
            ModelError: always; the others wait for this worker's part of the step.
        """
        raise ModelError(
            "Cannot leave out a batch here: all workers compute each step together. Use a smaller batch, "
            "BatchTuning(largest=...), or fabric=ParameterServer()."
        )

    def explain(self) -> str:
        """Who paces the rounds and why."""
        return self._tune.explain(self._books.tuning)

    def state_dict(self) -> dict[str, Any]:
        """Place in the data, and what is known of the machines."""
        at = self._at
        return {
            "leases": self.leases.to_plain(at.pool),
            "tuning": self._tune.to_plain(at.tuning),
            "round": at.round,
            "over": sorted(at.over),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, seed: int) -> None:
        """Go on where `state` was taken.

        Raises:
            ModelError: if it was taken with another dataset, seed or global batch.
        """
        self.leases = dataclasses.replace(self.leases, seed=seed)
        pool = self.leases.from_plain(state["leases"])
        tuning = self._tune.with_floor(self._tune.from_plain(state["tuning"], self._total), self._least)
        self._books = self._at = Books(pool, tuning, int(state["round"]), frozenset(state["over"]))
        self.progress = self._reached()

    def _reached(self) -> float:
        return self._at.pool.epoch + self._at.pool.fresh / self.leases.samples

    def _tell(self) -> None:
        """Exchange the times of the last steps. Collective."""
        mine = tuple(self._take_timings())[-_MOST_TOLD:]
        told = self._control.texts("how long the steps took", msgspec.json.encode(mine).decode())
        steps = zip(*map(_timings, told.values()), strict=False)
        tuning = self._books.tuning
        for step in steps:
            # Who waits least waits for nobody: that is how long it takes to send.
            transfer_s = min(timing.wait_s for timing in step)
            for rank, timing in zip(told, step, strict=True):
                if timing.samples:
                    blocked_s = timing.wait_s - transfer_s
                    tuning = self._tune.observe(tuning, rank, timing.samples, timing.compute_s, transfer_s, blocked_s)
        self._books = dataclasses.replace(self._books, tuning=tuning)
