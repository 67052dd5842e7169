"""The operations of an elastic fabric: an all-reduce, also in two rounds, an all-gather, a broadcast; each is tried
until one try comes to its end.

A try works in memory of its own, so that what was brought stays as it is for the next one, and what it came to stays
for those that lack it. As bytes, for them: a length, a header as JSON, the elements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from offbeat.errors import PeerError
from offbeat.fabric.process_group import GatherWorks, Works, joined
from offbeat.fabric.reduce_scatter import PartSums, sent_bytes_of_round
from offbeat.payload import Gather, GatheredPart, Reply, Sum, Total
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from offbeat.fabric.generation import GroupCollectives
    from offbeat.fabric.spare_memory import SpareMemory
    from offbeat.pending import Pending

_HEAD = 8
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class GatherHeader(msgspec.Struct, frozen=True, array_like=True):
    """The workers that took part, and, of an all-gather, the shapes of their payloads."""

    workers: tuple[int, ...]
    shapes: tuple[tuple[tuple[_Size, ...], ...], ...] = ()


_headers = msgspec.json.Decoder(GatherHeader)


class RetryableOp(ABC):
    """One exchange's payload. Call order: `issue`, as often as needed, or `take`; then `reply`, and `to_bytes`.

    Args:
        world: how many workers there were at the beginning.
    """

    implies_begun = True  # it comes to its end only once all have begun it

    def __init__(self, world: int) -> None:
        self._world = world
        self._workers: tuple[int, ...] = ()

    @abstractmethod
    def sent_bytes(self, rank: int) -> int:
        """Count the bytes that this worker puts on the network for one try, by the algorithm."""

    def issue(self, collectives: GroupCollectives, rank: int, members: tuple[int, ...]) -> Pending:
        """Begin a try among these.

        Raises:
            RuntimeError: if a connection is known to be broken.
        """
        self._workers = members
        return self._issue(collectives, members.index(rank))

    @abstractmethod
    def reply(self) -> Reply:
        """The reply, in the memory that was brought."""

    def to_bytes(self) -> bytes:
        """Encode the reply."""
        header, elements = self._pack()
        text = msgspec.json.encode(header)
        return len(text).to_bytes(_HEAD, "big") + text + elements

    def take(self, data: bytes) -> None:
        """Decode the reply that another worker has.

        Raises:
            PeerError: if that is not of such an exchange.
        """
        size = int.from_bytes(data[:_HEAD], "big")
        try:
            header = _headers.decode(data[_HEAD : _HEAD + size])
        except (msgspec.MsgspecError, ValueError) as error:
            raise PeerError(f"Cannot take over an exchange from another worker: {error}.") from error
        self._workers = header.workers
        self._unpack(header, memoryview(data)[_HEAD + size :])

    def free(self) -> torch.Tensor | None:
        """Give up the memory of its last try, once nobody can lack the result; None if none is of use to others."""
        return None

    @abstractmethod
    def _issue(self, collectives: GroupCollectives, place: int) -> Pending: ...

    @abstractmethod
    def _pack(self) -> tuple[GatherHeader, bytes]: ...

    @abstractmethod
    def _unpack(self, header: GatherHeader, elements: memoryview) -> None: ...


class RetryableAllReduce(RetryableOp):
    """A `Sum`.

    Args:
        spare: where it takes the memory of each try.
    """

    def __init__(self, world: int, payload: Sum, spare: SpareMemory) -> None:
        super().__init__(world)
        self._tensor, self._tail, self._spare = payload.tensor, payload.tail, spare
        self._numel = payload.tensor.numel() + (0 if payload.tail is None else payload.tail.numel())
        self._memory = torch.empty(0)
        self._is_replied = False

    def sent_bytes(self, rank: int) -> int:
        return 2 * (self._world - 1) * self._numel * self._tensor.element_size() // self._world

    def reply(self) -> Total:
        numel, self._is_replied = self._tensor.numel(), True
        self._tensor.copy_(self._memory[:numel])
        weight = len(self._workers) / self._world
        if self._tail is None:
            return Total(self._tensor, weight)
        return Total(self._tensor, weight, self._tail.copy_(self._memory[numel:]))

    def _issue(self, collectives: GroupCollectives, place: int) -> Pending:
        memory = self._memory = self._spare.take(self._numel, self._tensor.dtype)
        memory[: self._tensor.numel()].copy_(self._tensor)
        if self._tail is not None:
            memory[self._tensor.numel() :].copy_(self._tail)
        return collectives.all_reduce(memory)

    def _pack(self) -> tuple[GatherHeader, bytes]:
        return GatherHeader(self._workers), bytes(bytes_of(self._memory))

    def _unpack(self, header: GatherHeader, elements: memoryview) -> None:
        self._memory = _tensor_of(elements, self._tensor.dtype, (self._numel,))

    def free(self) -> torch.Tensor | None:
        memory, self._memory = self._memory, self._memory[:0]
        return memory if self._is_replied else None


class RetryableReduceScatter(RetryableOp):
    """The first round of a `Sum` in two: a part of the sum is here in the end, and no reply.

    Args:
        spare: where it takes the memory of each try.
    """

    def __init__(self, world: int, payload: Sum, spare: SpareMemory) -> None:
        super().__init__(world)
        self.payload, self.spare = payload, spare
        self.whole = joined(payload)  # that was brought: it stays as it is until the second round is done
        self._group: dist.ProcessGroup | None = None
        self._parts: PartSums | None = None

    def sent_bytes(self, rank: int) -> int:
        return sent_bytes_of_round(self.payload.size_bytes, self._world)

    def reply(self) -> list[GatheredPart]:
        return []

    def parts_in(self, group: dist.ProcessGroup) -> PartSums | None:
        """The parts of the sum, if they were made in this group: then all of its workers have one."""
        return self._parts if group is self._group else None

    def _issue(self, collectives: GroupCollectives, place: int) -> Pending:
        parts = self._parts = PartSums(collectives.group, self.whole, self.spare)
        self._group = collectives.group
        return Works([parts.scatter()], lambda: Total(parts.memory), 0)

    def _pack(self) -> tuple[GatherHeader, bytes]:
        return GatherHeader(self._workers), b""

    def _unpack(self, header: GatherHeader, elements: memoryview) -> None:
        self._group = self._parts = None  # others' parts are of no use here


class RetryableSumGather(RetryableOp):
    """The second round of a `Sum` in two.

    A worker that is lost between the rounds, or in this one, has a part of the sum that nobody else has. So in another
    group than that of the first round what was brought is summed again, in one round, by all that are left.

    Args:
        scatter: the first round.
    """

    def __init__(self, world: int, scatter: RetryableReduceScatter) -> None:
        super().__init__(world)
        self._scatter = scatter
        self._memory = torch.empty(0)
        self._is_replied = False

    def sent_bytes(self, rank: int) -> int:
        return sent_bytes_of_round(self._scatter.payload.size_bytes, self._world)

    def reply(self) -> Total:
        self._is_replied = True
        payload, weight = self._scatter.payload, len(self._workers) / self._world
        numel, end = payload.tensor.numel(), self._scatter.whole.numel()
        payload.tensor.copy_(self._memory[:numel])
        tail = None if payload.tail is None else payload.tail.copy_(self._memory[numel:end])
        return Total(payload.tensor, weight, tail)

    def _issue(self, collectives: GroupCollectives, place: int) -> Pending:
        parts, whole = self._scatter.parts_in(collectives.group), self._scatter.whole
        if parts is not None:
            self._memory = parts.memory
            return Works([parts.gather()], lambda: Total(parts.memory), 0)
        memory = self._memory = self._scatter.spare.take(whole.numel(), whole.dtype)
        memory.copy_(whole)
        return collectives.all_reduce(memory)

    def _pack(self) -> tuple[GatherHeader, bytes]:
        return GatherHeader(self._workers), bytes(bytes_of(self._memory[: self._scatter.whole.numel()]))

    def _unpack(self, header: GatherHeader, elements: memoryview) -> None:
        whole = self._scatter.whole
        self._memory = _tensor_of(elements, whole.dtype, (whole.numel(),))

    def free(self) -> torch.Tensor | None:
        memory, self._memory = self._memory, self._memory[:0]
        return memory if self._is_replied else None


class RetryableAllGather(RetryableOp):
    """A `Gather`."""

    def __init__(self, world: int, payload: Gather) -> None:
        super().__init__(world)
        self._tensors = payload.tensors
        self._works: GatherWorks | None = None
        self._contributions: list[GatheredPart] = []

    def sent_bytes(self, rank: int) -> int:
        return (self._world - 1) * sum(t.numel() * t.element_size() for t in self._tensors)

    def reply(self) -> list[GatheredPart]:
        return self._found()

    def _issue(self, collectives: GroupCollectives, place: int) -> GatherWorks:
        def all_gather(into: list[torch.Tensor], tensor: torch.Tensor) -> Any:
            return collectives.group.allgather([into], [tensor])

        self._works = GatherWorks(all_gather, place, len(self._workers), self._tensors)
        return self._works

    def _found(self) -> list[GatheredPart]:
        if self._works is not None:
            by_place = self._works.result()
            self._contributions = [
                GatheredPart(rank, one.tensors) for rank, one in zip(self._workers, by_place, strict=True)
            ]
            self._works = None
        return self._contributions

    def _pack(self) -> tuple[GatherHeader, bytes]:
        found = self._found()
        shapes = tuple(tuple(tuple(tensor.shape) for tensor in one.tensors) for one in found)
        return GatherHeader(self._workers, shapes), b"".join(bytes_of(t) for one in found for t in one.tensors)

    def _unpack(self, header: GatherHeader, elements: memoryview) -> None:
        self._works, self._contributions = None, []
        for rank, shapes in zip(header.workers, header.shapes, strict=True):
            tensors = []
            for mine, shape in zip(self._tensors, shapes, strict=True):
                size = math.prod(shape) * mine.element_size()
                tensors.append(_tensor_of(elements[:size], mine.dtype, shape))
                elements = elements[size:]
            self._contributions.append(GatheredPart(rank, tuple(tensors)))


class RetryableBroadcast(RetryableOp):
    """A broadcast.

    Args:
        tensor: contiguous.
        source: whose tensor counts; if it is gone, that of the first worker that is left.
    """

    implies_begun = False

    def __init__(self, world: int, tensor: torch.Tensor, source: int) -> None:
        super().__init__(world)
        self._tensor, self._source = tensor, source
        self._memory = torch.empty(0)

    def sent_bytes(self, rank: int) -> int:
        return self._tensor.numel() * self._tensor.element_size() if rank == self._source else 0

    def reply(self) -> Total:
        self._bytes.copy_(self._memory)
        return Total(self._tensor)

    @property
    def _bytes(self) -> torch.Tensor:
        # As bytes: Gloo has no broadcast for some dtypes, such as int16.
        return self._tensor.as_strided((self._tensor.numel(),), (1,)).view(torch.uint8)

    def _issue(self, collectives: GroupCollectives, place: int) -> Pending:
        source = self._workers.index(self._source) if self._source in self._workers else 0
        memory = self._memory = self._bytes.clone()
        return collectives.broadcast(memory, source)

    def _pack(self) -> tuple[GatherHeader, bytes]:
        return GatherHeader(self._workers), bytes(bytes_of(self._memory))

    def _unpack(self, header: GatherHeader, elements: memoryview) -> None:
        self._memory = _tensor_of(elements, torch.uint8, self._bytes.shape)


class ReplayBroadcast:
    """One worker gives another's exchange to those that lack it, as bytes: first how many, then these.

    Args:
        source: the place of the worker that gives it.
        data: what it gives; elsewhere b"".
    """

    def __init__(self, collectives: GroupCollectives, source: int, data: bytes) -> None:
        self._collectives, self._source = collectives, source
        self._bytes = _tensor_of(memoryview(data), torch.uint8, (len(data),))
        self._size = torch.tensor([len(data)])
        self._pending: Pending | None = None
        self._is_sized = False

    def wait(self, timeout: Any) -> bool:
        """Whether it is done.

        Raises:
            NetworkError: if a connection broke.
        """
        if self._pending is None:
            self._pending = self._collectives.broadcast(self._size, self._source)
        if not self._pending.wait(timeout):
            return False
        if not self._is_sized:
            self._is_sized = True
            if len(self._bytes) != int(self._size):
                self._bytes = torch.empty(int(self._size), dtype=torch.uint8)
            self._pending = self._collectives.broadcast(self._bytes, self._source)
        return self._pending.wait(timeout)

    @property
    def data(self) -> bytes:
        return bytes(bytes_of(self._bytes))


def _tensor_of(elements: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if len(elements) != math.prod(shape) * dtype.itemsize:
        raise PeerError(
            f"Cannot take over an exchange from another worker: {len(elements)} bytes are not {math.prod(shape)} "
            f"elements of {dtype}."
        )
    if not len(elements):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(elements), dtype=torch.uint8).view(dtype).reshape(tuple(shape))
