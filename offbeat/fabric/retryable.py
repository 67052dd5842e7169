"""The operations of an elastic fabric: an all-reduce, an all-gather, a broadcast, each tried until one try comes to its
end.

A try works in memory of its own, so that what was brought stays as it is for the next one, and what it came to stays
for those that lack it. As bytes, for them: a length, a header as JSON, the elements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
import torch.distributed as dist

from offbeat.errors import PeerError
from offbeat.fabric.process_group import GatherWorks, Works
from offbeat.payload import Gather, GatheredPart, Reply, Sum, Total
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def issue(self, group: dist.ProcessGroup, rank: int, members: tuple[int, ...]) -> Pending:
        """Begin a try among these.

        Raises:
            RuntimeError: if the group is broken.
        """
        self._workers = members
        return self._issue(group, members.index(rank))

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
    def _issue(self, group: dist.ProcessGroup, group_rank: int) -> Pending: ...

    @abstractmethod
    def _pack(self) -> tuple[GatherHeader, bytes]: ...

    @abstractmethod
    def _unpack(self, header: GatherHeader, elements: memoryview) -> None: ...


class SpareMemory:
    """The memory of exchanges that are over, for those that follow.

    To touch fresh pages takes three times as long as to copy a gradient into pages that are there. What no exchange has
    asked for in a few times as many exchanges as were ever kept is released.
    """

    def __init__(self) -> None:
        self._spare: deque[tuple[int, torch.Tensor]] = deque()  # with the number of the exchange that it was of

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Find memory of this size, which is uninitialized."""
        for i, (_, memory) in enumerate(self._spare):
            if memory.numel() == numel and memory.dtype == dtype:
                del self._spare[i]
                return memory
        return torch.empty(numel, dtype=dtype)

    def give(self, memory: torch.Tensor, number: int, kept: int) -> None:
        """Take back what exchange `number` worked in; `kept` is how many exchanges are kept at most."""
        self._spare.append((number, memory))
        while self._spare[0][0] < number - 4 * kept:
            self._spare.popleft()


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

    def _issue(self, group: dist.ProcessGroup, group_rank: int) -> Works:
        memory = self._memory = self._spare.take(self._numel, self._tensor.dtype)
        memory[: self._tensor.numel()].copy_(self._tensor)
        if self._tail is not None:
            memory[self._tensor.numel() :].copy_(self._tail)
        return Works([group.allreduce([memory])], lambda: Total(memory), 0)

    def _pack(self) -> tuple[GatherHeader, bytes]:
        return GatherHeader(self._workers), bytes(bytes_of(self._memory))

    def _unpack(self, header: GatherHeader, elements: memoryview) -> None:
        self._memory = _tensor_of(elements, self._tensor.dtype, (self._numel,))

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

    def _issue(self, group: dist.ProcessGroup, group_rank: int) -> GatherWorks:
        def all_gather(into: list[torch.Tensor], tensor: torch.Tensor) -> Any:
            return group.allgather([into], [tensor])

        self._works = GatherWorks(all_gather, group_rank, len(self._workers), self._tensors)
        return self._works

    def _found(self) -> list[GatheredPart]:
        if self._works is not None:
            by_group_rank = self._works.result()
            self._contributions = [
                GatheredPart(rank, one.tensors) for rank, one in zip(self._workers, by_group_rank, strict=True)
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

    def _issue(self, group: dist.ProcessGroup, group_rank: int) -> Works:
        source = self._workers.index(self._source) if self._source in self._workers else 0
        memory = self._memory = self._bytes.clone()
        return Works([broadcast(group, memory, source)], lambda: Total(memory), 0)

    def _pack(self) -> tuple[GatherHeader, bytes]:
        return GatherHeader(self._workers), bytes(bytes_of(self._memory))

    def _unpack(self, header: GatherHeader, elements: memoryview) -> None:
        self._memory = _tensor_of(elements, torch.uint8, self._bytes.shape)


class ReplayBroadcast:
    """One worker gives another's exchange to those that lack it, as bytes: first how many, then these.

    Args:
        source: the group rank of the worker that gives it.
        data: what it gives; elsewhere b"".
    """

    def __init__(self, group: dist.ProcessGroup, source: int, data: bytes) -> None:
        self._group, self._source = group, source
        self._bytes = _tensor_of(memoryview(data), torch.uint8, (len(data),))
        self._size = torch.tensor([len(data)])
        self._works: Works | None = None
        self._is_sized = False

    def wait(self, timeout: Any) -> bool:
        """Whether it is done.

        Raises:
            NetworkError: if a connection broke.
        """
        if self._works is None:
            self._works = Works([broadcast(self._group, self._size, self._source)], list, 0)
        if not self._works.wait(timeout):
            return False
        if not self._is_sized:
            self._is_sized = True
            if len(self._bytes) != int(self._size):
                self._bytes = torch.empty(int(self._size), dtype=torch.uint8)
            self._works = Works([broadcast(self._group, self._bytes, self._source)], list, 0)
        return self._works.wait(timeout)

    @property
    def data(self) -> bytes:
        return bytes(bytes_of(self._bytes))


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, source: int) -> Any:
    """Begin it; returns torch's handle."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return group.broadcast([tensor], options)


def _tensor_of(elements: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if len(elements) != math.prod(shape) * dtype.itemsize:
        raise PeerError(
            f"Cannot take over an exchange from another worker: {len(elements)} bytes are not {math.prod(shape)} "
            f"elements of {dtype}."
        )
    if not len(elements):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(elements), dtype=torch.uint8).view(dtype).reshape(tuple(shape))
