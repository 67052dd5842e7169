"""Batches that all workers work out alike: each keeps the same state of the leases, so nobody has to deal them out.

For fabrics on which every step is everybody's. Now and then the workers tell each other how long their steps took; from
that each computes all batches of the next steps, and takes its own. The state is a function of the workers' reports, so
it is equal everywhere, bit for bit.

Where the others go on without a worker that is lost, each knows the round in which that first lacked, from the exchange
that it was lost in, and tells it. Whoever does not answer is dealt nothing more; what it had been dealt from that round
on goes to the others. So the leases of some rounds are kept open, until their steps have surely been taken.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from offbeat.batching import Lease, LeasePool, TuningState, even_batches
from offbeat.engine import state_checks
from offbeat.errors import ModelError
from offbeat.loading.batch_source import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from offbeat.batching import BatchTuning, Keeps, Leases
    from offbeat.engine.control_group import ControlGroup

# Steps between two exchanges of times: each is a collective of its own, and plans need no more.
_REPORT_EVERY = 5
_MOST_TIMINGS = 256
_MOST_DRAWN = 1 << 12

_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]


class Timing(NamedTuple):
    """One step of one worker."""

    samples: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    compute_s: _Seconds
    wait_s: _Seconds


class StepReport(msgspec.Struct, frozen=True):
    """A worker's report: its last steps, and in which round each worker that it knows to be lost first lacked."""

    timings: Annotated[tuple[Timing, ...], msgspec.Meta(max_length=_MOST_TIMINGS)]
    lost: Annotated[dict[int, int], msgspec.Meta(max_length=4096)] = {}


_read_report = msgspec.json.Decoder(StepReport).decode


@dataclass(frozen=True)
class LeaseState:
    """The knowledge that all workers share; immutable.

    Args:
        members: ranks that are dealt to.
        over: those of them that have nothing more in this epoch, while others do.
        open: the leases of the last rounds that are not taken for used yet: round, rank and number.
    """

    pool: LeasePool
    tuning: TuningState | None
    members: tuple[int, ...]
    round: int = 0
    over: frozenset[int] = frozenset()
    open: tuple[tuple[int, int, int], ...] = ()


class BatchSizes(NamedTuple):
    """The sizes of the workers' batches.

    Args:
        mean: samples of a worker's batch on average.
        least: samples of any batch.
        keeps: what stays as it is when workers come and go, if batches are not tuned.
    """

    mean: int
    least: int = 1
    keeps: Keeps = "local_batch"


class LeaseStep(NamedTuple):
    """The state before a batch was taken, and after."""

    before: LeaseState
    after: LeaseState


class ReplicatedSource:
    """The source of one loader's batches without a server: all workers work out the same leases.

    Args:
        leases: how the dataset is dealt out.
        tune: how batches follow the machines; None if they are all alike.
        sizes: of the batches.
        control: how the workers tell each other.
        take_timings: this worker's steps since the last call.
        kept: for how many rounds leases are kept open; 0 where nobody can be lost.
    """

    def __init__(
        self,
        leases: Leases,
        tune: BatchTuning | None,
        sizes: BatchSizes,
        *,
        control: ControlGroup,
        take_timings: Callable[[], Sequence[Timing]],
        kept: int = 0,
    ) -> None:
        self.leases = leases
        self._tune, self._control, self._take_timings = tune, control, take_timings
        self._sizes, self._total = sizes, sizes.mean * control.world
        self._kept, self._world = kept, control.world
        tuning = None if tune is None else tune.init(self._total, together=True, floor=sizes.least)
        self._lease_state = self._join(LeaseState(leases.init(), tuning, ()), control.members)
        self._at = self._lease_state  # behind the last batch that the loop has
        self._drawn: deque[int] = deque(maxlen=_MOST_DRAWN)  # rounds of the last batches that the loop has
        self._lost: dict[int, int] = {}
        self._is_over = False  # the loop has been told the end of the epoch
        self._before: deque[Batch | None] = deque()  # what others had asked for when this worker came to them
        self.progress = 0.0

    def next(self) -> Batch | None:
        """Take this worker's part of the next step. Collective."""
        if self._before:
            return self._before.popleft()
        if self._lease_state.round % _REPORT_EVERY == 0:
            self._exchange_reports()
        lease_state = self._lease_state
        pool, tuning, parts = self._deal(lease_state)
        if not parts:
            self._lease_state = dataclasses.replace(lease_state, pool=pool, tuning=tuning, over=frozenset())
            self._is_over = True
            return None
        over = frozenset(lease_state.members) - parts.keys()
        dealt = tuple((lease_state.round, rank, lease.number) for rank, lease in parts.items())
        after = LeaseState(pool, tuning, lease_state.members, lease_state.round + 1, over, lease_state.open + dealt)
        self._lease_state = self._use(after, before=after.round - self._kept)
        mark = LeaseStep(lease_state, self._lease_state)
        mine = parts.get(self._control.rank)
        mean = sum(lease.count for lease in parts.values()) / len(parts)
        return Batch(mine, 0.0 if mine is None else mine.count / mean, min(parts), mark)

    @property
    def is_through(self) -> bool:
        """Whether nothing more can be asked for in this epoch, as far as this worker knows."""
        return self._is_over or not self._deal(self._lease_state)[2]

    def drawn(self, batch: Batch) -> None:
        """The loop has it."""
        self._at = batch.mark.after
        self._drawn.append(batch.mark.before.round)
        self.progress = max(self.progress, self._reached())

    def ended(self) -> None:
        """The next epoch begins."""
        self._at, self._is_over = self._lease_state, False
        self.progress = max(self.progress, self._reached())

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Go back to before the first of these; all workers leave the loop at the same batch."""
        if batches:
            before, now = batches[0].mark.before, self._lease_state
            lease_state = dataclasses.replace(before, tuning=now.tuning, members=now.members, round=now.round)
            self._lease_state = self._at = self._admit(lease_state, set(now.members) - lease_state.pool.at.keys())
            self._is_over = False
            self._before.clear()

    def joined(self, ranks: Iterable[int]) -> None:
        """Admit these workers from the next batch on that is asked for. On all workers at the same place."""
        ranks, tuning = sorted(ranks), self._lease_state.tuning
        for rank in ranks:
            tuning = None if self._tune is None or tuning is None else self._tune.join(tuning, rank)
        lease_state = self._admit(self._lease_state, ranks)
        self._lease_state = dataclasses.replace(
            lease_state, tuning=tuning, members=tuple(sorted({*lease_state.members, *ranks}))
        )

    def hand_over(self, asked: Sequence[Batch]) -> dict[str, Any]:
        """Collect what a new worker has to know, in dicts, lists and numbers.

        Args:
            asked: for these the loader has asked, and the loop does not have them.
        """
        return {
            "books": self._plain(self._lease_state),
            "at": self._plain(self._at),
            "asked": [[one.first, self._plain(one.mark.before), self._plain(one.mark.after)] for one in asked],
            "over": self._is_over,
            "progress": self.progress,
        }

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Take over what `hand_over` returned on another worker: this one goes through what was asked for without data.

        Raises:
            ModelError: if it is of another dataset, or does not add up.
        """
        self._lease_state, self._at = self._from_plain(state["books"]), self._from_plain(state["at"])
        for first, before, after in state["asked"]:
            mark = LeaseStep(self._from_plain(before), self._from_plain(after))
            self._before.append(Batch(None, 0.0, int(first), mark))
        if state["over"]:
            self._before.append(None)
        self.progress = float(state["progress"])

    def lost(self, ranks: Iterable[int], *, unused: int) -> None:
        """Go on without these: what they had for the last `unused` batches that the loop has is in no step."""
        unused = min(unused, len(self._drawn))
        first = self._drawn[-unused] if unused else self._at.round
        for rank in ranks:
            self._lost.setdefault(rank, first)

    def out_of_memory(self) -> None:
        """Refuse: it is not supported here.

        Raises:
            ModelError: always; the others wait for this worker's part of the step.
        """
        raise ModelError(
            "Cannot leave out a batch here: all workers compute each step together. Use a smaller batch, "
            "BatchTuning(largest=...), or fabric=ParameterServer()."
        )

    def explain(self) -> str:
        """Say which worker paces the rounds and why."""
        tuning = self._lease_state.tuning
        return "" if self._tune is None or tuning is None else self._tune.explain(tuning)

    def state_dict(self) -> dict[str, Any]:
        """Place in the data, and what is known of the machines."""
        at = self._use(self._at, before=self._at.round)
        return {
            "leases": self.leases.to_plain(at.pool),
            "tuning": None if self._tune is None or at.tuning is None else self._tune.to_plain(at.tuning),
            "round": at.round,
            "over": sorted(at.over),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, seed: int) -> None:
        """Go on where `state` was taken.

        Raises:
            ModelError: if it was taken with another dataset, seed or global batch, or is damaged.
        """
        round_ = state_checks.whole(state["round"], "round in the data")
        over = frozenset(state_checks.whole(rank, "rank whose data has ended") for rank in state["over"])
        self.leases = dataclasses.replace(self.leases, seed=seed)
        pool, tuning = self.leases.from_plain(state["leases"]), self._lease_state.tuning
        if self._tune is not None and state["tuning"] is not None:
            tuning = self._tune.with_floor(self._tune.from_plain(state["tuning"], self._total), self._sizes.least)
        present, then = self._lease_state.members, tuple(sorted(pool.at))
        lease_state = LeaseState(pool, tuning, then, round_, over)
        for rank in set(then) - set(present):
            lease_state = self._leave(lease_state, rank)
        self._lease_state = self._at = self._join(lease_state, [rank for rank in present if rank not in then])
        self.progress = self._reached()

    def _plain(self, lease_state: LeaseState) -> dict[str, Any]:
        tuning = lease_state.tuning
        return {
            "leases": self.leases.to_plain(lease_state.pool),
            "tuning": None if self._tune is None or tuning is None else self._tune.to_plain(tuning),
            "members": lease_state.members,
            "round": lease_state.round,
            "over": sorted(lease_state.over),
            "open": lease_state.open,
        }

    def _from_plain(self, plain: Mapping[str, Any]) -> LeaseState:
        tuning = self._lease_state.tuning
        if self._tune is not None and plain["tuning"] is not None:
            tuning = self._tune.with_floor(self._tune.from_plain(plain["tuning"], self._total), self._sizes.least)
        return LeaseState(
            self.leases.from_plain(plain["leases"]),
            tuning,
            tuple(plain["members"]),
            int(plain["round"]),
            frozenset(plain["over"]),
            tuple((int(round), int(rank), int(number)) for round, rank, number in plain["open"]),
        )

    def _admit(self, lease_state: LeaseState, ranks: Iterable[int]) -> LeaseState:
        """Lease to these, too, in the epoch in which the others are."""
        at = dict(lease_state.pool.at)
        epoch = min(at.values(), default=lease_state.pool.epoch)
        for rank in ranks:
            at[rank] = epoch
        return dataclasses.replace(lease_state, pool=dataclasses.replace(lease_state.pool, at=at))

    def _reached(self) -> float:
        return self._at.pool.reached(self.leases.samples)

    def _exchange_reports(self) -> None:
        """Exchange the times of the last steps. Collective."""
        mine = StepReport(tuple(self._take_timings())[-_MOST_TIMINGS:], self._lost)
        texts = self._control.texts("how long the steps took", msgspec.json.encode(mine).decode())
        reports = {rank: _read_report(text) for rank, text in texts.items()}
        lease_state = self._learn(self._lease_state, {rank: one.timings for rank, one in reports.items()})
        tuning = lease_state.tuning
        for rank in lease_state.members:
            if rank not in reports and self._tune is not None and tuning is not None:
                tuning = self._tune.leave(tuning, rank)
        lease_state = dataclasses.replace(
            lease_state, tuning=tuning, members=tuple(r for r in lease_state.members if r in reports)
        )
        for rank in lease_state.pool.at.keys() - set(lease_state.members):
            # Not before somebody knows: some may have been loading ahead when they noticed.
            if lacked := [one.lost[rank] for one in reports.values() if rank in one.lost]:
                lease_state = self._leave(lease_state, rank, since=max(lacked))
        self._lease_state = lease_state

    def _learn(self, lease_state: LeaseState, reports: Mapping[int, Sequence[Timing]]) -> LeaseState:
        """Learn how fast the machines are."""
        tuning = lease_state.tuning
        if self._tune is None or tuning is None:
            return lease_state
        for step in zip(*reports.values(), strict=False):
            # Who waits least waits for nobody: that is how long it takes to send.
            transfer_s = min(timing.wait_s for timing in step)
            for rank, timing in zip(reports, step, strict=True):
                if timing.samples:
                    blocked_s = timing.wait_s - transfer_s
                    tuning = self._tune.observe(tuning, rank, timing.samples, timing.compute_s, transfer_s, blocked_s)
        return dataclasses.replace(lease_state, tuning=tuning)

    def _deal(self, lease_state: LeaseState) -> tuple[LeasePool, TuningState | None, dict[int, Lease]]:
        """Lease each member's part of this round; nobody gets anything where the epoch ends."""
        pool, parts = lease_state.pool, dict[int, Lease]()
        tuning, counts = self._counts(lease_state)
        for rank in lease_state.members:
            if rank not in lease_state.over:
                count = min(counts[rank], self.leases.samples)
                pool, deal = self.leases.take(pool, rank, count, now_s=0.0, least=self._sizes.least)
                if isinstance(deal, Lease):
                    parts[rank] = deal
        return pool, tuning, parts

    def _counts(self, lease_state: LeaseState) -> tuple[TuningState | None, dict[int, int]]:
        """The batch of each member in this round."""
        if self._tune is not None and lease_state.tuning is not None:
            return self._tune.plan(lease_state.tuning, lease_state.round)
        return None, even_batches(self._sizes.mean, self._world, lease_state.members, self._sizes.keeps)

    def _use(self, lease_state: LeaseState, *, before: int) -> LeaseState:
        """Take the leases of the rounds before this one for used; but for those of who is lost."""
        there = set(lease_state.members)
        used = {one for one in lease_state.open if one[0] < before and one[1] in there}
        pool, _ = self.leases.acknowledge(lease_state.pool, [number for _, _, number in used])
        return dataclasses.replace(
            lease_state, pool=pool, open=tuple(one for one in lease_state.open if one not in used)
        )

    def _join(self, lease_state: LeaseState, ranks: Iterable[int]) -> LeaseState:
        pool, tuning = lease_state.pool, lease_state.tuning
        for rank in ranks:
            pool = self.leases.join(pool, rank)
            tuning = None if self._tune is None or tuning is None else self._tune.join(tuning, rank)
        return dataclasses.replace(
            lease_state, pool=pool, tuning=tuning, members=tuple(sorted({*lease_state.members, *ranks}))
        )

    def _leave(self, lease_state: LeaseState, rank: int, since: int = 0) -> LeaseState:
        """Give the leases of a worker from round `since` on to the others."""
        used = [number for round, whose, number in lease_state.open if whose == rank and round < since]
        pool, _ = self.leases.acknowledge(lease_state.pool, used)
        pool, tuning = self.leases.lose(pool, rank), lease_state.tuning
        tuning = None if self._tune is None or tuning is None else self._tune.leave(tuning, rank)
        members = tuple(other for other in lease_state.members if other != rank)
        return dataclasses.replace(
            lease_state,
            pool=pool,
            tuning=tuning,
            members=members,
            open=tuple(one for one in lease_state.open if one[1] != rank),
        )
