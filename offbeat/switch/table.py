"""The table at a switch: sums that last, to which workers add their updates when they like, and which they read.

A row keeps the sum of all that was ever added to it. An update is added once per step of a worker: only the step after
the last that it has finished counts, and of that each row's update once. An update of a later step says, too, that the
steps before it are over, and so does whoever reads: it would have had to push first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat.switch.fixed_point import saturating_sum
from offbeat.switch.members import Answer, Members, MemberState
from offbeat.switch.packet import NO_FLAGS, Flag, Packet, PacketKind, Reason, distance, wrapped

if TYPE_CHECKING:
    from offbeat.switch.clocks import Clocks
    from offbeat.switch.job_shape import JobShape


class Table:
    """The rows of one job.

    Args:
        shape, members, clocks: of the job.
        exponent: of all values.
    """

    def __init__(self, shape: JobShape, members: Members, clocks: Clocks, exponent: int = 0) -> None:
        self._shape, self._members, self._clocks, self.exponent = shape, members, clocks, exponent
        self.values = np.zeros((shape.rows, shape.values), np.int32)  # the sums of all that was added
        self._has_added = np.zeros(shape.rows, np.uint64)  # workers with an update in a row, as bits
        self._added = np.zeros((shape.rows, shape.workers), np.uint32)  # the last step of each of these
        self._is_saturated = np.zeros(shape.rows, np.bool_)  # a value did not fit

    def forget(self, worker: int) -> None:
        """Take nothing of a worker's next incarnation for a repetition of what the last one added."""
        self._has_added &= ~np.uint64(1 << worker)

    def inc(self, packet: Packet, member: MemberState) -> list[Answer]:
        """Take in a member's update of one row."""
        step = distance(packet.clock, member.finished)
        if step > self._shape.ring - 1:
            return [self._members.refuse(packet, Reason.WRONG_CLOCK)]
        is_whole = packet.chunk < self._shape.rows and len(packet.values) == self._shape.values
        if not is_whole or packet.exponent != self.exponent:
            return [self._members.refuse(packet, Reason.MALFORMED)]
        answers: list[Answer] = []
        if step > 1:  # all its updates of the step before are in, or it would not have begun this one
            answers = self._clocks.finish(packet.worker, member, wrapped(packet.clock - 1))
        row, worker = packet.chunk, packet.worker
        has_added = int(self._has_added[row]) >> worker & 1 and self._added[row, worker] == packet.clock
        if step <= 0 or has_added:
            member.counts["duplicates"] += 1
        else:
            self.values[row], did_not_fit = saturating_sum(self.values[row], packet.values)
            self._is_saturated[row] |= did_not_fit
            self._has_added[row] |= np.uint64(1 << worker)
            self._added[row, worker] = packet.clock
        told = Packet(PacketKind.INC_OK, packet.job, worker, clock=packet.clock, chunk=row, flags=self._flags_of(row))
        return [*answers, Answer(packet.worker, told)]

    def read(self, packet: Packet, member: MemberState) -> list[Answer]:
        """Answer with one row, and how far all are; who reads has finished its step."""
        if packet.chunk >= self._shape.rows:
            return [self._members.refuse(packet, Reason.MALFORMED)]
        row, clocks = packet.chunk, self._clocks
        ahead = distance(packet.clock, clocks.low)
        if ahead > self._shape.ring - 2:
            return [self._members.refuse(packet, Reason.AHEAD_OF_RING)]
        answers = clocks.finish(packet.worker, member, packet.clock) if ahead > 0 else []
        told = Packet(
            PacketKind.ROW, packet.job, packet.worker, clock=clocks.low, chunk=packet.chunk, epoch=clocks.windows.epoch,
            bitmap=packet.clock, exponent=self.exponent, flags=self._flags_of(row),
            values=tuple(self.values[row].tolist()),
        )  # fmt: skip
        return [*answers, Answer(packet.worker, told)]

    def _flags_of(self, row: int) -> Flag:
        return Flag.SATURATED if self._is_saturated[row] else NO_FLAGS
