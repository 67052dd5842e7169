"""The generations of an elastic group: who takes part, and how those that are left meet again. See `elastic` for the
data.

All that is said here is said through the store in which the workers first met. The members of the group are those of
its *generation*, which is numbered from 0; each generation has keys of its own.

    broken              set by whoever finds out that generation N is no more
    done, done/RANK     set by a worker that needs the others no more
    boundary/RANK       this worker has come to where it takes in newcomers
    progress/RANK       which exchanges of generation N this worker has completed, and whom it takes in
    members             those that go on, written once, by the lowest of them, when every other is known to be gone
    groups/NUMBER       where generation N + 1 connects, one group of torch for each bound fabric
    meetings/NUMBER     what its members tell each other meanwhile

A worker that waits looks at `broken` between two waits, so it need not be told by a broken connection: in a ring only
the neighbours of a lost worker have one. A worker that only takes long is waited for, since it will come; one that is
gone by mistake (its machine was cut off) finds that the others have gone on without it.

A worker that is done says so, and waits until all are, or the others have gone on without it: whoever waits for it in
an exchange that it does not begin any more ends the generation. It stays for one more if it has completed what another
that goes on has not.

Newcomers come in with the next generation. All members have to stand at the same place in the program for that, with no
exchange under way: each says that it has come there (`admit`), and once all have, the generation is ended. Who decides
who goes on takes the newcomers in if all that go on say that they stand there; else they meet there again, one
generation later. A newcomer (`join`) stands where they do, with nothing of its own, until it is among those that go on.

Several threads of a worker may wait at a time, each for an exchange of another fabric, as where two models' blocks are
on their way. One of them at a time ends a generation or leads to the next, by the group's lock, and has each fabric
stop and resume by that fabric's own. Whoever holds a fabric's lock does not take the group's.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.backoff import Backoff
from offbeat.errors import NetworkError, PeerError, WorkerLostError
from offbeat.fabric.generation import Generation, StoreMeeting
from offbeat.fabric.gloo_listener import stop_listening_at
from offbeat.protocol.group_progress import GroupProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from offbeat.fabric.generation import GroupCollectives

_log = logging.getLogger("offbeat")

_NEVER = timedelta(days=365)
_POLL_S = 0.02  # at the store, while there is nothing else to do
_DETECT_S = 0.05  # who is gone
_DONE_S = 0.05  # a wait that takes so long may be for somebody who is done
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # before a generation is formed behind one that did not hold
_HOLDS_S = 10.0
_SUSPECT_S = 1.0  # a wait that takes so long may be for somebody who is gone

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class MemberProgress(msgspec.Struct, frozen=True):
    """One worker's progress, of each of its fabrics.

    Args:
        admits: the ranks that it takes in, if it stands where that is done.
        is_done: it needs the others no more.
        told_at: behind which of its steps, if that is so because it was asked to leave.
    """

    progress: tuple[GroupProgress, ...]
    admits: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    is_done: bool = False
    told_at: _Count | None = None

    def is_ahead_of(self, other: MemberProgress) -> bool:
        """Whether it has completed what the other has not."""
        return any(
            any(mine.has(number) and not theirs.has(number) for number in range(theirs.below, mine.end))
            for mine, theirs in zip(self.progress, other.progress, strict=False)
        )


_progress_decoder = msgspec.json.Decoder(MemberProgress)


class Quorum(msgspec.Struct, frozen=True):
    """The next generation: its members; and who of the last one, or of the new workers, is lost, and why."""

    members: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)]
    lost: dict[int, str] = {}


_decided = msgspec.json.Decoder(Quorum)


class GroupClient(Protocol):
    """One fabric of this worker, as its group sees it; by whichever thread leads to the next generation."""

    @property
    def begun(self) -> int:
        """The number of exchanges that were begun."""

    def begin_at(self, number: int) -> None:
        """Give the first exchange this number: others are as far."""

    def connect(self, generation: Generation) -> GroupCollectives:
        """Connect with the others, on a thread beside; not used yet. Collective; raises as `Reconnector.connect`."""

    def stop(self) -> GroupProgress:
        """Expect nothing of this generation any more; returns what has been completed until now."""

    def resume(self, collectives: GroupCollectives, progress: Mapping[int, GroupProgress]) -> None:
        """Use these from now on, once `replay` has given what others have completed to those that lack it.

        Args:
            progress: by rank, of all members, in their order.
        """

    def replay(self, timeout: timedelta) -> bool:
        """Give and take what some have completed and others have not; returns whether that is done.

        Raises:
            NetworkError: if one more is lost meanwhile.
        """


class ElasticGroup:
    """One worker's view of the group; the same for all its fabrics.

    Args:
        store: where the workers met; it must outlive any of them.
        rank, world: worker `rank` of the `world` that the job begins with; a newcomer's rank is beyond those.
        patience: how long newcomers that are to come in are waited for.

    Attributes:
        members: ranks that take part, in the order in which they came.
        gone: says who is known to be gone, and why; None as long as that cannot be known.
        on_change: called with who is lost, and why, when the others go on.
    """

    def __init__(self, store: Store, rank: int, world: int, patience: timedelta = timedelta(seconds=5)) -> None:
        self._store = PrefixStore("elastic_group", store)
        self.rank, self.world, self.patience_s = rank, world, patience.total_seconds()
        self.members = tuple(range(world)) if rank < world else ()
        self.gone: Callable[[], Mapping[int, str]] | None = None
        self.on_change: Callable[[Mapping[int, str]], None] = lambda lost: None
        self._lock = threading.RLock()  # held by who ends a generation or leads to the next; not while it sleeps
        self._number = 0
        self._clients: list[GroupClient] = []
        self._reconfiguration: _Reconfiguration | None = None
        self._admits: tuple[int, ...] = ()  # ranks that are to come in, while this worker stands where that is done
        self._is_done = False  # this worker needs the others no more
        self._told_at: int | None = None  # behind which of its steps, if it was asked to leave
        self._rejected: dict[int, str] = {}  # those of them that did not, and why
        self._excluded: dict[int, str] = {}  # who is gone, as was learnt elsewhere
        self._said: set[tuple[int, str]] = set()
        self._detected_s = self._polled_s = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, holds_s=_HOLDS_S, seed=str(rank))

    def add_client(self, client: GroupClient) -> GroupCollectives | None:
        """Connect one more fabric; None for a newcomer, before it is in. Collective: all call it in the same order.

        Raises:
            WorkerLostError: if one is gone.
            NetworkError: if they cannot be connected.
        """
        if not self.members:
            self._clients.append(client)
            return None
        connector = _GroupConnector(self, self._number, self.members, {len(self._clients): client})
        while not connector.is_done:
            if lost := self.lost_members(self.members):
                connector.cancel()
                told = "; ".join(f"rank {rank} {why}" for rank, why in lost.items())
                raise WorkerLostError(f"Cannot connect all workers: {told}. Start the job again.")
            time.sleep(_POLL_S)
        self._clients.append(client)
        (collectives,) = connector.take()
        return collectives

    def remove_client(self, client: GroupClient) -> None:
        """Forget a fabric that is closed. Its number is not used again."""
        self._clients[self._clients.index(client)] = _ClosedClient(client)

    @property
    def is_first_generation(self) -> bool:
        """Whether this is the generation that the job began with: nobody has come or gone."""
        return self._number == 0

    @property
    def number(self) -> int:
        """The number of this generation."""
        return self._number

    @property
    def begun(self) -> tuple[int, ...]:
        """The number of exchanges that were begun, by fabric."""
        return tuple(client.begun for client in self._clients)

    def admit(self, newcomers: Sequence[int], timeout: timedelta) -> bool:
        """Take newcomers in; returns whether it is known who is in: call it again until it is.

        Collective, between exchanges.

        Who is gone, or done, does not come here any more: the others go on without it.

        Raises:
            WorkerLostError: if the others have gone on without this worker.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        self._admits = tuple(newcomers)
        while True:
            if not self.reconfigure(timedelta(seconds=max(0.0, deadline_s - time.monotonic()))):
                return False
            if all(rank in self.members or rank in self._rejected for rank in newcomers):
                self._admits = ()
                return True
            with self._asks_store():
                self._announce(f"boundary/{self.rank}")
                here = self._store.check([f"{self._number}/boundary/{rank}" for rank in self.members])
                is_over = here or self._store.check([f"{self._number}/done"])
            if is_over or self.lost_members(self.members):
                self.invalidate()
                continue
            self.poll(0.0)
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)

    def finish(self, timeout: timedelta, told_at: int | None = None) -> bool:
        """Be done; returns whether nobody needs this worker any more. Call it again until that is so.

        Args:
            told_at: behind which of its steps, if it is done because it was asked to leave.
        """
        self._is_done, self._told_at = True, told_at
        try:
            return self._finish(time.monotonic() + timeout.total_seconds())
        except dist.DistError:  # a TCPStore ends with the process it is in, whose worker was done as well
            return True

    def _finish(self, deadline_s: float) -> bool:
        while True:
            try:
                if not self.reconfigure(timedelta(seconds=max(0.0, deadline_s - time.monotonic()))):
                    return False
            except _Left:
                return True
            self._announce(f"done/{self.rank}")
            self._announce("done")
            if self._store.check([f"{self._number}/done/{rank}" for rank in self.members]):
                return True
            if self._store.check([f"{self._number}/broken"]) or self.lost_members(self.members):
                self.invalidate()
            elif time.monotonic() > deadline_s:
                return False
            else:
                time.sleep(_POLL_S)

    def join(self, number: int, begun: Sequence[int]) -> None:
        """Come in behind generation `number`, whose members have begun so much; `reconfigure` does the rest."""
        for client, count in zip(self._clients, begun, strict=True):
            client.begin_at(count)
        self._number, self._reconfiguration = number, _Reconfiguration(self, number, self._clients, joins=True)

    def invalidate(self, number: int | None = None) -> None:
        """End this generation: a connection in it broke.

        Args:
            number: of the generation that is meant; None for the present one. One that has ended is left alone.

        Raises:
            NetworkError: if nobody can know who is left.
        """
        if self.gone is None:
            raise NetworkError("The connection to another worker broke.")
        with self._lock, self._asks_store():
            if self._reconfiguration is None and number in (None, self._number):
                self._store.set(f"{self._number}/broken", "")
                self._reconfiguration = _Reconfiguration(self, self._number, self._clients)

    def exclude(self, excluded: Mapping[int, str]) -> None:
        """Go on without these members, and why: all others know that from elsewhere. Between exchanges.

        Raises:
            NetworkError: if nobody can know who else is left.
        """
        self._excluded |= {rank: why for rank, why in excluded.items() if rank in self.members}
        if self._excluded.keys() & set(self.members):
            self.invalidate()

    def poll(self, waited_s: float, *, suspects: bool = False) -> None:
        """See whether others have ended this generation, or a member is gone without a word.

        Args:
            waited_s: for how long the exchange at hand has been waited for.
            suspects: whether there is a sign that one may be gone.
        """
        now_s = time.monotonic()
        with self._lock, self._asks_store():
            if now_s - self._polled_s >= _POLL_S:
                self._polled_s = now_s
                keys = ["broken", "done"] if waited_s > _DONE_S else ["broken"]
                if any(self._store.check([f"{self._number}/{key}"]) for key in keys):
                    self.invalidate()
            # Seldom: who is killed is noticed by its neighbours, and whoever has many workers has many that wait.
            is_due = waited_s > _SUSPECT_S and now_s - self._detected_s > _SUSPECT_S
            if (is_due or suspects) and self.lost_members(self.members):
                self.invalidate()

    def lost_members(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Find which of these are known to be gone, and why; the detector is not asked too often."""
        if self.gone is not None and time.monotonic() - self._detected_s >= _DETECT_S:
            self._excluded = {**self.gone(), **self._excluded}  # who is gone does not come back as the same
            self._detected_s = time.monotonic()
        gone = self._excluded
        return {rank: gone[rank] for rank in ranks if rank in gone and rank != self.rank}

    def reconfigure(self, timeout: timedelta) -> bool:
        """Form the next generation, if this one has ended; returns whether it is ready. Call it again until it is.

        Raises:
            WorkerLostError: if the others have gone on without this worker, or nobody can know who is left.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        while True:
            with self._lock, self._asks_store():
                while self._reconfiguration is not None and self._advance(self._reconfiguration):
                    pass
                if self._reconfiguration is None:
                    return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)

    def _advance(self, reconfiguration: _Reconfiguration) -> bool:
        """Do what can be done now; whether there may be more that can."""
        try:
            lost = reconfiguration.advance()
        except NetworkError as error:  # one more is lost, or cannot be reached
            _log.debug("Generation %d does not hold: %s", reconfiguration.number + 1, error)
            self._reconfiguration = reconfiguration.restart()
            return True
        except _NotYet:
            self._reconfiguration = reconfiguration.defer()
            return True
        if lost is None:
            return False
        came = set(reconfiguration.members) - set(self.members)
        self.members, self._number, self._reconfiguration = reconfiguration.members, reconfiguration.number + 1, None
        self._rejected |= {rank: lost[rank] for rank in self._admits if rank in lost}
        if lost or not came:
            self.on_change(lost)
        return True

    @contextmanager
    def _asks_store(self) -> Iterator[None]:
        """Name the store where a question to it fails; `finish` itself knows that it may be gone.

        Raises:
            WorkerLostError: if nobody can know any more who is left.
        """
        try:
            yield
        except dist.DistError as error:
            if self._is_done:
                raise
            first = str(error).splitlines()[0]
            raise WorkerLostError(
                "Cannot continue: the store in which the workers met cannot be reached any more, so nobody can know "
                f"who is left ({first}). It ends with the first worker where each process was started by hand, and "
                "with the `offbeat run` of node 0 under --nodes. Resume from a checkpoint; `offbeat run` keeps a store "
                "that outlives every worker."
            ) from None

    def _announce(self, key: str) -> None:
        """Set a key of this generation, once: a file that is a store keeps each time."""
        if (self._number, key) not in self._said:
            self._said.add((self._number, key))
            self._store.set(f"{self._number}/{key}", "")

    def _connect(self, number: int, index: int, members: Sequence[int]) -> dist.ProcessGroup:
        store = PrefixStore(f"{number}/groups/{index}", self._store)
        # By itself, without torch's registry of groups: that knows only the workers of the beginning.
        group: Any = dist.ProcessGroupGloo(store, members.index(self.rank), len(members), _NEVER)
        stop_listening_at(store, group.rank(), group.size())
        return cast("dist.ProcessGroup", group)


class _NotYet(Exception):
    """The new worker did not join with the next generation; it may with the one behind it."""


class _Left(Exception):
    """The others have gone on without this worker, which is done."""


class _Reconfiguration:
    """Leads from generation `number` to the next one, in steps that do not block.

    Args:
        joins: this worker was not in generation `number`.
    """

    def __init__(
        self, group: ElasticGroup, number: int, clients: Sequence[GroupClient], *, joins: bool = False
    ) -> None:
        self._group, self.number, self._clients, self._joins = group, number, tuple(clients), joins
        self._store = PrefixStore(str(number), group._store)
        reports = MemberProgress(
            tuple(client.stop() for client in clients), group._admits, group._is_done, group._told_at
        )
        self._store.set(f"progress/{group.rank}", msgspec.json.encode(reports).decode())
        self._since_s = time.monotonic()
        self._connects_from_s = self._since_s + group._backoff.next_s()
        self._lost: dict[int, str] = {}
        self.members: tuple[int, ...] = ()
        self._connector: _GroupConnector | None = None
        self._has_groups = False
        self._waiting: list[GroupClient] = []

    def restart(self) -> _Reconfiguration:
        """Begin anew from generation `number` + 1: one more was lost on the way to it."""
        self._group._store.set(f"{self.number + 1}/broken", "")
        if self._connector is not None:
            self._connector.cancel()
        following = _Reconfiguration(self._group, self.number + 1, self._clients)
        following._lost = self._lost
        return following

    def defer(self) -> _Reconfiguration:
        """Come in behind generation `number` + 1 instead."""
        return _Reconfiguration(self._group, self.number + 1, self._clients, joins=True)

    def advance(self) -> Mapping[int, str] | None:
        """Do what can be done now; returns who was lost and why, once all is done.

        Raises:
            NetworkError: if one more is lost.
            WorkerLostError: if the others have gone on without this worker.
        """
        if not self.members and not self._agree():
            return None
        if self._connector is None:
            if time.monotonic() < self._connects_from_s:
                self._check_next()
                return None
            self._connector = _GroupConnector(
                self._group, self.number + 1, self.members, dict(enumerate(self._clients))
            )
        self._check_next()
        if not self._connector.is_done:
            return None
        if not self._has_groups:
            self._hand_over(self._connector.take())
        while self._waiting:
            if not self._waiting[0].replay(timedelta(seconds=_POLL_S)):
                return None
            self._waiting.pop(0)
        return self._lost

    def _agree(self) -> bool:
        """Whether it is known who goes on."""
        group, store = self._group, self._store
        if not store.check(["members"]) and not self._decide():
            return False
        decided = self._decided(self.number)
        if group.rank not in decided.members:
            if self._joins and group.rank not in decided.lost:
                raise _NotYet
            if group._is_done:
                raise _Left
            others = ", ".join(map(str, decided.members))
            raise WorkerLostError(
                f"Cannot continue as rank {group.rank}: nothing was heard of it, and the others, rank {others}, have "
                "continued without it."
            )
        self.members = decided.members
        self._lost |= decided.lost
        return True

    def _decide(self) -> bool:
        """Decide who goes on, if that is this worker's to do and all is known that must be; whether it is decided."""
        group, store = self._group, self._store
        candidates = self._candidates()
        self._lost |= group.lost_members((*candidates, *group._admits))
        left = [rank for rank in candidates if rank not in self._lost]
        if not left:  # this one has come to them
            raise WorkerLostError("Cannot join: all workers of the job are lost. Start the job again.")
        if left[0] != group.rank or not store.check([f"progress/{rank}" for rank in left]):
            return False
        reports = {rank: _progress_decoder.decode(store.get(f"progress/{rank}")) for rank in left}
        came = self._newcomers(list(reports.values()))
        if came is None:
            return False
        going = [rank for rank in left if not reports[rank].is_done]
        if going and not any(reports[a].is_ahead_of(reports[b]) for a in left if a not in going for b in going):
            self._lost |= {rank: _end_of(reports[rank]) for rank in left if rank not in going}
            left = going
        out = {rank: self._lost[rank] for rank in (*candidates, *group._admits) if rank in self._lost}
        store.compare_set("members", "", msgspec.json.encode(Quorum((*left, *came), out)).decode())
        return True

    def _newcomers(self, reports: Sequence[MemberProgress]) -> tuple[int, ...] | None:
        """Find who comes in; None if it is not known yet.

        Args:
            reports: of those of the generation that are not lost.
        """
        if not all(one.admits for one in reports):
            return ()
        candidates = self._candidates()
        wanted = [rank for rank in reports[0].admits if rank not in candidates and rank not in self._lost]
        late = [rank for rank in wanted if not self._store.check([f"progress/{rank}"])]
        if late and time.monotonic() - self._since_s < self._group.patience_s:
            return None
        self._lost |= dict.fromkeys(late, f"did not arrive within {self._group.patience_s:g} s.")
        return tuple(rank for rank in wanted if rank not in late)

    def _candidates(self) -> tuple[int, ...]:
        """The members of the generation that has ended."""
        if not self.number:
            return tuple(range(self._group.world))
        return self._decided(self.number - 1).members

    def _decided(self, number: int) -> Quorum:
        return _decided.decode(self._group._store.get(f"{number}/members"))

    def _check_next(self) -> None:
        if self._group._store.check([f"{self.number + 1}/broken"]) or self._group.lost_members(self.members):
            raise NetworkError("One more worker is lost.")

    def _hand_over(self, connected: Sequence[GroupCollectives]) -> None:
        progress = {
            rank: _progress_decoder.decode(self._store.get(f"progress/{rank}")).progress for rank in self.members
        }
        if len({len(one) for one in progress.values()}) > 1:
            raise PeerError("Cannot continue: the workers do not use the same number of groups.")
        for index, (client, collectives) in enumerate(zip(self._clients, connected, strict=True)):
            client.resume(collectives, {rank: one[index] for rank, one in progress.items()})
        self._waiting, self._has_groups = list(self._clients), True


def _end_of(reports: MemberProgress) -> str:
    """Say how a worker has ended that needs the others no more."""
    if reports.told_at is None:
        return "is done, and takes no further part."
    return f"was asked to leave, and left cleanly behind its step {reports.told_at}."


class _GroupConnector:
    """A thread that connects fabrics in a generation: it may never come to an end, if one more is lost.

    Args:
        clients: by number, the fabrics.
    """

    def __init__(
        self, group: ElasticGroup, number: int, members: Sequence[int], clients: Mapping[int, GroupClient]
    ) -> None:
        self._group, self._number, self._members, self._clients = group, number, tuple(members), clients
        self._connected: list[GroupCollectives] = []
        self._error: Exception | None = None
        self._lock, self._is_cancelled = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="offbeat-elastic-group", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def take(self) -> Sequence[GroupCollectives]:
        """Hand out what was connected.

        Raises:
            NetworkError: if that could not be.
            PlanError, PeerError: as `Reconnector.connect` does.
        """
        if isinstance(self._error, RuntimeError):  # torch's
            raise NetworkError(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        return self._connected

    def cancel(self) -> None:
        """Have it come to an end; nobody will take what it connects."""
        with self._lock:
            self._is_cancelled = True
            connected, self._connected = self._connected, []
        for one in connected:
            one.abandon()

    def _run(self) -> None:
        try:
            for index, client in self._clients.items():
                collectives = client.connect(self._generation(index))
                with self._lock:
                    if not self._is_cancelled:
                        self._connected.append(collectives)
                        continue
                collectives.abandon()
                return
        except Exception as error:
            self._error = error

    def _generation(self, index: int) -> Generation:
        group, members = self._group, self._members
        torch_group = group._connect(self._number, index, members)
        broken = f"{self._number}/broken"
        meeting = StoreMeeting(
            PrefixStore(f"{self._number}/meetings/{index}", group._store),
            members.index(group.rank),
            len(members),
            lambda: self._is_cancelled or group._store.check([broken]),
        )
        name = f"{self._number}/{index}"
        return Generation(self._number, name, group.rank, members, torch_group, meeting)


class _ClosedClient:
    """Stands for a fabric that is closed here, and soon on all workers.

    Args:
        client: that it was.
    """

    begun = 0

    def __init__(self, client: GroupClient) -> None:
        self._client = client

    def begin_at(self, number: int) -> None:
        """Ignore it: the fabric is closed."""

    def connect(self, generation: Generation) -> GroupCollectives:
        """Connect all the same: others may not have closed theirs yet, and wait for it."""
        return self._client.connect(generation)

    def stop(self) -> GroupProgress:
        return GroupProgress(0)

    def resume(self, collectives: GroupCollectives, progress: Mapping[int, GroupProgress]) -> None:
        """Let go of it: the fabric is closed."""
        collectives.abandon()

    def replay(self, timeout: timedelta) -> bool:
        return True
