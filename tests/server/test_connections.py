"""A worker's way back to its shards."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError
from offbeat.server.client.connections import ShardConnections

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from offbeat.errors import OffbeatError
    from offbeat.wire.link import PeerLink
    from offbeat.wire.session import Receiver


class Owner:
    """Uses the connections; hears what becomes of them."""

    def __init__(self) -> None:
        self.failed: OffbeatError | None = None

    def accept(self, link: PeerLink) -> Receiver:
        raise AssertionError("nobody is ever reached")

    def arrived(self) -> None:
        raise AssertionError("nobody is ever reached")

    def stranded(self, error: OffbeatError) -> None:
        pass

    def fail(self, error: OffbeatError) -> None:
        self.failed = error


def test_a_server_that_cannot_be_reached_is_dialled_again_after_ever_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dialling fails at once, as where a machine has no route any more."""
    now_s, dialled_s, owner = 0.0, list[float](), Owner()

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    async def dial(accept: Callable[[PeerLink], Receiver], patience: timedelta) -> PeerLink:
        dialled_s.append(now_s)
        raise NetworkError("No route to host")

    async def story() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: now_s)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        way = ShardConnections(owner, rank=0, dials=[dial], patience=timedelta(seconds=10))
        way.survives = way.is_up = True
        way.lose(NetworkError("it was killed"), way.entry)
        assert way._coming is not None
        await way._coming

    asyncio.run(story())
    assert owner.failed is not None
    assert dialled_s[0] == 0.0, "the first time at once"
    pauses = [after - before for before, after in itertools.pairwise(dialled_s)]
    assert all(0.025 <= pause <= 0.5 for pause in pauses)
    assert min(pauses[5:]) >= 0.25
    assert 20 <= len(dialled_s) <= 50, "in 10 s"
