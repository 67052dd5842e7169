"""A worker's end of a parameter server.

Call order, (each worker): `open` once per model; then, in each step, `exchange`, and wait for what it returns; `close`.
All links are served by one event loop on a thread of their own.

When a shard is lost, or says that the job went on without this worker, the client lets go of all shards, dials all of
them again, and opens its models again, saying where it was; what becomes of it then is decided there (see
`offbeat.fabric.server.resume`). What the training thread waits for goes on waiting meanwhile.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch

from offbeat.errors import DisagreementError, ModelError, NetworkError, OffbeatError, PeerError
from offbeat.fabric.server.checkpoint import Portion
from offbeat.fabric.server.deals import Books, Dealt, Restock, Stock
from offbeat.fabric.server.hands import Hands
from offbeat.fabric.server.messages import (
    About,
    Announce,
    Answer,
    Answered,
    Ask,
    Back,
    BlockOf,
    Details,
    Done,
    Evicted,
    Fetch,
    Fill,
    Go,
    Granted,
    Look,
    Open,
    Opened,
    Part,
    Piece,
    PieceOf,
    Pulled,
    Put,
    PutAll,
    Refused,
    Safe,
    Sight,
    Told,
    Values,
    pack,
    scenes_of,
    to_worker,
)
from offbeat.fabric.server.shard import bytes_of
from offbeat.fabric.server.snapshot import STATE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from offbeat.fabric.server.blocks import Block
    from offbeat.fabric.server.deals import Enrol, FromData
    from offbeat.fabric.server.hands import Hand
    from offbeat.fabric.server.messages import Scene, ToWorker
    from offbeat.fabric.server.optimizers import OptimizerSpec
    from offbeat.payload import Reply
    from offbeat.wire.link import Link
    from offbeat.wire.loop import Loop
    from offbeat.wire.session import Receiver

    Dial = Callable[[Callable[[Link], Receiver], timedelta], Awaitable[Link]]

_log = logging.getLogger("offbeat")
_MOST_DONE = 1 << 14  # contributions that are remembered until they are in a snapshot
_MOST_ANSWERED = 16
_RETURNS = 3  # in a row, without a single exchange in between; then there is something else that is wrong
_ALIVE_S = 1.0  # how long to dial at a time while it is not known whether anybody is there


class Exchange:
    """A contribution on its way out and parameters on their way in; waited for as any `Pending`.

    Args:
        sent_bytes: of the contribution.
    """

    def __init__(self, sent_bytes: int = 0) -> None:
        self.sent_bytes = sent_bytes
        self.granted = False
        self.step = -1  # that this worker was released for
        self.version = 0  # of the parameters
        self.staleness = 0  # of the contribution
        self.error: OffbeatError | None = None
        self.numbers: tuple[float, ...] = ()
        self.workers = 0
        self.scenes: tuple[Scene, ...] = ()
        self.portions: list[Portion] = []
        self.place = b""  # in the data
        self.left = 0  # shards that are not done
        self.is_used = True  # False if it was dropped because this worker had been left behind
        self._done = threading.Event()

    def finish(self, error: OffbeatError | None = None) -> None:
        """It is done, or will never be."""
        self.error = self.error or error
        self._done.set()

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done (True) or `timeout` has passed (False).

        Raises:
            OffbeatError: what ended it: the server is gone, or refused.
        """
        done = self._done.wait(timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return done

    def done(self) -> bool:
        return self._done.is_set() and self.error is None

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return self._done.is_set()

    def result(self) -> Reply:
        return []


@dataclass
class Place:
    """One model at this worker.

    Args:
        blocks: all of them.
        shards: which shard holds each.
        values: where each block's parameters lie, contiguous, on the CPU.
    """

    model: int
    blocks: Sequence[Block]
    shards: Sequence[int]
    values: Sequence[torch.Tensor]
    clock: int = 0
    exchange: Exchange = field(default_factory=Exchange)
    parts: Mapping[int, torch.Tensor] | None = None
    missing: set[int] = field(default_factory=set)
    going: Go | None = None  # the release whose parameters are still coming
    is_gated: bool = True  # whether it waits for its grant before it pushes
    names: dict[str, int] = field(default_factory=dict)
    plan: str = ""
    layout: str = ""
    optimizer: OptimizerSpec | None = None
    about: About | None = None  # what is said of the contribution that it has
    life: int = 0  # of the server, when it was let in last; 0 before the first time
    new_life: int = 0  # of the server that is to let it in now
    version: int = 0  # of the parameters it has
    is_in: bool = False
    is_outdated: bool = False  # it is to come again when it has its next contribution
    unopened: set[int] = field(default_factory=set)  # shards that have not opened it yet
    done: collections.deque[tuple[int, float]] = field(default_factory=lambda: collections.deque(maxlen=_MOST_DONE))

    @property
    def waits(self) -> bool:
        """Whether the training thread waits for the parameters, so that they may be overwritten."""
        return not self.exchange.is_over


class Client:
    """One worker's links to all shards.

    Args:
        loop: where the links live.
        rank, world: worker `rank` of the `world` that the job begins with.
        dials: how to reach each shard; if empty, a shard that is lost is lost for good.
        patience: for how long to dial a server that is gone; 0 gives up at once.
        tell: called, on the event loop's thread, with what people should know.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        rank: int,
        world: int,
        dials: Sequence[Dial] = (),
        patience: timedelta = timedelta(seconds=60),
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._loop = loop
        self.rank, self.world = rank, world
        self._dials, self._patience, self._tell = dials, patience, tell
        self._entry = 0  # how often it has come to the job; what comes over older links is not for it
        self._returns = 0
        self._coming: asyncio.Task[None] | None = None
        self._is_up = not dials
        self._survives = self._is_closed = False
        self._answered: collections.deque[Answered] = collections.deque(maxlen=_MOST_ANSWERED)
        self._links: list[Link] = []
        self._places: dict[int, Place] = {}
        self._questions: dict[int, tuple[Ask, Exchange]] = {}
        self._looks: dict[int, Exchange] = {}
        self._hands = Hands(self._say_if_up)
        self._enrolled = 0  # the entry in which it has enrolled
        self._draws: dict[int, Exchange] = {}  # by loader
        self._transfers: dict[int, Exchange] = {}
        self._transferred = 0
        self._asked = self._looked = 0  # questions are numbered alike on all workers
        self._error: OffbeatError | None = None

    def accept(self, link: Link) -> ShardSide:
        """Take a link into use, in order of shards; returns what it hands frames to."""
        self._links.append(link)
        return ShardSide(self, len(self._links) - 1, self._entry)

    async def connect(self, patience: timedelta) -> None:
        """Dial all shards for the first time.

        Raises:
            NetworkError: if one cannot be reached in time.
            PeerError: if one refused.
        """
        for dial in self._dials:
            await dial(self.accept, patience)
        self._is_up = True

    # -- called by the training thread ---------------------------------------------------------------------------

    def open(
        self,
        model: int,
        *,
        plan: str,
        layout: str,
        blocks: Sequence[Block],
        shards: Sequence[int],
        values: Sequence[torch.Tensor],
        optimizer: OptimizerSpec,
    ) -> Exchange:
        """Take part in training a model; done when this worker has the parameters.

        Args:
            plan: as TOML.
            layout: digest of the model's parameters.
            shards: which shard holds each block.
            values: [D] of each block; the first worker's are taken, and all are overwritten.
        """
        place = Place(model, blocks, shards, values, plan=plan, layout=layout, optimizer=optimizer)
        self._loop.call(self._open, place)
        return place.exchange

    def exchange(
        self,
        model: int,
        parts: Sequence[torch.Tensor],
        *,
        about: About,
        unused: tuple[str, ...] = (),
    ) -> Exchange:
        """Bring a contribution and wait for the parameters of the next step.

        Args:
            parts: [D] gradient of each block, contiguous, on the CPU; it may not change until the exchange is done.
            about: what it is; its `unused` is filled in.
            unused: names of parameters without a gradient.
        """
        exchange = Exchange(sum(part.numel() * part.element_size() for part in parts))
        self._loop.call(self._announce, model, exchange, dict(enumerate(parts)), about, unused)
        return exchange

    def enrol(self, about: Enrol) -> Hand:
        """Take part in a loader's data; where the leases come."""
        hand = self._hands.hold(about)
        self._loop.call(self._enrol)
        return hand

    def draw(self, hand: Hand) -> Exchange:
        """Done when there is something in `hand.deals`, from which only the caller takes."""
        exchange = Exchange()
        self._loop.call(self._draw, hand, exchange)
        return exchange

    def give_back(self, hand: Hand, numbers: Sequence[int]) -> None:
        """These leases will not be used."""
        self._loop.call(self._hands.give_back, hand.about.loader, numbers)

    def crowded(self, hand: Hand, count: int, numbers: Sequence[int]) -> None:
        """There was no memory for a batch of `count` samples: give back these leases, and what was not drawn."""
        self._loop.call(self._hands.crowded, hand.about.loader, count, [*numbers, *hand.take_undrawn()])

    def books(self) -> Exchange:
        """Where the data is, for a checkpoint; in `Exchange.place`."""
        exchange = Exchange()
        self._loop.call(self._books, exchange, None)
        return exchange

    def restock(self, place: bytes) -> Exchange:
        """Go on where `books` was called, on all workers; done when all are told so."""
        exchange = Exchange()
        self._loop.call(self._books, exchange, place)
        return exchange

    def reseed(self, hand: Hand, seed: int) -> None:
        """The order of the data is that of another run, from whose checkpoint this one goes on."""
        self._loop.call(self._hands.reseed, hand.about.loader, seed)

    def look(self) -> Exchange:
        """How it goes, as the coordinator sees it; in `Exchange.scenes`."""
        exchange = Exchange()
        self._loop.call(self._look, exchange)
        return exchange

    def ask(self, question: str, numbers: Sequence[float] = (), *, refresh: bool = False) -> Exchange:
        """Ask all workers together; the sums of their numbers are in `Exchange.numbers`.

        Args:
            refresh: take the newest parameters of all models; else only if there were updates in the meantime.
        """
        exchange = Exchange()
        self._loop.call(self._ask, question, tuple(numbers), refresh, exchange)
        return exchange

    def fetch(self, model: int) -> Exchange:
        """The optimizer's state at all shards, as it is now; in `Exchange.portions`."""
        exchange = Exchange()
        self._loop.call(self._fetch, self.place(model), exchange)
        return exchange

    def put(self, model: int, portions: Sequence[Portion]) -> Exchange:
        """Have the shards take over the optimizer's state, and the values of all blocks as they are here."""
        exchange = Exchange()
        self._loop.call(self._put, self.place(model), tuple(portions), exchange)
        return exchange

    def close(self) -> None:
        """Say good-bye to all shards."""
        self._loop.call(self._end)
        for link in tuple(self._links):
            self._loop.run(link.close())
        self._links.clear()

    # -- on the event loop ---------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._is_closed = True
        if self._coming is not None:
            self._coming.cancel()

    def _open(self, place: Place) -> None:
        self._places[place.model] = place
        if self._failed(place.exchange):
            return
        index = place.names = {p.name: 0 for b in place.blocks for p in b.pieces}
        index.update((name, i) for i, name in enumerate(index))
        if self._is_up:
            self._enter(place)

    def _enter(self, place: Place) -> None:
        """Open the model; at the coordinator when all others have done so, because it then lets them send values."""
        place.is_in = place.is_outdated = False
        place.going = None
        place.missing = set(range(len(place.blocks)))
        place.unopened = set(range(1, len(self._links)))
        for shard in place.unopened or {0}:
            self._open_at(place, shard)

    def _open_at(self, place: Place, shard: int) -> None:
        index = place.names
        held = tuple(
            BlockOf(b.index, b.dtype, tuple(PieceOf(index[p.name], p.start, p.numel) for p in b.pieces))
            for b in place.blocks
            if place.shards[b.index] == shard
        )
        assert place.optimizer is not None
        details = Details(
            world=self.world,
            shards=len(self._links),
            holders=len(set(place.shards)),
            plan=place.plan,
            layout=place.layout,
            names=tuple(index),
            blocks=held,
            optimizer=place.optimizer,
            back=self._back(place),
        )
        self._links[shard].send(pack(Open(place.model, self._entry)), pack(details))

    def _back(self, place: Place) -> Back | None:
        if not place.life:
            return None
        return Back(
            life=place.life,
            clock=place.clock,
            version=place.version,
            holds=place.parts is not None,
            waits=place.waits or bool(self._questions),
            weight=None if place.about is None else place.about.weight,
            done=tuple(place.done),
            answered=tuple(self._answered),
        )

    def _announce(
        self,
        model: int,
        exchange: Exchange,
        parts: Mapping[int, torch.Tensor],
        about: About,
        unused: tuple[str, ...],
    ) -> None:
        place = self._places[model]
        place.exchange, place.parts = exchange, parts
        place.about = msgspec.structs.replace(about, unused=tuple(place.names[name] for name in unused))
        if self._failed(exchange):
            return
        if place.is_in:
            self._say(Announce(model, place.clock, place.about))
            if not place.is_gated:
                self._push(place, place.clock)
        elif place.is_outdated:
            self._come_again(place)

    def _come_again(self, place: Place) -> None:
        place.is_outdated = False
        self._open_at(place, 0)

    def _look(self, exchange: Exchange) -> None:
        number, self._looked = self._looked, self._looked + 1
        self._looks[number] = exchange
        if not self._failed(exchange) and self._is_up:
            self._say(Look(number))

    def _enrol(self) -> None:
        self._enrolled = self._entry
        self._hands.enrol()

    def _draw(self, hand: Hand, exchange: Exchange) -> None:
        if not self._failed(exchange):
            self._draws[hand.about.loader] = exchange
            self._hands.want(hand, exchange.finish)

    def _say_if_up(self, message: FromData) -> None:
        """If the coordinator is away, all is said again when it is back."""
        if self._is_up and self._enrolled == self._entry and self._links:
            self._say(message)

    def _ask(self, question: str, numbers: tuple[float, ...], refresh: bool, exchange: Exchange) -> None:
        number, self._asked = self._asked, self._asked + 1
        ask = Ask(number, question, refresh, numbers)
        self._questions[number] = (ask, exchange)
        if self._failed(exchange):
            return
        for place in self._places.values():
            if place.is_outdated:
                self._come_again(place)
        if self._is_up and all(place.is_in for place in self._places.values()):
            self._say(ask)

    def _transfer(self, exchange: Exchange) -> int:
        """Its number; all shards have to be done with it."""
        number, self._transferred = self._transferred, self._transferred + 1
        self._transfers[number] = exchange
        exchange.left = len(self._links)
        if not self._links:
            exchange.finish(
                NetworkError("Cannot reach the parameter server now: it is being started again. Try again.")
            )
        self._failed(exchange)
        return number

    def _books(self, exchange: Exchange, place: bytes | None) -> None:
        number = self._transfer(exchange)
        exchange.left = 1
        for link in self._links[:1]:
            if place is None:
                link.send(pack(Books(number)))
            else:
                link.send(pack(Restock(number)), place)

    def stock(self, message: Stock, place: bytes) -> None:
        """Where the data is, or why it cannot be there."""
        transfer = self._transfers.pop(message.number, None)
        if transfer is not None:
            transfer.place = place
            transfer.finish(ModelError(message.refused) if message.refused else None)

    def _fetch(self, place: Place, exchange: Exchange) -> None:
        number = self._transfer(exchange)
        for link in self._links:
            link.send(pack(Fetch(place.model, number)))

    def _put(self, place: Place, portions: Sequence[Portion], exchange: Exchange) -> None:
        number = self._transfer(exchange)
        index = {name: i for i, name in enumerate(place.names)}
        for block in place.blocks if self._links else ():
            link = self._links[place.shards[block.index]]
            link.send(pack(Put(place.model, block.index)), bytes_of(place.values[block.index]))
        for it in portions if self._links else ():
            tensor = it.tensor.contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            put = Put(place.model, it.block, index[it.name], it.key, dtype, tensor.ndim == 0)
            self._links[place.shards[it.block]].send(pack(put), bytes_of(tensor.reshape(-1)))
        for link in self._links:
            link.send(pack(PutAll(place.model, number)))

    def _say(self, message: Announce | Ask | Look | Pulled | FromData) -> None:
        """To the coordinator; if that is just being lost, it is said again when it is back."""
        with contextlib.suppress(NetworkError):
            self._links[0].send(pack(message))

    def lose(self, error: OffbeatError, entry: int) -> None:
        """A shard is gone, or has gone on without this worker: come back."""
        if entry != self._entry or self._is_closed or self._error is not None:
            return
        for link in self._links:
            link.abort()
        self._links.clear()
        for transfer in self._transfers.values():
            transfer.finish(error)
        self._transfers.clear()
        self._entry += 1
        self._returns += 1
        self._is_up = False
        for place in self._places.values():
            place.is_in = place.is_outdated = False
        if not self._dials or self._patience <= timedelta(0) or self._returns > _RETURNS:
            self.fail(error)
            return
        _log.warning("Rank %d has lost the parameter server (%s) It tries to come back.", self.rank, error)
        if self._coming is None or self._coming.done():
            self._coming = asyncio.get_running_loop().create_task(self._come_back(error))

    async def _come_back(self, error: OffbeatError) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._patience.total_seconds()
        refusals = 0
        while True:
            entry = self._entry
            left_s = deadline_s - loop.time()
            try:
                for dial in self._dials:
                    await dial(self.accept, timedelta(seconds=max(0.01, min(left_s, _ALIVE_S))))
                    if entry != self._entry:
                        break
                else:
                    break
            except OffbeatError as reason:
                self._drop_links()
                refusals += isinstance(reason, PeerError)
                if not self._is_worth_while(reason) or left_s <= 0 or refusals == _RETURNS:
                    self.fail(
                        NetworkError(
                            f"Cannot come back to the job ({error}): {str(reason).removesuffix('.')}. Either it has "
                            "ended, or its parameter server was killed and nobody has started it again."
                        )
                    )
                    return
        self._is_up = True
        for place in self._places.values():
            self._enter(place)
        for number in self._looks:
            self._say(Look(number))

    def _is_worth_while(self, reason: OffbeatError) -> bool:
        """Whether to dial again: not if nobody listens any more, and nobody will."""
        return self._survives or not isinstance(reason.__cause__, ConnectionRefusedError)

    def _drop_links(self) -> None:
        self._entry += 1
        for link in self._links:
            link.abort()
        self._links.clear()

    def _failed(self, exchange: Exchange) -> bool:
        if self._error is not None:
            exchange.finish(self._error)
        return self._error is not None

    def fail(self, error: OffbeatError) -> None:
        """Nothing can be exchanged any more."""
        self._error = self._error or error
        exchanges = [place.exchange for place in self._places.values()]
        questions = [asked for _, asked in self._questions.values()]
        for exchange in [*exchanges, *questions, *self._looks.values(), *self._draws.values()]:
            if not exchange.done():
                exchange.finish(self._error)

    def place(self, model: int) -> Place:
        """The model's.

        Raises:
            PeerError: if this worker did not open it.
        """
        if model not in self._places:
            raise PeerError(f"The server speaks of model {model}, which was not opened.")
        return self._places[model]

    def hear(self, shard: int, message: ToWorker) -> None:
        """Something a shard said."""
        match message:
            case Opened(model=model):
                self._opened(self.place(model), shard, message)
            case Granted(model=model, clock=clock):
                self._push(self.place(model), clock)
            case Go(model=model):
                self._go(self.place(model), message)
            case Safe(model=model, clock=clock):
                done = self.place(model).done
                while done and done[0][0] < clock:
                    done.popleft()
            case Told(text=text):
                self._tell(text)
            case Dealt():
                self._hands.deal(message)
            case Values(model=model, block=block):
                place = self.place(model)
                place.missing.discard(block)
                self._finish(place)
            case Answer(number=number, numbers=numbers, workers=workers, disagreement=disagreement):
                _, asked = self._questions.pop(number, (None, None))
                if asked is not None:
                    asked.numbers, asked.workers = numbers, workers
                    if not disagreement:
                        self._answered.append(Answered(number, numbers, workers))
                    asked.finish(_apart(disagreement) if disagreement else None)
            case Done(number=number):
                transfer = self._transfers.get(number)
                if transfer is not None:
                    transfer.left -= 1
                    if not transfer.left:
                        del self._transfers[number]
                        transfer.finish()
            case Evicted(reason=reason):
                self.lose(NetworkError(f"The server went on without this worker: {reason}."), self._entry)
            case Refused(reason=reason, disagrees=disagrees):
                self.fail(DisagreementError(reason) if disagrees else PeerError(reason))

    def _opened(self, place: Place, shard: int, message: Opened) -> None:
        self._survives = message.survives
        if message.wants_values:
            self._fill(place, shard)
        if message.later:
            place.is_outdated = True
            if place.parts is not None or self._questions:  # it has its contribution by now
                self._come_again(place)
            return
        if shard in place.unopened:
            place.unopened.discard(shard)
            if not place.unopened:
                self._open_at(place, 0)
        place.new_life = message.life

    def _go(self, place: Place, go: Go) -> None:
        was_in, place.is_in, place.is_gated = place.is_in, True, go.waits
        if not was_in:
            if place.life != place.new_life:
                place.done.clear()  # what was lost is counted
            place.life = place.new_life
            if self._enrolled != self._entry:
                self._enrol()
        if not was_in and place.parts is not None and not go.values:
            assert place.about is not None
            place.clock = go.step
            self._say(Announce(place.model, place.clock, place.about))
            return
        if go.values:
            exchange = place.exchange
            exchange.is_used = was_in or place.parts is None
            exchange.step, exchange.version, exchange.staleness = go.step, go.version, go.staleness
        place.going = go
        self._finish(place)
        self._ask_again(was_in)

    def _ask_again(self, was_in: bool) -> None:
        """What was asked and not answered, once all models are open again."""
        if not was_in and all(place.is_in for place in self._places.values()):
            for ask, _ in self._questions.values():
                self._say(ask)

    def see(self, number: int, scenes: tuple[Scene, ...]) -> None:
        """The answer to a look."""
        look = self._looks.pop(number, None)
        if look is not None:
            look.scenes = scenes
            look.finish()

    def portion_place(self, message: Piece, size_bytes: int) -> memoryview:
        """Where a part of the optimizer's state goes.

        Raises:
            PeerError: if it was not asked for, or cannot be.
        """
        transfer, place = self._transfers.get(message.number), self.place(message.model)
        dtype, names = STATE_DTYPES.get(message.dtype), tuple(place.names)
        if transfer is None or dtype is None or message.name >= len(names) or message.block >= len(place.blocks):
            raise PeerError("The server sends a state that was not asked for.")
        pieces = {piece.name: piece.numel for piece in place.blocks[message.block].pieces}
        numel = 1 if message.single else pieces.get(names[message.name], 0)
        if size_bytes != numel * dtype.itemsize:
            raise PeerError(f"The server sends {size_bytes} bytes for a state of {numel} elements.")
        flat = torch.empty(numel, dtype=dtype)
        name = names[message.name]
        transfer.portions.append(Portion(message.block, name, message.key, flat[0] if message.single else flat))
        return bytes_of(flat)

    def _fill(self, place: Place, shard: int) -> None:
        for block, holder in enumerate(place.shards):
            if holder == shard:
                self._links[shard].send(pack(Fill(place.model, block)), bytes_of(place.values[block]))

    def _push(self, place: Place, clock: int) -> None:
        parts = place.parts
        if parts is None or clock != place.clock:
            raise PeerError(f"The server granted contribution {clock}, this worker has {place.clock}.")
        place.exchange.granted = True
        place.missing = set(range(len(place.blocks)))
        for block, part in parts.items():
            dtype = str(part.dtype).removeprefix("torch.")
            link = self._links[place.shards[block]]
            link.send(pack(Part(place.model, clock, block, dtype)), bytes_of(part))

    def _finish(self, place: Place) -> None:
        go = place.going
        if go is None or (go.values and place.missing):
            return
        if go.counted and place.about is not None:
            place.done.append((place.clock, place.about.weight))
        place.going, place.clock = None, go.step
        if go.values:
            if place.about is not None:
                self._hands.brought(place.about.used)
            place.parts, place.version = None, go.version
            place.missing = set(range(len(place.blocks)))
            self._returns = 0
            self._say(Pulled(place.model, place.clock))
            place.exchange.finish()


class ShardSide:
    """What a link to a shard hands frames to.

    Args:
        client: the worker's.
        shard: which one it is.
        entry: of the worker, to which the link belongs.
    """

    def __init__(self, client: Client, shard: int, entry: int) -> None:
        self._client, self._shard, self._entry = client, shard, entry

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Where a block's values go: straight into the parameters.

        Raises:
            PeerError: if they are not expected, or of another size.
        """
        message = to_worker(metadata)
        if isinstance(message, Sight | Stock):
            return memoryview(bytearray(size_bytes))  # at most what `Limits` allow
        if isinstance(message, Piece):
            return self._client.portion_place(message, size_bytes)
        if not isinstance(message, Values):
            raise PeerError(f"{type(message).__name__} has no body.")
        place = self._client.place(message.model)
        if message.block not in place.missing:
            raise PeerError(f"The server sends block {message.block} of model {message.model}, which was not expected.")
        view = bytes_of(place.values[message.block])
        if view.nbytes != size_bytes:
            raise PeerError(f"The server sends {size_bytes} bytes for a block of {view.nbytes}.")
        return view

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A message is here, whole."""
        message = to_worker(metadata)
        if isinstance(message, Sight):
            self._client.see(message.number, scenes_of(body))
        elif isinstance(message, Stock):
            self._client.stock(message, bytes(body))
        elif isinstance(message, Piece):
            pass  # it is in its place
        else:
            self._client.hear(self._shard, message)

    def lost(self, error: OffbeatError | None) -> None:
        """The shard is gone for good."""
        self._client.lose(error or NetworkError("The parameter server has ended."), self._entry)


def _apart(questions: str) -> DisagreementError:
    return DisagreementError(
        f"The workers disagree about where they are: they ask for {questions} at the same time. Let every worker call "
        "run.mean equally often and in the same order."
    )
