"""The measurement of links: how much is sent, and what is said of one that does not come to an end."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from offbeat.errors import NetworkError
from offbeat.fabric.discovery import PairExchange, measure_rates
from tests.wire.meshes import in_loop, meshes

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from offbeat.fabric.lane_network import LaneNetwork

BYTES = 400_000
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("out_bytes", "come_bytes", "says"),
    [
        (BYTES, 1, f"in 1 s: it has not confirmed the {BYTES} bytes sent to it. Give"),
        (1, BYTES, rf"in 1 s: \d+ of the {BYTES} bytes that it sends are here. Give"),
    ],
    ids=["to it", "from it"],
)
@in_loop
async def test_the_direction_that_has_not_ended_is_named(out_bytes: int, come_bytes: int, says: str) -> None:
    async with meshes(2, {(0, 1): []}) as (made, proxies):
        for way in (proxies[0, 1].up, proxies[0, 1].down):
            way.rate_bytes_per_s = 100_000
        mine, theirs = (PairExchange(made[rank].channel(0), 1 - rank, SECOND) for rank in (0, 1))
        other = asyncio.ensure_future(theirs.both_ways(0, come_bytes, out_bytes))
        with pytest.raises(NetworkError, match=f"Cannot measure the link with rank 1 {says}"):
            await mine.both_ways(0, out_bytes, come_bytes)
        other.cancel()


class FakeNetwork:
    """Two workers, of which the other one's figures are this one's."""

    world, place, members, patience = 2, 0, (0, 1), SECOND
    loop: FakeNetwork

    def __init__(self) -> None:
        self.loop = self

    def measurements(self, count: int) -> tuple[Any, int]:
        return None, 0

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)

    def meet(self, text: str) -> list[str]:
        if not text:
            return [text, text]
        message_s, rates, paces, error = json.loads(text)
        return [text, json.dumps([message_s, rates[::-1], paces[::-1], error])]


@pytest.mark.parametrize(("pace", "second"), [(1e9, 64 << 20), (1e6, 256 << 10)], ids=["quiet", "busy"])
def test_where_workers_wait_for_a_processor_less_is_sent(
    monkeypatch: pytest.MonkeyPatch, pace: float, second: int
) -> None:
    """A few blocks come as fast as the link is, and yet the whole exchange takes long."""
    sent: list[int] = []

    async def both_ways(self: PairExchange, number: int, out_bytes: int, come_bytes: int) -> tuple[float, float]:
        sent.append(out_bytes)
        return 1e9, come_bytes / pace

    monkeypatch.setattr(PairExchange, "both_ways", both_ways)
    network = FakeNetwork()
    rates, _ = measure_rates(cast("LaneNetwork", network), network.meet, [1])
    assert [size for size in sent if size > 1] == [256 << 10, second]
    assert rates == [[0, 1e9], [1e9, 0]]
