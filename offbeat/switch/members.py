"""The workers that take part in a job at a switch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.switch.cap import Brought
from offbeat.switch.packet import Packet, PacketKind, Reason, is_newer

ALL = 255  # the worker of an answer to all members
Port = Hashable


class Answer(NamedTuple):
    """A packet to one worker, or to all members (`ALL`)."""

    worker: int
    packet: Packet


@dataclass
class MemberState:
    """One worker that takes part.

    Args:
        cookie: of its incarnation.
        port: where its packets come from; None until it has joined.
        finished: its last step that is over.
        acked: the first chunk whose result it lacks.
        until: it may begin steps before this clock, whatever the windows say.
        heard_s: when its last packet came.
        counts: its packets by kind and by what became of them.
        brought: what was added of it, where that is capped.
    """

    cookie: int
    port: Port = None
    finished: int = 0
    acked: int = 0
    until: int = 0
    heard_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    brought: Brought = field(default_factory=Brought)


class Members:
    """The workers that take part, by rank."""

    def __init__(self) -> None:
        self._by_rank: dict[int, MemberState] = {}
        self.bits = 0  # bit w is set if worker w takes part
        self.refused: Counter[str] = Counter()  # packets, by reason

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._by_rank))

    def __contains__(self, worker: int) -> bool:
        return worker in self._by_rank

    def __getitem__(self, worker: int) -> MemberState:
        return self._by_rank[worker]

    def get(self, worker: int) -> MemberState | None:
        """The state of a worker; None if it takes no part."""
        return self._by_rank.get(worker)

    def add(self, worker: int, state: MemberState) -> None:
        """Take a worker in, instead of its earlier incarnation if there is one."""
        self._by_rank[worker] = state
        self.bits |= 1 << worker

    def remove(self, worker: int) -> None:
        """Go on without a worker."""
        del self._by_rank[worker]
        self.bits &= ~(1 << worker)

    def lacks(self, chunk: int) -> int | None:
        """Find a member that has not said yet that it has the result of `chunk`."""
        return next((w for w in self if not is_newer(self[w].acked, chunk)), None)

    def refuse(
        self, packet: Packet, reason: Reason, *, worker: int | None = None, chunk: int | None = None,
        attempt: int = 0, exponent: int = 0,
    ) -> Answer:  # fmt: skip
        """Answer a packet that is refused.

        Args:
            worker: whom it is about, if not the sender.
            chunk, attempt, exponent: what the packet's slot serves instead.
        """
        self.refused[reason.name] += 1
        about = packet.worker if worker is None else worker
        chunk = packet.chunk if chunk is None else chunk
        return Answer(packet.worker, refusal(packet, reason, about, chunk, attempt, exponent))


def refusal(packet: Packet, reason: Reason, worker: int, chunk: int = 0, attempt: int = 0, exponent: int = 0) -> Packet:
    """The packet that says why another one was refused."""
    return Packet(
        PacketKind.NACK, packet.job, worker, clock=packet.clock, chunk=chunk, slot=packet.slot, epoch=attempt,
        exponent=exponent, window_old=packet.kind, window_new=reason,
    )  # fmt: skip
