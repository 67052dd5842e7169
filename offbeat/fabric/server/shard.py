"""One shard of a parameter server, at work: between the links, the tables and, on the first shard, the lead.

Everything happens on one event loop, so an update of a block is atomic to whoever reads it. A `Shard` has one life (see
`offbeat.fabric.server.resume`): it ends when the last worker has gone, or begins another one as a new `Shard`.

Call order: (the process) `accept` whoever dials, and on shards that do not coordinate `follow` the one that does;
`begin_with_who_is_here_after` when it goes on from a snapshot; `save` before it ends for another reason than by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PeerError
from offbeat.fabric.server.checkpoint import Portion
from offbeat.fabric.server.deals import Books, Crowded, Enrol, Restock, Return, Stock, Take
from offbeat.fabric.server.keeping import Keeping, Rhythm
from offbeat.fabric.server.lead import Lead
from offbeat.fabric.server.memory import bytes_of
from offbeat.fabric.server.messages import (
    SAYS,
    Admit,
    Announce,
    Ask,
    Begin,
    Done,
    Enlist,
    Fetch,
    Fill,
    Filled,
    Look,
    Mark,
    Open,
    Opened,
    Part,
    Piece,
    Pulled,
    Put,
    PutAll,
    Refused,
    Safe,
    Save,
    Saved,
    Sight,
    Values,
    Whole,
    details_of,
    from_chief,
    from_guest,
    pack,
)
from offbeat.fabric.server.snapshot import STATE_DTYPES, Identity, ModelOf
from offbeat.fabric.server.store import DTYPES
from offbeat.fabric.server.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fabric.server.archive import Archive
    from offbeat.fabric.server.deals import FromData
    from offbeat.fabric.server.lead import Parts
    from offbeat.fabric.server.ledger import Loss
    from offbeat.fabric.server.messages import Decision, Details, FromChief, FromShard, FromWorker, Scene, ToWorker
    from offbeat.fabric.server.snapshot import Progress
    from offbeat.sync import Push
    from offbeat.wire.link import Link

_log = logging.getLogger("offbeat")

_MOST_UNSEEN = 8
_A = {"worker": "a worker", "shard": "another shard", "onlooker": "an onlooker"}


class Shard:
    """Serves the workers of one job.

    Args:
        read_plan: from TOML, if this is the first shard, which coordinates; None if another does.
        done: called when the last worker has gone.
        archive: where snapshots are kept; None for none.
        job: its name.
        every: updates between two snapshots.
        again: called when another shard is lost, and this one has to begin a new life with it.
        patience_s: for how long a worker that was lost, and was the last, may come back.
    """

    def __init__(
        self,
        read_plan: Callable[[str], Parts] | None,
        done: Callable[[], None] = lambda: None,
        *,
        archive: Archive | None = None,
        job: str = "",
        every: int = 100,
        again: Callable[[], None] = lambda: None,
        patience_s: float = 0.0,
    ) -> None:
        self._done, self._again, self._patience_s = done, again, patience_s
        self._archive = archive
        self._tables: dict[int, Table] = {}
        self._guests: dict[int, Guest] = {}  # workers
        self._admitted: dict[tuple[int, int], int] = {}  # entry, by model and worker
        self._shards: list[Guest] = []  # that follow this one
        self._held: dict[Guest, Enlist] = {}  # what each of them could go on from
        self._early: dict[int, list[Decision]] = {}  # about models that nobody has opened here yet
        self._waiting: list[tuple[Guest, int, Details, int]] = []  # that came before this life had begun
        self._chief: Link | None = None  # to the shard that coordinates, if that is another
        self.life = secrets.randbits(39) + 1 if read_plan is not None else 0
        self._lead = None if read_plan is None else Lead(read_plan, self._decide, self._say, self.life)
        self._keeping = None if archive is None else Keeping(archive, job, self._written)
        self._every, self._rhythm = every, Rhythm(every, least=0, life=self.life)
        self._marked: dict[int, Progress] = {}
        self._saves: list[asyncio.Future[None]] = []  # done with the next snapshot
        self._looks_soon = False
        self._last_number = 0
        self._is_last = False  # the next snapshot is
        self.begun = asyncio.Event()
        self.was_visited = False
        self.is_over = False  # set by the process: what it hears now is of no interest any more
        self.is_finished = False  # the last worker has said good-bye
        if self._lead is not None:
            self._begin_if_all_are_here()

    def accept(self, link: Link) -> Guest:
        """A worker, or another shard, has connected and proved who it is."""
        return Guest(self, link)

    def follow(self, link: Link) -> Chief:
        """The coordinator has been reached; returns what the link hands frames to."""
        self._chief = link
        held = self._archive.held if self._archive is not None else {}
        least = self._archive.least if self._archive is not None else 0
        link.send(pack(Enlist(tuple((one.number, one.life) for one in held), least)))
        return Chief(self)

    # -- lives and snapshots -------------------------------------------------------------------------------------

    def begin_with_who_is_here_after(self, patience_s: float) -> None:
        """Wait no longer than this for the workers of a snapshot; begin with those that are here by then."""
        if self._lead is not None:
            asyncio.get_running_loop().call_later(patience_s, self._lead.begin_with_who_is_here)

    async def save(self) -> None:
        """Have all shards make a last snapshot, and wait for it; nothing if there is nothing to keep.

        From then on nothing is decided, so that nobody is told of an update that is not in it.
        """
        is_idle = self._lead is not None and not self._lead.started
        if self._keeping is None or not self._tables or is_idle:
            return
        future = asyncio.get_running_loop().create_future()
        self._saves.append(future)
        if self._chief is not None:
            with contextlib.suppress(NetworkError):
                self._chief.send(pack(Save()))
        else:
            self._is_last = True
            self._look_soon()
        await future

    async def be_quiet(self) -> None:
        """Wait until no file is being written."""
        if self._keeping is not None and self._keeping.writing is not None:
            await asyncio.wait([self._keeping.writing])

    def begin(self, begin: Begin) -> None:
        """The life begins, from a snapshot or from nothing."""
        self.life = begin.life
        try:
            if begin.snapshot is not None:
                self._restore(Identity(*begin.snapshot))
        except PeerError as error:
            _log.error("Cannot go on from the snapshot %d: %s.", begin.snapshot and begin.snapshot[0], error)
            raise
        self.begun.set()
        waiting, self._waiting = self._waiting, []
        for guest, model, details, entry in waiting:
            with contextlib.suppress(PeerError):  # it has been told
                guest.open(model, details, entry)

    def mark(self, mark: Mark, progress: dict[int, Progress]) -> None:
        """Keep all models as they are after what was decided so far."""
        if self._keeping is None:
            self._written(mark.number, False, 0.0)
            return
        self._last_number = mark.number if mark.is_last else 0
        plain = {model: msgspec.structs.replace(table.details, back=None) for model, table in self._tables.items()}
        self._keeping.begin(
            Identity(mark.number, self.life),
            None if mark.keep is None else Identity(*mark.keep),
            shards=len(self._shards) + 1,
            models=[ModelOf(m, self._tables[m].version, details, progress.get(m)) for m, details in plain.items()],
            blocks={model: table.blocks for model, table in self._tables.items()},
        )
        for table in self._tables.values():
            table.mark()

    def _restore(self, identity: Identity) -> None:
        assert self._archive is not None
        snapshot = self._archive.read(identity)
        for one in snapshot.header.models:
            table = Table(one.model, one.details, self._give, keeping=self._keeping, version=one.version)
            self._tables[one.model] = table
            if self._lead is not None and one.progress is not None:
                self._lead.restore(one.model, one.details, one.version, one.progress)
        for what, tensor in snapshot.tensors:
            self.table(what.model).restore(what, tensor)
        if self._lead is not None:
            self._rhythm.start_from(identity, self._lead.version)
        versions = ", ".join(str(one.version) for one in snapshot.header.models)
        _log.warning("Goes on from its snapshot of version %s.", versions)

    def _begin_if_all_are_here(self) -> None:
        """Decide which snapshot all shards go on from, once all that it was made by are here."""
        held = dict(self._archive.held) if self._archive is not None else {}
        if self.begun.is_set() or (held and len(self._held) < next(iter(held.values())).shards - 1):
            return
        theirs = [{Identity(*one) for one in enlist.held} for enlist in self._held.values()]
        common = [one for one, header in held.items() if header.shards == len(theirs) + 1 and _all_have(theirs, one)]
        if held and not common:
            _log.error("Cannot go on: no snapshot is there on every shard.")
        least = max([0 if self._archive is None else self._archive.least, *(e.least for e in self._held.values())])
        self._rhythm = Rhythm(self._every, least=least, life=self.life)
        chosen = (common[0].number, common[0].life) if common else None
        for shard in self._shards:
            shard.say(Begin(self.life, chosen))
        self.begin(Begin(self.life, chosen))

    def _enlist(self, guest: Guest, enlist: Enlist) -> None:
        if self.begun.is_set() and self._tables and self._archive is not None:
            self._again()  # one of the shards has come back before it was missed
            return
        self._shards.append(guest)
        self._held[guest] = enlist
        if self.begun.is_set():
            guest.say(Begin(self.life))
        self._begin_if_all_are_here()

    def _look_soon(self) -> None:
        """See whether a snapshot is due, when all that follows from the present event has been decided."""
        if self._keeping is not None and self._lead is not None and not self._looks_soon:
            self._looks_soon = True
            asyncio.get_running_loop().call_soon(self._mark_if_due)

    def _mark_if_due(self) -> None:
        self._looks_soon = False
        lead, rhythm = self._lead, self._rhythm
        assert lead is not None
        if (
            lead.is_over
            or not lead.started
            or rhythm.is_under_way
            or any(table.unfilled for table in self._tables.values())
        ):
            return
        now_s = asyncio.get_running_loop().time()
        if not self._is_last and not rhythm.is_due(lead.version, now_s):
            return
        lead.is_over = self._is_last
        self._marked = {model: lead.progress(model) for model in lead.models}
        last = rhythm.last
        number = rhythm.next(lead.version, len(self._shards) + 1)
        mark = Mark(number, None if last is None else (last.number, last.life), lead.is_over)
        for shard in self._shards:
            shard.say(mark)
        self.mark(mark, self._marked)

    def _written(self, number: int, well: bool, cost_s: float) -> None:
        """This shard has written a snapshot, or could not."""
        if self._chief is not None:
            with contextlib.suppress(NetworkError):
                self._chief.send(pack(Saved(number, well, cost_s)))
            self._end_saves(number)
        else:
            self._saved(number, well, cost_s)

    def _saved(self, number: int, well: bool, cost_s: float) -> None:
        if self._rhythm.saved(number, well, cost_s, asyncio.get_running_loop().time()):
            for model, progress in self._marked.items():
                for worker, clock in progress.next.items():
                    self._say(worker, Safe(model, clock))
        if not self._rhythm.is_under_way:
            self._end_saves(number)
            self._look_soon()

    def _end_saves(self, number: int) -> None:
        if number != self._last_number:
            return
        saves, self._saves = self._saves, []
        for future in saves:
            if not future.done():
                future.set_result(None)

    # -- what is said --------------------------------------------------------------------------------------------

    def open(self, guest: Guest, model: int, details: Details, entry: int = 0) -> None:
        """A worker wants to train a model, or comes back to it.

        Raises:
            DisagreementError: if it differs from the others' in plan or layout.
            PeerError: if the model cannot be held, the worker is here already, or it was here before and nothing is
                known of that.
        """
        if not self.begun.is_set():
            self._waiting.append((guest, model, details, entry))
            return
        if model in guest.models and details.back is None:
            raise PeerError(f"Rank {guest.rank} opens model {model} for a second time.")
        self._make_room(guest, comes_back=details.back is not None)
        table = self._tables.get(model)
        if table is None and details.back is not None and self._lead is None:
            raise PeerError("Cannot go on: this shard of the parameter server was restarted without a snapshot.")
        is_first = table is None
        if table is None:
            table = Table(model, details, self._give, keeping=self._keeping)
            if self._lead is not None:
                self._lead.begin(model, details)
            self._tables[model] = table  # not before nothing of it can be refused: it is what others are compared with
            for decision in self._early.pop(model, []):
                table.decide(decision)
        _compare(guest.rank, details, table.details)
        self._guests[guest.rank] = guest
        self.was_visited = True
        guest.models[model] = entry
        filler = any(model in other.filling for other in self._guests.values())
        if table.unfilled and not filler:
            guest.filling.add(model)
        guest.say(Opened(model, model in guest.filling, self.life, self._archive is not None))
        if not details.blocks and is_first and details.back is None:  # more shards than blocks
            self._on_filled(model)
        if self._lead is not None:
            self._lead.join(model, guest.rank, details, entry)

    def fill(self, guest: Guest, model: int, block: int) -> None:
        """A block of the initial parameters is here.

        Raises:
            PeerError: if this worker was not asked for it.
        """
        table = self.table(model)
        if model not in guest.filling or block not in table.unfilled:
            raise PeerError(f"Rank {guest.rank} was not asked for the values of block {block}.")
        table.unfilled.discard(block)
        if not table.unfilled:
            guest.filling.discard(model)
            self._on_filled(model)

    def arrive(self, model: int, push: Push, block: int, part: torch.Tensor) -> None:
        """A block of a contribution is here."""
        table = self.table(model)
        # Not if the worker was sent away in the meantime.
        if table.expects(push, block) and table.arrive(push, block, part):
            if self._lead is not None:
                self._lead.whole(model, push)
            elif self._chief is not None:
                self._chief.send(pack(Whole(model, *push)))

    def fetch(self, guest: Guest, message: Fetch) -> None:
        """A worker wants the optimizer's state, as it is now."""
        table = self.table(message.model)
        index = {name: i for i, name in enumerate(table.details.names)}
        for it in table.state():
            tensor = it.tensor.clone()
            dtype = str(tensor.dtype).removeprefix("torch.")
            piece = Piece(message.model, message.number, it.block, index[it.name], it.key, dtype, tensor.ndim == 0)
            guest.say(piece, bytes_of(tensor.reshape(-1)))
        guest.say(Done(message.number))

    def hear(self, guest: Guest, message: Announce | Pulled | Look | Ask | FromData | FromShard) -> None:
        """Something for the coordinator.

        Raises:
            PeerError: if this is not the coordinator, or it cannot be.
        """
        lead = self._lead
        if lead is None:
            raise PeerError(f"{type(message).__name__} is for the shard that coordinates; this is another.")
        match message:
            case Announce():
                lead.announce(guest.rank, message)
            case Pulled(model=model, step=step):
                lead.pulled(model, guest.rank, step)
            case Look(number=number):
                guest.show(Sight(number), lead.look())
            case Ask():
                if self._guests.get(guest.rank) is not guest:
                    raise PeerError(
                        f"Cannot ask all workers for rank {guest.rank}: it trains no model yet. Call run.prepare first."
                    )
                lead.ask(guest.rank, message)
            case Enrol() | Take() | Return() | Crowded():
                lead.data(guest.rank, message)
            case Books(number=number):
                guest.say(Stock(number), lead.books())
            case Restock(number=number):
                guest.say(Stock(number, lead.restock(guest.take_body())))
            case Enlist():
                self._enlist(guest, message)
            case Save():
                self._is_last = True
                self._look_soon()
            case Saved(number=number, well=well, cost_s=cost_s):
                self._saved(number, well, cost_s)
            case Filled(model=model):
                lead.filled(model)
            case Whole(model=model, worker=worker, clock=clock):
                lead.whole(model, (worker, clock))

    def lose(self, guest: Guest, error: OffbeatError | None) -> None:
        """A worker or shard is gone; `error` says why, None that it said good-bye."""
        if self.is_over:
            return
        if guest in self._shards:
            self._shards.remove(guest)
            self._held.pop(guest, None)
            if self._archive is not None:
                if self.begun.is_set():
                    _log.warning("A shard of the parameter server is gone: %s", error or "it has ended.")
                    self._again()
                return
            for worker in self._guests.values():
                worker.say(Refused(f"A shard of the parameter server is gone: {error or 'it has ended'}"))
            return
        if self._guests.get(guest.rank) is not guest:  # it was never taken in
            if isinstance(error, PeerError):
                _log.warning("%s", error)
            return
        if error is not None and self._lead is not None:
            _log.warning("Rank %d is gone: %s The others go on.", guest.rank, error)
        self._remove(guest)
        if not self._guests:
            self._end_unless_one_comes_back(error)

    def _end_unless_one_comes_back(self, error: OffbeatError | None) -> None:
        if error is None:
            self.is_finished = True
            self._done()
            return
        asyncio.get_running_loop().call_later(self._patience_s, lambda: None if self._guests else self._done())

    def decide(self, decision: Decision) -> Loss | None:
        """Carry out what the coordinator decided."""
        if isinstance(decision, Admit):
            self._admitted[(decision.model, decision.worker)] = decision.entry
        if decision.model not in self._tables:
            self._early.setdefault(decision.model, []).append(decision)
            return None
        return self._tables[decision.model].decide(decision)

    def end(self, error: OffbeatError | None) -> None:
        """The coordinator is gone, and with it the job; or it is to come back."""
        if self.is_over:
            return
        if error is not None and self._archive is not None:
            _log.warning("The shard that coordinates is gone: %s", error)
            self._again()
        else:
            self._done()

    def table(self, model: int) -> Table:
        """The model's.

        Raises:
            PeerError: if nobody has opened it.
        """
        if model not in self._tables:
            raise PeerError(f"Model {model} has not been opened.")
        return self._tables[model]

    def may_push(self, model: int, push: Push) -> bool:
        """Whether the policy has let the worker push this contribution, as far as this shard can know."""
        return self._lead is None or self._lead.has_granted(model, push)

    @property
    def coordinates(self) -> bool:
        """Whether this is the first shard."""
        return self._lead is not None

    def _make_room(self, guest: Guest, *, comes_back: bool) -> None:
        """See that there is one worker of each rank; one that comes back is not who it was."""
        there = self._guests.get(guest.rank)
        if there is None or there is guest:
            return
        if there.link.connected and not comes_back:
            raise PeerError(f"Cannot take in rank {guest.rank}: one is here already, from {there.link.peer}.")
        self._remove(there)  # its process is gone, and this is the one that follows it
        there.link.abort()

    def _remove(self, guest: Guest) -> None:
        del self._guests[guest.rank]
        if self._lead is not None:
            self._lead.leave(guest.rank)
        for model in guest.filling:
            self._ask_another_to_fill(model)

    def _ask_another_to_fill(self, model: int) -> None:
        """Who was to send the first values is gone."""
        table = self._tables[model]
        table.unfilled = set(table.sizes)  # of what has come, nothing goes with the values of another
        for other in self._guests.values():
            if model in other.models:
                other.filling.add(model)
                other.say(Opened(model, True, self.life, self._archive is not None))
                return
        del self._tables[model]  # whoever comes next is the first
        if self._lead is not None:
            self._lead.forget(model)

    # -- what goes out -------------------------------------------------------------------------------------------

    def _decide(self, decision: Decision) -> Loss | None:
        for shard in self._shards:
            shard.say(decision)
        self._look_soon()
        return self.decide(decision)

    def _say(self, worker: int, message: ToWorker) -> None:
        if worker in self._guests:
            self._guests[worker].say(message)

    def _give(self, worker: int, message: Values, values: torch.Tensor) -> None:
        guest = self._guests.get(worker)
        if guest is not None and guest.models.get(message.model) == self._admitted.get((message.model, worker)):
            guest.say(message, bytes_of(values))

    def _on_filled(self, model: int) -> None:
        if self._lead is not None:
            self._lead.filled(model)
        elif self._chief is not None:
            self._chief.send(pack(Filled(model)))


class Guest:
    """One connected worker, or another shard; what its link hands frames to."""

    def __init__(self, shard: Shard, link: Link) -> None:
        self._shard, self.link = shard, link
        self.rank, self.role = link.rank, link.role
        self.models: dict[int, int] = {}  # that it has opened, with its entry
        self.filling: set[int] = set()  # models whose first values come from it
        self._unseen = 0  # looks that it has not received
        self._landing: torch.Tensor | None = None
        self._filled: int | None = None  # the block whose values are being received
        self._details = bytearray()

    def say(self, message: ToWorker | FromChief, body: Any = b"") -> None:
        """Send a message; nothing if the peer is just leaving."""
        with contextlib.suppress(NetworkError):
            self.link.send(pack(message), body)

    def show(self, sight: Sight, scenes: tuple[Scene, ...]) -> None:
        """Answer a look.

        Raises:
            PeerError: if answers pile up, because it does not take them in.
        """
        if self._unseen >= _MOST_UNSEEN:
            raise PeerError("Cannot answer this peer: it asks for looks that it does not take in.")
        self._unseen += 1
        with contextlib.suppress(NetworkError):
            self.link.send(pack(sight), pack(scenes), self._on_seen)

    def _on_seen(self) -> None:
        self._unseen -= 1

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Where the body of a message goes.

        Raises:
            PeerError: if it is not expected, or of another size or type.
        """
        message = self._hear(metadata)
        match message:
            case Open():
                self._details = bytearray(size_bytes)
                return memoryview(self._details)
            case Fill(model=model, block=block):
                table = self._shard.table(model)
                if model not in self.filling or block not in table.unfilled:
                    raise PeerError(f"Rank {self.rank} was not asked for the values of block {block}.")
                self._filled = block
                return _sized(table.values(block), block, size_bytes)
            case Part():
                return self._landing_place(message, size_bytes)
            case Put():
                return self._putting_place(message, size_bytes)
            case Restock():
                self._details = bytearray(size_bytes)
                return memoryview(self._details)
            case _:
                raise PeerError(f"{type(message).__name__} has no body.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A message is here, whole."""
        self._take(self._hear(metadata))

    def lost(self, error: OffbeatError | None) -> None:
        """The link is gone for good."""
        self._shard.lose(self, error)

    def open(self, model: int, details: Details, entry: int) -> None:
        """What it wants to open can be opened now, or refused."""
        try:
            self._shard.open(self, model, details, entry)
        except PeerError as error:
            self.say(Refused(str(error), disagrees=isinstance(error, DisagreementError)))
            raise

    def take_body(self) -> bytearray:
        """What came with the message at hand."""
        body, self._details = self._details, bytearray()
        return body

    def _hear(self, metadata: bytes) -> FromWorker | FromShard:
        message = from_guest(metadata)
        if type(message) not in SAYS[self.role]:
            raise PeerError(f"{type(message).__name__} is not for {_A[self.role]} to say.")
        return message

    def _take(self, message: FromWorker | FromShard) -> None:
        shard = self._shard
        match message:
            case Open(model=model, entry=entry):
                details, self._details = details_of(self._details), bytearray()
                self.open(model, details, entry)
            case Fill(model=model, block=block):
                filled, self._filled = self._filled, None
                if filled != block:
                    raise PeerError(f"Rank {self.rank} sends values of block {block} without a body.")
                shard.fill(self, model, block)
            case Part(model=model, clock=clock, block=block):
                landing, self._landing = self._landing, None
                if landing is None:
                    raise PeerError(f"Rank {self.rank} sends block {block} without a body.")
                shard.arrive(model, (self.rank, clock), block, landing)
            case Fetch(model=model):
                if model not in self.models:
                    raise PeerError(f"Rank {self.rank} does not take part in model {model}.")
                shard.fetch(self, message)
            case Put(model=model, block=block, name=name, key=key):
                landing, self._landing = self._landing, None
                names = shard.table(model).details.names
                if landing is None or name >= len(names):
                    raise PeerError(f"Rank {self.rank} puts something into block {block} that does not belong there.")
                shard.table(model).put(Portion(block, names[name] if key else "", key, landing))
            case PutAll(number=number):
                self.say(Done(number))
            case _:
                shard.hear(self, message)

    def _putting_place(self, message: Put, size_bytes: int) -> memoryview:
        values = self._shard.table(message.model).values(message.block)
        if message.model not in self.models or (message.key and message.dtype not in STATE_DTYPES):
            raise PeerError(f"Cannot take a state of type {message.dtype!r} from rank {self.rank}.")
        dtype = STATE_DTYPES[message.dtype] if message.key else values.dtype
        if size_bytes % dtype.itemsize or size_bytes > values.numel() * dtype.itemsize:
            raise PeerError(f"Cannot take {size_bytes} bytes of {message.dtype}: the block is smaller.")
        flat = torch.empty(size_bytes // dtype.itemsize, dtype=dtype)
        self._landing = flat[0] if message.single else flat
        return bytes_of(flat)

    def _landing_place(self, message: Part, size_bytes: int) -> memoryview:
        model, block, dtype = message.model, message.block, message.dtype
        if model not in self.models:
            raise PeerError(f"Rank {self.rank} does not take part in model {model}.")
        table = self._shard.table(model)
        numel = table.values(block).numel()
        if dtype not in DTYPES:
            raise PeerError(f"Cannot take a gradient of type {dtype!r} from rank {self.rank}.")
        self._check_turn((self.rank, message.clock), table, block)
        self._landing = torch.empty(numel, dtype=DTYPES[dtype])
        return _sized(self._landing, block, size_bytes)

    def _check_turn(self, push: Push, table: Table, block: int) -> None:
        expected, shard = table.next(self.rank), self._shard
        if table.expects(push, block):
            if not shard.may_push(table.model, push):
                raise PeerError(f"Cannot take contribution {push[1]} of rank {self.rank}: it has not been granted.")
        elif expected is not None and (shard.coordinates or not table.is_past(push)):
            # To other shards the coordinator's word may be quicker than what the worker had still on its way.
            raise PeerError(
                f"Cannot take block {block} of contribution {push[1]} of rank {self.rank}: what is left of number "
                f"{expected} is next."
            )


class Chief:
    """What the link to the coordinator hands frames to.

    Args:
        shard: that follows it.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Nowhere: decisions have no body.

        Raises:
            PeerError: always.
        """
        raise PeerError("The coordinator sends a body where none is expected.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A decision is here."""
        match message := from_chief(metadata):
            case Begin():
                self._shard.begin(message)
            case Mark():
                self._shard.mark(message, {})
            case _:
                self._shard.decide(message)

    def lost(self, error: OffbeatError | None) -> None:
        """The coordinator is gone for good."""
        self._shard.end(error)


def _all_have(theirs: list[set[Identity]], one: Identity) -> bool:
    return all(one in held for held in theirs)


def _sized(tensor: torch.Tensor, block: int, size_bytes: int) -> memoryview:
    view = bytes_of(tensor)
    if view.nbytes != size_bytes:
        raise PeerError(f"Cannot take {size_bytes} bytes as block {block}: it has {view.nbytes}.")
    return view


def _compare(rank: int, theirs: Details, ours: Details) -> None:
    for what, there, here in (
        ("plan", _digest(theirs.plan), _digest(ours.plan)),
        ("layout", theirs.layout, ours.layout),
        ("number of workers", str(theirs.world), str(ours.world)),
        ("number of shards", str(theirs.shards), str(ours.shards)),
    ):
        if there != here:
            raise DisagreementError(
                f"Cannot take in rank {rank}: its {what} is {there!r}, that of the job here is {here!r}. Start every "
                "worker with the same plan and the same model."
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
