"""One shard of a parameter server, at work: between the links, the tables and, on the first shard, the lead.

Everything happens on one event loop, so an update of a block is atomic to whoever reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PeerError
from offbeat.fabric.server.lead import Lead
from offbeat.fabric.server.messages import (
    Announce,
    Answer,
    Ask,
    Enlist,
    Evicted,
    Fill,
    Filled,
    Go,
    Granted,
    Look,
    Open,
    Opened,
    Part,
    Pulled,
    Refused,
    Sight,
    Values,
    Whole,
    decision_of,
    details_of,
    from_guest,
    pack,
)
from offbeat.fabric.server.store import DTYPES
from offbeat.fabric.server.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fabric.server.ledger import Loss
    from offbeat.fabric.server.messages import Decision, Details, FromShard, FromWorker
    from offbeat.sync import Policy, Push
    from offbeat.wire.link import Link

_log = logging.getLogger("offbeat")


class Shard:
    """Serves the workers of one job.

    Args:
        policy_of: the policy in a plan's TOML, if this is the first shard, which coordinates; None if another does.
        done: called when the last worker has gone.
    """

    def __init__(self, policy_of: Callable[[str], Policy] | None, done: Callable[[], None] = lambda: None) -> None:
        self._done = done
        self._tables: dict[int, Table] = {}
        self._guests: dict[int, Guest] = {}  # workers
        self._shards: list[Guest] = []  # that follow this one
        self._early: dict[int, list[Decision]] = {}  # about models that nobody has opened here yet
        self._chief: Link | None = None  # to the shard that coordinates, if that is another
        self._lead = None if policy_of is None else Lead(policy_of, self._decide, self._say)
        self.was_visited = False

    def accept(self, link: Link) -> Guest:
        """A worker, or another shard, has connected and proved who it is."""
        return Guest(self, link)

    def follow(self, link: Link) -> Chief:
        """The coordinator has been reached; returns what the link hands frames to."""
        self._chief = link
        link.send(pack(Enlist()))
        return Chief(self)

    # -- what is said --------------------------------------------------------------------------------------------

    def open(self, guest: Guest, model: int, details: Details) -> None:
        """A worker wants to train a model.

        Raises:
            DisagreementError: if it differs from the others' in plan or layout.
            PeerError: if the model cannot be held.
        """
        table = self._tables.get(model)
        if table is None:
            table = self._tables[model] = Table(model, details, self._give)
            for decision in self._early.pop(model, []):
                table.decide(decision)
        _compare(guest.rank, details, table.details)
        self._guests[guest.rank] = guest
        self.was_visited = True
        guest.models.add(model)
        filler = any(model in other.filling for other in self._guests.values())
        if table.unfilled and not filler:
            guest.filling.add(model)
        guest.say(Opened(model, model in guest.filling))
        if not details.blocks and not filler:  # more shards than blocks
            self._on_filled(model)
        if self._lead is not None:
            self._lead.join(model, guest.rank, details)

    def fill(self, guest: Guest, model: int, block: int) -> None:
        """A block of the initial parameters is here."""
        table = self.table(model)
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

    def hear(self, guest: Guest, message: Announce | Pulled | Look | Ask | FromShard) -> None:
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
                guest.say(Sight(number), pack(lead.look()))
            case Ask():
                lead.ask(guest.rank, message)
            case Enlist():
                self._shards.append(guest)
            case Filled(model=model):
                lead.filled(model)
            case Whole(model=model, worker=worker, clock=clock):
                lead.whole(model, (worker, clock))

    def lose(self, guest: Guest, error: OffbeatError | None) -> None:
        """A worker or shard is gone; `error` says why, None that it said good-bye."""
        if guest in self._shards:
            self._shards.remove(guest)
            for worker in self._guests.values():
                worker.say(Refused(f"A shard of the parameter server is gone: {error or 'it has ended'}"))
            return
        if self._guests.get(guest.rank) is not guest:
            return
        del self._guests[guest.rank]
        if error is not None and self._lead is not None:
            _log.warning("Rank %d is gone: %s The others go on.", guest.rank, error)
        if self._lead is not None:
            self._lead.leave(guest.rank)
        if not self._guests:
            self._done()

    def decide(self, decision: Decision) -> Loss | None:
        """Carry out what the coordinator decided."""
        if decision.model not in self._tables:
            self._early.setdefault(decision.model, []).append(decision)
            return None
        return self._tables[decision.model].decide(decision)

    def end(self) -> None:
        """The coordinator is gone, and with it the job."""
        self._done()

    def table(self, model: int) -> Table:
        """The model's.

        Raises:
            PeerError: if nobody has opened it.
        """
        if model not in self._tables:
            raise PeerError(f"Model {model} has not been opened.")
        return self._tables[model]

    # -- what goes out -------------------------------------------------------------------------------------------

    def _decide(self, decision: Decision) -> Loss | None:
        for shard in self._shards:
            shard.say(decision)
        return self.decide(decision)

    def _say(self, worker: int, message: Granted | Go | Evicted | Answer) -> None:
        if worker in self._guests:
            self._guests[worker].say(message)

    def _give(self, worker: int, message: Values, values: torch.Tensor) -> None:
        if worker in self._guests:
            self._guests[worker].say(message, bytes_of(values))

    def _on_filled(self, model: int) -> None:
        if self._lead is not None:
            self._lead.filled(model)
        elif self._chief is not None:
            self._chief.send(pack(Filled(model)))


class Guest:
    """One connected worker, or another shard; what its link hands frames to."""

    def __init__(self, shard: Shard, link: Link) -> None:
        self._shard, self.link = shard, link
        self.rank = link.rank
        self.models: set[int] = set()
        self.filling: set[int] = set()  # models whose first values come from it
        self._landing: torch.Tensor | None = None
        self._details = bytearray()

    def say(
        self, message: Opened | Granted | Go | Evicted | Answer | Sight | Refused | Values | Decision, body: Any = b""
    ) -> None:
        """Send a message; nothing if the peer is just leaving."""
        with contextlib.suppress(NetworkError):
            self.link.send(pack(message), body)

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Where the body of a message goes.

        Raises:
            PeerError: if it is not expected, or of another size or type.
        """
        message = from_guest(metadata)
        match message:
            case Open():
                self._details = bytearray(size_bytes)
                return memoryview(self._details)
            case Fill(model=model, block=block):
                table = self._shard.table(model)
                if model not in self.filling or block not in table.unfilled:
                    raise PeerError(f"Rank {self.rank} was not asked for the values of block {block}.")
                return _sized(table.values(block), size_bytes)
            case Part():
                return self._landing_place(message, size_bytes)
            case _:
                raise PeerError(f"{type(message).__name__} has no body.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A message is here, whole."""
        try:
            self._take(from_guest(metadata))
        except DisagreementError as error:
            self.say(Refused(str(error), disagrees=True))
            raise

    def lost(self, error: OffbeatError | None) -> None:
        """The link is gone for good."""
        self._shard.lose(self, error)

    def _take(self, message: FromWorker | FromShard) -> None:
        shard = self._shard
        match message:
            case Open(model=model):
                details, self._details = details_of(self._details), bytearray()
                shard.open(self, model, details)
            case Fill(model=model, block=block):
                if block not in shard.table(model).unfilled:
                    raise PeerError(f"Rank {self.rank} sends values of block {block} without a body.")
                shard.fill(self, model, block)
            case Part(model=model, clock=clock, block=block):
                landing, self._landing = self._landing, None
                if landing is None:
                    raise PeerError(f"Rank {self.rank} sends block {block} without a body.")
                shard.arrive(model, (self.rank, clock), block, landing)
            case _:
                shard.hear(self, message)

    def _landing_place(self, message: Part, size_bytes: int) -> memoryview:
        table = self._shard.table(message.model)
        numel = table.values(message.block).numel()
        if message.model not in self.models or message.dtype not in DTYPES:
            raise PeerError(f"Cannot take a gradient of type {message.dtype!r} from rank {self.rank}.")
        push = (self.rank, message.clock)
        if not table.expects(push, message.block) and not table.is_past(push):
            raise PeerError(
                f"Cannot take block {message.block} of contribution {message.clock} of rank {self.rank}: it is not "
                "expected now."
            )
        self._landing = torch.empty(numel, dtype=DTYPES[message.dtype])
        return _sized(self._landing, size_bytes)


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
        self._shard.decide(decision_of(metadata))

    def lost(self, error: OffbeatError | None) -> None:
        """The coordinator is gone for good."""
        self._shard.end()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def _sized(tensor: torch.Tensor, size_bytes: int) -> memoryview:
    view = bytes_of(tensor)
    if view.nbytes != size_bytes:
        raise PeerError(f"Cannot take {size_bytes} bytes: the block has {view.nbytes}.")
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
