"""The table at a switch: sums that last, to which workers add their updates when they like, and which they read.

A row keeps the sum of all that was ever added to it. An update is added once per step of a worker: only the step after
the last that it has finished counts, and of that each row's update once. An update of a later step says, too, that the
steps before it are over, and so does whoever reads: it would have had to push first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.switch.chunk_stream import add_to
from offbeat.switch.members import Answer, Members, MemberState
from offbeat.switch.packet import NO_FLAGS, Flag, Packet, PacketKind, Reason, distance, wrapped

if TYPE_CHECKING:
    from offbeat.switch.clocks import Clocks
    from offbeat.switch.job_shape import JobShape


@dataclass
class TableRow:
    """One row.

    Args:
        values: the sum of all that was added.
        added: the last step of each worker whose update is in it.
        flags: `SATURATED` if a value did not fit.
    """

    values: list[int]
    added: dict[int, int] = field(default_factory=dict)
    flags: Flag = NO_FLAGS


class Table:
    """The rows of one job.

    Args:
        shape, members, clocks: of the job.
        exponent: of all values.
    """

    def __init__(self, shape: JobShape, members: Members, clocks: Clocks, exponent: int = 0) -> None:
        self._shape, self._members, self._clocks, self.exponent = shape, members, clocks, exponent
        self.rows = [TableRow([0] * shape.values) for _ in range(shape.rows)]

    def forget(self, worker: int) -> None:
        """Take nothing of a worker's next incarnation for a repetition of what the last one added."""
        for row in self.rows:
            row.added.pop(worker, None)

    def inc(self, packet: Packet, member: MemberState) -> list[Answer]:
        """Take in a member's update of one row."""
        step = distance(packet.clock, member.finished)
        if step > self._shape.ring - 1:
            return [self._members.refuse(packet, Reason.WRONG_CLOCK)]
        is_whole = packet.chunk < len(self.rows) and len(packet.values) == self._shape.values
        if not is_whole or packet.exponent != self.exponent:
            return [self._members.refuse(packet, Reason.MALFORMED)]
        answers: list[Answer] = []
        if step > 1:  # all its updates of the step before are in, or it would not have begun this one
            answers = self._clocks.finish(packet.worker, member, wrapped(packet.clock - 1))
        row = self.rows[packet.chunk]
        if step <= 0 or row.added.get(packet.worker) == packet.clock:
            member.counts["duplicates"] += 1
        else:
            if add_to(row.values, packet.values):
                row.flags = Flag.SATURATED
            row.added[packet.worker] = packet.clock
        told = Packet(
            PacketKind.INC_OK, packet.job, packet.worker, clock=packet.clock, chunk=packet.chunk, flags=row.flags
        )
        return [*answers, Answer(packet.worker, told)]

    def read(self, packet: Packet, member: MemberState) -> list[Answer]:
        """Answer with one row, and how far all are; who reads has finished its step."""
        if packet.chunk >= len(self.rows):
            return [self._members.refuse(packet, Reason.MALFORMED)]
        row, clocks = self.rows[packet.chunk], self._clocks
        ahead = distance(packet.clock, clocks.low)
        if ahead > self._shape.ring - 2:
            return [self._members.refuse(packet, Reason.AHEAD_OF_RING)]
        answers = clocks.finish(packet.worker, member, packet.clock) if ahead > 0 else []
        told = Packet(
            PacketKind.ROW, packet.job, packet.worker, clock=clocks.low, chunk=packet.chunk, epoch=clocks.windows.epoch,
            bitmap=packet.clock, exponent=self.exponent, flags=row.flags, values=tuple(row.values),
        )  # fmt: skip
        return [*answers, Answer(packet.worker, told)]
