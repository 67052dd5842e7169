"""Leases and the pool they come from: the state says where every sample is."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


# So that a lease is never long to tell of.
_MOST_PIECES = 1000
_MOST_COUNTED = 1 << 61  # of what is saved, so that it can be told of
_MOST_S = 1e12
_MOST_BEHIND = 1 << 16  # epochs: who is behind is told the end of each


class PositionRange(NamedTuple):
    """Positions `start` to below `stop` in the order of `epoch`."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Samples in it."""
        return self.stop - self.start


@dataclass(frozen=True)
class Lease:
    """The samples that a worker computes next.

    Args:
        number: by which it is delivered and acknowledged; no two leases have the same.
        epoch: the worker is in. Pieces that others lost may be of earlier epochs.
        pieces: in the order in which the samples are to be drawn.
    """

    number: int
    epoch: int
    pieces: tuple[PositionRange, ...]

    @property
    def count(self) -> int:
        """Samples in it."""
        return total(self.pieces)


@dataclass(frozen=True)
class EndOfEpoch:
    """No samples of `epoch` are left for this worker; its next request is for the epoch behind it, if there is one."""

    epoch: int


@dataclass(frozen=True)
class NoDataYet:
    """No samples are left, but `workers` may return what they hold, and no epoch follows in which others could take it.

    Ask again when one of them has delivered or is lost, at the latest at `until_s`. Who still holds leases contributes
    what it has before it asks again. Where a round needs everybody, who waits takes part with nothing.
    """

    workers: tuple[int, ...]
    until_s: float


@dataclass(frozen=True)
class HeldLease:
    """A lease that is neither acknowledged nor returned.

    Args:
        taken_s: when.
        delivered: whether the contribution computed from it has arrived whole.
    """

    lease: Lease
    worker: int
    taken_s: float
    delivered: bool = False


@dataclass(frozen=True)
class SampleCounts:
    """Samples that are settled, and how.

    Args:
        used: were in a contribution that was applied.
        dropped: were in one that arrived and was not applied.
        skipped: were left out: the last ones with `drop_last`, or by `Leases.close`.
    """

    used: int = 0
    dropped: int = 0
    skipped: int = 0

    @property
    def settled(self) -> int:
        """The number of samples that are used, dropped or skipped."""
        return self.used + self.dropped + self.skipped

    def __add__(self, other: SampleCounts) -> SampleCounts:
        return SampleCounts(self.used + other.used, self.dropped + other.dropped, self.skipped + other.skipped)


@dataclass(frozen=True)
class LeasePool:
    """The place of every sample; immutable.

    Args:
        epoch: the newest that somebody has begun.
        fresh: the first of its positions that nobody has leased yet.
        number: of the next lease.
        held: leases that are neither acknowledged nor returned, by number.
        returned: what is to be leased again, by position.
        at: workers that take part, and the epoch each is in.
        open: epochs in which samples are not settled yet.
        complete: how many epochs are settled, and ...
        settled: ... how, all together.
        came_back: samples that were returned so far, for people.
        now_s: time of the last request.
    """

    epoch: int = 0
    fresh: int = 0
    number: int = 0
    held: dict[int, HeldLease] = field(default_factory=dict)
    returned: tuple[PositionRange, ...] = ()
    at: dict[int, int] = field(default_factory=dict)
    open: dict[int, SampleCounts] = field(default_factory=lambda: {0: SampleCounts()})
    complete: int = 0
    settled: SampleCounts = SampleCounts()
    came_back: int = 0
    now_s: float = 0.0

    @property
    def left_over(self) -> int:
        """Samples that came back and that nobody has leased since."""
        return total(self.returned)

    def reached(self, samples: int) -> float:
        """Epochs of so many samples that are dealt out, or over for all; what came back is not, even of later ones."""
        dealt = self.epoch + (self.fresh - self.left_over) / samples
        return max(dealt, float(min(self.at.values(), default=0)))

    def leased_to(self, worker: int) -> tuple[int, ...]:
        """Numbers of the leases that `worker` holds and has not delivered."""
        return tuple([n for n, held in self.held.items() if held.worker == worker and not held.delivered])


def total(pieces: Iterable[PositionRange]) -> int:
    """Samples in all of them."""
    return sum([stop - start for _, start, stop in pieces])


def give_back(pool: LeasePool, numbers: Collection[int]) -> LeasePool:
    """The pool in which those of the leases that were not delivered are returned."""
    # A dict, so that whatever a lost worker held is gone through once.
    back = {n: held for n in numbers if not (held := pool.held[n]).delivered}
    if not back:
        return pool
    pieces = [piece for held in back.values() for piece in held.lease.pieces]
    return dataclasses.replace(
        pool,
        held={n: held for n, held in pool.held.items() if n not in back},
        returned=_joined([*pool.returned, *pieces]),
        came_back=pool.came_back + total(pieces),
    )


def draw(pool: LeasePool, count: int) -> tuple[LeasePool, tuple[PositionRange, ...]]:
    """Take `count` samples that are there: first what was returned, oldest first, then fresh ones.

    Fewer if they would be in too many pieces.
    """
    drawn: list[PositionRange] = []
    # Only what is taken is looked at: much may have been returned, and the next who asks waits.
    for piece in pool.returned[:_MOST_PIECES]:
        if not count:
            break
        drawn.append(piece._replace(stop=min(piece.stop, piece.start + count)))
        count -= drawn[-1].size
    kept = pool.returned[len(drawn) :]
    if drawn and (cut := drawn[-1]).stop < (whole := pool.returned[len(drawn) - 1]).stop:
        kept = (whole._replace(start=cut.stop), *kept)
    if kept:
        count = 0  # there would be too many pieces
    if count:
        drawn.append(PositionRange(pool.epoch, pool.fresh, pool.fresh + count))
    return dataclasses.replace(pool, returned=kept, fresh=pool.fresh + count), tuple(drawn)


def set_aside(pool: LeasePool, *, samples: int) -> LeasePool:
    """Set aside all that is fresh, to be leased behind the end of its epoch."""
    if pool.fresh == samples:
        return pool
    piece = PositionRange(pool.epoch, pool.fresh, samples)
    return dataclasses.replace(pool, fresh=samples, returned=_joined([*pool.returned, piece]))


def settle(pool: LeasePool, epoch: int, tally: SampleCounts, *, samples: int) -> LeasePool:
    """Count samples of `epoch`; with the last of its `samples` the epoch is complete."""
    now = pool.open[epoch] + tally
    if now.settled < samples:
        return dataclasses.replace(pool, open={**pool.open, epoch: now})
    rest = {other: of_other for other, of_other in pool.open.items() if other != epoch}
    return dataclasses.replace(pool, open=rest, complete=pool.complete + 1, settled=pool.settled + now)


def audit(pool: LeasePool, *, samples: int) -> str | None:
    """Find what does not add up; None if each of the `samples` of each epoch is in exactly one place."""
    wrong = _out_of_bounds(pool)
    if wrong:
        return wrong
    if not 0 <= pool.fresh <= samples or (pool.fresh < samples and pool.epoch not in pool.open):
        return f"position {pool.fresh} of {samples} in epoch {pool.epoch}"
    pieces = sorted([*pool.returned, *(piece for held in pool.held.values() for piece in held.lease.pieces)])
    for piece in pieces:
        end = pool.fresh if piece.epoch == pool.epoch else samples
        if not 0 <= piece.start < piece.stop <= end or piece.epoch not in pool.open:
            return f"{piece} was never leased"
    for one, other in itertools.pairwise(pieces):
        if one.epoch == other.epoch and other.start < one.stop:
            return f"{one} and {other} overlap"
    for epoch, tally in pool.open.items():
        fresh = samples - pool.fresh if epoch == pool.epoch else 0
        away = total([piece for piece in pieces if piece.epoch == epoch])
        if min(dataclasses.astuple(tally)) < 0 or tally.settled + away + fresh != samples:
            return f"epoch {epoch}: {tally.settled} samples settled, {away} leased, {fresh} fresh, of {samples}"
    if pool.complete + len(pool.open) != pool.epoch + 1 or pool.settled.settled != pool.complete * samples:
        return f"{pool.complete} epochs complete and {len(pool.open)} open, of {pool.epoch + 1}; {pool.settled}"
    if any(number != held.lease.number or number >= pool.number for number, held in pool.held.items()):
        return f"leases {sorted(pool.held)} are held, the next is {pool.number}"
    if any(not max(0, pool.epoch - _MOST_BEHIND) <= epoch <= pool.epoch + 1 for epoch in pool.at.values()):
        return f"workers are in the epochs {pool.at}, the newest is {pool.epoch}"
    return None


def _out_of_bounds(pool: LeasePool) -> str | None:
    """Find what cannot have been counted or timed; None if everything can."""
    counted = {
        "the epoch": [pool.epoch],
        "the next lease": [pool.number],
        "complete epochs": [pool.complete],
        "samples that came back": [pool.came_back],
        "a worker": [*pool.at, *(held.worker for held in pool.held.values())],
        "the epoch of a lease": [held.lease.epoch for held in pool.held.values()],
    }
    for what, numbers in counted.items():
        for number in numbers:
            if not 0 <= number < _MOST_COUNTED:
                return f"{what} is {number}"
    if any(not 0 <= epoch <= pool.epoch for epoch in pool.open):
        return f"the epochs {sorted(pool.open)} are open, the newest is {pool.epoch}"
    for time_s in (pool.now_s, *(held.taken_s for held in pool.held.values())):
        if not -_MOST_S < time_s < _MOST_S:
            return f"a time is {time_s} s"
    return None


def _joined(pieces: list[PositionRange]) -> tuple[PositionRange, ...]:
    """Sort ranges and join neighbours, so that what comes back does not fall into ever smaller pieces."""
    joined: list[PositionRange] = []
    for piece in sorted(pieces):
        if joined and joined[-1][::2] == piece[:2]:
            joined[-1] = joined[-1]._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)
