"""A store: the objects of one machine, what it reads from other stores and feeds them, and the stages that it runs.

It does what the directory tells it, and reports what has arrived and what cannot be read; it decides nothing about
other stores. Its users - clients on its machine, or the process that it is embedded in - call `create`, `want` and
`reduce` on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import xxhash

from offbeat.errors import DisagreementError, ObjectError, OffbeatError, PeerError
from offbeat.objects.data_links import FeederLink, ReaderLink
from offbeat.objects.directory_link import DirectoryLink
from offbeat.objects.memory import Segment
from offbeat.objects.room import ObjectRoom
from offbeat.objects.stage_runner import StageRunner
from offbeat.objects.stored_object import AlreadyHereError, LaneReading, Outcome, StoredObject, other_bytes
from offbeat.objects.stripes import cut
from offbeat.protocol import objects as say
from offbeat.protocol.object_calls import StatusAnswer, StoredStatus
from offbeat.protocol.object_lanes import ALL_BYTES, ReadObject, ReadStage
from offbeat.protocol.objects import INLINE_BYTES, ObjectMeta, ObjectName
from offbeat.wire import tcp
from offbeat.wire.lane import CopyingSink, GrowingBuffer
from offbeat.wire.session import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from offbeat.objects.stage import Arithmetic
    from offbeat.protocol.objects import FromDirectory, FromStore, ReduceOp
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.lane import Sink
    from offbeat.wire.link import PeerLink
    from offbeat.wire.listener import Listener
    from offbeat.wire.session import Receiver

_log = logging.getLogger("offbeat.objects")
LIMITS = Limits(timeout=timedelta(seconds=1), max_body_bytes=1 << 20)
"""The limits of links between stores: a reader leaves a feeder that is silent for a second."""
DIRECTORY_PATIENCE = timedelta(seconds=30)
"""The time for which a call waits while the directory of its object is lost."""
_RETRY_S = 1.0  # after which what nobody feeds is asked for again
_RATE_S, _MOST_RATES = 0.1, 8
_MOST_TOLD = 4096
_MAPPED_S = 5.0  # within which a client maps an object that it was told of
KnownVersions = say.VersionsKnown | OffbeatError
"""The versions of an id, or the reason why a directory does not say them."""


@dataclass(frozen=True, eq=False)
class VersionsWait:
    """The wait of one caller for a version of an id after this one."""

    after: int
    waits: bool
    told: Callable[[KnownVersions], None]


@dataclass
class AskedSum:
    """A sum that this store has asked for and that is not settled.

    Args:
        until_s: when its patience is over.
        told: called when it is, or refused.
    """

    request: say.ReduceObjects
    until_s: float
    told: list[Callable[[OffbeatError | None], None]] = field(default_factory=list)


class NodeStore:
    """The objects of one machine; on one event loop.

    Args:
        job: to which all stores of a cluster belong.
        credentials: what stores prove to each other.
        most_bytes: of all objects.
        arithmetic: (op, dtype in which it adds) -> what adds objects.
        limits: of the links between stores.
        directory_patience: for how long those who wait do without a directory.
        waits_for_stopped: whether a silent peer is waited for as long as its machine says that its process is there.

    Attributes:
        accept_onlooker: takes in those who ask for the status; None if nobody may.
        on_directory_lost: called with the address of a directory whose link has ended, and why; None for a good-bye.
    """

    def __init__(
        self,
        *,
        job: str,
        credentials: Credentials | None,
        most_bytes: int,
        arithmetic: Callable[[ReduceOp, str], Arithmetic],
        limits: Limits = LIMITS,
        directory_patience: timedelta = DIRECTORY_PATIENCE,
        waits_for_stopped: bool = False,
    ) -> None:
        self._directory_patience, self._waits_for_stopped = directory_patience, waits_for_stopped
        self._given: dict[ObjectName, tuple[memoryview, Callable[[], None]]] = {}
        self.on_directory_lost: Callable[[str, OffbeatError | None], None] = lambda address, error: None
        self._job, self._credentials, self._limits = job, credentials, limits
        self.most_bytes, self.used_bytes, self._peak_bytes = most_bytes, 0, 0
        self._stages = StageRunner(self, arithmetic)
        self.objects: OrderedDict[ObjectName, StoredObject] = OrderedDict()
        self._waiting: dict[ObjectName, list[Callable[[Outcome], None]]] = {}
        self.sums_that_wait: dict[ObjectName, say.SumWaits] = {}
        self._retrying: set[ObjectName] = set()
        self._putting: dict[ObjectName, Callable[[Outcome], None]] = {}
        self._asked: dict[ObjectName, AskedSum] = {}
        self._wanting_versions: dict[str, list[VersionsWait]] = {}  # by id
        self.used: dict[ObjectName, tuple[say.UsedSource, ...]] = {}
        self._feeders: dict[str, FeederLink] = {}
        self._readers: set[ReaderLink] = set()
        self._rates: asyncio.TimerHandle | None = None  # of the next look at how fast they are
        self._sent_bytes = self._received_bytes = 0  # over links that have ended
        self._listener: Listener | None = None
        self._directories: list[DirectoryLink] = []
        self._room = ObjectRoom(self)
        self._held: dict[ObjectName, list[FromDirectory]] = {}  # of sums that wait for room
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.accept_onlooker: Callable[[PeerLink], Receiver] | None = None

    async def open(self, bind: str, port: int, directories: list[str], patience: timedelta) -> str:
        """Listen for stores that read, and join the directory; returns the address by which this store is known.

        Raises:
            NetworkError: if the address cannot be used, or a directory cannot be reached.
            PeerError: if a directory refuses.
        """
        self._listener = await tcp.listen(
            bind, port, accept=self._accept, job=self._job, credentials=self._credentials, limits=self._limits
        )
        self.address = self._listener.address
        for number in range(len(directories)):
            link = DirectoryLink(
                self,
                tuple(directories),
                number,
                job=self._job,
                credentials=self._credentials,
                patience=self._directory_patience,
                waits_for_stopped=self._waits_for_stopped,
            )
            await link.open(patience)
            self._directories.append(link)
        return self.address

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of objects that were sent to other stores."""
        return self._sent_bytes + sum(reader.sent_bytes for reader in self._readers)

    async def close(self) -> None:
        """Say good-bye to all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *(feeder.close() for feeder in list(self._feeders.values())),
            *(directory.close() for directory in self._directories),
        )
        if self._listener is not None:
            readers = self._listener.links
            self._listener.close()
            await asyncio.gather(*(link.close() for link in readers))
        for stored in list(self.objects.values()):
            self._let_go(stored)

    def abort(self) -> None:
        """End all links at once, as when the process is killed."""
        if self._listener is not None:
            self._listener.close()
        links = [reader.link for reader in self._readers]
        links += [feeder.link for feeder in self._feeders.values() if feeder.link is not None]
        for link in links:
            link.abort()
        for directory in self._directories:
            directory.abort()

    # -- what users do -------------------------------------------------------------------------------------------

    def create(self, name: ObjectName, meta: ObjectMeta) -> StoredObject:
        """Begin to make an object; its maker fills `memory` and calls `filled`, and at the end `finish`.

        Raises:
            AlreadyHereError: if the store has it, which may be the same.
            ObjectError: if it is on its way here, or there is no room for it.
        """
        known = self.objects.get(name)
        if known is not None:
            raise _is_here(known)
        stored = self._make(name, meta, is_own=True)
        self.tell_directory(put_of(stored))
        return stored

    def when_room(self, name: ObjectName, size_bytes: int, told: Callable[[ObjectError | None], None]) -> None:
        """Call `told` once there is room for an object that is put, or with why there is none.

        What others have, too, and nobody has mapped is dropped, which takes a moment; and so does what was deleted.
        """

        def deleted(error: ObjectError | None) -> None:
            if error is not None:
                told(error)
            else:
                self._room.when_there(name, size_bytes, told)

        self._directory_of(name).deletions.when_over(name, deleted)

    def put_small(
        self,
        name: ObjectName,
        meta: ObjectMeta,
        data: bytes,
        told: Callable[[Outcome], None],
        generation: int | None = None,
    ) -> None:
        """Put an object that travels in a message; `told` is called as by `finish`.

        Args:
            generation: that the directory has chosen for it; None for one that nobody has.

        Raises:
            AlreadyHereError: if the same object is here.
            DisagreementError: if another one is.
            ObjectError: if it is on its way here, or there is no room for it.
        """
        if (known := self.objects.get(name)) is not None:
            is_other = (known.meta.dtype, known.meta.shape) != (meta.dtype, meta.shape) or known.memory != data
            raise other_bytes(name) if known.is_whole and is_other else _is_here(known)
        stored = self._make(name, meta, is_own=True)
        stored.memory[:] = data
        if generation is not None:
            stored.stripes[0].generation = generation
        stored.stripes[0].grow(len(data))
        stored.digest = digest_of(stored.memory)
        self._putting[name] = told
        self.tell_directory(put_of(stored))
        self._tell_waiting(stored)

    def adopt(self, name: ObjectName, meta: ObjectMeta, memory: memoryview, released: Callable[[], None]) -> None:
        """Put an object where it lies; its user leaves the memory as it is until `released` is called.

        Nobody else may put this name: what stands for a digest of its bytes is a number of its own.

        Raises:
            ObjectError: as `create`.
        """
        if (known := self.objects.get(name)) is not None:
            raise _is_here(known)
        self._given[name] = memory, released
        stored = self._make(name, meta, is_own=True)
        stored.digest = f"{stored.stripes[0].generation:x}"
        self.filled(stored, meta.size_bytes)
        self.tell_directory(put_of(stored))

    def filled(self, stored: StoredObject, have_bytes: int) -> None:
        """Note how many bytes of an object that is made here are there."""
        for stripe, buffer in enumerate(stored.stripes):
            begin, end = stored.range_of(stripe)
            buffer.grow(min(have_bytes, end) - begin)

    def finish(self, stored: StoredObject, told: Callable[[Outcome], None]) -> None:
        """All bytes of an object that is made here are there; `told` is called once the directory has taken the put,
        or with why it has not."""
        if stored.refused is not None:
            told(stored.refused)
            return
        self.filled(stored, stored.meta.size_bytes)
        if stored.segment is not None:
            stored.segment.seal()
        self._putting[stored.name] = told
        self._tell_waiting(stored)
        self._spawn(self._tell_digest(stored))

    async def _tell_digest(self, stored: StoredObject) -> None:
        """Say that an object is whole; on a thread of its own a digest stops no beat of a link."""
        digest = await asyncio.to_thread(digest_of, stored.memory)
        if self.objects.get(stored.name) is stored:
            stored.digest = digest
            self.tell_directory(say.ObjectWhole(name=stored.name, digest=digest))

    def abandon(self, stored: StoredObject) -> None:
        """Give up an object whose maker is gone before it was whole."""
        if stored.refused is None:
            self.remove(stored)
            self._fail(stored.name, ObjectError(f"{stored.name} is lost: the client that put it has ended meanwhile."))
            self.tell_directory(say.WithdrawPut(name=stored.name))

    def want(
        self,
        name: ObjectName,
        told: Callable[[Outcome], None],
        into: tuple[memoryview, Callable[[], None]] | None = None,
    ) -> None:
        """Get an object here: `told` is called with it once it is whole, or with why it will not be.

        Args:
            into: memory of its size to keep it in, and what to call when that is free again; None for some of the
                store's own.
        """
        if into is not None:
            self._given[name] = into
        stored = self.objects.get(name)
        if stored is not None and stored.is_whole and stored.is_settled:
            self.objects.move_to_end(name)
            told(stored)
            return
        waiting = self._waiting.setdefault(name, [])
        waiting.append(told)
        if len(waiting) == 1 and (stored is None or not stored.is_own):
            self.tell_directory(say.WantObject(name=name))
            self._retry(name)

    def stop_wanting(self, name: ObjectName, told: Callable[[Outcome], None]) -> None:
        """Withdraw a `want`."""
        waiting = self._waiting.get(name, [])
        if told in waiting:
            waiting.remove(told)
        if not waiting:
            self._waiting.pop(name, None)
            stored = self.objects.get(name)
            if stored is None or not (stored.is_own or stored.is_whole or stored.is_root):
                self.tell_directory(say.StopWanting(name=name))
                if stored is not None:
                    self.remove(stored)

    def want_versions(self, id_: str, after: int, *, waits: bool, told: Callable[[KnownVersions], None]) -> None:
        """Ask which versions of an id are there; `told` is called once, as soon as one after `after` is, or at once."""
        self._wanting_versions.setdefault(id_, []).append(VersionsWait(after, waits, told))
        if waits:
            self._ask_for_versions(id_)
        else:
            self.tell_directory(say.WantVersions(name=ObjectName(id_)))

    def stop_wanting_versions(self, id_: str, told: Callable[[KnownVersions], None]) -> None:
        """Withdraw a `want_versions`."""
        waiting = [wait for wait in self._wanting_versions.pop(id_, []) if wait.told is not told]
        if waiting:
            self._wanting_versions[id_] = waiting
        self._ask_for_versions(id_)

    def reduce(
        self, request: say.ReduceObjects, told: Callable[[OffbeatError | None], None] = lambda error: None
    ) -> None:
        """Have a sum made, which this store keeps; `told` is called once it is made, or with why it is refused."""
        name, home = request.name, self._directory_of(request.name)
        if (away := next((one for one in request.sources if self._directory_of(one) is not home), None)) is not None:
            reason = (
                f"Cannot reduce into {name}: {away} is kept by another directory. Directories share ids by "
                'what is before the first "/": give sources and target the same, as in "grad/0" and "grad/sum".'
            )
            told(ObjectError(reason))
            return
        asked = self._asked.setdefault(name, AskedSum(request, time.monotonic() + (request.patience_s or 0)))
        if asked.request != request:
            told(DisagreementError(f"Cannot reduce into {name}: another reduce makes it, in another way."))
            return
        asked.told.append(told)
        self.tell_directory(request)

    def delete(self, name: ObjectName, *, when_read: bool = False, after: int = 1) -> None:
        """Have all stores let go of an object.

        Args:
            when_read: only when no store reads it any more.
            after: so many stores have called this.
        """
        stored = self.objects.get(name)
        is_known = stored is not None and (stored.is_taken if stored.is_own else stored.is_whole and stored.is_settled)
        generations = stored.generations if stored is not None and is_known else ()
        self._directory_of(name).delete(say.DeleteObject(name=name, when_read=when_read, after=after), generations)

    def status(self, call: int) -> StatusAnswer:
        """Return the status of this store, as the answer to a call."""
        return StatusAnswer(
            call=call,
            address=self.address,
            used_bytes=self.used_bytes,
            peak_bytes=self._peak_bytes,
            most_bytes=self.most_bytes,
            sent_bytes=self.sent_bytes,
            received_bytes=self._received_bytes + sum(feeder.received_bytes for feeder in self._feeders.values()),
            objects=tuple(
                StoredStatus(stored.name, stored.meta, stored.have_bytes, stored.is_own, stored.pins)
                for stored in list(self.objects.values())[-_MOST_TOLD:]
            ),
        )

    # -- what the directory says ---------------------------------------------------------------------------------

    def hear(self, message: FromDirectory) -> None:
        """Do what the directory says; where there is no room for it, tell those who wait."""
        if (held := self._held.get(message.name)) is not None:
            held.append(message)
            return
        if isinstance(message, say.RunStage) and message.slot < 0 and message.name not in self.objects:
            self._run_with_room(message)
        else:
            self._try(message)

    def _try(self, message: FromDirectory) -> None:
        try:
            self._do(message)
        except ObjectError as error:
            self._end_wait(message.name, error)
            if isinstance(message, say.ReduceSmall):
                self.tell_directory(say.RefuseSum(name=message.name, reason=str(error)))
        except RuntimeError as error:  # of torch: what it cannot add ends one sum, and not this store's link
            if not isinstance(message, say.ReduceSmall):
                raise
            self.tell_directory(say.RefuseSum(name=message.name, reason=f"Cannot make {message.name}: {error}"))

    def _run_with_room(self, order: say.RunStage) -> None:
        """Begin to make a sum once there is room for it; what the directory says of it meanwhile waits, too."""
        held: list[FromDirectory] = []
        self._held[order.name] = held

        def told(error: ObjectError | None) -> None:
            del self._held[order.name]
            if error is not None:
                self._end_wait(order.name, error)
                self.tell_directory(say.RefuseSum(name=order.name, reason=str(error)))
            else:
                self._try(order)
            for message in held:
                self.hear(message)

        self._room.when_there(order.name, order.meta.size_bytes, told)

    def _do(self, message: FromDirectory) -> None:
        name = message.name
        stored = self.objects.get(name)
        match message:
            case say.PutTaken():
                if stored is not None:
                    stored.is_taken = True
                    self.retry_readers()
                    if (told := self._putting.pop(name, None)) is not None:
                        told(stored)
                else:  # it was deleted while its put was on its way
                    self.tell_directory(say.WithdrawPut(name=name))
            case say.ObjectFound():
                self._found(message)
            case say.ObjectInline():
                self._received_bytes += len(message.data)
                if stored is None:
                    stored = self._make(name, message.meta)
                    stored.memory[:] = message.data
                    for stripe, generation in enumerate(message.generations):
                        stored.stripes[stripe].generation = generation
                        stored.stripes[stripe].grow(len(stored.stripes[stripe].memory))
                self._tell_waiting(stored)
            case say.ChangeFeeder():
                if stored is not None:
                    self._read_from(stored, message.stripe, message.generation, message.feeder)
            case say.RestartObject():
                if stored is not None and not stored.is_own:
                    stored.is_settled = message.settled
                    self._restart(stored, message.stripe, message.generation)
            case say.ForgetObject():
                if stored is not None and stored.is_own and stored.generations != message.generations:
                    return  # it was put after what is to be forgotten
                forgotten = ObjectError(message.reason)
                if stored is not None:
                    self._end(stored, forgotten)
                self._end_asked(name, forgotten)
                self._fail(name, forgotten)
            case say.ObjectDeleted():
                self._directory_of(name).deletions.answered(name)
            case say.VersionsKnown():
                self._versions_known(message)
            case say.ObjectDropped():
                self._room.dropped(message)
            case say.RunStage():
                self._stages.run(message)
            case say.FeedStage():
                self._stages.feed(message)
            case say.EndStage():
                self._stages.end(message)
            case say.ReduceSmall():
                self._add_small(message)
            case say.ReduceSettled():
                self._end_asked(name, None)
                self.used[name] = message.used
                if stored is not None:
                    stored.is_settled = True
                    self._tell_waiting(stored)
            case say.SumWaits():
                if name in self._waiting:
                    self.sums_that_wait[name] = message
            case say.ObjectRefused():
                if stored is not None and message.generations and message.generations != stored.generations:
                    return  # it is about an earlier put
                error = (DisagreementError if message.differs else ObjectError)(message.reason)
                if message.differs and stored is not None and (stored.is_own or stored.digest):
                    self._end(stored, error)  # others say that the name stands for other bytes
                if message.is_there and name in self._asked:  # others wait for what is there
                    self._end_asked(name, error)
                else:
                    self._end_wait(name, error)

    # -- a directory that begins anew ----------------------------------------------------------------------------

    async def prepare_reports(self, link: DirectoryLink) -> None:
        """Compute the digests that it will ask for."""
        for stored in self._objects_of(link):
            if stored.is_whole and stored.is_settled and not stored.digest:
                stored.digest = await asyncio.to_thread(digest_of, stored.memory)

    def reports(self, link: DirectoryLink) -> Iterator[FromStore]:
        """Say what is here and made here, which stages run, and what is waited for."""
        parts = []
        for stored in self._objects_of(link):
            self._room.forget_question(stored.name)
            if stored.digest or stored.is_own:
                yield put_of(stored, self.used.get(stored.name, ()))
            else:
                parts.append(stored)
        yield from self._stages.reports(lambda name: self._directory_of(name) is link)
        for asked in self._asked.values():
            request = asked.request
            if self._directory_of(request.name) is link:
                left_s = None if request.patience_s is None else max(0.0, asked.until_s - time.monotonic())
                yield msgspec.structs.replace(request, patience_s=left_s)
        for name in self._waiting:
            known = self.objects.get(name)
            if self._directory_of(name) is link and (known is None or not (known.is_own or known.digest)):
                yield say.WantObject(name=name, have_bytes=0 if known is None else known.have_bytes)
        for id_, waiting in self._wanting_versions.items():
            if self._directory_of(ObjectName(id_)) is link:
                yield from versions_wanted(id_, waiting)
        for stored in parts:
            for stripe, buffer in enumerate(stored.stripes):
                if buffer.is_whole:
                    yield say.StripeArrived(name=stored.name, stripe=stripe, generation=buffer.generation)

    def directory_lost(self, link: DirectoryLink, error: OffbeatError | None) -> None:
        self.on_directory_lost(link.address, error)

    def directory_away(self, link: DirectoryLink, error: ObjectError) -> None:
        """A directory has been lost for long: nobody gets what it does not have a way to already."""
        for name in list(self._putting):
            if self._directory_of(name) is link:
                why = ObjectError(f"Cannot put {name}: {error}")
                if (stored := self.objects.get(name)) is not None:
                    self._end(stored, why)  # so that it can be put again
                self._fail(name, why)
        for name in list(self._waiting):
            if self._directory_of(name) is link:
                self._fail(name, ObjectError(f"Cannot get {name}: {error}"))
        for id_ in list(self._wanting_versions):
            if self._directory_of(ObjectName(id_)) is link:
                for wait in self._wanting_versions.pop(id_):
                    wait.told(ObjectError(f"Cannot look for versions of {id_!r}: {error}"))

    def directory_away_s(self, name: ObjectName) -> float:
        """Return for how many seconds the directory of an object has been lost; 0 if it is there."""
        return self._directory_of(name).away_s

    def _objects_of(self, link: DirectoryLink) -> list[StoredObject]:
        return [stored for stored in self.objects.values() if self._directory_of(stored.name) is link]

    def _versions_known(self, message: say.VersionsKnown) -> None:
        id_, newest = message.name.id, message.versions[-1] if message.versions else -1
        waiting = self._wanting_versions.pop(id_, [])
        left = [] if message.refusal else [wait for wait in waiting if wait.waits and wait.after >= newest]
        if left:
            self._wanting_versions[id_] = left
            self._ask_for_versions(id_)
        for wait in waiting:
            if wait not in left:
                wait.told(ObjectError(message.refusal) if message.refusal and wait.waits else message)

    def _ask_for_versions(self, id_: str) -> None:
        """Have the directory wait for the first version that anybody here waits for."""
        wanted = [wait for wait in self._wanting_versions.get(id_, ()) if wait.waits]
        for question in versions_wanted(id_, wanted):
            self.tell_directory(question)
        if not wanted:
            self.tell_directory(say.StopWantingVersions(name=ObjectName(id_)))

    # -- reading -------------------------------------------------------------------------------------------------

    def _found(self, message: say.ObjectFound) -> None:
        name, stored = message.name, self.objects.get(message.name)
        if stored is not None:
            self._read(stored, message)
            return

        has_waited = False

        def told(error: ObjectError | None) -> None:
            if name in self.objects:
                return
            if name not in self._waiting:  # any more
                self.tell_directory(say.StopWanting(name=name))
                return
            if error is not None:
                self._fail(name, error)
                return
            made = self._make(name, message.meta)
            if has_waited:  # others may feed it by now
                self.tell_directory(say.WantObject(name=name))
            else:
                self._read(made, message)

        self._room.when_there(name, message.meta.size_bytes, told)
        has_waited = True

    def _read(self, stored: StoredObject, message: say.ObjectFound) -> None:
        if stored.is_own:
            return
        stored.is_settled = message.settled
        for stripe, feeder in enumerate(message.stripes):
            if not stored.stripes[stripe].is_whole or stored.stripes[stripe].generation != feeder.generation:
                self._read_from(stored, stripe, feeder.generation, feeder.store)
        self.retry_readers()

    def _read_from(self, stored: StoredObject, stripe: int, generation: int, feeder: str) -> None:
        """Read a stripe from a feeder, from where it is; "" for none just now."""
        if stored.is_own:
            return
        if generation != stored.stripes[stripe].generation:
            self._restart(stored, stripe, generation)
        if stored.feeders.get(stripe) == feeder and stripe in stored.readings:
            return
        self._stop_reading(stored, stripe)
        stored.feeders[stripe] = feeder
        buffer = stored.stripes[stripe]
        if not feeder or buffer.is_whole:
            return
        begin, end = stored.range_of(stripe)

        def arrived() -> None:
            stored.readings.pop(stripe, None)
            stored.came_s = time.monotonic()
            self.tell_directory(say.StripeArrived(name=stored.name, stripe=stripe, generation=generation))
            self._tell_waiting(stored)

        def failed(why: str) -> None:
            _log.info("Cannot read %s from the store at %s: %s", stored.name, feeder, why)
            stored.readings.pop(stripe, None)
            self.tell_directory(say.FeederFailed(name=stored.name, stripe=stripe, generation=generation, feeder=feeder))

        sink = CopyingSink(buffer, arrived, start=buffer.progress)
        stored.readings[stripe] = self.read(
            feeder,
            lambda lane: ReadObject(
                lane=lane,
                name=stored.name,
                stripe=stripe,
                generation=generation,
                begin=begin,
                end=end,
                start=buffer.progress,
                until=ALL_BYTES,
            ),
            sink,
            failed,
        )

    def _restart(self, stored: StoredObject, stripe: int, generation: int) -> None:
        """Begin a stripe anew."""
        self._stop_reading(stored, stripe)
        begin, end = stored.range_of(stripe)
        self._replace_buffer(stored, stripe, GrowingBuffer(stored.memory[begin:end], 0, generation))

    def _replace_buffer(self, stored: StoredObject, stripe: int, buffer: GrowingBuffer) -> None:
        before, stored.stripes[stripe] = stored.stripes[stripe], buffer
        self.end_lanes_of(before, f"{stored.name} is made anew")
        self.retry_readers()

    def memory_for(self, order: say.RunStage) -> memoryview:
        target = self.objects.get(order.name) or self._make(order.name, order.meta)
        target.is_root, target.is_settled = True, False
        begin, end = target.range_of(order.stripe)
        return target.memory[begin:end]

    def publish(self, order: say.RunStage, buffer: GrowingBuffer) -> None:
        target = self.objects[order.name]
        self._stop_reading(target, order.stripe)
        self._replace_buffer(target, order.stripe, buffer)

    def _stop_reading(self, stored: StoredObject, stripe: int) -> None:
        if (reading := stored.readings.pop(stripe, None)) is not None:
            reading.stop()

    def read(
        self,
        feeder: str,
        ask: Callable[[int], ReadObject | ReadStage],
        sink: Sink,
        failed: Callable[[str], None],
    ) -> LaneReading:
        link = self._feeders.get(feeder)
        if link is None:
            link = self._feeders[feeder] = FeederLink(feeder, self.address, lambda: self._forget_feeder(feeder))
            link.waits_for_stopped = self._waits_for_stopped
            dial = link.dial(
                job=self._job, credentials=self._credentials, limits=self._limits, patience=self._limits.timeout
            )
            self._spawn(dial)
        return LaneReading(link, link.read(ask, sink, failed))

    # -- feeding -------------------------------------------------------------------------------------------------

    def _accept(self, link: PeerLink) -> Receiver:
        if link.role == "onlooker" and self.accept_onlooker is not None:
            return self.accept_onlooker(link)
        if link.role != "peer":
            raise PeerError(
                f"here it listens for other stores, and takes no {link.role}: use the address that it has printed "
                "after OFFBEAT_OBJECTS="
            )
        reader = ReaderLink(self, link)
        self._readers.add(reader)
        if self._rates is None:
            self._rates = asyncio.get_running_loop().call_later(_RATE_S, self._tell_rates)
        return reader

    def _tell_rates(self) -> None:
        """Tell the directory how fast each reader can be sent to for which there is more to send.

        Where links are equally full, this store's own is what bounds them: each of them could have all of it.
        """
        full = {reader: reader.full_bytes() / _RATE_S for reader in self._readers}
        full = {reader: rate for reader, rate in full.items() if rate and reader.address}
        together = sum(full.values())
        for reader, rate in full.items():
            could = together if 2 * rate * len(full) > together else rate
            for asked in reader.sending[:_MOST_RATES]:
                generation = asked.generation if isinstance(asked, ReadObject) else 0
                self.tell_directory(
                    say.ReaderRate(
                        name=asked.name,
                        stripe=asked.stripe,
                        generation=generation,
                        reader=reader.address,
                        bytes_per_s=could,
                    )
                )
        self._rates = asyncio.get_running_loop().call_later(_RATE_S, self._tell_rates) if self._readers else None

    def reader_left(self, link: ReaderLink) -> None:
        if link in self._readers:
            self._readers.remove(link)
            self._sent_bytes += link.sent_bytes

    def end_lanes_of(self, buffer: GrowingBuffer, reason: str) -> bool:
        ended = [reader.end_lanes_of(buffer, reason) for reader in self._readers]  # each of them
        return any(ended)

    def retry_readers(self) -> None:
        for reader in list(self._readers):
            reader.retry()

    def source_of(self, message: ReadObject | ReadStage) -> GrowingBuffer | str | None:
        if isinstance(message, ReadStage):
            return self._stages.source_of(message)
        stored = self.objects.get(message.name)
        if stored is None:
            return None
        begin, end, generation = message.begin, message.end, message.generation
        if not 0 <= begin <= end <= stored.meta.size_bytes:
            raise PeerError(f"Cannot send bytes {begin} to {end} of {message.name}: it has {stored.meta.size_bytes}.")
        if stored.is_whole and (stored.is_taken or not generation):  # a put that is not taken may be refused yet
            return self._stages.part_of(stored, message)
        if message.wire or message.stripe >= stored.meta.stripes or (begin, end) != stored.range_of(message.stripe):
            return None
        buffer = stored.stripes[message.stripe]
        return buffer if buffer.generation == generation else None

    def _add_small(self, message: say.ReduceSmall) -> None:
        name = message.name
        self.used[name] = tuple(say.UsedSource(source) for source in message.used)
        total = self._stages.add_small(message)
        self.put_small(name, message.meta, total, lambda _: None, message.generation)
        self._end_asked(name, None)

    # -- memory --------------------------------------------------------------------------------------------------

    def _make(self, name: ObjectName, meta: ObjectMeta, *, is_own: bool = False) -> StoredObject:
        self._room.take(name, meta.size_bytes)
        given, released = self._given.pop(name, (None, lambda: None))
        segment = Segment(meta.size_bytes) if given is None and meta.size_bytes > INLINE_BYTES else None
        if given is not None:
            memory = given
        else:
            memory = memoryview(bytearray(meta.size_bytes)) if segment is None else segment.memory
        ranges = cut(meta.size_bytes, meta.stripes, meta.item_bytes)
        generation = time.time_ns() if is_own else 0  # which no other maker, nor a directory, has for this name
        stripes = [GrowingBuffer(memory[begin:end], 0, generation) for begin, end in ranges]
        if segment is not None and not is_own:
            segment.seal()  # this store alone writes
        stored = self.objects[name] = StoredObject(name, meta, memory, segment, stripes, is_own, released=released)
        self.used_bytes += meta.size_bytes
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)
        return stored

    def remove(self, stored: StoredObject) -> None:
        for stripe in list(stored.readings):
            self._stop_reading(stored, stripe)
        for buffer in stored.stripes:
            self.end_lanes_of(buffer, f"{stored.name} is not here any more")
        self._let_go(stored)

    def _end(self, stored: StoredObject, error: OffbeatError) -> None:
        """Remove an object; whoever still makes it learns why when it is finished."""
        stored.refused = error
        self.remove(stored)

    def _end_wait(self, name: ObjectName, error: OffbeatError) -> None:
        """Tell those who wait for an object, or have asked for a sum, why there is none."""
        _log.warning("%s", error)
        self._end_asked(name, error)
        self._fail(name, error)

    def _let_go(self, stored: StoredObject) -> None:
        if self.objects.pop(stored.name, None) is not None:
            self.used_bytes -= stored.meta.size_bytes
            self.used.pop(stored.name, None)
            if stored.segment is not None and stored.pins:  # a client may be about to map it
                self._later(_MAPPED_S, stored.segment.close)
            elif stored.segment is not None:
                stored.segment.close()
            stored.released()
            self._room.give()

    # -- small things --------------------------------------------------------------------------------------------

    def _tell_waiting(self, stored: StoredObject) -> None:
        if not (stored.is_whole and stored.is_settled):
            return
        for told in self._waiting.pop(stored.name, []):
            told(stored)

    def _fail(self, name: ObjectName, error: OffbeatError) -> None:
        if (putting := self._putting.pop(name, None)) is not None:
            putting(error)
        if waiting := self._waiting.pop(name, []):
            self.tell_directory(say.StopWanting(name=name))  # it may have heard of a want only after what ends it
        for told in waiting:
            told(error)

    def _end_asked(self, name: ObjectName, error: OffbeatError | None) -> None:
        """Tell those who have asked for a sum that it is made, or why not."""
        asked = self._asked.pop(name, None)
        for told in asked.told if asked is not None else ():
            told(error)

    def _retry(self, name: ObjectName) -> None:
        if name not in self._retrying:
            self._retrying.add(name)
            self._later(_RETRY_S, lambda: self._want_again(name))

    def _want_again(self, name: ObjectName) -> None:
        """Ask again for an object that is waited for and that no store feeds, or for what a sum waits."""
        self._retrying.discard(name)
        if name not in self._waiting:
            self.sums_that_wait.pop(name, None)
            return
        stored = self.objects.get(name)
        if stored is None:
            is_idle = name in self.sums_that_wait  # whose sources may have come
        else:
            stripes = enumerate(stored.stripes)
            is_fed = all(buffer.is_whole or stripe in stored.readings for stripe, buffer in stripes)
            is_idle = not (is_fed or stored.is_own)
        if is_idle:
            self.tell_directory(say.WantObject(name=name))
        self._retry(name)

    def tell_directory(self, message: FromStore) -> None:
        self._directory_of(message.name).send(message)

    def _directory_of(self, name: ObjectName) -> DirectoryLink:
        return self._directories[shard_of(name, len(self._directories))]

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, what)

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget_feeder(self, address: str) -> None:
        if (link := self._feeders.pop(address, None)) is not None:
            self._received_bytes += link.received_bytes


def put_of(stored: StoredObject, used: tuple[say.UsedSource, ...] = ()) -> say.PutObject:
    """Describe an object that a store has, or makes, to its directory."""
    return say.PutObject(
        name=stored.name,
        meta=stored.meta,
        generations=stored.generations,
        whole=bool(stored.digest),
        digest=stored.digest,
        inline=bytes(stored.memory) if stored.digest and stored.meta.size_bytes <= INLINE_BYTES else None,
        used=used,
    )


def _is_here(stored: StoredObject) -> ObjectError:
    if stored.is_whole and stored.is_settled:
        return AlreadyHereError(f"Cannot put {stored.name}: this store has it already, and its bytes never change.")
    return ObjectError(f"Cannot put {stored.name}: it is on its way to this store.")


def shard_of(name: ObjectName, shards: int) -> int:
    """Return the number of the directory that has a name: all that have the same before the first "/" of their ids."""
    return xxhash.xxh3_64_intdigest(name.id.partition("/")[0].encode()) % shards


def digest_of(memory: memoryview) -> str:
    """The digest of an object's bytes."""
    return xxhash.xxh3_64_hexdigest(memory)


def versions_wanted(id_: str, waiting: list[VersionsWait]) -> list[say.WantVersions]:
    """The questions to a directory for callers who want to know which versions of an id there are."""
    after = [wait.after for wait in waiting if wait.waits]
    asked = [say.WantVersions(name=ObjectName(id_), after=min(after), waits=True)] if after else []
    if len(after) < len(waiting):
        asked.append(say.WantVersions(name=ObjectName(id_)))
    return asked
