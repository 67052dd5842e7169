"""Peers that may not dial the server: with another token, another version of the protocol, or by TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from offbeat.errors import OffbeatError
from offbeat.wire.credentials import Token
from offbeat.wire.frame import VERSION, Frame, encode
from offbeat.wire.tcp import connect

if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE = timedelta(seconds=5)


def dial(kind: str, address: str, rank: int, note: Callable[[], None]) -> None:
    """Do so, on another thread.

    Args:
        address: "host:port".
        rank: that it pretends to be.
        note: called when it has been turned away.
    """

    async def story() -> None:
        if kind == "wrong-token":
            try:
                await connect(
                    address,
                    accept=lambda link: _Nobody(),
                    job=os.environ.get("OFFBEAT_JOB", "default"),
                    rank=rank,
                    credentials=Token(b"nobody gave me the right one...."),
                    patience=_PATIENCE,
                )
            except OffbeatError:
                note()
            return
        host, _, port = address.rpartition(":")
        if kind == "wrong-version":
            reader, writer = await asyncio.open_connection(host, int(port))
            frame = bytearray(encode(Frame(b"")))
            frame[4] = VERSION + 1
            writer.write(bytes(frame))
            while await reader.read(4096):
                pass
            writer.close()
        else:
            with contextlib.suppress(OSError):
                await asyncio.open_connection(host, int(port), ssl=ssl.create_default_context())
        note()

    threading.Thread(target=lambda: asyncio.run(story()), name="offbeat-faults", daemon=True).start()


class _Nobody:
    """A receiver for a peer that never gets so far."""

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        return memoryview(bytearray(size_bytes))

    def received(self, metadata: bytes, body: memoryview) -> None:
        pass

    def lost(self, error: OffbeatError | None) -> None:
        pass
