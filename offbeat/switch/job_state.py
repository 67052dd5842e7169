"""The reference model of a job at a switch: what it keeps, and what it makes of each packet. No I/O, and no clock.

Every data plane does what this does, bit for bit: tests replay recorded packets to both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from offbeat.switch.chunk_stream import ChunkStream
from offbeat.switch.clocks import Clocks
from offbeat.switch.members import ALL, Answer, Members, MemberState, Port, refusal
from offbeat.switch.packet import FROM_WORKERS, Packet, PacketKind, Reason
from offbeat.switch.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.protocol.switch_control import Strategy
    from offbeat.switch.clocks import Windows
    from offbeat.switch.job_shape import JobShape


class Send(NamedTuple):
    """A packet to a port."""

    port: Port
    packet: Packet


class SumsChunks(Protocol):
    """The part of a job that sums streams: `ChunkStream`, or one that does the same faster."""

    quorum: int | None

    def data(self, packet: Packet, member: MemberState) -> list[Answer]: ...

    def evict(self, worker: int) -> list[Answer]: ...

    def unsettled(self, least: int) -> dict[int, int]: ...

    def close(self, clock: int, least: int) -> list[Answer]: ...


class JobState:
    """The state of one job.

    Args:
        shape: what the job takes of it.
        strategy: of the policy that the job begins with.
        clock: the last step that all workers have finished.
        exponent: of all values of the table.
        windows: that another switch had; see `Clocks`.
        stream: makes the part that sums streams.

    Raises:
        PlanError: if the strategy does not fit the shape.
    """

    def __init__(
        self,
        shape: JobShape,
        strategy: Strategy,
        *,
        clock: int = 0,
        exponent: int = 0,
        windows: Windows | None = None,
        stream: Callable[[JobShape, Members, int | None], SumsChunks] = ChunkStream,
    ) -> None:
        self.shape, self.members = shape, Members()
        self.clocks = Clocks(shape, self.members, strategy, clock, windows)
        self.stream = stream(shape, self.members, strategy.settling)
        self.table = Table(shape, self.members, self.clocks, exponent)

    # -- control -------------------------------------------------------------------------------------------------

    def admit(self, worker: int, cookie: int, *, chunk: int = 0) -> None:
        """Take a worker in, or take its new incarnation instead of the old one.

        Args:
            chunk: the first of the stream that it takes part in.
        """
        assert 0 <= worker < self.shape.workers, f"worker {worker} of {self.shape.workers}"
        low = self.clocks.low
        self.clocks.forget(worker)
        self.table.forget(worker)
        self.members.add(worker, MemberState(cookie, finished=low, acked=chunk, until=low))

    def evict(self, worker: int) -> list[Send]:
        """Go on without a worker; what it has contributed stays where it is."""
        if worker not in self.members:
            return []
        self.members.remove(worker)
        return self._addressed([*self.clocks.evict(worker), *self.stream.evict(worker)])

    def set_strategy(self, strategy: Strategy) -> list[Send] | None:
        """Change the policy; see `Clocks.set_strategy`. A quorum holds for exchanges that are not settled yet."""
        answers = self.clocks.set_strategy(strategy)
        if answers is None:
            return None
        self.stream.quorum = strategy.settling
        return self._addressed(answers)

    def allow(self, worker: int, until: int) -> list[Send]:
        """Let one worker begin steps before clock `until`; see `Clocks.allow`."""
        return self._addressed(self.clocks.allow(worker, until))

    def close(self, clock: int, least: int) -> list[Send]:
        """Settle an exchange of the stream with those who are in it, if they are so many."""
        return self._addressed(self.stream.close(clock, least))

    # -- packets -------------------------------------------------------------------------------------------------

    def handle(self, packet: Packet, port: Port, now_s: float = 0.0) -> list[Send]:
        """Take in one packet; returns what to send.

        Args:
            port: where it came from.
            now_s: the time, for statistics.
        """
        member = self.members.get(packet.worker)
        reason = self._refusal(packet, member, port)
        if reason is not None or member is None:
            reason = reason or Reason.NOT_A_MEMBER
            self.members.refused[reason.name] += 1
            return [Send(port, refusal(packet, reason, packet.worker, packet.chunk))]
        member.port = port
        member.heard_s = now_s
        member.counts[packet.kind.name] += 1
        if packet.kind == PacketKind.LEAVE:
            return [*self.evict(packet.worker), Send(port, Packet(PacketKind.LEAVE_OK, packet.job, packet.worker))]
        return self._addressed(self._answers(packet, member))

    def _refusal(self, packet: Packet, member: MemberState | None, port: Port) -> Reason | None:
        """Find why a packet is not looked at; None if it is."""
        if packet.kind not in FROM_WORKERS:
            return Reason.MALFORMED
        if member is None:
            return Reason.NOT_A_MEMBER
        if packet.cookie != member.cookie:
            return Reason.STALE_COOKIE
        binds = packet.kind == PacketKind.JOIN and member.port is None
        return None if binds or port == member.port else Reason.WRONG_PORT

    def _answers(self, packet: Packet, member: MemberState) -> list[Answer]:
        match packet.kind:
            case PacketKind.DATA:
                return self.stream.data(packet, member)
            case PacketKind.INC:
                return self.table.inc(packet, member)
            case PacketKind.READ:
                return self.table.read(packet, member)
            case PacketKind.CLOCK:
                return self.clocks.clock(packet, member)
            case PacketKind.JOIN:
                return [self.clocks.to_one(packet.worker, PacketKind.JOIN_OK)]
            case _:  # PROBE
                return [self.clocks.to_one(packet.worker, PacketKind.PROBE_OK)]

    def _addressed(self, answers: list[Answer]) -> list[Send]:
        """Say where answers go."""
        sends = []
        for worker, packet in answers:
            for one in self.members if worker == ALL else (worker,):
                port = self.members[one].port if one in self.members else None
                if port is not None:
                    sends.append(Send(port, packet))
        return sends
