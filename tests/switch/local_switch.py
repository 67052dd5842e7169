"""A switch over UDP on loopback, on a thread of the test."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

from offbeat.switch.serve import open_switch
from offbeat.wire.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.wire.credentials import Credentials


@contextlib.contextmanager
def served_switch(
    credentials: Credentials | None = None,
    timeout: timedelta = timedelta(seconds=5),
    interfaces: Sequence[str] = (),
    *,
    at_xdp: bool = False,
) -> Iterator[str]:
    """Yield the address of its control; with `interfaces` it is the kernel's."""
    with LoopThread("served-switch") as loop:
        server = loop.run(open_switch("127.0.0.1", 0, credentials, timeout, interfaces, at_xdp=at_xdp))
        try:
            yield server.address
        finally:
            loop.run(server.close())
