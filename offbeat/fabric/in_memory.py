"""Workers as threads of one process.

For tests, for the docs, and for a worker that is alone. It adds in rank order, so results are the same on every run.

>>> import torch
>>> from offbeat.fabric import BindContext
>>> from datetime import timedelta
>>> from offbeat.payload import Sum
>>> fabric = InMemory().bind(BindContext())
>>> pending = fabric.start(Sum(torch.ones(2)))
>>> pending.wait(timedelta(seconds=1)), pending.result().tensor
(True, tensor([1., 1.]))
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.errors import DisagreementError, PlanError
from offbeat.fabric.fabric import BindContext, Offers
from offbeat.payload import Gather, GatheredPart, Payload, Reply, Sum, Total

if TYPE_CHECKING:
    from datetime import timedelta

_OFFERS = Offers(reduce_scatter=True)
_OF_ALL, _IN_PARTS = -1, -2


@dataclass(frozen=True)
class InMemory:
    """A fabric whose workers are all in one process, such as threads of a test.

    >>> InMemory()
    InMemory()
    """

    @property
    def offers(self) -> Offers:
        return _OFFERS

    def bind(self, context: BindContext) -> BoundInMemory:
        """Make the end of a worker that is alone; threads share an `InMemoryGroup`, and each has a `BoundInMemory`.

        Raises:
            PlanError: if it is one of several processes.
        """
        if context.world > 1:
            raise PlanError(
                f"Cannot run {context.world} worker processes over {self!r}: it lives in one process. "
                "Use ProcessGroup() - at `plan.fabric`."
            )
        return BoundInMemory(InMemoryGroup(1), 0)


class InMemoryGroup:
    """The exchanges of `world` workers: one slot for each, numbered by order of issue."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.lock = threading.Lock()
        self.slots: dict[int, ExchangeSlot] = {}


class ExchangeSlot:
    """One exchange: what each rank brought, and an event for when all have."""

    def __init__(self, world: int) -> None:
        self.brought: dict[int, tuple[int, Payload]] = {}
        self.full = threading.Event()
        self.left = world
        self.reply: Reply | None = None


class BoundInMemory:
    """One worker's end of a `InMemoryGroup`."""

    def __init__(self, group: InMemoryGroup, rank: int) -> None:
        self._group = group
        self._issued = 0
        self.rank = rank
        self.world = group.world
        self.offers = _OFFERS

    def start(self, payload: Payload) -> InMemoryPending:
        return self.bring(payload, _OF_ALL)

    def reduce_scatter(self, payload: Sum) -> InMemoryScattered:
        return InMemoryScattered(self, payload)

    def broadcast(self, tensor: torch.Tensor, source: int) -> InMemoryPending:
        return self.bring(Sum(tensor), source)

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def abandon(self) -> None:
        """Do nothing: it holds no resources."""

    def bring(self, payload: Payload, source: int) -> InMemoryPending:
        """Begin the next exchange, of what all bring or of what worker `source` does."""
        number, self._issued = self._issued, self._issued + 1
        with self._group.lock:
            slot = self._group.slots.setdefault(number, ExchangeSlot(self.world))
            slot.brought[self.rank] = (source, payload)
            if len(slot.brought) == self.world:
                slot.full.set()
        return InMemoryPending(self._group, number, self.rank, payload)


class InMemoryPending:
    """An exchange that this rank has come to."""

    def __init__(self, group: InMemoryGroup, number: int, rank: int, payload: Payload) -> None:
        self._group, self._number, self._rank, self._payload = group, number, rank, payload
        self._slot = group.slots[number]
        self.sent_bytes = payload.size_bytes if group.world > 1 else 0

    def wait(self, timeout: timedelta) -> bool:
        return self._slot.full.wait(timeout.total_seconds())

    def done(self) -> bool:
        return self._slot.full.is_set()

    def result(self) -> Reply:
        with self._group.lock:
            if self._slot.reply is None:
                self._slot.reply = _combine(self._slot.brought)
            reply = self._own(self._slot.reply)
            self._slot.left -= 1
            if self._slot.left == 0:
                self._group.slots.pop(self._number, None)
        return reply

    def _own(self, reply: Reply) -> Reply:
        """Copy the reply into this rank's own memory, as a real all-reduce in place would leave it."""
        if not isinstance(reply, Total):
            return reply
        assert isinstance(self._payload, Sum)
        tensor = self._payload.tensor.copy_(reply.tensor)
        tail = None if reply.tail is None or self._payload.tail is None else self._payload.tail.copy_(reply.tail)
        return Total(tensor, tail=tail)


class InMemoryScattered:
    """The first round of a sum in two: a part of the sum is this rank's, which it has others see in the second round. A
    `Scattered`.
    """

    def __init__(self, fabric: BoundInMemory, payload: Sum) -> None:
        self._fabric, self._payload = fabric, payload
        copies = (payload.tensor.clone(), None if payload.tail is None else payload.tail.clone())
        self._pending = fabric.bring(Sum(*copies), _IN_PARTS)
        self._part = payload.tensor[:0]
        self.sent_bytes = self._pending.sent_bytes // 2

    def wait(self, timeout: timedelta) -> bool:
        return self._pending.wait(timeout)

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> Reply:
        reply = self._pending.result()
        assert isinstance(reply, Total)
        whole = reply.tensor if reply.tail is None else torch.cat([reply.tensor, reply.tail.to(reply.tensor.dtype)])
        self._part = whole.tensor_split(self._fabric.world)[self._fabric.rank]
        return []

    def all_gather(self) -> InMemoryGathered:
        return InMemoryGathered(self._fabric.bring(Gather((self._part,)), _OF_ALL), self._payload, self.sent_bytes)


class InMemoryGathered:
    """The second round of a sum in two. A `Pending`."""

    def __init__(self, pending: InMemoryPending, payload: Sum, sent_bytes: int) -> None:
        self._pending, self._payload, self.sent_bytes = pending, payload, sent_bytes

    def wait(self, timeout: timedelta) -> bool:
        return self._pending.wait(timeout)

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> Reply:
        reply, tensor, tail = self._pending.result(), self._payload.tensor, self._payload.tail
        assert isinstance(reply, list)
        whole = torch.cat([part.tensors[0] for part in reply])
        tensor.copy_(whole[: tensor.numel()])
        return Total(tensor, tail=None if tail is None else tail.copy_(whole[tensor.numel() :]))


def _combine(brought: dict[int, tuple[int, Payload]]) -> Reply:
    ordered = [brought[rank] for rank in sorted(brought)]
    sources = {source for source, _ in ordered}
    sums = [payload for _, payload in ordered if isinstance(payload, Sum)]
    gathers = {rank: payload for rank, (_, payload) in sorted(brought.items()) if isinstance(payload, Gather)}
    if len(sources) > 1 or (sums and gathers):
        raise DisagreementError(f"The workers issued different operations in one exchange: {ordered}.")
    if gathers:
        return [GatheredPart(rank, tuple(t.clone() for t in gather.tensors)) for rank, gather in gathers.items()]
    (source,) = sources
    if source >= 0:
        return Total(sums[source].tensor.clone())
    shapes = {(p.tensor.shape, p.tensor.dtype, None if p.tail is None else p.tail.shape) for p in sums}
    if len(shapes) > 1:
        raise DisagreementError(f"The workers passed tensors of different shape or dtype to one sum: {shapes}.")
    total = sums[0].tensor.clone()
    tail = None if sums[0].tail is None else sums[0].tail.clone()
    for payload in sums[1:]:
        total += payload.tensor
        if tail is not None and payload.tail is not None:
            tail += payload.tail
    return Total(total, tail=tail)
