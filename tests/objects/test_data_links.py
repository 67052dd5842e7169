"""Tests of the links on which a store reads from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from offbeat.objects.data_links import FeederLink
from offbeat.protocol.object_lanes import ReadObject
from offbeat.protocol.objects import ObjectName
from offbeat.wire.lane import AddingSink, CopyingSink, GrowingBuffer, LaneBlock, StagingPool

if TYPE_CHECKING:
    from offbeat.wire.lane import Sink
    from offbeat.wire.link import PeerLink


class SilentLink:
    """A link on which nobody answers."""

    def __init__(self) -> None:
        self.releases = 0

    def send(self, metadata: bytes) -> None:
        """Nobody hears it."""

    def release_body(self) -> None:
        self.releases += 1


def test_a_block_that_is_here_in_part_has_no_effect_once_nobody_wants_it() -> None:
    out, own = (GrowingBuffer(memoryview(bytearray(8)), progress) for progress in (0, 8))
    sinks: list[Sink] = [CopyingSink(out), AddingSink(own, out, lambda *_: None, StagingPool())]
    for sink in sinks:
        feeder, link = FeederLink("10.0.0.1:1", "10.0.0.2:1", lambda: None), SilentLink()
        feeder.link = cast("PeerLink", link)
        lane = feeder.read(
            lambda lane: ReadObject(
                lane=lane, name=ObjectName("w"), stripe=0, generation=0, begin=0, end=8, start=0, until=8
            ),
            sink,
            lambda why: None,
        )
        block = msgspec.msgpack.encode(LaneBlock(0, lane, 0, 0, 0))
        place = feeder.destination(block, 4)
        feeder.stop(lane)
        feeder.received(block, place)
        assert out.progress == 0
        assert link.releases == 1, "its memory may have another use now"
