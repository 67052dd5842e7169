"""A TCP proxy on loopback that does to the bytes what a network should not."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_READ_BYTES = 64 << 10


@dataclass
class Fault:
    """One thing that happens to one direction of one connection.

    Args:
        kind: "cut" the connection; "flip" a bit; "drop", "repeat" or "delay" `size` bytes; "swap" them with the
            `size` bytes behind them.
        at: after so many bytes of this direction.
        up: from who dialled; else towards it.
        fired: whether it has happened.
    """

    kind: str
    at: int
    size: int = 1
    up: bool = True
    fired: bool = False

    @property
    def needs(self) -> int:
        """How many bytes have to be there for it to happen."""
        return {"cut": 0, "flip": 1, "swap": 2 * self.size}.get(self.kind, self.size)


class Proxy:
    """Forwards each connection to `target`.

    Args:
        target: "host:port".
        faults: those of the first connection, of the second, and so on; later ones have none.
    """

    def __init__(self, target: str, faults: Iterable[list[Fault]] = ()) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._faults = list(faults)
        self.pause_s = 0.0  # before each 4,000 bytes or so
        self.connections = 0
        self.forwarded = 0
        self.held = asyncio.Event()  # cleared, nothing passes: a partition
        self.held.set()
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
        self.held.set()
        self.cut_all()
        while self._serving:  # those that have just come in are cut, too
            await asyncio.sleep(0.001)
            self.cut_all()

    def cut_all(self) -> None:
        """Break every connection there is."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving += 1
        try:
            await self._forward(reader, writer)
        finally:
            self._serving -= 1

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        faults = self._faults[number] if number < len(self._faults) else []
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        up = self._pump(reader, far_writer, [fault for fault in faults if fault.up])
        down = self._pump(far_reader, writer, [fault for fault in faults if not fault.up])
        pumps = {asyncio.ensure_future(up), asyncio.ensure_future(down)}
        try:
            await asyncio.wait(pumps, return_when="FIRST_COMPLETED")
        finally:
            for pump in pumps:
                pump.cancel()
            for one in both:
                one.transport.abort()
            self._writers -= both

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: list[Fault]) -> None:
        done, pending = 0, b""
        faults = sorted(faults, key=lambda fault: fault.at)
        with contextlib.suppress(OSError):
            while True:
                fault = faults[0] if faults else None
                if fault is None:
                    now, pending = pending, b""
                elif done + len(pending) >= fault.at + fault.needs:
                    now, pending = pending[: fault.at - done], pending[fault.at - done :]
                else:
                    size = max(0, fault.at - done)
                    now, pending = pending[:size], pending[size:]
                await self.held.wait()
                writer.write(now)
                await writer.drain()
                done += len(now)
                self.forwarded += len(now)
                if fault is not None and done == fault.at and len(pending) >= fault.needs:
                    faults.pop(0)
                    fault.fired = True
                    if fault.kind == "cut":
                        await asyncio.sleep(0.002)  # what was forwarded shall arrive
                        return
                    pending = await _spoil(fault, pending)
                    if faults or pending:
                        continue
                await asyncio.sleep(self.pause_s)
                data = await reader.read(4000 if self.pause_s else _READ_BYTES)
                if not data:
                    return
                pending += data


async def _spoil(fault: Fault, data: bytes) -> bytes:
    part, rest = data[: fault.size], data[fault.size :]
    if fault.kind == "flip":
        return bytes((data[0] ^ 1,)) + data[1:]
    if fault.kind == "drop":
        return rest
    if fault.kind == "repeat":
        return part + data
    if fault.kind == "swap":
        return rest[: fault.size] + part + rest[fault.size :]
    assert fault.kind == "delay"
    await asyncio.sleep(0.3)
    return data
