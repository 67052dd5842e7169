"""A worker's leases: what the coordinator dealt out to it, and what of that it has not brought or given back yet.

Lives on the event loop; only `deals` of a queue is taken from by the training thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from offbeat.batching import EndOfEpoch, Lease
from offbeat.errors import PeerError
from offbeat.protocol.data_leases import MemoryExhausted, RegisterLoader, RequestLease, ReturnLease, leases_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from offbeat.protocol.data_leases import FromData, LeaseGrants


@dataclass
class LeaseQueue:
    """One loader's leases.

    Args:
        about: what the worker says about its data.
        deals: that it has not drawn yet.
        doubtful: those when it enrolled once more; which of them hold is said with the first deals after that.
        held: numbers of leases that it has neither brought nor given back.
        epoch: it is in.
        wanted: called when there is something to draw; None if nobody waits.
        has_begun: whether the first have come; they come unasked, and who asks for more would get too many.
    """

    about: RegisterLoader
    deals: deque[Lease | EndOfEpoch] = field(default_factory=deque)
    doubtful: list[Lease | EndOfEpoch] = field(default_factory=list)
    held: dict[int, None] = field(default_factory=dict)
    epoch: int = 0
    wanted: Callable[[], None] | None = None
    has_begun: bool = False

    def doubt(self) -> None:
        """Mark all leases that were not drawn as doubtful: they may be others' by now."""
        self.doubtful += [self.deals.popleft() for _ in range(len(self.deals))]

    def keep_all_but(self, void: Iterable[int]) -> None:
        """Drop these leases, which are others'; keep what else was in doubt."""
        for number in void:
            self.held.pop(number, None)
        self.deals.extend(deal for deal in self.doubtful if isinstance(deal, EndOfEpoch) or deal.number in self.held)
        self.doubtful.clear()

    @property
    def begins(self) -> int:
        """The epoch in which the worker draws next; others that were dealt out beforehand may have ended behind it."""
        return next((deal.epoch for deal in self.deals), self.epoch)

    def take_undrawn(self) -> list[int]:
        """Numbers of the leases that were not drawn, which are not there any more; what ends an epoch stays."""
        undrawn = [self.deals.popleft() for _ in range(len(self.deals))]
        self.deals.extend(deal for deal in undrawn if isinstance(deal, EndOfEpoch))
        return [deal.number for deal in undrawn if isinstance(deal, Lease)]


class LeaseQueues:
    """All loaders' leases of one worker.

    Args:
        say: sends a message to the coordinator.
    """

    def __init__(self, say: Callable[[FromData], None]) -> None:
        self._say = say
        self._queues: dict[int, LeaseQueue] = {}

    def hold(self, about: RegisterLoader) -> LeaseQueue:
        """The queue of a loader that this worker is about to enrol for."""
        return self._queues.setdefault(about.loader, LeaseQueue(about))

    def enrol(self, only: LeaseQueue | None = None) -> None:
        """Enrol for all loaders, for the first time or once more after the server was lost; or for `only` this one."""
        for queue in self._queues.values() if only is None else (only,):
            queue.has_begun = False
            queue.doubt()
            self._say(msgspec.structs.replace(queue.about, epoch=queue.epoch, holds=tuple(queue.held)))

    def reseed(self, loader: int, seed: int) -> None:
        """The order is that of another run, from whose checkpoint this one goes on."""
        queue = self._queues[loader]
        queue.about = msgspec.structs.replace(queue.about, seed=seed)

    def want(self, queue: LeaseQueue, wanted: Callable[[], None]) -> None:
        """Have `wanted` called when there is a deal to draw; ask for one if none is on its way."""
        if queue.deals:
            wanted()
            return
        queue.wanted = wanted
        if queue.has_begun:
            self._say(RequestLease(queue.about.loader))

    def deal(self, message: LeaseGrants) -> None:
        """The coordinator has dealt out.

        Raises:
            PeerError: if there are no such samples, or this worker has not enrolled.
        """
        queue = self._queues.get(message.loader)
        if queue is None:
            raise PeerError(f"The server leases data of loader {message.loader}, which this worker has not.")
        if not queue.has_begun:
            queue.keep_all_but(message.void)
        if message.afresh:
            queue.deals.clear()
            queue.held.clear()
        for deal in leases_of(message, queue.about.samples):
            queue.deals.append(deal)
            if isinstance(deal, Lease):
                queue.held[deal.number] = None
                queue.epoch = deal.epoch
            else:
                queue.epoch = deal.epoch + 1
        queue.has_begun = True
        if queue.wanted is not None:
            wanted, queue.wanted = queue.wanted, None
            self.want(queue, wanted)

    def brought(self, used: Iterable[tuple[int, int]]) -> None:
        """A contribution that was computed from these leases, by loader and number, is done with."""
        for loader, number in used:
            self._queues[loader].held.pop(number, None)

    def give_back(self, loader: int, numbers: Iterable[int]) -> None:
        """Return these leases unused."""
        queue = self._queues[loader]
        numbers = tuple(number for number in numbers if queue.held.pop(number, number) is None)
        if numbers:
            self._say(ReturnLease(loader, numbers))

    def out_of_memory(self, loader: int, count: int, numbers: Iterable[int]) -> None:
        """Return these leases: there was no memory for a batch of `count` samples."""
        self._say(MemoryExhausted(loader, count))
        self.give_back(loader, numbers)
