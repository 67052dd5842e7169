"""All-reduce by stores of objects that are embedded in the workers (`offbeat.objects`): they begin at different times.

Exchange n is a few objects with the id n: each worker's contribution is version 1 + rank, and the sum, or what is
broadcast, is version 0. As soon as two contributions are there their sum begins, so a late worker finds those of the
others added already. Once every worker has the result all stores let go of it. Every worker keeps the directory of a
part of the ids, so it has a link with every other one, and notices at once that one is lost.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.diagnosis.startup_barrier import startup_limit
from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PlanError
from offbeat.fabric.fabric import BindContext, Offers
from offbeat.fabric.in_memory import InMemory
from offbeat.fabric.introduction import introduce, texts_of_all
from offbeat.fabric.process_group import ProcessGroup, joined, sent_bytes, total_of
from offbeat.fabric.spare_memory import SpareMemory
from offbeat.fabric.staging import CudaCopies, StagedFabric
from offbeat.objects.adding import TorchArithmetic
from offbeat.objects.client import job_name
from offbeat.objects.directory_server import DirectoryServer
from offbeat.objects.node_store import NodeStore
from offbeat.objects.serve import LINK
from offbeat.objects.stripes import MAX_STRIPES
from offbeat.payload import Gather, GatheredPart, Sum, Total
from offbeat.pending import Completion
from offbeat.protocol.objects import ObjectMeta, ObjectName, ReduceObjects
from offbeat.tensors import bytes_of, dtype_name
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.session import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.fabric.fabric import Fabric
    from offbeat.objects.stored_object import Outcome, StoredObject
    from offbeat.payload import Payload, Reply
    from offbeat.wire.credentials import Credentials

_OFFERS = Offers()
_LIMITS = Limits(timeout=timedelta(seconds=5), max_body_bytes=1 << 20)  # training holds the GIL for seconds
_MOST_BYTES = 1 << 62  # what is exchanged is the plan's affair
_PARTING_S, _LOOK_S = 5.0, 0.005
_ALIGNED, _MOST_DIMS = 16, 16


@dataclass(frozen=True)
class ObjectStore:
    """All-reduce by stores in the workers, for workers that do not reach an exchange at the same time.

    A contribution is read where it lies, and stays as it is until the sum is there; the sum arrives in memory beside
    it, and is copied into its place by whoever waits for it.

    Args:
        stripes: the most stripes of a sum, each of which another worker makes; 1 for one worker alone. None for as many
            as suit its size.
        deterministic: whether each sum is added in a fixed order, so that it has the same bits in every run; else in
            the order in which the workers arrive.

    Raises:
        PlanError: if a value is not possible.

    >>> ObjectStore(deterministic=False)
    ObjectStore(stripes=None, deterministic=False)
    """

    stripes: int | None = None
    deterministic: bool = True

    def __post_init__(self) -> None:
        known = self.stripes is None or (isinstance(self.stripes, int) and not isinstance(self.stripes, bool))
        if not known or not 1 <= (self.stripes or 1) <= MAX_STRIPES or self.stripes == 0:
            raise PlanError(
                f"Cannot cut sums into stripes={self.stripes!r}: use 1 to {MAX_STRIPES}, or None for what suits their "
                "size - at `plan.fabric.stripes`."
            )
        if not isinstance(self.deterministic, bool):
            raise PlanError(
                f"Cannot use deterministic={self.deterministic!r}: it is True or False - at "
                "`plan.fabric.deterministic`."
            )

    @property
    def offers(self) -> Offers:
        return _OFFERS

    @property
    def connecting(self) -> str:
        """The purpose of the wait while a worker is bound."""
        return "the links with the others' stores"

    @property
    def companion(self) -> ProcessGroup:
        """The fabric of questions to the others."""
        return ProcessGroup()

    def bind(self, context: BindContext) -> Fabric:
        """Make one worker's end. Collective: every rank calls it.

        Raises:
            NetworkError, PeerError: if there is no link with one of the others.
        """
        if context.world == 1:
            return InMemory().bind(context)
        if context.backend != "gloo":
            return StagedFabric(self.bind(replace(context, backend="gloo")), CudaCopies())
        companion, patience = self.companion.bind(context), startup_limit(context.timeout)
        meet = functools.partial(texts_of_all, companion, patience=patience)
        try:
            return BoundObjectStore(self, replace(context, timeout=patience), companion, meet)
        except BaseException:
            companion.abandon()
            raise


class BoundObjectStore:
    """One worker's end. A `Fabric`."""

    def __init__(
        self, spec: ObjectStore, context: BindContext, companion: Fabric, meet: Callable[[str], list[str]]
    ) -> None:
        self.spec, self.rank, self.world, self.offers = spec, context.rank, context.world, _OFFERS
        self._companion, self._directory = companion, DirectoryServer(LINK, waits_for_stopped=True)
        self._store: NodeStore | None = None
        self.loop, self.spare = LoopThread("offbeat-objects"), SpareMemory()
        self._issued, self._order = 0, threading.Lock()
        self._under_way: set[StoreExchange] = set()
        self._error: NetworkError | None = None
        self._is_over = False
        bound_at = ""

        def listen(bind: str, credentials: Credentials) -> str:
            nonlocal bound_at
            bound_at = bind
            self._store = NodeStore(
                job=job_name("workers"),
                credentials=credentials,
                most_bytes=_MOST_BYTES,
                arithmetic=TorchArithmetic,
                limits=_LIMITS,
                waits_for_stopped=True,
            )
            self._store.on_directory_lost = self._lost
            return self.loop.run(
                self._directory.open(bind, 0, job=job_name("workers"), credentials=credentials, limits=_LIMITS)
            )

        try:
            self._directories = [one.address for one in introduce(meet, context.settings, listen)]
            self._addresses = self._connected(bound_at, context.timeout, meet)
        except BaseException:
            self._end()
            raise

    @property
    def store(self) -> NodeStore:
        """The store of this worker; to be used on its loop alone."""
        assert self._store is not None, "it was made when the workers met"
        return self._store

    def start(self, payload: Payload) -> StoreExchange:
        if isinstance(payload, Sum):
            return self._begin(functools.partial(StoredSum, payload=payload))
        return self._begin(functools.partial(StoredGather, payload=payload))

    def broadcast(self, tensor: torch.Tensor, source: int) -> StoreExchange:
        return self._begin(functools.partial(StoredBroadcast, tensor=tensor, source=source))

    def close(self) -> None:
        if self._is_over:
            return
        self.loop.run(self._part())
        self._end()
        self._companion.close()

    def abandon(self) -> None:
        if not self._is_over:
            self._end()
            self._companion.abandon()

    def rank_of(self, address: str) -> int:
        """The rank of the worker with the store at an address."""
        return self._addresses.index(address)

    def _connected(self, bind: str, patience: timedelta, meet: Callable[[str], list[str]]) -> list[str]:
        """Reach all directories, and return the addresses of all stores; who cannot tells the others before it ends."""
        refused: OffbeatError | None = None
        try:
            mine = f"at {self.loop.run(self.store.open(bind, 0, self._directories, patience))}"
        except OffbeatError as error:
            refused, mine = error, f"error {error}"
        told = [text.split(" ", 1) for text in meet(mine)]
        if refused is not None:
            raise refused
        for rank, (kind, text) in enumerate(told):
            if kind == "error":
                raise NetworkError(f"Cannot begin without rank {rank}, which has no links with the others: {text}")
        return [text for _, text in told]

    def _begin(self, make: Callable[..., StoreExchange]) -> StoreExchange:
        with self._order:
            exchange = make(self, self._issued)
            self._issued += 1
            self.loop.call(self._run, exchange)
        return exchange

    def _run(self, exchange: StoreExchange) -> None:
        if self._error is not None:
            exchange.end(self._error)
            return
        self._under_way.add(exchange)
        exchange.add_done_callback(lambda: self._under_way.discard(exchange))
        try:
            exchange.begin()
        except OffbeatError as error:
            exchange.end(error)

    def _lost(self, address: str, error: OffbeatError | None) -> None:
        """The link with the directory of another worker has ended: no exchange comes to an end without that worker."""
        why = "it has left" if error is None else str(error)
        self._error = NetworkError(f"Cannot sum without rank {self._directories.index(address)}: {why}")
        for exchange in list(self._under_way):
            exchange.end(self._error)

    async def _part(self) -> None:
        """Leave once nobody reads from this store any more, and nobody needs its directory."""
        until_s = time.monotonic() + _PARTING_S
        while self.store.objects and self._error is None and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
        self.store.on_directory_lost = lambda address, error: None
        await self.store.close()
        await self._directory.close()

    def _end(self) -> None:
        self._is_over = True

        async def abort() -> None:
            if self._store is not None:
                self._store.abort()
            self._directory.abort()

        self.loop.run(abort())
        self.loop.close()


class StoreExchange(Completion):
    """An exchange through stores. A `Pending`; `begin` and what follows run on the loop of the store.

    Args:
        bound: this worker's end.
        number: of the exchange.
        sent_bytes: by this worker, as the mean over the workers.
    """

    def __init__(self, bound: BoundObjectStore, number: int, sent_bytes: int) -> None:
        super().__init__()
        self.bound, self.number, self.sent_bytes = bound, number, sent_bytes
        self.name = ObjectName(str(number))

    @property
    def owed(self) -> str:
        """The transfer that it waits for; see `TellsOwed`."""
        stored = self.bound.store.objects.get(self.name)
        if self.done() or stored is None or stored.is_own:
            return ""
        feeder = next((stored.feeders[stripe] for stripe in list(stored.readings)), "")
        where = f" from rank {self.bound.rank_of(feeder)}" if feeder else ""
        return f"exchange {self.number}: {stored.have_bytes:,} of {stored.meta.size_bytes:,} bytes are here{where}"

    def wait(self, timeout: timedelta) -> bool:
        is_over = super().wait(timeout)
        if is_over and self.error is not None:
            raise self.error
        return is_over

    def begin(self) -> None:
        """Begin it."""
        raise AssertionError("each kind of exchange has its own")

    def result(self) -> Reply:
        raise AssertionError("each kind of exchange has its own")

    def contribution_of(self, rank: int) -> ObjectName:
        """The name of a worker's contribution."""
        return ObjectName(str(self.number), 1 + rank)

    def done_with(self, name: ObjectName) -> None:
        """Have an object let go of once all workers have said this."""
        self.bound.store.delete(name, after=self.bound.world)


class StoredSum(StoreExchange):
    """A sum."""

    def __init__(self, bound: BoundObjectStore, number: int, *, payload: Sum) -> None:
        self._payload, self._whole = payload, joined(payload)
        super().__init__(bound, number, sent_bytes(self._whole, bound.world))
        self._total: StoredObject | None = None

    def begin(self) -> None:
        bound, spec, data = self.bound, self.bound.spec, bytes_of(self._whole)
        memory = bound.spare.take(len(data), torch.uint8)
        bound.store.want(self.name, self._arrived, (bytes_of(memory), lambda: self._give(memory)))
        bound.store.reduce(
            ReduceObjects(
                name=self.name,
                sources=tuple(self.contribution_of(rank) for rank in range(bound.world)),
                op="sum",
                count=bound.world,
                least=bound.world,
                in_order=spec.deterministic,
                striped=spec.stripes != 1,
                most_stripes=spec.stripes or MAX_STRIPES,
            )
        )
        meta = ObjectMeta(dtype_name(self._whole.dtype), tuple(self._whole.shape), len(data))
        bound.store.adopt(self.contribution_of(bound.rank), meta, data, lambda: None)

    def result(self) -> Reply:
        total, self._total = self._total, None
        if total is not None:  # the first time
            if total.meta.size_bytes:
                self._whole.view(torch.uint8).copy_(torch.frombuffer(total.memory, dtype=torch.uint8))
            self.bound.loop.call(self._let_go)
        return total_of(self._payload, self._whole)

    def _arrived(self, outcome: Outcome) -> None:
        if isinstance(outcome, OffbeatError):
            self.end(outcome)
        else:
            self._total = outcome
            self.end()

    def _let_go(self) -> None:
        self.bound.store.delete(self.contribution_of(self.bound.rank))
        self.done_with(self.name)

    def _give(self, memory: torch.Tensor) -> None:
        self.bound.spare.give(memory, self.number, max(1, len(self.bound.store.objects)))


class StoredBroadcast(StoreExchange):
    """A broadcast, to and from where the tensors lie: over once all have it, since some read from others."""

    def __init__(self, bound: BoundObjectStore, number: int, *, tensor: torch.Tensor, source: int) -> None:
        self._tensor, self._is_source = tensor, bound.rank == source
        super().__init__(bound, number, tensor.numel() * tensor.element_size() if self._is_source else 0)

    def begin(self) -> None:
        data = bytes_of(self._tensor.as_strided((self._tensor.numel(),), (1,)))
        if self._is_source:
            self.bound.store.adopt(self.name, ObjectMeta("uint8", (len(data),), len(data)), data, self.end)
            self.done_with(self.name)
        else:
            self.bound.store.want(self.name, self._arrived, (data, self.end))

    def result(self) -> Reply:
        return Total(self._tensor)

    def _arrived(self, outcome: Outcome) -> None:
        if isinstance(outcome, OffbeatError):
            self.end(outcome)
        else:
            self.done_with(self.name)


class StoredGather(StoreExchange):
    """A gather: each worker gets the contribution of each."""

    def __init__(self, bound: BoundObjectStore, number: int, *, payload: Gather) -> None:
        self._tensors = payload.tensors
        super().__init__(bound, number, (bound.world - 1) * payload.size_bytes)
        self._found: dict[int, memoryview] = {}

    def begin(self) -> None:
        store, bound = self.bound.store, self.bound
        data = packed(self._tensors)
        store.adopt(self.contribution_of(bound.rank), ObjectMeta("uint8", (len(data),), len(data)), data, lambda: None)
        for rank in range(bound.world):
            store.want(self.contribution_of(rank), functools.partial(self._arrived, rank))

    def result(self) -> Reply:
        return [GatheredPart(rank, self._unpacked(rank)) for rank in range(self.bound.world)]

    def _arrived(self, rank: int, outcome: Outcome) -> None:
        if isinstance(outcome, OffbeatError):
            self.end(outcome)
            return
        self._found[rank] = outcome.memory
        self.done_with(outcome.name)
        if len(self._found) == self.bound.world:
            self.end()

    def _unpacked(self, rank: int) -> tuple[torch.Tensor, ...]:
        memory = torch.frombuffer(self._found[rank], dtype=torch.uint8)
        header = _header_bytes(len(self._tensors))
        rows = memory[:header].view(torch.int64)[: len(self._tensors) * (1 + _MOST_DIMS)]
        shapes = rows.reshape(-1, 1 + _MOST_DIMS).tolist()
        tensors, at = [], header
        for (dims, *shape), like in zip(shapes, self._tensors, strict=True):
            size = torch.Size(shape[:dims]).numel() * like.element_size()
            if at + size > memory.numel():
                raise DisagreementError(f"Cannot gather: rank {rank} has sent other tensors than this worker.")
            tensors.append(memory[at : at + size].view(like.dtype).reshape(shape[:dims]))
            at += _aligned(size)
        return tuple(tensors)


def packed(tensors: Sequence[torch.Tensor]) -> memoryview:
    """Tensors in one piece of memory, with their shapes before them."""
    parts = [bytes_of(tensor) for tensor in tensors]
    header = _header_bytes(len(tensors))
    data = torch.zeros(header + sum(_aligned(len(part)) for part in parts), dtype=torch.uint8)
    rows = data[:header].view(torch.int64)
    memory, at = bytes_of(data), header
    for number, (tensor, part) in enumerate(zip(tensors, parts, strict=True)):
        row = rows[number * (1 + _MOST_DIMS) :]
        row[0] = tensor.dim()
        row[1 : 1 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.int64)
        memory[at : at + len(part)] = part
        at += _aligned(len(part))
    return memory


def _header_bytes(count: int) -> int:
    return _aligned(8 * (1 + _MOST_DIMS) * count) + _ALIGNED  # never empty


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
