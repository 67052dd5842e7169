"""The thread that carries blocks of gradients while the training thread computes.

It does one thing after the other, in the order in which it is told, which is the schedule's on all workers: so whatever
it begins, later rounds of an exchange too, is begun in the same order everywhere, and nothing else may be begun on the
fabric while it has something to do. Before a block is issued it brings as many of those under way to their end as the
schedule says. Where a schedule has two rounds, each of a block's two is a thing of its own: first all blocks are
reduced, then all are gathered. While it has nothing to do it lands what the next thing waits for, and notes when others
that are under way are done.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from offbeat.engine.bucket_buffer import BucketBuffer, BucketTrailer
    from offbeat.engine.bucket_exchange import BucketExchange
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.communicator import Communicator
    from offbeat.payload import Reply
    from offbeat.pending import Pending

_LOOK_S = 0.002  # at what is under way: 2 ms too late is little beside a block, and looking takes some 30 us


def marks(devices: Sequence[torch.device]) -> list[torch.cuda.Event]:
    """Mark behind what this thread has let each of these GPUs do so far."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def wait_behind(events: Sequence[torch.cuda.Event]) -> None:
    """Have what this thread lets their GPUs do from here on come behind these."""
    for event in events:
        torch.cuda.current_stream(event.device).wait_event(event)


class InFlight(ABC):
    """One thing that the thread carries, until it has landed. A `Pending`."""

    sent_bytes = 0

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._landed = threading.Event()
        self._ended: list[torch.cuda.Event] = []  # what the thread had devices do for it

    @abstractmethod
    def issue(self) -> None:
        """Begin it; on the thread."""

    @abstractmethod
    def finish(self) -> None:
        """Bring it to its end; on the thread."""

    def look(self) -> bool:
        """Whether there is nothing to note any more of when it is done; on the thread."""
        return True

    def land(self, devices: Sequence[torch.device] = ()) -> None:
        """Bring it to its end, and say so; `take_up` waits for what these devices still have to do for that."""
        self.finish()
        self._ended = marks(devices)
        self._landed.set()

    def take_up(self) -> None:
        """Have what this thread lets devices do from here on come behind it, once it has landed."""
        wait_behind(self._ended)

    def fail(self, failure: BaseException) -> None:
        """Note that it will not come to its end."""
        self.failure = failure
        self._landed.set()

    def done(self) -> bool:
        return self._landed.is_set()

    @property
    def has_landed(self) -> bool:
        """Whether it has come to a good end."""
        return self._landed.is_set() and self.failure is None

    def wait(self, timeout: timedelta) -> bool:
        """Wait until it has landed; raises what has kept it from that."""
        if not self._landed.wait(timeout.total_seconds()):
            return False
        if self.failure is not None:
            raise self.failure
        return True

    def result(self) -> Reply:
        """No payloads: what came is where it belongs."""
        return []


class BlockInFlight(InFlight):
    """One block's exchange: once it has landed the mean lies in the gradients.

    Args:
        complete_s: its gradients were, in clock seconds.

    Attributes:
        trailer: what the workers said along with it, once it has landed.
        is_end_seen: whether the thread looked at it when it was done; else that may have been earlier than noted.
    """

    def __init__(self, buffer: BucketBuffer, exchange: BucketExchange, complete_s: float = 0.0) -> None:
        super().__init__()
        self.buffer, self.exchange, self.complete_s = buffer, exchange, complete_s
        self.is_end_seen = False
        self.trailer: BucketTrailer | None = None

    def issue(self) -> None:
        """Begin its first round."""
        self.exchange.issue(self.buffer.trailer)

    def look(self) -> bool:
        """Note when its first round is done; whether it is."""
        self.is_end_seen = self.is_end_seen or self.exchange.poll()
        return self.is_end_seen

    def finish(self) -> None:
        """Complete its rounds, and leave the mean where gradients are whole."""
        self.is_end_seen = self.is_end_seen or not self.exchange.poll()
        total, part = self.exchange.wait()
        self.trailer = self.buffer.read_trailer(total, part)
        self.exchange.finish(self.trailer.weight or 1.0)  # nobody had data: the sum is zero, and so is the mean
        self.buffer.unpack()


class ReduceInFlight(InFlight):
    """The reduce-scatter of a block whose sum is made in two rounds.

    Attributes:
        is_end_seen: as of a `BlockInFlight`.
    """

    def __init__(self, buffer: BucketBuffer, exchange: BucketExchange) -> None:
        super().__init__()
        self.buffer, self.exchange = buffer, exchange
        self.is_end_seen = False

    def issue(self) -> None:
        """Begin it."""
        self.exchange.issue(self.buffer.trailer)

    def look(self) -> bool:
        """Note when it is done; whether it is."""
        self.is_end_seen = self.is_end_seen or self.exchange.poll_reduce()
        return self.is_end_seen

    def finish(self) -> None:
        """Wait for it."""
        self.is_end_seen = self.is_end_seen or not self.exchange.poll_reduce()
        self.exchange.reduce()


class GatherInFlight(BlockInFlight):
    """A block whose sum is made in two rounds, from the second on.

    Args:
        reduce: the first.
        complete_s: as of a `BlockInFlight`.
    """

    def __init__(self, reduce: ReduceInFlight, complete_s: float = 0.0) -> None:
        super().__init__(reduce.buffer, reduce.exchange, complete_s)
        self.reduce = reduce

    def issue(self) -> None:
        """Begin its all-gather."""
        self.exchange.gather()


class BroadcastInFlight(InFlight):
    """The broadcast of the model's buffers as they are when it is made; the training thread takes over what came.

    Args:
        buffers, source: as of `Buffers.start`.
        communicator: the thread's.
    """

    def __init__(self, buffers: Buffers, source: int, communicator: Communicator) -> None:
        super().__init__()
        self._buffers, self._source, self._communicator = buffers, source, communicator
        self._broadcasts: list[Pending] = []
        buffers.pack()

    def issue(self) -> None:
        """Begin it."""
        self._broadcasts = self._buffers.start(self._source)

    def finish(self) -> None:
        """Wait for it."""
        for one in self._broadcasts:
            self._communicator.wait(one, "broadcast of the buffers")

    def take_over(self) -> None:
        """Leave what came in the buffers; backward is over, which reads them.

        If backward has written to them, too, the source goes back to what it has sent: all are to have the same.
        """
        self.take_up()
        self._buffers.set_(self._buffers.take(self._source, own=bool(self._buffers.changed())))


class CommunicationThread:
    """A thread that issues and lands blocks.

    Args:
        after: for each thing of a step, in order, how many of the first have landed before it is issued.
        devices: the GPUs on which gradients are: each thread has streams of its own there.
    """

    def __init__(self, after: tuple[int, ...], devices: Sequence[torch.device] = ()) -> None:
        self._after, self._devices = after, devices
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: list[InFlight] = []  # of the step at hand, in order; the first `_landed` have landed
        self._landed = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="offbeat-communication", daemon=True)
        self._thread.start()

    def issue(self, one: InFlight) -> None:
        """Begin the next of the step, behind what the caller has had devices do."""
        packed = marks(self._devices)
        self._jobs.put(lambda: self._issue(one, packed))

    def finish(self) -> None:
        """Land all of the step."""
        self._jobs.put(self._finish)

    def close(self) -> None:
        """End, when all that it was told is done; what waits for a worker that is lost is left."""
        self._jobs.put(None)

    def _run(self) -> None:
        while True:
            try:
                if (job := self._next_job()) is None:
                    return
                job()
                self._land_before_next()
            except BaseException as failure:
                self._failure = failure
                for one in self._under_way[self._landed :]:
                    one.fail(failure)

    def _land_before_next(self) -> None:
        """Land what has to have landed before the next thing of the step is issued."""
        if len(self._under_way) < len(self._after):
            self._land(self._after[len(self._under_way)])

    def _next_job(self) -> Callable[[], None] | None:
        """The next thing that it is told to do; until then it looks at what is under way."""
        for one in self._under_way[self._landed :]:
            while not self._is_noted(one):
                with suppress(queue.Empty):
                    return self._jobs.get(timeout=_LOOK_S)
        return self._jobs.get()

    def _is_noted(self, one: InFlight) -> bool:
        if self._failure is not None:
            return True
        try:
            return one.look()
        except NetworkError:  # whoever waits for it learns of that
            return True

    def _issue(self, one: InFlight, packed: Sequence[torch.cuda.Event]) -> None:
        if self._failure is not None:
            one.fail(NetworkError(str(self._failure)))
            return
        wait_behind(packed)
        self._under_way.append(one)
        one.issue()

    def _land(self, count: int) -> None:
        while self._failure is None and self._landed < count:
            self._under_way[self._landed].land(self._devices)
            self._landed += 1

    def _finish(self) -> None:
        self._land(len(self._under_way))
        self._under_way, self._landed = [], 0
