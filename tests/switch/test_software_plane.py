"""What a switch in software makes of batches in which workers come and go, and of what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat.protocol.switch_control import Strategy
from offbeat.switch.job_shape import JobShape
from offbeat.switch.packet import Flag, Packet, PacketKind, Reason, decode
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.software_plane import SoftwarePlane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VALUES = 16


class PlayedPlane(SoftwarePlane):
    """A plane with jobs 1 and 2 of two workers each, which keeps what it sends."""

    def __init__(self) -> None:
        super().__init__(self._keep)
        self.sent: list[Packet] = []
        for number in (1, 2):
            self.create_job(JobShape(number, 2, VALUES, 4, 4), Strategy())
            for worker in range(2):
                self.admit(number, worker, 100 + worker)

    def _keep(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64]) -> None:
        self.sent += [decode(data) for data in batch.among(rows).datagrams()]

    def take(self, packets: Sequence[Packet], ports: Sequence[int]) -> list[Packet]:
        """Take in one batch; what it sends."""
        self.sent.clear()
        self.handle(PacketBatch.of(list(packets), VALUES), np.array(ports, np.uint64), 0.0)
        return list(self.sent)


def packet(kind: PacketKind, worker: int = 0, job: int = 1, bitmap: int = 0) -> Packet:
    flags = Flag.FIRST | Flag.PRIME if kind == PacketKind.DATA else Flag(0)
    return Packet(kind, job, worker, cookie=100 + worker, bitmap=bitmap, flags=flags)


def test_who_leaves_and_sends_in_one_batch_is_refused_and_costs_no_other_job_its_packets() -> None:
    plane = PlayedPlane()
    joins = [packet(PacketKind.JOIN, worker, job) for job in (1, 2) for worker in range(2)]
    plane.take(joins, [11, 12, 21, 22])
    told = plane.take(
        [packet(PacketKind.LEAVE), packet(PacketKind.DATA), packet(PacketKind.CLOCK, job=2)], [11, 11, 21]
    )
    assert [one.kind for one in told] == [PacketKind.LEAVE_OK, PacketKind.NACK, PacketKind.GRANT]
    assert told[1].reason is Reason.NOT_A_MEMBER
    assert plane.stats(2, 0.0).members[0].counts["CLOCK"] == 1


def test_who_joins_and_sends_in_one_batch_is_heard() -> None:
    plane = PlayedPlane()
    told = plane.take([packet(PacketKind.JOIN), packet(PacketKind.DATA), packet(PacketKind.PROBE)], [11, 11, 11])
    assert [one.kind for one in told] == [PacketKind.JOIN_OK, PacketKind.PROBE_OK]
    assert plane.stats(1, 0.0).members[0].counts["DATA"] == 1
    assert plane.dropped["refused"] == 0


def test_the_first_few_that_are_refused_are_told_why_and_all_are_counted() -> None:
    plane = PlayedPlane()
    told = plane.take([packet(PacketKind.JOIN, 7)] * 50 + [packet(PacketKind.DATA, 7)] * 50, [11] * 100)
    assert 0 < len(told) < 50
    assert plane.dropped["refused"] == 100


def test_nobody_is_ahead_of_the_furthest_also_where_numbers_have_wrapped_around() -> None:
    plane = PlayedPlane()
    plane.take([packet(PacketKind.JOIN)], [11])
    for bitmap in (0x7FFF_FFFF, 0x9000_0000):
        plane.take([packet(PacketKind.DATA, bitmap=bitmap)], [11])
        assert all(one.lag >= 0 for one in plane.stats(1, 0.0).members.values())
