"""Runners of algorithms on vectors: over lanes, or in rounds of a process group's sends and receives."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from offbeat.collective.rank_part import part_of
from offbeat.fabric.lane_exchange import LaneExchange
from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from offbeat.collective.algorithm import Algorithm
    from offbeat.fabric.lane_exchange import Owed
    from offbeat.fabric.lane_network import LaneNetwork
    from offbeat.wire.lane import BusyTime


class Exchange(Protocol):
    """The Protocol of an exchange that is under way."""

    sent_bytes: int

    def wait(self, timeout: timedelta) -> bool:
        """Wait until it is over.

        Raises:
            OffbeatError: that it failed with.
        """

    def done(self) -> bool:
        """Whether it is over."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have something called when it is over, well or not; at once, if it is."""

    def owed(self) -> Sequence[Owed]:
        """List the transfers that have not come, if it is known; those that miss most come first."""


class AlgorithmRunner(Protocol):
    """The Protocol of what carries out algorithms, whose ranks are places in a group.

    Attributes:
        network: the links with the others.
        busy: what it has sent, and in what time.
        device: where the vectors are.
        in_rounds: whether algorithms have to be in rounds (`offbeat.collective.rounds`).
    """

    network: LaneNetwork
    busy: BusyTime
    device: torch.device
    in_rounds: bool

    def prepared(self, algorithm: Algorithm) -> Callable[[torch.Tensor], Exchange]:
        """Make what begins an exchange of a vector [D], contiguous, which the result is written to.

        Exchanges begin in the same order on all workers.
        """

    def close(self) -> None:
        """Let go of what is its own, once nothing is under way; again does nothing."""

    def abandon(self) -> None:
        """Let go at once."""


class LaneRunner:
    """A channel on which algorithms are carried out on vectors in the memory of the host. An `AlgorithmRunner`.

    Args:
        network: the links.
    """

    device, in_rounds = torch.device("cpu"), False

    def __init__(self, network: LaneNetwork) -> None:
        self.network, self.busy, self._channel = network, network.mesh.busy, network.channel()
        self._issued, self._order = 0, threading.Lock()

    def prepared(self, algorithm: Algorithm) -> Callable[[torch.Tensor], LaneExchange]:
        part, digest = part_of(algorithm, self.network.place, self.network.members), algorithm.digest[:8]

        def start(whole: torch.Tensor) -> LaneExchange:
            terms = f"a sum of {whole.numel()} {dtype_name(whole.dtype)} ({digest})"
            bytes_of_all = memoryview(whole.detach().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
            size = whole.element_size()
            places = [
                bytes_of_all[size * place.start : size * place.stop]
                for place in (chunk.place(whole.numel()) for chunk in algorithm.chunks)
            ]
            add, pool = functools.partial(_add, whole.dtype), self.network.pool
            with self._order:
                exchange = LaneExchange(self._channel, self._issued, part, terms, places, add, pool)
                self._issued += 1
                self.network.loop.call(exchange.begin)
            return exchange

        return start

    def close(self) -> None:
        """Do nothing: links belong to the network."""

    def abandon(self) -> None:
        """Do nothing: links belong to the network."""


def _add(dtype: torch.dtype, out: memoryview, own: memoryview, received: bytearray) -> None:
    """Add two parts of a vector."""
    mine, theirs = torch.frombuffer(own, dtype=dtype), torch.frombuffer(received, dtype=dtype)
    torch.add(mine, theirs, out=torch.frombuffer(out, dtype=dtype))
