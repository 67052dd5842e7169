"""A worker's end of a parameter server.

Call order, (each worker): `open` once per model; then, in each step, `exchange`, and wait for what it returns; `close`.
All links are served by one event loop on a thread of their own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PeerError
from offbeat.fabric.server.messages import (
    About,
    Announce,
    Answer,
    Ask,
    BlockOf,
    Details,
    Evicted,
    Fill,
    Go,
    Granted,
    Look,
    Open,
    Opened,
    Part,
    PieceOf,
    Pulled,
    Refused,
    Sight,
    Values,
    pack,
    scenes_of,
    to_worker,
)
from offbeat.fabric.server.shard import bytes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    import torch

    from offbeat.fabric.server.blocks import Block
    from offbeat.fabric.server.messages import Scene, ToWorker
    from offbeat.fabric.server.optimizers import Hyper, OptimizerSpec
    from offbeat.payload import Reply
    from offbeat.wire.link import Link
    from offbeat.wire.loop import Loop


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
    going: bool = False
    names: dict[str, int] = field(default_factory=dict)


class Client:
    """One worker's links to all shards.

    Args:
        loop: where the links live.
        rank, world: worker `rank` of the `world` that the job begins with.
    """

    def __init__(self, loop: Loop, *, rank: int, world: int) -> None:
        self._loop = loop
        self.rank, self.world = rank, world
        self._links: list[Link] = []
        self._places: dict[int, Place] = {}
        self._questions: dict[int, Exchange] = {}
        self._looks: dict[int, Exchange] = {}
        self._asked = self._looked = 0  # questions are numbered alike on all workers
        self._error: OffbeatError | None = None

    def accept(self, link: Link) -> ShardSide:
        """Take a link into use, in order of shards; returns what it hands frames to."""
        self._links.append(link)
        return ShardSide(self, len(self._links) - 1)

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
        place = Place(model, blocks, shards, values)
        self._loop.call(self._open, place, plan, layout, optimizer)
        return place.exchange

    def exchange(
        self,
        model: int,
        parts: Sequence[torch.Tensor],
        *,
        weight: float,
        hyper: tuple[Hyper, ...],
        unused: tuple[str, ...] = (),
    ) -> Exchange:
        """Bring a contribution and wait for the parameters of the next step.

        Args:
            parts: [D] gradient of each block, contiguous, on the CPU; it may not change until the exchange is done.
            weight: samples it was computed from.
            hyper: the optimizer's hyper-parameters, by group.
            unused: names of parameters without a gradient.
        """
        exchange = Exchange(sum(part.numel() * part.element_size() for part in parts))
        self._loop.call(self._announce, model, exchange, dict(enumerate(parts)), weight, hyper, unused)
        return exchange

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

    def close(self) -> None:
        """Say good-bye to all shards."""
        for link in self._links:
            self._loop.run(link.close())
        self._links.clear()

    # -- on the event loop ---------------------------------------------------------------------------------------

    def _open(self, place: Place, plan: str, layout: str, optimizer: OptimizerSpec) -> None:
        self._places[place.model] = place
        if self._failed(place.exchange):
            return
        place.missing = set(range(len(place.blocks)))
        index = place.names = {p.name: 0 for b in place.blocks for p in b.pieces}
        index.update((name, i) for i, name in enumerate(index))
        for shard, link in enumerate(self._links):
            held = tuple(
                BlockOf(b.index, b.dtype, tuple(PieceOf(index[p.name], p.start, p.numel) for p in b.pieces))
                for b in place.blocks
                if place.shards[b.index] == shard
            )
            details = Details(self.world, len(self._links), plan, layout, tuple(index), held, optimizer)
            link.send(pack(Open(place.model)), pack(details))

    def _announce(
        self,
        model: int,
        exchange: Exchange,
        parts: Mapping[int, torch.Tensor],
        weight: float,
        hyper: tuple[Hyper, ...],
        unused: tuple[str, ...],
    ) -> None:
        place = self._places[model]
        place.exchange, place.parts = exchange, parts
        if not self._failed(exchange):
            indices = tuple(place.names[name] for name in unused)
            self._links[0].send(pack(Announce(model, place.clock, About(weight, hyper, indices))))

    def _look(self, exchange: Exchange) -> None:
        number, self._looked = self._looked, self._looked + 1
        self._looks[number] = exchange
        if not self._failed(exchange):
            self._links[0].send(pack(Look(number)))

    def _ask(self, question: str, numbers: tuple[float, ...], refresh: bool, exchange: Exchange) -> None:
        number, self._asked = self._asked, self._asked + 1
        self._questions[number] = exchange
        if not self._failed(exchange):
            self._links[0].send(pack(Ask(number, question, refresh, numbers)))

    def _failed(self, exchange: Exchange) -> bool:
        if self._error is not None:
            exchange.finish(self._error)
        return self._error is not None

    def fail(self, error: OffbeatError) -> None:
        """Nothing can be exchanged any more."""
        self._error = self._error or error
        exchanges = [place.exchange for place in self._places.values()]
        for exchange in [*exchanges, *self._questions.values(), *self._looks.values()]:
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
            case Opened(model=model, wants_values=wants):
                if wants:
                    self._fill(self.place(model), shard)
            case Granted(model=model, clock=clock):
                self._push(self.place(model), clock)
            case Go(model=model, step=step, version=version, staleness=staleness, values=values):
                place = self.place(model)
                place.going, place.clock = values, step
                exchange = place.exchange
                exchange.step, exchange.version, exchange.staleness = step, version, staleness
                self._finish(place)
            case Values(model=model, block=block):
                place = self.place(model)
                place.missing.discard(block)
                self._finish(place)
            case Answer(number=number, numbers=numbers, workers=workers, disagreement=disagreement):
                asked = self._questions.pop(number, None)
                if asked is not None:
                    asked.numbers, asked.workers = numbers, workers
                    asked.finish(_apart(disagreement) if disagreement else None)
            case Evicted(reason=reason):
                self.fail(NetworkError(f"The server went on without this worker: {reason}."))
            case Refused(reason=reason, disagrees=disagrees):
                self.fail(DisagreementError(reason) if disagrees else PeerError(reason))

    def see(self, number: int, scenes: tuple[Scene, ...]) -> None:
        """The answer to a look."""
        look = self._looks.pop(number, None)
        if look is not None:
            look.scenes = scenes
            look.finish()

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
        if place.going and not place.missing:
            place.going, place.parts = False, None
            place.missing = set(range(len(place.blocks)))
            self._links[0].send(pack(Pulled(place.model, place.clock)))
            place.exchange.finish()


class ShardSide:
    """What a link to a shard hands frames to.

    Args:
        client: the worker's.
        shard: which one it is.
    """

    def __init__(self, client: Client, shard: int) -> None:
        self._client, self._shard = client, shard

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Where a block's values go: straight into the parameters.

        Raises:
            PeerError: if they are not expected, or of another size.
        """
        message = to_worker(metadata)
        if isinstance(message, Sight):
            return memoryview(bytearray(size_bytes))  # at most what `Limits` allow
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
        else:
            self._client.hear(self._shard, message)

    def lost(self, error: OffbeatError | None) -> None:
        """The shard is gone for good."""
        self._client.fail(error or NetworkError("The parameter server has ended."))


def _apart(questions: str) -> DisagreementError:
    return DisagreementError(
        f"The workers disagree about where they are: they ask for {questions} at the same time. Let every worker call "
        "run.mean equally often and in the same order."
    )
