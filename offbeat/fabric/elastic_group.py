"""Who takes part in an elastic group, and how those that are left find together again. See `elastic` for the data.

All that is said here is said through the store in which the workers first met. The *circle* is numbered: the first one
is 0, and each has its own keys.

    broken              set by whoever finds out that circle N is no more
    done, done/RANK     set by a worker that needs the others no more
    border/RANK         this worker has come to where it takes in newcomers
    stands/RANK         where this worker stands: which exchanges of circle N it has completed, and whom it takes in
    members             those that go on, written once, by the lowest of them, when every other is known to be gone
    groups/NUMBER       where circle N + 1 connects, one group for each bound fabric

Whoever waits looks at `broken` between two waits, so it need not be told by a broken connection: in a ring only the
neighbours of a lost worker have one. A worker that only takes long is waited for, since it will come; one that is gone
by mistake (its machine was cut off) finds that the others have gone on without it.

A worker that is done says so, and waits until all are, or the others have gone on without it: whoever waits for it in
an exchange that it does not begin any more breaks the circle. It stays for one more circle if it has completed what
another that goes on has not.

Newcomers come in with the next circle. All members have to stand at the same place in the program for that, with no
exchange under way: each says that it has come there (`admit`), and once all have, the circle is broken. Who decides
who goes on takes the newcomers in if all that go on say that they stand there; else they meet there again, one circle
later. A newcomer (`arrive`) stands where they do, with nothing of its own, until it is among those that go on.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.backoff import Backoff
from offbeat.errors import NetworkError, PeerError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_NEVER = timedelta(days=365)
_LOOK_S = 0.02  # at the store, while there is nothing else to do
_ASK_S = 0.25  # who is gone
_DONE_S = 0.05  # a wait that takes so long may be for somebody who is done
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # before a circle is formed behind one that did not hold
_HOLDS_S = 10.0
_SUSPECT_S = 1.0  # a wait that takes so long may be for somebody who is gone

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class GroupProgress(msgspec.Struct, frozen=True):
    """Which exchanges of one fabric a worker has completed: all before `below`, and some beyond."""

    below: _Count
    beyond: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=1 << 20)] = ()

    def has(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    @property
    def end(self) -> int:
        """Behind the last one."""
        return max(self.beyond, default=self.below - 1) + 1


class MemberProgress(msgspec.Struct, frozen=True):
    """One worker's stands, of each of its fabrics.

    Args:
        admits: the ranks that it takes in, if it stands where that is done.
        is_done: it needs the others no more.
        told_at: behind which of its steps, if that is so because it was told to leave.
    """

    stands: tuple[GroupProgress, ...]
    admits: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    is_done: bool = False
    told_at: _Count | None = None

    def is_ahead_of(self, other: MemberProgress) -> bool:
        """Whether it has completed what the other has not."""
        return any(
            any(mine.has(number) and not theirs.has(number) for number in range(theirs.below, mine.end))
            for mine, theirs in zip(self.stands, other.stands, strict=False)
        )


_standing = msgspec.json.Decoder(MemberProgress)


class Quorum(msgspec.Struct, frozen=True):
    """Who goes on; and who of the circle that is no more, or of those that wanted to come in, does not, and why."""

    members: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)]
    lost: dict[int, str] = {}


_decided = msgspec.json.Decoder(Quorum)


class GroupClient(Protocol):
    """One fabric of this worker, as its circle sees it."""

    @property
    def begun(self) -> int:
        """How many exchanges were begun."""

    def begin_at(self, number: int) -> None:
        """The first exchange has this number: others are as far."""

    def stop(self) -> GroupProgress:
        """Nothing is expected of the group any more; what has been completed until now."""

    def go_on(self, group: dist.ProcessGroup, stands: Mapping[int, GroupProgress]) -> None:
        """Use this group from now on, once those that lack what others have completed were `supplied` with it.

        Args:
            stands: by rank, of all members, in their order.
        """

    def supplied(self, timeout: timedelta) -> bool:
        """Give and take what some have completed and others have not; whether that is done.

        Raises:
            NetworkError: if one more is lost meanwhile.
        """


class ElasticGroup:
    """One worker's view of it; the same for all its fabrics.

    Args:
        store: where the workers met; it must outlive any of them.
        rank, world: worker `rank` of the `world` that the job begins with; a newcomer's rank is beyond those.
        patience: how long newcomers that are to come in are waited for.

    Attributes:
        members: ranks that take part, in the order in which they came.
        gone: says who is known to be gone, and why; None as long as that cannot be known.
        changed: called with who is lost, and why, when the others go on.
    """

    def __init__(self, store: Store, rank: int, world: int, patience: timedelta = timedelta(seconds=5)) -> None:
        self._store = PrefixStore("circle", store)
        self.rank, self.world, self.patience_s = rank, world, patience.total_seconds()
        self.members = tuple(range(world)) if rank < world else ()
        self.gone: Callable[[], Mapping[int, str]] | None = None
        self.changed: Callable[[Mapping[int, str]], None] = lambda lost: None
        self._number = 0
        self._parties: list[GroupClient] = []
        self._mending: _Mending | None = None
        self._admits: tuple[int, ...] = ()  # ranks that are to come in, while this worker stands where that is done
        self._is_done = False  # this worker needs the others no more
        self._told_at: int | None = None  # behind which of its steps, if it was told to leave
        self._turned_away: dict[int, str] = {}  # those of them that did not, and why
        self._absent: dict[int, str] = {}  # who is gone, as was learnt elsewhere
        self._said: set[tuple[int, str]] = set()
        self._asked_s = self._looked_s = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, holds_s=_HOLDS_S, seed=str(rank))

    def enter(self, party: GroupClient) -> dist.ProcessGroup | None:
        """A group for one more fabric; None for a newcomer, before it is in. Collective: all call it in the same order.

        Raises:
            WorkerLostError: if one is gone.
            NetworkError: if they cannot be connected.
        """
        if not self.members:
            self._parties.append(party)
            return None
        connecting = _Connecting(self, self._number, self.members, range(len(self._parties), len(self._parties) + 1))
        while not connecting.is_done:
            if lost := self.ask(self.members):
                told = "; ".join(f"rank {rank} {why}" for rank, why in lost.items())
                raise WorkerLostError(f"Cannot connect all workers: {told}. Start the job again.")
            time.sleep(_LOOK_S)
        self._parties.append(party)
        (group,) = connecting.take()
        return group

    def leave(self, party: GroupClient) -> None:
        """This fabric is closed. Its number is not used again."""
        self._parties[self._parties.index(party)] = _Closed()

    @property
    def is_whole(self) -> bool:
        """Whether exchanges can go on."""
        return self._mending is None and bool(self.members)

    @property
    def is_first(self) -> bool:
        """Whether this is the circle that the job began with: nobody has come or gone."""
        return self._number == 0

    @property
    def number(self) -> int:
        """Of this circle."""
        return self._number

    @property
    def begun(self) -> tuple[int, ...]:
        """How many exchanges were begun, by fabric."""
        return tuple(party.begun for party in self._parties)

    def admit(self, newcomers: Sequence[int], timeout: timedelta) -> bool:
        """Take these in; whether it is known who is in. Call it again until it is. Collective, between exchanges.

        Who is gone, or done, does not come here any more: the others go on without it.

        Raises:
            WorkerLostError: if the others have gone on without this worker.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        self._admits = tuple(newcomers)
        while True:
            if not self.mend(timedelta(seconds=max(0.0, deadline_s - time.monotonic()))):
                return False
            if all(rank in self.members or rank in self._turned_away for rank in newcomers):
                self._admits = ()
                return True
            self._say(f"border/{self.rank}")
            here = self._store.check([f"{self._number}/border/{rank}" for rank in self.members])
            if here or self._store.check([f"{self._number}/done"]) or self.ask(self.members):
                self.break_()
                continue
            self.look(0.0)
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)

    def part(self, timeout: timedelta, told_at: int | None = None) -> bool:
        """Be done; whether nobody needs this worker any more. Call it again until that is so.

        Args:
            told_at: behind which of its steps, if it is done because it was told to leave.
        """
        self._is_done, self._told_at = True, told_at
        try:
            return self._part(time.monotonic() + timeout.total_seconds())
        except dist.DistError:  # a TCPStore ends with the process it is in, whose worker was done as well
            return True

    def _part(self, deadline_s: float) -> bool:
        while True:
            try:
                if not self.mend(timedelta(seconds=max(0.0, deadline_s - time.monotonic()))):
                    return False
            except _Left:
                return True
            self._say(f"done/{self.rank}")
            self._say("done")
            if self._store.check([f"{self._number}/done/{rank}" for rank in self.members]):
                return True
            if self._store.check([f"{self._number}/broken"]) or self.ask(self.members):
                self.break_()
            elif time.monotonic() > deadline_s:
                return False
            else:
                time.sleep(_LOOK_S)

    def arrive(self, number: int, begun: Sequence[int]) -> None:
        """Come in behind circle `number`, whose workers have begun so many exchanges; then `mend` until it is whole."""
        for party, count in zip(self._parties, begun, strict=True):
            party.begin_at(count)
        self._number, self._mending = number, _Mending(self, number, self._parties, arrives=True)

    def break_(self) -> None:
        """This circle is no more: a connection in it broke.

        Raises:
            NetworkError: if nobody can know who is left.
        """
        if self.gone is None:
            raise NetworkError("The connection to another worker broke.")
        if self._mending is None:
            self._store.set(f"{self._number}/broken", "")
            self._mending = _Mending(self, self._number, self._parties)

    def go_on_without(self, absent: Mapping[int, str]) -> None:
        """These members take no further part, and why: all others know that from elsewhere. Between exchanges.

        Raises:
            NetworkError: if nobody can know who else is left.
        """
        self._absent |= {rank: why for rank, why in absent.items() if rank in self.members}
        if self._absent.keys() & set(self.members):
            self.break_()

    def look(self, waited_s: float) -> None:
        """See whether others have found out that it is no more, or somebody is gone without a word.

        Args:
            waited_s: for how long the exchange at hand has been waited for.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            keys = ["broken", "done"] if waited_s > _DONE_S else ["broken"]
            if any(self._store.check([f"{self._number}/{key}"]) for key in keys):
                self.break_()
        # Seldom: who is killed is noticed by its neighbours, and whoever has many workers has many that wait.
        if waited_s > _SUSPECT_S and now_s - self._asked_s > _SUSPECT_S and self.ask(self.members):
            self.break_()

    def ask(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Which of these are known to be gone, and why; asked not too often."""
        gone = self._absent
        if self.gone is not None and time.monotonic() - self._asked_s >= _ASK_S:
            gone = {**self.gone(), **gone}
            self._asked_s = time.monotonic()
        return {rank: gone[rank] for rank in ranks if rank in gone and rank != self.rank}

    def mend(self, timeout: timedelta) -> bool:
        """Go on forming the next circle; whether it is whole. Call it again until it is.

        Raises:
            WorkerLostError: if the others have gone on without this worker.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        while self._mending is not None:
            mending = self._mending
            try:
                lost = mending.advance()
            except NetworkError:  # one more is lost
                self._mending = mending.again()
                continue
            except _NotYet:
                self._mending = mending.follow()
                continue
            if lost is not None:
                came = set(mending.members) - set(self.members)
                self.members, self._number, self._mending = mending.members, mending.number + 1, None
                self._turned_away |= {rank: lost[rank] for rank in self._admits if rank in lost}
                if lost or not came:
                    self.changed(lost)
            elif time.monotonic() > deadline_s:
                return False
            else:
                time.sleep(_LOOK_S)
        return True

    def _say(self, key: str) -> None:
        """Set a key of this circle, once: a file that is a store keeps each time."""
        if (self._number, key) not in self._said:
            self._said.add((self._number, key))
            self._store.set(f"{self._number}/{key}", "")

    def _connect(self, number: int, index: int, members: Sequence[int]) -> dist.ProcessGroup:
        place = PrefixStore(f"{number}/groups/{index}", self._store)
        # By itself, without torch's registry of groups: that knows only the workers of the beginning.
        group: Any = dist.ProcessGroupGloo(place, members.index(self.rank), len(members), _NEVER)
        return cast("dist.ProcessGroup", group)


class _NotYet(Exception):
    """This newcomer did not come in with the next circle; it may with the one behind it."""


class _Left(Exception):
    """The others have gone on without this worker, which is done."""


class _Mending:
    """From circle `number` to the next one, in steps that do not block.

    Args:
        arrives: this worker was not in circle `number`.
    """

    def __init__(
        self, circle: ElasticGroup, number: int, parties: Sequence[GroupClient], *, arrives: bool = False
    ) -> None:
        self._circle, self.number, self._parties, self._arrives = circle, number, tuple(parties), arrives
        self._store = PrefixStore(str(number), circle._store)
        standing = MemberProgress(
            tuple(party.stop() for party in parties), circle._admits, circle._is_done, circle._told_at
        )
        self._store.set(f"stands/{circle.rank}", msgspec.json.encode(standing).decode())
        self._since_s = time.monotonic()
        self._connects_from_s = self._since_s + circle._backoff.next_s()
        self._lost: dict[int, str] = {}
        self.members: tuple[int, ...] = ()
        self._connecting: _Connecting | None = None
        self._has_groups = False
        self._waiting: list[GroupClient] = []

    def again(self) -> _Mending:
        """One more was lost on the way to circle `number` + 1: that is no more, either."""
        self._circle._store.set(f"{self.number + 1}/broken", "")
        following = _Mending(self._circle, self.number + 1, self._parties)
        following._lost = self._lost
        return following

    def follow(self) -> _Mending:
        """This newcomer is to come in behind circle `number` + 1."""
        return _Mending(self._circle, self.number + 1, self._parties, arrives=True)

    def advance(self) -> Mapping[int, str] | None:
        """Do what can be done now; who was lost and why, once all is done.

        Raises:
            NetworkError: if one more is lost.
            WorkerLostError: if the others have gone on without this worker.
        """
        if not self.members and not self._agree():
            return None
        if self._connecting is None:
            if time.monotonic() < self._connects_from_s:
                self._check_next()
                return None
            self._connecting = _Connecting(self._circle, self.number + 1, self.members, range(len(self._parties)))
        self._check_next()
        if not self._connecting.is_done:
            return None
        if not self._has_groups:
            self._hand_over(self._connecting.take())
        while self._waiting:
            if not self._waiting[0].supplied(timedelta(seconds=_LOOK_S)):
                return None
            self._waiting.pop(0)
        return self._lost

    def _agree(self) -> bool:
        """Whether it is known who goes on."""
        circle, store = self._circle, self._store
        if not store.check(["members"]) and not self._decide():
            return False
        decided = self._decided(self.number)
        if circle.rank not in decided.members:
            if self._arrives and circle.rank not in decided.lost:
                raise _NotYet
            if circle._is_done:
                raise _Left
            others = ", ".join(map(str, decided.members))
            raise WorkerLostError(
                f"Cannot go on as rank {circle.rank}: nothing was heard of it, and what is left, rank {others}, has "
                "gone on without it."
            )
        self.members = decided.members
        self._lost |= decided.lost
        return True

    def _decide(self) -> bool:
        """Decide who goes on, if that is this worker's to do and all is known that must be; whether it is decided."""
        circle, store = self._circle, self._store
        candidates = self._candidates()
        self._lost |= circle.ask((*candidates, *circle._admits))
        left = [rank for rank in candidates if rank not in self._lost]
        if not left:  # this one has come to them
            raise WorkerLostError("Cannot come in: all that trained are lost. Start the job again.")
        if left[0] != circle.rank or not store.check([f"stands/{rank}" for rank in left]):
            return False
        standing = {rank: _standing.decode(store.get(f"stands/{rank}")) for rank in left}
        came = self._newcomers(list(standing.values()))
        if came is None:
            return False
        going = [rank for rank in left if not standing[rank].is_done]
        if going and not any(standing[a].is_ahead_of(standing[b]) for a in left if a not in going for b in going):
            self._lost |= {rank: _end_of(standing[rank]) for rank in left if rank not in going}
            left = going
        out = {rank: self._lost[rank] for rank in (*candidates, *circle._admits) if rank in self._lost}
        store.compare_set("members", "", msgspec.json.encode(Quorum((*left, *came), out)).decode())
        return True

    def _newcomers(self, standing: Sequence[MemberProgress]) -> tuple[int, ...] | None:
        """Who comes in; None if it is not known yet.

        Args:
            standing: of those in the circle that are not lost.
        """
        if not all(one.admits for one in standing):
            return ()
        candidates = self._candidates()
        wanted = [rank for rank in standing[0].admits if rank not in candidates and rank not in self._lost]
        late = [rank for rank in wanted if not self._store.check([f"stands/{rank}"])]
        if late and time.monotonic() - self._since_s < self._circle.patience_s:
            return None
        self._lost |= dict.fromkeys(late, f"did not come within {self._circle.patience_s:g} s.")
        return tuple(rank for rank in wanted if rank not in late)

    def _candidates(self) -> tuple[int, ...]:
        """Members of the circle that is no more."""
        if not self.number:
            return tuple(range(self._circle.world))
        return self._decided(self.number - 1).members

    def _decided(self, number: int) -> Quorum:
        return _decided.decode(self._circle._store.get(f"{number}/members"))

    def _check_next(self) -> None:
        if self._circle._store.check([f"{self.number + 1}/broken"]) or self._circle.ask(self.members):
            raise NetworkError("One more worker is lost.")

    def _hand_over(self, groups: Sequence[dist.ProcessGroup]) -> None:
        stands = {rank: _standing.decode(self._store.get(f"stands/{rank}")).stands for rank in self.members}
        if len({len(one) for one in stands.values()}) > 1:
            raise PeerError("Cannot go on: the workers do not use the same number of groups.")
        for index, (party, group) in enumerate(zip(self._parties, groups, strict=True)):
            party.go_on(group, {rank: one[index] for rank, one in stands.items()})
        self._waiting, self._has_groups = list(self._parties), True


def _end_of(standing: MemberProgress) -> str:
    """How a worker has ended that needs the others no more, in words."""
    if standing.told_at is None:
        return "is done, and takes no further part."
    return f"was told to leave, and has left in order behind its step {standing.told_at}."


class _Connecting:
    """Makes the groups of a circle on a thread of its own: it may never come to an end, if one more is lost."""

    def __init__(self, circle: ElasticGroup, number: int, members: Sequence[int], indices: Sequence[int]) -> None:
        self._circle, self._number, self._members, self._indices = circle, number, members, indices
        self._groups: list[dist.ProcessGroup] = []
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, name="offbeat-circle", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def take(self) -> Sequence[dist.ProcessGroup]:
        """The groups.

        Raises:
            NetworkError: if they could not be made.
        """
        if self._error is not None:
            raise NetworkError(str(self._error)) from self._error
        return self._groups

    def _run(self) -> None:
        try:
            for index in self._indices:
                self._groups.append(self._circle._connect(self._number, index, self._members))
        except RuntimeError as error:
            self._error = error


class _Closed:
    """A fabric that is closed on all workers."""

    begun = 0

    def begin_at(self, number: int) -> None:
        """Nobody uses it."""

    def stop(self) -> GroupProgress:
        return GroupProgress(0)

    def go_on(self, group: dist.ProcessGroup, stands: Mapping[int, GroupProgress]) -> None:
        """Nobody uses it."""

    def supplied(self, timeout: timedelta) -> bool:
        return True
