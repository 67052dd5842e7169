"""Tensors on a GPU over a fabric that carries those of CPUs: through pinned memory of the host.

    tensor -> pinned memory   on a stream of its own, behind what was to be computed when the exchange began
    -> the fabric             once the copy is there: nobody waits for it but whoever waits for the exchange
    -> tensor                 on the stream of whoever takes the result

So a backward pass goes on while its first buckets are copied. Exchanges reach the fabric in the order in which they
were begun, whatever is copied first: on every worker the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from offbeat.fabric.fabric import Reroutes
from offbeat.payload import GatheredPart, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from offbeat.fabric.fabric import Fabric, Offers
    from offbeat.payload import Payload, Reply
    from offbeat.pending import Pending


class CopyEvent(Protocol):
    """The Protocol of what tells that copies are there, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether they are."""

    def synchronize(self) -> None:
        """Wait until they are."""


class HostCopies(Protocol):
    """The Protocol of what copies tensors to the host."""

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], CopyEvent | None]:
        """Begin to copy tensors; those that lie there already are returned as they are.

        Returns:
            The copies, and what tells when they are there; None if they are.
        """


class CudaCopies:
    """Copies to pinned memory, on a stream beside those that compute. A `HostCopies`."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], CopyEvent | None]:
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return list(tensors), None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # The allocator of pinned memory gives none of it to another before the copies from it have been made.
            hosts = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                if tensor.is_cuda
                else tensor
                for tensor in tensors
            ]
            event = torch.cuda.Event()
            event.record(stream)
        return hosts, event


class StagedFabric:
    """A fabric for tensors that are copied to the host and back. A `Fabric`.

    Args:
        fabric: that carries the copies.
        copies: makes them.
    """

    def __init__(self, fabric: Fabric, copies: HostCopies) -> None:
        self._fabric, self._copies = fabric, copies
        self._waiting: deque[StagedPending] = deque()  # for their copies, in the order in which they were begun

    @property
    def rank(self) -> int:
        return self._fabric.rank

    @property
    def world(self) -> int:
        return self._fabric.world

    @property
    def offers(self) -> Offers:
        return replace(self._fabric.offers, reduce_scatter=False)  # parts of sums are not staged

    def start(self, payload: Payload) -> StagedPending:
        sent_bytes = payload.size_bytes if self.world > 1 else 0
        if not isinstance(payload, Sum):
            hosts, event = self._copies.take(payload.tensors)
            gather = type(payload)(tuple(hosts))
            return self._begin(payload.tensors, hosts, event, lambda: self._fabric.start(gather), sent_bytes)
        tensors = (payload.tensor,) if payload.tail is None else (payload.tensor, payload.tail)
        hosts, event = self._copies.take(tensors)
        staged = replace(payload, tensor=hosts[0], tail=None if payload.tail is None else hosts[1])
        return self._begin(tensors, hosts, event, lambda: self._fabric.start(staged), sent_bytes)

    def broadcast(self, tensor: torch.Tensor, source: int) -> StagedPending:
        hosts, event = self._copies.take((tensor,))
        sent_bytes = tensor.numel() * tensor.element_size() if self.rank == source and self.world > 1 else 0
        return self._begin((tensor,), hosts, event, lambda: self._fabric.broadcast(hosts[0], source), sent_bytes)

    def wants_reroute(self) -> bool:
        return isinstance(self._fabric, Reroutes) and self._fabric.wants_reroute()

    def reroute(self, meet: Callable[[str], list[str]]) -> str:
        return self._fabric.reroute(meet) if isinstance(self._fabric, Reroutes) else ""

    def close(self) -> None:
        self._fabric.close()

    def abandon(self) -> None:
        self._fabric.abandon()

    def advance(self, until: StagedPending | None = None) -> None:
        """Hand to the fabric what has been copied.

        Args:
            until: an exchange that is to be handed over, whatever has to be waited for.
        """
        while self._waiting and (self._waiting[0].is_copied() or (until is not None and not until.has_begun)):
            self._waiting[0].begin()
            self._waiting.popleft()

    def _begin(
        self, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor], event: CopyEvent | None,
        issue: Callable[[], Pending], sent_bytes: int,
    ) -> StagedPending:  # fmt: skip
        pending = StagedPending(self, tensors, hosts, event, issue, sent_bytes)
        self._waiting.append(pending)
        self.advance()
        return pending


class StagedPending:
    """An exchange whose tensors are copied first. A `Pending`; made by `StagedFabric`."""

    def __init__(
        self, fabric: StagedFabric, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor],
        event: CopyEvent | None, issue: Callable[[], Pending], sent_bytes: int,
    ) -> None:  # fmt: skip
        self._fabric, self._tensors, self._hosts, self._event, self._issue = fabric, tensors, hosts, event, issue
        self._pending: Pending | None = None
        self.sent_bytes = sent_bytes

    @property
    def has_begun(self) -> bool:
        """Whether it has been handed to the fabric."""
        return self._pending is not None

    @property
    def trouble(self) -> str:
        """The trouble that the fabric knows of; see `TellsTrouble`."""
        return getattr(self._pending, "trouble", "")

    @property
    def owed(self) -> str:
        """The transfer that the fabric waits for; see `TellsOwed`."""
        return getattr(self._pending, "owed", "")

    def is_copied(self) -> bool:
        """Whether its tensors are on the host."""
        return self._event is None or self._event.query()

    def begin(self) -> None:
        """Hand it to the fabric, once its tensors are on the host."""
        if self._event is not None:
            self._event.synchronize()
        self._pending = self._issue()

    def wait(self, timeout: timedelta) -> bool:
        self._fabric.advance(until=self)
        assert self._pending is not None
        return self._pending.wait(timeout)

    def done(self) -> bool:
        self._fabric.advance()
        return self._pending is not None and self._pending.done()

    def result(self) -> Reply:
        assert self._pending is not None, "only after it was waited for"
        reply = self._pending.result()
        if isinstance(reply, Total):
            tail = None if reply.tail is None else self._back(1, reply.tail)
            return Total(self._back(0, reply.tensor), reply.weight, tail)
        devices = [tensor.device for tensor in self._tensors]
        return [
            GatheredPart(part.worker, tuple(one.to(at) for one, at in zip(part.tensors, devices, strict=True)))
            for part in reply
        ]

    def _back(self, index: int, result: torch.Tensor) -> torch.Tensor:
        """A result in the place of what it was made of."""
        tensor = self._tensors[index]
        if self._hosts[index] is tensor:
            return result
        return tensor.copy_(result.view_as(tensor), non_blocking=True)
