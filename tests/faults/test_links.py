"""Faults of links, on connections that echo: each does to the bytes what it says, for as long as it says."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from offbeat.fault_spec import Fault, Link
from offbeat.testing.faults.links import Proxies
from offbeat.testing.faults.unauthorized_peers import dial
from offbeat.wire.credentials import Token
from offbeat.wire.session import Limits
from tests.wire.peers import play, serving, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECONDS = 0.4
LINE = bytes(range(200))


class Echo:
    """Sends back what comes, and keeps it, by connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.received: list[bytearray] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.received.append(bytearray())
                threading.Thread(target=self._echo, args=(connection, self.received[-1]), daemon=True).start()

    def _echo(self, connection: socket.socket, received: bytearray) -> None:
        with contextlib.suppress(OSError), connection:
            while data := connection.recv(1 << 16):
                received += data
                connection.sendall(data)


class Talk:
    """A worker's connection through its proxy."""

    def __init__(self, echo: Echo, folder: Path) -> None:
        os.environ["OFFBEAT_SERVERS"] = echo.address
        self.proxies = Proxies(folder / "links", 1)
        host, _, port = os.environ["OFFBEAT_SERVERS"].partition(":")
        self.connection = socket.create_connection((host, int(port)), timeout=5)
        self.fired = threading.Event()

    def strike(self, kind: Link, factor: float = 10.0) -> None:
        fault = Fault(worker=1, step=0, kind=kind, seconds=SECONDS, factor=factor)
        self.proxies.strike(fault, self.fired.set)

    def say(self, data: bytes = LINE) -> None:
        self.connection.sendall(data)

    def hear(self, size: int = len(LINE), patience_s: float = 5.0) -> bytes:
        """So many bytes, or what has come until nobody says more."""
        self.connection.settimeout(patience_s)
        heard = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while len(heard) < size and (data := self.connection.recv(size - len(heard))):
                heard += data
        return heard


@pytest.fixture
def echo() -> Iterator[Echo]:
    one = Echo()
    yield one
    one.close()


@pytest.fixture
def talk(echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Talk]:
    monkeypatch.setenv("OFFBEAT_SERVERS", "")
    one = Talk(echo, tmp_path)
    one.say()
    assert one.hear() == LINE
    yield one
    one.connection.close()
    for process in one.proxies._processes:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.wait()


@pytest.mark.parametrize(("kind", "arrives"), [("partition", 1), ("mute", 1), ("deaf", 2)])
def test_nothing_passes_for_a_while_and_then_it_does(talk: Talk, echo: Echo, kind: Link, arrives: int) -> None:
    talk.strike(kind)
    assert talk.fired.wait(5)
    began_s = time.monotonic()
    talk.say()
    assert talk.hear(patience_s=SECONDS / 2) == b""
    assert len(echo.received[0]) == arrives * len(LINE), "whether the server hears the worker"
    assert talk.hear() == LINE, "nothing of it is lost"
    assert time.monotonic() - began_s > 0.8 * SECONDS


def test_a_slow_link_takes_its_time(talk: Talk) -> None:
    talk.strike("slow-link", factor=1000.0)  # 12.5 kB/s each way
    assert talk.fired.wait(5)
    began_s = time.monotonic()
    talk.say(bytes(2500))
    assert len(talk.hear(2500)) == 2500
    assert time.monotonic() - began_s > 0.3


def test_a_lossy_link_hesitates(talk: Talk) -> None:
    talk.strike("lossy")
    assert talk.fired.wait(5)
    took_s = []
    for _ in range(2):
        began_s = time.monotonic()
        talk.say()
        assert talk.hear() == LINE
        took_s.append(time.monotonic() - began_s)
    assert max(took_s) > 0.02, "up to 0.2 s in each direction"


@pytest.mark.parametrize("kind", ["cut", "lost-reply"])
def test_a_connection_breaks_before_or_behind_what_was_said(talk: Talk, echo: Echo, kind: Link) -> None:
    talk.strike(kind)
    talk.say()
    assert talk.hear() == b""
    assert talk.fired.wait(5)
    assert len(echo.received[0]) == (1 if kind == "cut" else 2) * len(LINE)


@pytest.mark.parametrize("kind", ["flip", "truncate", "duplicate", "reorder"])
def test_bytes_are_not_what_they_were(talk: Talk, kind: Link) -> None:
    talk.strike(kind)
    talk.say()
    heard = talk.hear(2 * len(LINE), patience_s=0.3)
    assert talk.fired.is_set()
    part, rest = LINE[:64], LINE[64:]
    expected = {
        "flip": bytes((LINE[0] ^ 1,)) + LINE[1:],
        "truncate": rest,
        "duplicate": part + LINE,
        "reorder": rest[:64] + part + rest[64:],
    }
    assert heard == expected[kind]
    talk.say()
    assert talk.hear() == LINE, "once"


def test_what_was_said_is_said_again_by_somebody_else(talk: Talk, echo: Echo) -> None:
    talk.strike("replay")
    assert talk.fired.wait(5)
    deadline_s = time.monotonic() + 5
    while (len(echo.received) < 2 or bytes(echo.received[1]) != LINE) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert [bytes(one) for one in echo.received] == [LINE, LINE]


@pytest.mark.parametrize("kind", ["wrong-token", "wrong-version", "wrong-certificate"])
def test_a_stranger_is_turned_away(kind: str) -> None:
    fired = threading.Event()

    async def story() -> None:
        async with serving(credentials=Token(b"k" * 32), limits=Limits()) as server:
            dial(kind, server.address, 0, fired.set)
            await until(fired.is_set, "it never fired")
            assert not server.takers, "nobody was taken in"

    play(story)
