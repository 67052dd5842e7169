"""Several meshes on one event loop, over loopback, some links through a proxy that does what networks should not."""

from __future__ import annotations

import asyncio
import functools
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from offbeat.testing.chaos_proxy import Damage, Proxy
from offbeat.wire.credentials import Token
from offbeat.wire.mesh import PeerMesh
from offbeat.wire.session import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

TOKEN = Token(b"0123456789abcdef")
PATIENCE = timedelta(seconds=10)


def in_loop(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine."""

    @functools.wraps(story)
    def test(*args: Any, **kwargs: Any) -> None:
        asyncio.run(story(*args, **kwargs))

    return test


def mesh(rank: int, job: str = "test/0", timeout_s: float = 2.0) -> PeerMesh:
    return PeerMesh(rank, job=job, credentials=TOKEN, limits=Limits(timeout=timedelta(seconds=timeout_s)))


@asynccontextmanager
async def meshes(
    count: int, proxied: Mapping[tuple[int, int], list[Damage]] | None = None, timeout_s: float = 2.0
) -> AsyncIterator[tuple[list[PeerMesh], dict[tuple[int, int], Proxy]]]:
    """So many that have met; `proxied` are pairs, the one that dials first, and what happens to their connection."""
    made = [mesh(rank, timeout_s=timeout_s) for rank in range(count)]
    proxies: dict[tuple[int, int], Proxy] = {}
    async with AsyncExitStack() as stack:
        addresses = {rank: await one.open("127.0.0.1") for rank, one in enumerate(made)}
        for (one, other), damages in (proxied or {}).items():
            proxies[one, other] = await stack.enter_async_context(Proxy(addresses[other], [damages]))
        seen = [
            {r: proxies[rank, r].address if (rank, r) in proxies else a for r, a in addresses.items()}
            for rank in range(count)
        ]
        await asyncio.gather(*(one.meet(to, PATIENCE) for one, to in zip(made, seen, strict=True)))
        try:
            yield made, proxies
        finally:
            for each in made:
                each.abort()
            await asyncio.sleep(0)
