"""All-reduce that goes on without the workers it loses.

A Gloo group is of no use any more once one of its workers is gone, nor are paths that lead over it. Those that are left
then form a new generation (see `elastic_group`), connect anew (`generation`), and redo what was under way:

    completed by all            nothing to do
    completed by some           one of these supplies the others with the result, so that all have the same
    completed by none           done again, without the lost worker: the reply says how many took part

So an exchange is worked on in memory of its own: what was brought stays as it is until the exchange is complete, and a
result is kept until nobody can lack it. That is known without a word: when an exchange is complete, all have begun it,
and whoever has begun it had waited for all those that came before in the program.

Two copies of a gradient, and memory for two steps, are what it costs; the memory goes from one step to the next. To
reduce in place, in the bucket, would not do. An all-reduce that breaks off half-way has spoilt its input. Gloo's
threads may write to what they were given for as long as the process lives, once a worker that only hung goes on.
And the user may scale a gradient, or the next backward overwrite it, while another worker still lacks the result.

Ranks do not change: they name the workers in replies. A broadcast of a worker that is gone is one of the first that is
left.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from offbeat.errors import NetworkError, PeerError, PlanError
from offbeat.fabric.fabric import BindContext, FabricSpec, Offers, Reconnects
from offbeat.fabric.path_collectives import PathPending
from offbeat.fabric.process_group import ProcessGroup
from offbeat.fabric.retryable import (
    ReplayBroadcast,
    RetryableAllGather,
    RetryableAllReduce,
    RetryableBroadcast,
    RetryableReduceScatter,
    RetryableSumGather,
)
from offbeat.fabric.routed import Routed
from offbeat.fabric.spare_memory import SpareMemory
from offbeat.fabric.staging import CudaCopies, StagedFabric
from offbeat.payload import Sum
from offbeat.protocol.group_progress import GroupProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from offbeat.fabric.elastic_group import ElasticGroup
    from offbeat.fabric.generation import Generation, GroupCollectives, Reconnector
    from offbeat.fabric.retryable import RetryableOp
    from offbeat.payload import Payload, Reply
    from offbeat.pending import Pending

_AT_ONCE = timedelta(milliseconds=1)
_OFFERS = Offers(partial=True, elastic=True, reduce_scatter=True)


@dataclass(frozen=True, repr=False)
class Elastic:
    """All-reduce that goes on without the workers it loses.

    Args:
        over: the fabric that carries it, among those that take part; None for `ProcessGroup()`.

    Raises:
        PlanError: if that cannot be connected anew.

    >>> from offbeat.fabric import Routed
    >>> Elastic(), Elastic(over=Routed())
    (Elastic(), Elastic(over=Routed(method=None, grouped=False)))
    """

    over: FabricSpec | None = None

    def __post_init__(self) -> None:
        if self.over == ProcessGroup():  # one way to say it
            object.__setattr__(self, "over", None)
        if self.over is not None and (isinstance(self.over, type) or not isinstance(self.over, Reconnects)):
            raise PlanError(
                f"Cannot be elastic over {self.over!r}: its workers cannot be connected anew without one that is lost. "
                "Use ProcessGroup() or Routed(), made with (...) - at `plan.fabric.over`."
            )
        if isinstance(self.over, Routed) and self.over.grouped:
            raise PlanError(
                "Cannot be elastic over Routed(grouped=True): a worker cannot leave the sends and receives of torch's "
                "group. Use Routed() - at `plan.fabric.over.grouped`."
            )

    def __repr__(self) -> str:
        return "Elastic()" if self.over is None else f"Elastic(over={self.over!r})"

    @property
    def offers(self) -> Offers:
        return _OFFERS

    @property
    def connecting(self) -> str:
        """The purpose of the wait while a worker is bound."""
        return getattr(self.over, "connecting", "the connection to the others")

    @property
    def companion(self) -> Elastic:
        """The fabric of questions to the others."""
        return Elastic()

    def bind(self, context: BindContext) -> BoundElastic | StagedFabric:
        """Make one worker's end of it in the group of the context. Collective: every rank calls it.

        Raises:
            PlanError: if what it is over cannot carry the model's tensors.
        """
        assert context.group is not None, "an elastic fabric is bound to the group that its workers form"
        over = ProcessGroup() if self.over is None else self.over
        assert isinstance(over, Reconnects), "checked when the plan was made"
        if context.backend != "gloo" and not isinstance(over, ProcessGroup):
            staged = self.bind(replace(context, backend="gloo"))
            return StagedFabric(staged, CudaCopies())
        return BoundElastic(context.group, over.reconnector(context))


class BoundElastic:
    """One worker's end of the fabric. A `Fabric`.

    Args:
        group: who takes part; one for all fabrics of a worker.
        reconnector: connects each generation.
    """

    def __init__(self, group: ElasticGroup, reconnector: Reconnector) -> None:
        self._elastic_group, self._members, self._reconnector = group, group.members, reconnector
        self._lock = threading.RLock()  # a thread that waits for another fabric's exchange may have this one stop
        self.rank, self.world = group.rank, group.world
        self.offers = _OFFERS
        self._collectives: GroupCollectives | None = None
        self._collectives = group.add_client(self)
        self._is_issuing = self._collectives is not None  # between `replay` and `stop`
        self._exchanges: deque[ElasticExchange] = deque()  # in order, from the first whose result another may lack
        self._begun = self._most_kept = 0
        self._spare = SpareMemory()
        self._early: dict[int, bytes] = {}  # results of exchanges that are not begun here
        self._lacking: list[int] = []
        self._progress: Mapping[int, GroupProgress] = {}
        self._supply: ReplayBroadcast | None = None
        self._left_behind: list[Any] = []  # what Gloo's threads may still write to

    # -- a fabric ------------------------------------------------------------------------------------------------

    def start(self, payload: Payload) -> ElasticExchange:
        if isinstance(payload, Sum):
            return self.begin(RetryableAllReduce(self.world, payload, self._spare))
        return self.begin(RetryableAllGather(self.world, payload))

    def reduce_scatter(self, payload: Sum) -> ElasticScattered:
        return ElasticScattered(self, RetryableReduceScatter(self.world, payload, self._spare))

    def broadcast(self, tensor: torch.Tensor, source: int) -> ElasticExchange:
        return self.begin(RetryableBroadcast(self.world, tensor, source))

    def wants_reroute(self) -> bool:
        return self._collectives is not None and self._collectives.wants_reroute()

    def reroute(self, meet: Callable[[str], list[str]]) -> str:
        number = self._elastic_group.number
        try:
            return self._handle.reroute(meet)
        except NetworkError:
            self._elastic_group.invalidate(number)
            return ""

    def close(self) -> None:
        if self._collectives is not None:
            self._elastic_group.remove_client(self)
            self._collectives.close()
            self._collectives = None

    def abandon(self) -> None:
        if self._collectives is not None:
            self._collectives.abandon()
            self._collectives = None

    # -- a client of its group -----------------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        return self._begun

    def begin_at(self, number: int) -> None:
        self._begun = number

    def connect(self, generation: Generation) -> GroupCollectives:
        return self._reconnector.connect(generation, self._collectives)

    def stop(self) -> GroupProgress:
        with self._lock:
            self._is_issuing = False
            # Gloo's threads may write there as long as the process lives.
            left = [self._supply, *(exchange.stop() for exchange in self._exchanges)]
            self._left_behind += [one for one in left if one is not None]
            self._supply = None
            if self._collectives is not None:
                self._collectives.abandon()
            below = self._begun - len(self._exchanges)
            complete = [exchange.number for exchange in self._exchanges if exchange.is_complete]
            return GroupProgress(below, (*complete, *sorted(self._early)))

    def resume(self, collectives: GroupCollectives, progress: Mapping[int, GroupProgress]) -> None:
        self._collectives, self._progress, self._members = collectives, progress, tuple(progress)
        first, end = min(one.below for one in progress.values()), max(one.end for one in progress.values())
        self._lacking = [
            number
            for number in range(first, end)
            if 0 < sum(one.has(number) for one in progress.values()) < len(progress)
        ]

    def replay(self, timeout: timedelta) -> bool:
        with self._lock:
            return self._replay(timeout)

    def _replay(self, timeout: timedelta) -> bool:
        while self._lacking:
            number = self._lacking[0]
            if self._supply is None:
                source = min(rank for rank, progress in self._progress.items() if progress.has(number))
                mine = self._find(number)
                data = mine.to_bytes() if mine is not None and source == self.rank else b""
                self._supply = ReplayBroadcast(self._handle, self._members.index(source), data)
            if not self._supply.wait(timeout):
                return False
            data, self._supply = self._supply.data, None
            mine = self._find(number)
            if mine is not None and not mine.is_complete:
                mine.take(data)
            elif number >= self._begun:
                self._early[number] = data
            self._lacking.pop(0)
        if not all(self._issue(exchange) for exchange in self._exchanges):
            raise NetworkError("A connection to another worker broke.")
        self._is_issuing = True
        return True

    # -- at work -------------------------------------------------------------------------------------------------

    def proceed(self, exchange: ElasticExchange, timeout: timedelta) -> bool:
        """Wait for an exchange; returns whether it is complete."""
        group = self._elastic_group
        if not group.reconfigure(timeout):
            return False
        with self._lock:
            number, is_broken = group.number, False
            try:
                if exchange.poll(timeout):
                    self._forget(exchange)
                    return True
            except (NetworkError, PeerError):  # a link that is refused when it comes back is lost as well
                is_broken = True
        if is_broken:
            group.invalidate(number)
        else:
            group.poll(exchange.waited_s, suspects=self._handle.is_suspicious)
        return False

    @property
    def _handle(self) -> GroupCollectives:
        assert self._collectives is not None, "fabric used after close"
        return self._collectives

    def begin(self, operation: RetryableOp) -> ElasticExchange:
        """Begin the next exchange."""
        with self._lock:
            number, is_broken = self._elastic_group.number, False
            floor = next((e.number for e in self._exchanges if not e.is_taken), self._begun)
            exchange = ElasticExchange(self, operation, self._begun, floor)
            self._begun += 1
            self._exchanges.append(exchange)
            self._most_kept = max(self._most_kept, len(self._exchanges))
            if exchange.number in self._early:
                exchange.take(self._early.pop(exchange.number))
            elif self._is_issuing:
                is_broken = not self._issue(exchange)
        if is_broken:
            self._elastic_group.invalidate(number)
        return exchange

    def _issue(self, exchange: ElasticExchange) -> bool:
        """Begin a try, if it is not complete; False if a connection of the group is known to be broken."""
        if exchange.is_complete:
            return True
        try:
            exchange.issue(self._handle, self.rank, self._members)
        except (RuntimeError, NetworkError):
            return False
        return True

    def _forget(self, exchange: ElasticExchange) -> None:
        """Let go of what all others have, too: all that came before this exchange was begun."""
        while exchange.implies_begun and self._exchanges[0].number < exchange.floor:
            over = self._exchanges.popleft()
            if (memory := over.free()) is not None:
                self._spare.give(memory, over.number, self._most_kept)

    def _find(self, number: int) -> ElasticExchange | None:
        first = self._begun - len(self._exchanges)
        return self._exchanges[number - first] if first <= number < self._begun else None


class ElasticScattered:
    """The first round of a sum in two. A `Scattered`."""

    def __init__(self, fabric: BoundElastic, operation: RetryableReduceScatter) -> None:
        self._fabric, self._operation, self._exchange = fabric, operation, fabric.begin(operation)
        self.sent_bytes = self._exchange.sent_bytes

    def wait(self, timeout: timedelta) -> bool:
        return self._exchange.wait(timeout)

    def done(self) -> bool:
        return self._exchange.done()

    def result(self) -> Reply:
        return self._exchange.result()

    def all_gather(self) -> ElasticExchange:
        return self._fabric.begin(RetryableSumGather(self._fabric.world, self._operation))


class ElasticExchange:
    """One exchange under way, or kept. A `Pending`.

    Args:
        number: from 0, the same on all workers.
        floor: all before this one had been waited for when it was begun.
    """

    def __init__(self, fabric: BoundElastic, operation: RetryableOp, number: int, floor: int) -> None:
        self._fabric, self._operation = fabric, operation
        self.number, self.floor = number, floor
        self.sent_bytes = operation.sent_bytes(fabric.rank)
        self.is_complete = self.is_taken = False
        self.implies_begun = operation.implies_begun
        self._pending: Pending | None = None
        self._since_s = time.monotonic()

    # -- called by the engine ------------------------------------------------------------------------------------

    @property
    def owed(self) -> str:
        """The transfer that it waits for; see `TellsOwed`."""
        return getattr(self._pending, "owed", "")

    def wait(self, timeout: timedelta) -> bool:
        self.is_taken = self.is_taken or self._fabric.proceed(self, timeout)
        return self.is_taken

    def done(self) -> bool:
        pending = self._pending
        return self.is_complete or (pending is not None and pending.done())

    def result(self) -> Reply:
        return self._operation.reply()

    # -- called by its fabric ------------------------------------------------------------------------------------

    @property
    def waited_s(self) -> float:
        """Seconds that it has been under way."""
        return time.monotonic() - self._since_s

    def issue(self, collectives: GroupCollectives, rank: int, members: tuple[int, ...]) -> None:
        """Begin a try among these members.

        Raises:
            RuntimeError: if a connection is known to be broken.
        """
        self._pending = self._operation.issue(collectives, rank, members)
        self.sent_bytes = self._pending.sent_bytes or self.sent_bytes

    def poll(self, timeout: timedelta) -> bool:
        """Whether it is complete.

        Raises:
            NetworkError: if a connection broke.
        """
        if not self.is_complete and self._pending is not None and self._pending.wait(timeout):
            self.is_complete, self._pending = True, None
        return self.is_complete

    def stop(self) -> Pending | None:
        """Give up its try, unless that has come to its end just now; returns what Gloo may still write to."""
        with suppress(NetworkError, PeerError):
            self.poll(_AT_ONCE)
        left, self._pending = self._pending, None
        return None if isinstance(left, PathPending) else left

    def take(self, data: bytes) -> None:
        """Complete it with what it came to elsewhere."""
        self._operation.take(data)
        self.is_complete, self._pending = True, None

    def to_bytes(self) -> bytes:
        """The result, as bytes."""
        return self._operation.to_bytes()

    def free(self) -> torch.Tensor | None:
        """Give up the memory that it is kept in; nobody can lack it any more."""
        return self._operation.free()
