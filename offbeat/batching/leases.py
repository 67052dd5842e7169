"""Leases of samples: every epoch is one seeded order of all samples, and workers lease positions of it.

Nobody owns a part of the data. A worker that is slow leases less, one that joins leases from then on, and what a lost
one had leased goes to the others. A sample's way through an epoch:

    fresh --take--> leased --deliver--> delivered --acknowledge--> used, or dropped (which is counted)
                    ^    |              neither loss nor time takes it back
                    |    +-- lose, give_back; or overdue, while nothing else is left
                   take  |
                    +--- returned

Rules:

* In each epoch every sample is used exactly once, whatever the sizes of leases and whoever comes and goes. A
  contribution may be used only if all its leases are valid when it arrives: `deliver` and `acknowledge` say so.
* A worker that asks is given what was returned, oldest first, then what is fresh. Only where that is not enough are
  leases taken back whose term is over; until then a late contribution is as good as any.
* When an epoch has nothing more to give, each worker that asks is told so once (`EndOfEpoch`), and begins the next at
  once, alone, while others still hold leases of the old one. Every worker is told the end of every epoch since it
  joined, also one that slept through it.
* If a holder dies after others have gone on, what it held is leased in the epoch they are in, before anything else, and
  counted to the epoch it is of. So an epoch is complete a little after the next has begun.
* Nothing comes behind the last epoch. There a worker waits (`NoDataYet`) while another holds what may still return, and
  nobody holds for longer than the term. Only where `epochs` is not known, or with the last worker of all, can samples
  be left over in the end; `LeasePool.left_over` counts them.

`Leases` is the description, `LeasePool` the state. A pool is a function of the description and of the calls so far, so
one that was saved and loaded anywhere goes on as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from offbeat.batching.lease_state import (
    EndOfEpoch,
    HeldLease,
    Lease,
    LeasePool,
    NoDataYet,
    SampleCounts,
    audit,
    draw,
    give_back,
    set_aside,
    settle,
)
from offbeat.batching.permutation import shuffled
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_VERSION = 1  # of the saved form


@dataclass(frozen=True)
class Leases:
    """The description of how a dataset is leased. All methods are pure; those that change a pool return the new one.

    1) (server) `init`, or `from_plain` of a checkpoint and then `lose` for each of its workers that does not come back.
    2) (server) `join` for each worker, which is told the epoch it begins in.
    3) (server) `take` when a worker asks for data. A worker may hold several leases, to load ahead or to accumulate.
    4) (worker) `indices` of the lease.
    5) (server) `deliver` when a contribution has arrived whole, with the numbers of all leases it was computed from.
    6) (server) `acknowledge` when it was applied, or dropped for good.
    7) (server) `lose` when a worker is gone, in order or not.

    5) may be left out where a contribution is applied as it arrives. Where it waits for others it must not: they might
    be told to wait for it.

    Args:
        samples: size of the dataset.
        seed: of the order, together with the number of the epoch.
        shuffle: a new order for each epoch; as the samples lie if False.
        drop_last: no lease is smaller than was asked for; when less is left of an epoch, that is skipped for all.
        epochs: how many there are, so that in the last one losses can be waited for; None if that is not known.
        term: how long a worker may hold a lease before another may be given it. Many times a usual step: it is there
            for workers that are alive and never deliver; who is dead is lost at once.

    Raises:
        ModelError: if a value cannot be.

    >>> leases = Leases(10, shuffle=False)
    >>> pool = leases.join(leases.init(), worker=0)
    >>> pool, first = leases.take(pool, worker=0, count=8, now_s=0.0)
    >>> pool, second = leases.take(pool, worker=0, count=8, now_s=0.0)
    >>> leases.indices(second).tolist(), leases.take(pool, worker=0, count=8, now_s=0.0)[1]
    ([8, 9], EndOfEpoch(epoch=0))
    """

    samples: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    epochs: int | None = None
    term: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        if type(self.samples) is not int or not 0 < self.samples <= 2**62:
            raise ModelError(f"Cannot lease {self.samples!r} samples: a dataset has at least 1, and at most 2^62.")
        if type(self.seed) is not int:
            raise ModelError(f"Cannot shuffle with the seed {self.seed!r}: choose a whole number.")
        for name in ("shuffle", "drop_last"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise ModelError(f"Cannot lease data with {name}={value!r}: choose True or False.")
        if self.epochs is not None and (type(self.epochs) is not int or self.epochs < 1):
            raise ModelError(f"Cannot lease {self.epochs!r} epochs: choose a whole number from 1, or None.")
        if not isinstance(self.term, timedelta):
            raise ModelError(
                f"Cannot lease for {self.term!r}: give a datetime.timedelta, such as timedelta(minutes=10)."
            )
        if self.term <= timedelta(0):
            raise ModelError(f"Cannot lease for {self.term}: no worker computes in no time. Choose more than 0.")

    def init(self) -> LeasePool:
        """The first pool: no lease, no worker."""
        return LeasePool()

    def beginning(self, epoch: int, workers: Iterable[int] = ()) -> LeasePool:
        """The pool with these workers at the beginning of an epoch; the epochs before it are behind them."""
        behind = SampleCounts(used=epoch * self.samples)
        at = dict.fromkeys(workers, epoch)
        return LeasePool(epoch=epoch, at=at, open={epoch: SampleCounts()}, complete=epoch, settled=behind)

    def join(self, pool: LeasePool, worker: int, *, epoch: int | None = None, holds: Iterable[int] = ()) -> LeasePool:
        """`worker` takes part from now on.

        Args:
            epoch: it was in before, if it comes back; the newest if None.
            holds: leases that it still has from before; what it had beside them is leased again.
        """
        kept = set(holds)
        pool = give_back(pool, [number for number in pool.leased_to(worker) if number not in kept])
        return dataclasses.replace(
            pool, at={**pool.at, worker: pool.epoch if epoch is None else min(epoch, pool.epoch)}
        )

    def take(
        self, pool: LeasePool, worker: int, count: int, now_s: float, *, least: int = 1
    ) -> tuple[LeasePool, Lease | EndOfEpoch | NoDataYet]:
        """The answer to `worker`, which takes part and asks for `count` samples.

        A lease has fewer only where an epoch ends, and never with `drop_last`; or if it would be in a thousand pieces.

        Args:
            now_s: monotonic; a time before the last one counts as that.
            least: no lease has fewer, unless the dataset has: what would be left of an epoch is added to the lease
                before, and what came back later to one of the next epoch.

        Raises:
            ModelError: if no epoch can fill such a lease with `drop_last`.
        """
        assert count >= 1, f"worker {worker} asks for {count} samples"
        assert worker in pool.at, f"worker {worker} asks for samples, but only {sorted(pool.at)} take part"
        if self.drop_last and count > self.samples:
            raise ModelError(
                f"Cannot fill batches of {count} from {self.samples} samples with drop_last: every epoch would be "
                "skipped. Use smaller batches, or no drop_last."
            )
        epoch = pool.at[worker]
        if self.epochs is not None and epoch >= self.epochs:
            return pool, EndOfEpoch(epoch - 1)
        pool = dataclasses.replace(pool, now_s=max(pool.now_s, now_s))
        if epoch > pool.epoch:
            pool = dataclasses.replace(pool, epoch=epoch, fresh=0, open={**pool.open, epoch: SampleCounts()})
        least = 1 if self.drop_last else min(least, count, self.samples)
        there = self._there(pool, epoch, count + least)
        if there < count and (overdue := self._overdue(pool, worker, epoch)):
            pool = give_back(pool, overdue)
            there = self._there(pool, epoch, count + least)
        if there >= (count if self.drop_last else least):
            pool, pieces = draw(pool, count if there == count + least else there)
            lease = Lease(pool.number, epoch, pieces)
            held = {**pool.held, lease.number: HeldLease(lease, worker, pool.now_s)}
            return dataclasses.replace(pool, number=lease.number + 1, held=held), lease
        return self._end(pool, worker)

    def deliver(self, pool: LeasePool, worker: int, numbers: Iterable[int]) -> tuple[LeasePool, bool]:
        """A contribution of `worker` that was computed from these leases has arrived whole; whether it may be used.

        If one of them is not the worker's (any more), the contribution must not be used, and what it has of the others
        is leased again. That is also the answer to a contribution that was acknowledged already.
        """
        numbers = set(numbers)
        valid = sorted(n for n in numbers if n in pool.held and pool.held[n].worker == worker)
        if len(valid) < len(numbers):
            return give_back(pool, valid), False
        arrived = {n: dataclasses.replace(pool.held[n], delivered=True) for n in valid}
        return dataclasses.replace(pool, held={**pool.held, **arrived}), True

    def acknowledge(self, pool: LeasePool, numbers: Iterable[int], *, dropped: bool = False) -> tuple[LeasePool, bool]:
        """The contribution from these leases is applied now, or `dropped`; whether it may be.

        Without `deliver` before, ask before it is applied: False means that it must not be, as there.
        """
        numbers = set(numbers)
        valid = sorted(numbers & pool.held.keys())
        if len(valid) < len(numbers):
            return give_back(pool, valid), False
        pieces = [piece for n in valid for piece in pool.held[n].lease.pieces]
        pool = dataclasses.replace(pool, held={n: held for n, held in pool.held.items() if n not in numbers})
        for piece in pieces:
            tally = SampleCounts(dropped=piece.size) if dropped else SampleCounts(used=piece.size)
            pool = settle(pool, piece.epoch, tally, samples=self.samples)
        return pool, True

    def retract(self, pool: LeasePool, worker: int, numbers: Iterable[int]) -> LeasePool:
        """Take back the report that `worker` had leases delivered: time and loss may take these leases back again."""
        held = dict(pool.held)
        for n in numbers:
            if n in held and held[n].worker == worker:
                held[n] = dataclasses.replace(held[n], delivered=False)
        return dataclasses.replace(pool, held=held)

    def give_back(self, pool: LeasePool, worker: int, numbers: Iterable[int]) -> LeasePool:
        """`worker` will not use these leases, such as those it took ahead in another size."""
        return give_back(pool, sorted(set(numbers) & set(pool.leased_to(worker))))

    def lose(self, pool: LeasePool, worker: int) -> LeasePool:
        """`worker` is gone: what it had not delivered is leased again. Nothing changes if it takes no part."""
        pool = give_back(pool, pool.leased_to(worker))
        return dataclasses.replace(pool, at={other: epoch for other, epoch in pool.at.items() if other != worker})

    def close(self, pool: LeasePool, epoch: int) -> LeasePool:
        """Skip what is fresh of `epoch`, if that is the newest: for loops that end before the data does."""
        fresh = self.samples - pool.fresh
        if epoch != pool.epoch or not fresh:
            return pool
        pool = dataclasses.replace(pool, fresh=self.samples)
        return settle(pool, epoch, SampleCounts(skipped=fresh), samples=self.samples)

    def indices(self, lease: Lease) -> NDArray[np.int64]:
        """The samples of a lease, [lease.count]. Needs nothing but this description: each worker does it by itself."""
        parts = []
        for epoch, start, stop in lease.pieces:
            positions = np.arange(start, stop, dtype=np.int64)
            if self.shuffle:
                positions = shuffled(positions, samples=self.samples, seed=self.seed, epoch=epoch)
            parts.append(positions)
        return np.concatenate(parts)

    def to_plain(self, pool: LeasePool) -> dict[str, Any]:
        """The pool in dicts, lists and numbers, for a checkpoint in JSON or MessagePack."""
        return {"version": _VERSION, **self._identity(), "pool": msgspec.to_builtins(pool, str_keys=True)}

    def from_plain(self, plain: Any, *, now_s: float | None = None) -> LeasePool:
        """The pool that `to_plain` gave.

        Args:
            now_s: the present time of a clock that was started anew, so that leases are as old as they were; None if it
                is the same clock.

        Raises:
            ModelError: if it belongs to another dataset, seed or order, or does not add up.
        """
        if not isinstance(plain, dict) or plain.get("version") != _VERSION:
            raise ModelError("Cannot resume the data: the checkpoint has no place in it that this version can read.")
        for name, mine in self._identity().items():
            if plain.get(name) != mine:
                raise ModelError(
                    f"Cannot resume the data with {name}={mine!r}: the checkpoint was made with {plain.get(name)!r}. "
                    "Use the same dataset, seed and order, or load only the model and the optimizer."
                )
        try:
            pool = msgspec.convert(plain.get("pool"), LeasePool, str_keys=True)
        except msgspec.ValidationError as error:
            raise ModelError(f"Cannot resume the data: the checkpoint is damaged ({error}).") from error
        wrong = audit(pool, samples=self.samples)
        if wrong:
            raise ModelError(f"Cannot resume the data: the checkpoint does not add up ({wrong}).")
        if now_s is None:
            return pool
        later_s = now_s - pool.now_s
        held = {n: dataclasses.replace(one, taken_s=one.taken_s + later_s) for n, one in pool.held.items()}
        return dataclasses.replace(pool, held=held, now_s=now_s)

    def _identity(self) -> dict[str, Any]:
        return {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle, "drop_last": self.drop_last}

    def _there(self, pool: LeasePool, epoch: int, most: int) -> int:
        """Samples that a worker in `epoch` could be given now, as far as it wants them."""
        there = self.samples - pool.fresh if epoch == pool.epoch else 0
        for piece in pool.returned:
            if there >= most or piece.epoch > epoch:
                break
            there += piece.size
        return min(there, most)

    def _overdue(self, pool: LeasePool, worker: int, epoch: int) -> list[int]:
        """Leases that others have held for too long, and that would help `worker`."""
        return [
            number
            for number, held in pool.held.items()
            if held.worker != worker
            and held.taken_s + self.term.total_seconds() <= pool.now_s
            and any(piece.epoch <= epoch for piece in held.lease.pieces)
        ]

    def _end(self, pool: LeasePool, worker: int) -> tuple[LeasePool, EndOfEpoch | NoDataYet]:
        """Answer where an epoch has no samples (or with `drop_last` not enough) to give."""
        epoch = pool.at[worker]
        last = self.epochs is not None and epoch >= self.epochs - 1
        # Who holds leases itself is not waited for by itself, and what has been delivered does not return.
        others = [held for held in pool.held.values() if held.worker != worker and not held.delivered]
        if last and others:
            until_s = min(held.taken_s for held in others) + self.term.total_seconds()
            return pool, NoDataYet(tuple(sorted({held.worker for held in others})), until_s)
        if self.drop_last:
            pool = self.close(pool, epoch)
        elif epoch == pool.epoch:
            pool = set_aside(pool, samples=self.samples)
        if self.drop_last and last:
            for piece in pool.returned:
                pool = settle(pool, piece.epoch, SampleCounts(skipped=piece.size), samples=self.samples)
            pool = dataclasses.replace(pool, returned=())
        return dataclasses.replace(pool, at={**pool.at, worker: epoch + 1}), EndOfEpoch(epoch)
