"""The leases of a job's data, and the tuning of its batches; the coordinator's part of `offbeat.batching`, without I/O.

A worker is dealt its next batch when it is released, not when it asks: that costs no round trip, and where the order of
releases is fixed (strict `RoundRobin`), so is who computes what.

Rules:

* The first leases are dealt once all workers of the beginning have enrolled, in order of rank. From then on a worker
  gets as many as its last contribution used, and more only if it asks.
* From the moment in which a contribution is announced, time does not take back the leases it was computed from. They
  are used up once all contributions of its update have arrived whole: until then it may be withdrawn. If its worker is
  lost before the contribution has arrived, they are dealt again.
* A contribution that was computed from a lease that others were given meanwhile, or are given since the server was
  restarted and knows nothing of it, weighs nothing, and is reported as dropped.
* A batch is what the user asked for, or what the tuning says: then its sum over the workers is constant.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from offbeat.batching import (
    BatchTuning,
    EndOfEpoch,
    Lease,
    LeasePool,
    Leases,
    NoDataYet,
    TuningState,
    even_batches,
    what_changes,
)
from offbeat.errors import DisagreementError, OffbeatError, PeerError
from offbeat.protocol.data_leases import RegisterLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from offbeat.batching import Keeps
    from offbeat.sync import Push

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_LIFE = 1 << 32  # numbers of leases that a server deals out in one life, at most
_TERM = timedelta(minutes=10)  # see `Leases.term`
# Leases of a worker: those of one contribution, and as many ahead (see the bounds in `offbeat.protocol.data_leases`).
_MOST_HELD = 2 << 12


@dataclass
class LoaderLeases:
    """One loader's data.

    Args:
        about: what the first worker said.
        leases, pool: who has which samples.
        tune, tuning: how large batches are, if they are tuned.
        keeps: what stays as it is when workers come and go, if they are not.
        missing: how many workers of the beginning have not enrolled.
        gone: those of them that are lost and had not.
        ahead: workers that have, and how many leases they are to hold.
        rounds: the round each worker's next lease is of.
    """

    about: RegisterLoader
    leases: Leases
    pool: LeasePool
    tune: BatchTuning | None
    tuning: TuningState | None
    missing: int
    keeps: Keeps = "local_batch"
    gone: set[int] = field(default_factory=set)
    ahead: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)

    def holds(self, worker: int) -> int:
        """Count the leases that the worker has and has not brought."""
        return len(self.pool.leased_to(worker))

    def draw(self, worker: int, now_s: float) -> list[Lease | EndOfEpoch]:
        """The worker's next lease, behind the end of the epoch if there is nothing more in it."""
        deals: list[Lease | EndOfEpoch] = []
        while not deals or isinstance(deals[-1], EndOfEpoch):
            count = min(self._count(worker), self.leases.samples)
            self.pool, deal = self.leases.take(self.pool, worker, count, now_s, least=self.about.least)
            assert not isinstance(deal, NoDataYet), "there is always another epoch"
            deals.append(deal)
        self.rounds[worker] += 1
        return deals

    def _count(self, worker: int) -> int:
        if self.tune is None or self.tuning is None:
            return even_batches(self.about.batch, self.about.world, self.ahead, self.keeps)[worker]
        while True:
            self.tuning, batches = self.tune.plan(self.tuning, self.rounds[worker])
            if worker in batches:
                return batches[worker]
            self.rounds[worker] += 1  # it takes part in some rounds only


@dataclass
class UsedLeases:
    """A contribution, and what it was computed from.

    Args:
        numbers: of leases, by loader; those that count.
        used: how many leases, by loader.
        samples: in them, by loader.
        computing_s: how long its worker took for it.
        hidden_s: of these, while parameters were still on their way to it.
        applied, whole: whether it is in an update, and has arrived.
        awaited: the contributions to its update that have not arrived; all of the update share one set.
    """

    numbers: dict[int, tuple[int, ...]]
    used: dict[int, int]
    samples: dict[int, int]
    computing_s: float | None
    hidden_s: float = 0.0
    applied: bool = False
    whole: bool = False
    awaited: set[Push] = field(default_factory=set)


class LeaseManager:
    """The leases of all workers and loaders.

    Args:
        tuning_of: how batches are tuned, in a plan's TOML; None if they are not.
        keeps_of: what stays as it is when workers come and go, in a plan's TOML.
        now_s: monotonic seconds.
    """

    def __init__(
        self,
        tuning_of: Callable[[str], BatchTuning | None],
        now_s: Callable[[], float],
        keeps_of: Callable[[str], Keeps] = lambda plan: "local_batch",
    ) -> None:
        self._tuning_of, self._now_s, self._keeps_of = tuning_of, now_s, keeps_of
        self._loaders: dict[int, LoaderLeases] = {}
        self._used_leases: dict[tuple[int, Push], UsedLeases] = {}
        self._awaited: dict[tuple[int, Push], set[Push]] = {}  # by model and contribution: see `UsedLeases`
        self._last: dict[int, UsedLeases] = {}  # by worker: for its next leases, and to learn how fast it is
        self._samples: dict[int, int] = {}  # by worker: in the leases that it last named

    # -- workers come and go -------------------------------------------------------------------------------------

    def enrol(
        self, worker: int, about: RegisterLoader, *, together: bool, world: int, ranks: Collection[int] = ()
    ) -> dict[int, list[Lease | EndOfEpoch]]:
        """A worker takes part, or does again; what is dealt now, by worker.

        Args:
            together: whether all workers wait for each other in every round.
            world: how many workers are to enrol before the first leases are dealt.
            ranks: of these; () for all below the number with which the job began.

        Raises:
            DisagreementError: if its data is not the others'.
            PeerError: if such data cannot be dealt out.
        """
        loader = self._loaders.get(about.loader)
        if loader is None:
            loader = self._loaders[about.loader] = self._open(about, together=together, world=world)
        _compare(worker, about, loader.about)
        begun = not loader.missing
        is_awaited = (
            worker in (ranks or range(about.world)) and worker not in loader.gone and worker not in loader.ahead
        )
        loader.missing -= not begun and is_awaited
        self._take_in(loader, worker, about)
        if loader.missing:
            return {}
        new = (worker,) if begun else sorted(loader.ahead)
        return {one: self._draw(loader, one, loader.ahead[one] - loader.holds(one)) for one in new}

    def void(self, worker: int, about: RegisterLoader) -> tuple[int, ...]:
        """List the leases that a worker came back with and that are not its own any more."""
        leased = set(self._loaders[about.loader].pool.leased_to(worker))
        return tuple(number for number in about.holds if number not in leased)

    def lose(
        self, worker: int, unclear: Collection[tuple[int, Push]] = ()
    ) -> dict[int, dict[int, list[Lease | EndOfEpoch]]]:
        """A worker is gone: what it had not brought is dealt to others; what is dealt now, by loader and worker.

        Args:
            unclear: contributions, by model, that may have arrived; `whole` or `withdrawn` follows.
        """
        for (model, push), used_leases in list(self._used_leases.items()):
            if push[0] == worker and not used_leases.whole and (model, push) not in unclear:
                self._retract(model, push)
        self._last.pop(worker, None)
        for loader in self._loaders.values():
            loader.pool = loader.leases.lose(loader.pool, worker)
            if loader.ahead.pop(worker, None) is not None and loader.tune is not None and loader.tuning is not None:
                loader.tuning = loader.tune.leave(loader.tuning, worker)
        return {
            loader_number: dealt
            for loader_number, loader in self._loaders.items()
            if (dealt := self._begin_without(loader, worker))
        }

    # -- contributions -------------------------------------------------------------------------------------------

    def announce(
        self,
        model: int,
        push: Push,
        used: Iterable[tuple[int, int]],
        computing_s: float | None = None,
        *,
        hidden_s: float = 0.0,
    ) -> bool:
        """A worker has computed a contribution from these leases; whether it may count.

        Args:
            computing_s: how long it took; None if that does not count.
            hidden_s: of these, while parameters were still on their way to it.

        Raises:
            PeerError: if it has nothing to do with such a loader.
        """
        by_loader: dict[int, list[int]] = {}
        for loader_number, number in used:
            by_loader.setdefault(loader_number, []).append(number)
        used_of = {loader_number: len(numbers) for loader_number, numbers in by_loader.items()}
        used_leases = UsedLeases({}, used_of, {}, computing_s, hidden_s)
        valid = True
        for loader_number, numbers in by_loader.items():
            loader = self._enrolled(loader_number, push[0])
            held = loader.pool.held
            used_leases.samples[loader_number] = sum(held[n].lease.count for n in numbers if n in held)
            loader.pool, fine = loader.leases.deliver(loader.pool, push[0], numbers)
            valid &= fine
            used_leases.numbers[loader_number] = tuple(numbers) if fine else ()
        self._last[push[0]] = used_leases
        if not valid:
            for loader_number, kept in used_leases.numbers.items():
                loader = self._loaders[loader_number]
                loader.pool = loader.leases.give_back(loader.leases.retract(loader.pool, push[0], kept), push[0], kept)
        elif by_loader:
            self._used_leases[(model, push)] = used_leases
        return valid

    def most_samples(self, worker: int, used: Collection[tuple[int, int]]) -> int | None:
        """The most samples that a contribution can be of, before it is announced; None if no data is leased.

        Args:
            used: the leases that it names. None are named for a second model that is computed from the same: it is of
                no more samples than the contribution before it, nor is the first of more than its worker holds.
        """
        held = {(number, lease): one for number, one in self._loaders.items() for lease in one.pool.leased_to(worker)}
        counts = {key: one.pool.held[key[1]].lease.count for key, one in held.items()}
        if used:
            self._samples[worker] = sum(counts.get(key, 0) for key in set(used))
        return self._samples.get(worker) or sum(counts.values()) or None

    def applied(self, model: int, push: Push, awaited: set[Push] | None = None) -> None:
        """The contribution is in an update.

        Args:
            awaited: the contributions to this update that have not arrived; one set for all of them.
        """
        awaited = set() if awaited is None else awaited
        if push in awaited:
            self._awaited[(model, push)] = awaited
        used_leases = self._used_leases.get((model, push))
        if used_leases is not None:
            used_leases.applied, used_leases.awaited = True, awaited
            self._close_if_done(model, push, used_leases)

    def whole(self, model: int, push: Push) -> None:
        """The contribution has arrived."""
        used_leases = self._used_leases.get((model, push))
        if used_leases is not None:
            used_leases.whole = True
            self._close_if_done(model, push, used_leases)
        self._await_no_longer(model, push)

    def withdrawn(self, model: int, push: Push) -> None:
        """The contribution was in an update, and has not arrived; its worker is gone."""
        if (model, push) in self._used_leases:
            for loader_number, numbers in self._retract(model, push).items():
                loader = self._loaders[loader_number]
                loader.pool = loader.leases.give_back(loader.pool, push[0], numbers)
        self._await_no_longer(model, push)

    def taken_back(self, model: int, push: Push) -> None:
        """The contribution is taken out of its update; its worker still holds it, and these leases."""
        if (model, push) in self._used_leases:
            self._retract(model, push)

    def dropped(self, model: int, push: Push) -> None:
        """The contribution is not used."""
        used_leases = self._used_leases.pop((model, push), None)
        if used_leases is not None:
            self._acknowledge(used_leases, dropped=True)

    def stepped(self, worker: int, transfer_s: float, blocked_s: float) -> None:
        """A worker has the parameters again: how long it pushed and pulled, and how long it waited for others.

        What it computes while it pulls is known when it brings the next contribution: about what it was in the last.
        """
        last = self._last.get(worker)
        for loader_number, samples in last.samples.items() if last is not None else ():
            loader = self._loaders[loader_number]
            if loader.tune is not None and loader.tuning is not None and last is not None and last.computing_s:
                rest_s = max(0.0, transfer_s - last.hidden_s)
                loader.tuning = loader.tune.observe(loader.tuning, worker, samples, last.computing_s, rest_s, blocked_s)

    # -- leases --------------------------------------------------------------------------------------------------

    def refill(self, worker: int) -> dict[int, list[Lease | EndOfEpoch]]:
        """Lease as much as the worker's last contribution used, by loader."""
        last = self._last.get(worker)
        if last is None:
            return {}
        dealt = {}
        for loader_number, used in last.used.items():
            loader = self._loaders[loader_number]
            dealt[loader_number] = self._draw(loader, worker, min(used, _MOST_HELD - loader.holds(worker)))
        return dealt

    def take(self, worker: int, loader_number: int) -> list[Lease | EndOfEpoch]:
        """One more lease.

        Raises:
            PeerError: if the worker has nothing to do with such a loader, or brings nothing of what it holds.
        """
        loader = self._enrolled(loader_number, worker)
        if loader.holds(worker) >= _MOST_HELD:
            raise PeerError(
                f"Cannot lease more to rank {worker}: it holds {_MOST_HELD} batches of loader {loader_number} and has "
                "pushed none of them. Step after fewer, and evaluate with a loader that is not prepared."
            )
        return [] if loader.missing else self._draw(loader, worker, 1)

    def give_back(self, worker: int, loader_number: int, numbers: Iterable[int]) -> None:
        """The worker will not use these leases.

        Raises:
            PeerError: if it has nothing to do with such a loader.
        """
        loader = self._enrolled(loader_number, worker)
        loader.pool = loader.leases.give_back(loader.pool, worker, numbers)

    def what_changes(self) -> str:
        """Say what becomes of batches and learning rate when workers join and leave."""
        loaders = self._loaders.values()
        keeps_total = any(loader.tuning is not None or loader.keeps == "global_batch" for loader in loaders)
        return what_changes("global_batch" if keeps_total else "local_batch")

    def together(self, is_together: bool) -> None:
        """Set whether all workers wait for each other in every round from now on."""
        for loader in self._loaders.values():
            if loader.tuning is not None:
                loader.tuning = dataclasses.replace(loader.tuning, together=is_together)

    def out_of_memory(self, worker: int, loader_number: int, count: int) -> None:
        """The worker had no memory for so many samples.

        Raises:
            PeerError: if it has nothing to do with such a loader.
        """
        loader = self._enrolled(loader_number, worker)
        if loader.tune is not None and loader.tuning is not None:
            loader.tuning = loader.tune.out_of_memory(loader.tuning, worker, count)

    # -- for people, and for checkpoints -------------------------------------------------------------------------

    def explain(self) -> str:
        """Say which worker paces the rounds and why, where batches are tuned; else ""."""
        told = [
            loader.tune.explain(loader.tuning) for loader in self._loaders.values() if loader.tune and loader.tuning
        ]
        return " ".join(told)

    def every(self) -> dict[int, int]:
        """The interval of rounds in which each worker takes part: above 1 if it is too slow for all."""
        every: dict[int, int] = {}
        for loader in self._loaders.values():
            for worker, machine in (loader.tuning.machines if loader.tuning is not None else {}).items():
                every[worker] = max(every.get(worker, 1), machine.every)
        return every

    def epochs(self) -> dict[int, LeasePool]:
        """The state of the data, by loader."""
        return {loader_number: loader.pool for loader_number, loader in self._loaders.items()}

    @property
    def workers(self) -> set[int]:
        """The workers that have enrolled, also before this server was started again."""
        return {worker for loader in self._loaders.values() for worker in loader.pool.at}

    def to_plain(self) -> dict[str, Any]:
        """The state of the data and of what is known of the machines, in dicts, lists and numbers.

        As it is once all updates that were decided on have been made: what is in one is used up, and what is in none is
        its worker's, which will announce it again.
        """
        return {
            str(loader_number): self._plain(loader_number, loader) for loader_number, loader in self._loaders.items()
        }

    def restore(self, plain: Any) -> None:
        """Go on where `to_plain` was called; the workers enrol again.

        Raises:
            PeerError: if it is damaged.
        """
        try:
            loaders = {int(loader_number): self._loader_of(one) for loader_number, one in dict(plain).items()}
        except (OffbeatError, msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
            raise PeerError(f"Cannot resume the data: {error}") from error
        self._loaders.update(loaders)

    def load(self, plain: Any) -> dict[int, dict[int, list[Lease | EndOfEpoch]]]:
        """Go on where another run called `to_plain`, with the workers that are here; what is dealt now.

        Raises:
            PeerError: if it is damaged, or of other data.
        """
        before = self._loaders
        if {str(loader_number) for loader_number in before} != set(plain if isinstance(plain, dict) else ()):
            raise PeerError("Cannot resume the data: the checkpoint has other loaders than this run.")
        self._loaders = {}
        try:
            self.restore(plain)
            for loader_number, loader in self._loaders.items():
                _compare_data(loader.about, before[loader_number].about)
        except OffbeatError as error:
            self._loaders = before
            raise PeerError(str(error)) from error
        self._used_leases.clear()
        self._awaited.clear()
        self._last.clear()
        dealt = {}
        for loader_number, loader in self._loaders.items():
            former = before[loader_number]
            loader.missing, loader.gone, loader.ahead = former.missing, former.gone, former.ahead
            world, least = former.about.world, former.about.least
            loader.about = msgspec.structs.replace(loader.about, world=world, least=least)
            if loader.tune is not None and loader.tuning is not None:
                loader.tuning = loader.tune.with_floor(loader.tuning, least)
            self._set_members(loader)
            dealt[loader_number] = {one: self._draw(loader, one, loader.ahead[one]) for one in sorted(loader.ahead)}
        return dealt

    # -- inside --------------------------------------------------------------------------------------------------

    def _plain(self, loader_number: int, loader: LoaderLeases) -> dict[str, Any]:
        pool = loader.pool
        for (_, push), used_leases in self._used_leases.items():
            numbers = used_leases.numbers.get(loader_number, ())
            if used_leases.applied:
                pool, _ = loader.leases.acknowledge(pool, numbers)
            else:
                pool = loader.leases.retract(pool, push[0], numbers)
        return {
            "about": msgspec.to_builtins(loader.about),
            "leases": loader.leases.to_plain(pool),
            "tuning": loader.tune.to_plain(loader.tuning) if loader.tune and loader.tuning else None,
            "rounds": {str(worker): number for worker, number in loader.rounds.items()},
        }

    def _loader_of(self, plain: dict[str, Any]) -> LoaderLeases:
        about = msgspec.convert(plain["about"], RegisterLoader)
        loader = self._open(about, together=False, world=0)
        pool = loader.leases.from_plain(plain["leases"], now_s=self._now_s())
        # What was dealt out after this was kept is not known, and must not be taken for what is dealt out from now on.
        loader.pool = dataclasses.replace(pool, number=pool.number + _LIFE)
        if loader.tune is not None and loader.tuning is not None:
            tuning = loader.tune.from_plain(plain["tuning"], loader.tuning.total)
            loader.tuning = loader.tune.with_floor(tuning, about.least)
        loader.rounds = msgspec.convert(plain["rounds"], dict[_Count, _Count], strict=False)
        return loader

    def _set_members(self, loader: LoaderLeases) -> None:
        """Have those who are here take part, and nobody else."""
        leases, at = loader.leases, dict(loader.pool.at)
        for worker in {*at, *(held.worker for held in loader.pool.held.values())}:
            loader.pool = leases.lose(loader.pool, worker)
        first = max(loader.rounds.values(), default=0)
        for worker in loader.ahead:
            loader.pool = leases.join(loader.pool, worker, epoch=at.get(worker, min(at.values(), default=0)))
        loader.rounds = {worker: loader.rounds.get(worker, first) for worker in loader.ahead}
        if loader.tune is not None and loader.tuning is not None:
            for worker in loader.tuning.machines.keys() - loader.ahead.keys():
                loader.tuning = loader.tune.leave(loader.tuning, worker)
            for worker in sorted(loader.ahead.keys() - loader.tuning.machines.keys()):
                loader.tuning = loader.tune.join(loader.tuning, worker)

    def _open(self, about: RegisterLoader, *, together: bool, world: int) -> LoaderLeases:
        tune = self._tuning_of(about.plan)
        total = about.batch * about.world
        try:
            leases = Leases(
                about.samples, seed=about.seed, shuffle=about.shuffle, drop_last=about.drop_last, term=_TERM
            )
            tuning = None if tune is None else tune.init(total, together=together, floor=about.least)
        except OffbeatError as error:
            raise PeerError(str(error)) from error
        return LoaderLeases(about, leases, leases.init(), tune, tuning, world, self._keeps_of(about.plan))

    def _begin_without(self, loader: LoaderLeases, worker: int) -> dict[int, list[Lease | EndOfEpoch]]:
        """Begin without a worker that had not enrolled and will not come; what is leased now, by worker."""
        if not loader.missing or worker in loader.gone or worker in loader.rounds:
            return {}
        loader.gone.add(worker)
        loader.missing -= 1
        there = () if loader.missing else sorted(loader.ahead)
        return {one: self._draw(loader, one, loader.ahead[one]) for one in there}

    def _take_in(self, loader: LoaderLeases, worker: int, about: RegisterLoader) -> None:
        comes_back = bool(about.epoch or about.holds)
        epoch = about.epoch if comes_back else None
        loader.pool = loader.leases.join(loader.pool, worker, epoch=epoch, holds=about.holds)
        loader.ahead[worker] = about.ahead
        loader.rounds[worker] = max(loader.rounds.values(), default=0)
        if loader.tune is not None and loader.tuning is not None and worker not in loader.tuning.machines:
            loader.tuning = loader.tune.join(loader.tuning, worker)

    def _draw(self, loader: LoaderLeases, worker: int, count: int) -> list[Lease | EndOfEpoch]:
        now_s = self._now_s()
        return [deal for _ in range(count) for deal in loader.draw(worker, now_s)]

    def _retract(self, model: int, push: Push) -> dict[int, tuple[int, ...]]:
        """Retract what was announced and did not arrive; the leases that it was computed from, by loader."""
        numbers_of = self._used_leases.pop((model, push)).numbers
        for loader_number, numbers in numbers_of.items():
            loader = self._loaders[loader_number]
            loader.pool = loader.leases.retract(loader.pool, push[0], numbers)
        return numbers_of

    def _await_no_longer(self, model: int, push: Push) -> None:
        awaited = self._awaited.pop((model, push), None)
        if awaited is not None:
            awaited.discard(push)
            for (of, other), used_leases in list(self._used_leases.items()):
                if of == model and used_leases.awaited is awaited:
                    self._close_if_done(model, other, used_leases)

    def _close_if_done(self, model: int, push: Push, used_leases: UsedLeases) -> None:
        if used_leases.applied and used_leases.whole and not used_leases.awaited:
            del self._used_leases[(model, push)]
            self._acknowledge(used_leases, dropped=False)

    def _acknowledge(self, used_leases: UsedLeases, *, dropped: bool) -> None:
        for loader_number, numbers in used_leases.numbers.items():
            loader = self._loaders[loader_number]
            loader.pool, fine = loader.leases.acknowledge(loader.pool, numbers, dropped=dropped)
            assert fine, f"leases {numbers} were delivered, and are gone"

    def _enrolled(self, loader_number: int, worker: int) -> LoaderLeases:
        loader = self._loaders.get(loader_number)
        if loader is None or worker not in loader.ahead:
            raise PeerError(f"Rank {worker} has not enrolled for loader {loader_number}.")
        return loader


def _compare(worker: int, theirs: RegisterLoader, ours: RegisterLoader) -> None:
    for name in ("samples", "seed", "shuffle", "drop_last", "batch", "least", "world"):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            raise DisagreementError(
                f"Cannot lease data to rank {worker}: its loader has {name}={there!r}, that of the others {here!r}. "
                "Give every worker the same dataset, batch size and seed."
            )


def _compare_data(theirs: RegisterLoader, ours: RegisterLoader) -> None:
    for name in ("samples", "shuffle", "drop_last"):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            raise PeerError(
                f"Cannot resume the data with {name}={here!r}: the checkpoint was made with {there!r}. Use the same "
                "dataset and order, or leave the loaders out of it."
            )
