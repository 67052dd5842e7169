"""A TCP proxy on loopback that does to the bytes what a network should not. Needs no rights, and no offbeat.

In a test's own event loop:

    async with Proxy("127.0.0.1:7070") as proxy:    # dial proxy.address
        proxy.down.hold()                           # a partition in one direction ...
        proxy.down.release()                        # ... is healed
        proxy.up.rate_bytes_per_s = 1e6
        proxy.up.damage(Damage("flip"))             # in what passes next

As a program: `python chaos_proxy.py SOCKET TARGET` writes its address, obeys a JSON line per connection to SOCKET (see
`obey`), answers "told" once it does, if it has not happened yet, and "fired" when it has, and ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_READ_BYTES = 64 << 10
_SLOW_READ_BYTES = 4000  # where bytes wait: small pieces, so that they flow
_READ_AHEAD = 64  # pieces that wait in one direction of a connection
_RECORDED_BYTES = 256 << 10  # of a connection, to be replayed


@dataclass
class Damage:
    """One thing that happens to one direction of one connection.

    Args:
        kind: "cut" the connection; "flip" a bit; "drop", "repeat" or "delay" `size` bytes; "swap" them with the
            `size` bytes behind them.
        at: after so many bytes of this direction.
        up: from who dialled; else towards it.
        fired: whether it has happened.
        then: called when it happens.
    """

    kind: str
    at: int = 0
    size: int = 1
    up: bool = True
    fired: bool = False
    then: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def needs(self) -> int:
        """The number of bytes that have to be there for it to happen."""
        return {"cut": 0, "flip": 1, "swap": 2 * self.size}.get(self.kind, self.size)


class ProxyDirection:
    """One direction of every connection.

    `delay_s` and up to `jitter_s` more pass before a piece goes on; `rate_bytes_per_s` is what a connection carries, 0
    for as much as it can. All may be changed at any time.
    """

    def __init__(self, name: str) -> None:
        self.delay_s = self.jitter_s = self.rate_bytes_per_s = 0.0
        self.ordered: list[Damage] = []
        self._passes = asyncio.Event()
        self._passes.set()
        self._chance = random.Random(name)

    def hold(self) -> None:
        """Hold all bytes back."""
        self._passes.clear()

    def release(self) -> None:
        """Let pass what was held, and all that comes."""
        self._passes.set()

    def damage(self, damage: Damage) -> None:
        """Do it to what passes next, on whichever connection."""
        self.ordered.append(damage)

    @property
    def is_slow(self) -> bool:
        """Whether bytes wait."""
        return bool(self.delay_s or self.jitter_s or self.rate_bytes_per_s)

    def due_s(self, now_s: float) -> float:
        """The time when a piece that has just arrived may go on."""
        return now_s + self.delay_s + (self.jitter_s * self._chance.random() if self.jitter_s else 0.0)

    async def pass_on(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        """Write a piece, as soon and as fast as it may."""
        if self.rate_bytes_per_s:
            await asyncio.sleep(len(data) / self.rate_bytes_per_s)
        await self._passes.wait()
        writer.write(data)
        await writer.drain()


class Proxy:
    """A TCP proxy that forwards each connection to `target`.

    Args:
        target: "host:port".
        damages: those of the first connection, of the second, and so on; later ones have none.
    """

    def __init__(self, target: str, damages: Iterable[list[Damage]] = ()) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._damages = list(damages)
        self.up, self.down = ProxyDirection("up"), ProxyDirection("down")
        self.connections = 0
        self.forwarded = 0
        self.recorded = bytearray()  # how the first connection began, from who dialled
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving = 0
        self.address = ""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.release()
        self.cut_all()
        while self._serving:  # those that have just come in are cut, too
            await asyncio.sleep(0.001)
            self.cut_all()

    def hold(self) -> None:
        """Hold all bytes back in both directions: a partition."""
        self.up.hold()
        self.down.hold()

    def release(self) -> None:
        """Heal it."""
        self.up.release()
        self.down.release()

    def cut_all(self) -> None:
        """Break every connection there is."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def replay(self) -> bytes:
        """Send what the first connection began with on another one; what is answered until that is closed."""
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        answer = b""
        with contextlib.suppress(OSError):
            writer.write(bytes(self.recorded))
            while data := await reader.read(_READ_BYTES):
                answer += data
        writer.transport.abort()
        return answer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving += 1
        try:
            await self._forward(reader, writer)
        finally:
            self._serving -= 1

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        damages = self._damages[number] if number < len(self._damages) else []
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        up = self._pump(self.up, reader, far_writer, [one for one in damages if one.up], is_first=number == 0)
        down = self._pump(self.down, far_reader, writer, [one for one in damages if not one.up])
        pumps = {asyncio.ensure_future(up), asyncio.ensure_future(down)}
        try:
            await asyncio.wait(pumps, return_when="FIRST_COMPLETED")
        finally:
            for pump in pumps:
                pump.cancel()
            for one in both:
                one.transport.abort()
            self._writers -= both

    async def _pump(
        self,
        way: ProxyDirection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        damages: list[Damage],
        is_first: bool = False,
    ) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_READ_AHEAD)
        reading = asyncio.ensure_future(_read(way, reader, pieces))
        try:
            await self._pass_on(way, pieces, writer, sorted(damages, key=lambda one: one.at), is_first=is_first)
        finally:
            reading.cancel()

    async def _pass_on(
        self,
        way: ProxyDirection,
        pieces: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        damages: list[Damage],
        *,
        is_first: bool,
    ) -> None:
        done, pending = 0, b""
        with contextlib.suppress(OSError):
            while True:
                if way.ordered and pending:
                    ordered = way.ordered.pop(0)
                    ordered.at = done
                    damages.insert(0, ordered)
                damage = damages[0] if damages else None
                if damage is None:
                    now, pending = pending, b""
                elif done + len(pending) >= damage.at + damage.needs:
                    now, pending = pending[: damage.at - done], pending[damage.at - done :]
                else:
                    size = max(0, damage.at - done)
                    now, pending = pending[:size], pending[size:]
                await way.pass_on(now, writer)
                if is_first and len(self.recorded) < _RECORDED_BYTES:
                    self.recorded += now
                done += len(now)
                self.forwarded += len(now)
                if damage is not None and done == damage.at and len(pending) >= damage.needs:
                    damages.pop(0)
                    damage.fired = True
                    damage.then()
                    if damage.kind == "cut":
                        await asyncio.sleep(0.002)  # what was forwarded shall arrive
                        return
                    pending = await _spoil(damage, pending)
                    if damages or pending:
                        continue
                due_s, data = await pieces.get()
                if not data:
                    return
                if (early_s := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(early_s)
                pending += data


async def _read(way: ProxyDirection, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
    """Take in what comes, up to its end."""
    data = b"begin"
    while data:
        try:
            data = await reader.read(_SLOW_READ_BYTES if way.is_slow else _READ_BYTES)
        except OSError:
            data = b""
        await pieces.put((way.due_s(time.monotonic()), data))


async def _spoil(damage: Damage, data: bytes) -> bytes:
    part, rest = data[: damage.size], data[damage.size :]
    if damage.kind == "flip":
        return bytes((data[0] ^ 1,)) + data[1:]
    if damage.kind == "drop":
        return rest
    if damage.kind == "repeat":
        return part + data
    if damage.kind == "swap":
        return rest[: damage.size] + part + rest[damage.size :]
    assert damage.kind == "delay"
    await asyncio.sleep(0.3)
    return data


# -- as a program ------------------------------------------------------------------------------------------------------

_NOMINAL_BYTES_PER_S = 100e6 / 8  # of which a slow link is a part: loopback has no rate of its own
_JITTER_S = 0.2
_SOME_BYTES = 64
_DAMAGES = {"cut": "cut", "flip": "flip", "truncate": "drop", "duplicate": "repeat", "reorder": "swap"}


async def obey(proxy: Proxy, order: dict[str, Any], fired: Callable[[], None]) -> None:
    """Do what an order says, and undo it after `seconds`.

    Args:
        order: {"kind": one of `offbeat.fault_spec.Link`, "seconds": for how long, "factor": how many times slower}.
        fired: called when it has happened, or has begun.
    """
    kind = order["kind"]
    if kind in _DAMAGES:
        proxy.up.damage(Damage(_DAMAGES[kind], size=_SOME_BYTES, then=fired))
        return
    if kind == "lost-reply":
        proxy.down.damage(Damage("cut", up=False, then=fired))
        return
    if kind == "replay":
        fired()
        await proxy.replay()
        return
    ways = {"mute": [proxy.up], "deaf": [proxy.down]}.get(kind, [proxy.up, proxy.down])
    for way in ways:
        if kind == "slow-link":
            way.rate_bytes_per_s = _NOMINAL_BYTES_PER_S / order["factor"]
        elif kind == "lossy":
            way.jitter_s = _JITTER_S
        else:
            way.hold()
    fired()
    await asyncio.sleep(order["seconds"])
    for way in ways:
        way.rate_bytes_per_s = way.jitter_s = 0.0
        way.release()


async def _serve_orders(socket: str, target: str) -> None:
    obeying: set[asyncio.Task[None]] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def fired() -> None:
            writer.write(b"fired\n")
            writer.close()

        task = asyncio.ensure_future(obey(proxy, json.loads(await reader.readline()), fired))
        obeying.add(task)
        task.add_done_callback(obeying.discard)
        await asyncio.sleep(0)  # it has begun
        if not writer.is_closing():
            writer.write(b"told\n")

    async with Proxy(target) as proxy:
        server = await asyncio.start_unix_server(take, socket)
        sys.stdout.write(f"{proxy.address}\n")
        sys.stdout.flush()
        ended = asyncio.Event()

        def listen() -> None:
            if not os.read(sys.stdin.fileno(), 4096):
                ended.set()

        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), listen)
        await ended.wait()
        server.close()


if __name__ == "__main__":
    asyncio.run(_serve_orders(sys.argv[1], sys.argv[2]))
