"""The protocol by which workers join a job without a server while it trains, over the store in which the others met.

    newcomer                                      the first of those that train
      hello: who it is, its plan           --->
                                           <---   answer: the plan that holds, what was prepared; or why not
      prepares the same, and compares
      ready                                --->
                                                  requests a vote, as for another plan (`plan_vote`): all know of it
      where the script begins again, behind a step:
                                           <---   entry: behind which generation, how many exchanges were begun by then
      is in the next generation (`ElasticGroup.join`, `ElasticGroup.admit`), and is handed what the others have
      (`state_transfer`)

Until it is ready nobody waits for it, and of those that train only the first looks for newcomers, once a second. It is
agreed upon behind an exchange, and comes in later: it begins its script where the others have to be then, and these may
ask each other for more before, such as the mean of a loss.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.diagnosis.wait import PolledPending, WaitContext
from offbeat.engine.control_group import first_difference
from offbeat.errors import DisagreementError, NetworkError, PlanError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.control_group import ControlGroup
    from offbeat.fabric import ElasticGroup

_LOOK_S = 1.0  # of the first worker, for newcomers
_ASK_S = 1.0  # of a newcomer, whether anybody trains
_MOST_BYTES = 256 << 20  # of what one says
_AWAY = "Cannot join: the job goes by another plan meanwhile, which lets nobody come in here. Start this worker again."
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
_Text = Annotated[str, msgspec.Meta(max_length=64 << 20)]
T = TypeVar("T")


class JoinCheck(msgspec.Struct, frozen=True):
    """A thing that is the same on all workers: what it is, in words; its lines; what to do where they differ."""

    what: str
    text: _Text
    advice: str


class JoinHello(msgspec.Struct, frozen=True):
    """New worker: who it is, which offbeat it runs, and its plan as TOML."""

    rank: _Rank
    version: str
    plan: _Text


class JobInfo(msgspec.Struct, frozen=True):
    """The description of the job that a new worker needs before it joins.

    Args:
        plan: that holds, as TOML.
        hub, token: where the watch of the workers is, and what proves that one may come there.
        history: the name of the run's history; "" if none is kept.
        claims: what was prepared, in order.
    """

    plan: _Text
    hub: str
    token: bytes
    history: str
    claims: Annotated[tuple[JoinCheck, ...], msgspec.Meta(max_length=4096)]


class JoinReply(msgspec.Struct, frozen=True):
    """The answer to a new worker: the description of the job, or why it is refused."""

    job: JobInfo | None = None
    refusal: _Text = ""


class JoinReady(msgspec.Struct, frozen=True):
    """New worker: it has prepared these."""

    claims: Annotated[tuple[JoinCheck, ...], msgspec.Meta(max_length=4096)]


class JoinGrant(msgspec.Struct, frozen=True):
    """The admission of a new worker: behind which generation it joins, and how many exchanges were begun by then; or
    why it does not.
    """

    generation: _Count = 0
    begun: tuple[_Count, ...] = ()
    refusal: _Text = ""


class _Newcomer(msgspec.Struct, frozen=True):
    """A newcomer that is ready, as the first tells the others."""

    number: _Count
    rank: _Rank


_decode_newcomers = msgspec.json.Decoder(tuple[_Newcomer, ...])


class JoinServer:
    """One worker's part in taking in newcomers.

    Args:
        store: where the workers met.
        control: this worker's end of the control group.
        group: who takes part.
        waiter: the one waiting primitive.
        job: what new workers receive at first; None while they cannot be told.
        version: of this offbeat.
    """

    def __init__(
        self,
        store: Store,
        control: ControlGroup,
        group: ElasticGroup,
        waiter: BlockingWait,
        *,
        job: Callable[[], JobInfo | None],
        version: str,
    ) -> None:
        self._store = PrefixStore("newcomers", store)
        self._control, self._group, self._waiter = control, group, waiter
        self._job, self._version = job, version
        self._looked_s = time.monotonic()
        self._heard = 0  # newcomers that have said hello
        self._open: list[int] = []  # those of them of whom it is not known what becomes
        self._ready: dict[int, _Newcomer] = {}
        self._expected: dict[int, _Newcomer] = {}  # on all workers: those that come in next

    def wants_vote(self, *, looks: bool) -> bool:
        """Whether this worker wants all to come together, because a newcomer is ready.

        Args:
            looks: whether it is the one that looks, now and then.
        """
        if looks and self._hear_hellos():
            for number in tuple(self._open):
                self._attend(number)
        return bool(self._ready)

    def agree_on_newcomers(self) -> None:
        """Have all expect who is ready. Collective, between exchanges."""
        mine = msgspec.json.encode(tuple(self._ready.values())).decode()
        texts = self._control.texts("the question who joins", mine)
        said = [one for text in texts.values() for one in _decode_newcomers.decode(text)]
        self._expected |= {one.number: one for one in said}
        self._ready.clear()
        self._open = [number for number in self._open if number not in self._expected]

    @property
    def expects(self) -> bool:
        """Whether somebody is to come in; the same on all."""
        return bool(self._expected)

    def admit_pending(self) -> tuple[int, ...]:
        """Take in who is expected; the ranks of those that are in. Collective, between exchanges."""
        ranks = sorted({newcomer.rank for newcomer in self._expected.values()} - set(self._group.members))
        entry = msgspec.json.encode(JoinGrant(self._group.number, self._group.begun)).decode()
        for number in self._expected:
            self._store.compare_set(f"{number}/entry", "", entry)
        self._expected.clear()
        self._waiter.wait(_Admission(self._group, ranks), WaitContext("new workers to join"))
        return tuple(rank for rank in ranks if rank in self._group.members)

    def postpone(self) -> None:
        """Take in nobody now, on all workers: they call each other again in the next exchange."""
        self._ready |= self._expected
        self._expected.clear()

    def reject_pending(self, *, looks: bool) -> None:
        """Have nobody wait to come in: those that train have gone over to a server, where newcomers are not met here.

        Args:
            looks: whether this worker is the one that looks for them, now and then.
        """
        self._open += self._expected
        self._ready.clear()
        self._expected.clear()
        if not looks or not self._hear_hellos():
            return
        for number in self._open:
            self._store.compare_set(f"{number}/answer", "", msgspec.json.encode(JoinReply(refusal=_AWAY)).decode())
            self._store.compare_set(f"{number}/entry", "", msgspec.json.encode(JoinGrant(refusal=_AWAY)).decode())
        self._open.clear()

    def _hear_hellos(self) -> bool:
        """Take notice of newcomers, now and then; whether it was time for that."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return False
        self._looked_s = now_s
        while self._store.check([f"{self._heard}/hello"]):
            self._open.append(self._heard)
            self._heard += 1
        return True

    def _attend(self, number: int) -> None:
        """See what this newcomer wants now."""
        store = self._store
        if store.check([f"{number}/entry"]):
            self._open.remove(number)
        elif not store.check([f"{number}/answer"]):
            self._answer(number)
        elif number not in self._ready and store.check([f"{number}/ready"]):
            self._check(number)

    def _answer(self, number: int) -> None:
        job = self._job()
        if job is None:
            return
        hello = _read(self._store, f"{number}/hello", JoinHello)
        if hello is None:
            refusal = "Cannot join: this worker runs another offbeat than the job."
        elif hello.version != self._version:
            refusal = f"Cannot join with offbeat {hello.version}: the job runs {self._version}. Install that one."
        elif hello.plan not in (job.plan, job.claims[0].text):
            theirs, ours = first_difference(hello.plan, job.plan)
            refusal = (
                f"Cannot join with another plan: this worker has {theirs!r}, the job {ours!r}. Give it the job's "
                "plan, which is plan.toml in the run folder."
            )
        elif self._is_taken(number, hello.rank):
            refusal = f"Cannot join as rank {hello.rank}: another worker has that rank. Start this one again."
        else:
            refusal = ""
        answer = JoinReply(refusal=refusal) if refusal else JoinReply(job)
        self._store.set(f"{number}/answer", msgspec.json.encode(answer).decode())

    def _is_taken(self, number: int, rank: int) -> bool:
        """Whether another worker, or a newcomer before this one, has its rank."""
        before = (_read(self._store, f"{other}/hello", JoinHello) for other in self._open if other < number)
        return rank in self._group.members or any(one is not None and one.rank == rank for one in before)

    def _check(self, number: int) -> None:
        job, hello = self._job(), _read(self._store, f"{number}/hello", JoinHello)
        ready = _read(self._store, f"{number}/ready", JoinReady)
        if job is None or hello is None:
            return
        if ready is None or ready.claims[1:] != job.claims[1:]:
            text = "Cannot join: the job has prepared something else meanwhile. Start this worker again."
            self._store.compare_set(f"{number}/entry", "", msgspec.json.encode(JoinGrant(refusal=text)).decode())
            return
        self._ready[number] = _Newcomer(number, hello.rank)


class JoinClient:
    """A worker that is to come in. Call order: `ask`, `compare` for each thing prepared, `join`.

    Args:
        store: where the others met.
        rank: of this worker.
        waiter: the one waiting primitive.
        version: of this offbeat.
    """

    def __init__(self, store: Store, rank: int, waiter: BlockingWait, *, version: str) -> None:
        self._store = PrefixStore("newcomers", store)
        self._rank, self._waiter, self._version = rank, waiter, version
        self._number = -1  # of those that have come
        self._claims: list[JoinCheck] = []
        self._job: JobInfo | None = None

    def ask(self, plan: str, ended: Callable[[], bool]) -> JobInfo:
        """Say hello.

        Args:
            plan: of this worker, as TOML.
            ended: whether nobody trains any more.

        Raises:
            PlanError: if this worker is not let in.
            WorkerLostError: if nobody trains any more.
        """

        def check() -> None:
            if ended():
                raise WorkerLostError("Cannot join: the job has ended. Start it again.")

        self._say_hello(msgspec.json.encode(JoinHello(self._rank, self._version, plan)))
        answer = self._await_key("answer", JoinReply, "the job's workers to notice this one", check)
        if answer.job is None:
            raise PlanError(answer.refusal)
        self._job = answer.job
        return answer.job

    def compare(self, what: str, text: str, advice: str) -> None:
        """Note what this worker has: what it is, in words; its lines; what to do where they differ.

        Raises:
            DisagreementError: if those that train have another one in its place.
        """
        assert self._job is not None, "asked before"
        number = len(self._claims)
        self._claims.append(claim := JoinCheck(what, text, advice))
        if number == 0:  # the plan, which was compared
            return
        theirs = self._job.claims[number] if number < len(self._job.claims) else JoinCheck("", "nothing", "")
        if (claim.what, claim.text) != (theirs.what, theirs.text):
            mine, others = first_difference(claim.text, theirs.text)
            raise DisagreementError(
                f"Cannot join: the {claim.what} differs from that of the job's workers. First difference: this worker "
                f"has {mine!r}, they have {others!r}. {claim.advice}"
            )

    @property
    def is_complete(self) -> bool:
        """Whether it has prepared all that those that train have."""
        return self._job is not None and len(self._claims) == len(self._job.claims)

    def join(self, group: ElasticGroup, gone: Callable[[], Mapping[int, str]]) -> None:
        """Be in the next generation of the group.

        Args:
            gone: who is known to have ended.

        Raises:
            PlanError: if this worker is not let in.
            WorkerLostError: if nobody trains any more.
        """

        def check() -> None:
            ended = gone()
            if all(rank in ended for rank in range(group.world)):
                raise WorkerLostError("Cannot join: all workers that the job began with have ended.")

        self._say("ready", JoinReady(tuple(self._claims)))
        entry = self._await_key("entry", JoinGrant, "the job's workers to admit this one", check)
        if entry.refusal:
            raise PlanError(entry.refusal)
        group.join(entry.generation, entry.begun)
        self._waiter.wait(_Arrival(group), WaitContext("the connection to the job's workers"))

    def _say_hello(self, hello: bytes) -> None:
        """Say hello under the first free number: one that is lost has said it, or has none that others wait for."""
        while True:
            self._number += 1
            if self._store.compare_set(f"{self._number}/hello", "", hello.decode()) == hello:
                return

    def _say(self, what: str, message: JoinReady) -> None:
        self._store.set(f"{self._number}/{what}", msgspec.json.encode(message).decode())

    def _await_key(self, what: str, kind: type[T], words: str, check: Callable[[], None]) -> T:
        key = f"{self._number}/{what}"
        self._waiter.wait(_Key(self._store, key, check), WaitContext(words, through_server=True))
        heard = _read(self._store, key, kind)
        if heard is None:
            raise NetworkError("Cannot join: the job runs another offbeat, whose messages this one cannot read.")
        return heard


def _read(store: Store, key: str, kind: type[T]) -> T | None:
    data = store.get(key)
    try:
        return msgspec.json.decode(data, type=kind) if len(data) <= _MOST_BYTES else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _Key(PolledPending):
    """The wait for a key of the store."""

    def __init__(self, store: Store, key: str, check: Callable[[], Any]) -> None:
        self._store, self._key, self._look = store, key, check
        self._looked_s = time.monotonic()

    def done(self) -> bool:
        try:
            if self._store.check([self._key]):
                return True
        except RuntimeError as error:
            raise WorkerLostError("Cannot join: the job has ended, and so has the store in which it met.") from error
        if time.monotonic() - self._looked_s > _ASK_S:
            self._look()
            self._looked_s = time.monotonic()
        return False


class _Arrival(PolledPending):
    """The wait until this worker has joined."""

    def __init__(self, group: ElasticGroup) -> None:
        self._group = group

    def done(self) -> bool:
        return self._group.reconfigure(timedelta())


class LeaveBarrier(PolledPending):
    """The wait until no worker needs this one any more, which is done; `told_at` as in `ElasticGroup.finish`."""

    def __init__(self, group: ElasticGroup, told_at: int | None = None) -> None:
        self._group, self._told_at = group, told_at

    def done(self) -> bool:
        return self._group.finish(timedelta(), self._told_at)


class _Admission(PolledPending):
    """The wait until it is known who has joined."""

    def __init__(self, group: ElasticGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks

    def done(self) -> bool:
        return self._group.admit(self._ranks, timedelta())
