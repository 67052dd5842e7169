"""The measurements of `offbeat bench wire`: both sides of it. This process receives and asks, another sends and
answers.

Messages of 16 MiB in blocks of 1 MiB go over loopback, by turns over a bare blocking socket and over a link, so that
both see the same machine. A link checks every byte and could send it again; a bare socket does not even look. Requests
go by turns with the echo of a blocking socket, which tells how long this machine takes to wake two processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.rpc import RpcClient, RpcServer
from offbeat.errors import NetworkError, OffbeatError
from offbeat.wire import busy_poll
from offbeat.wire.credentials import Certificates
from offbeat.wire.session import Limits
from offbeat.wire.tcp import connect, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from offbeat.wire.link import PeerLink

MESSAGE_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
LINKS = 16
LEAST_SHARE = 0.70
MOST_LATENCY_US = 200.0
LIMITS = Limits()
_BLOCKS = MESSAGE_BYTES // BLOCK_BYTES
_WARM_S = 0.15
_START_S = 20.0
_QUESTION_BYTES = 64
_WARM_QUESTIONS = 50
_JOB = "offbeat bench wire"


@dataclass(frozen=True)
class WireFigure:
    """The measurement of one thing.

    Args:
        name: "bare", "link", "bare tls", "link tls", "bare request", "request p50", "request p99" or "memory".
        unit: of the values.
        values: one per repeat.
        target: in words, or "".
        ratio: of the median to that of the row it is compared with; for "memory" to the bound.
    """

    name: str
    unit: str
    values: list[float]
    target: str = ""
    ratio: float | None = None
    met: bool | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def measure(seconds: float, repeats: int, certificates: str, tell: Callable[[str], None]) -> list[WireFigure]:
    """All rows, by turns.

    Args:
        seconds: how long each turn takes.
        certificates: folder that `offbeat certs` made; "" leaves TLS out.
        tell: called with what is measured next.
    """
    names = ["bare", "link", *(["bare tls", "link tls"] if certificates else [])]
    rates: dict[str, list[float]] = {name: [] for name in names}
    bare_us, p50_us, p99_us = [], [], []
    for repeat in range(repeats):
        # There and back, so that neither always comes after the other.
        for name in names if repeat % 2 == 0 else names[::-1]:
            tell(name)
            folder = certificates if name.endswith("tls") else ""
            turn = _receive_bare if name.startswith("bare") else _receive_link
            rates[name].append(turn(seconds, folder))
        tell("bare request")
        bare_us.append(statistics.median(_ask_bare(seconds)))
        tell("request")
        latencies_us = sorted(busy_poll.run(_ask(seconds)))
        p50_us.append(statistics.median(latencies_us))
        p99_us.append(latencies_us[int(0.99 * len(latencies_us))])
    tell("memory")
    memory_bytes = busy_poll.run(_peak_memory())
    latency_us, ratio = statistics.median(p50_us), memory_bytes / LIMITS.bookkeeping_bytes
    slowdown = statistics.median(ours / bare for ours, bare in zip(p50_us, bare_us, strict=True))
    return [
        *(_rate_row(name, rates) for name in names),
        WireFigure("bare request", "us", bare_us),
        WireFigure("request p50", "us", p50_us, f"< {MOST_LATENCY_US:g} us", slowdown, latency_us < MOST_LATENCY_US),
        WireFigure("request p99", "us", p99_us),
        WireFigure("memory", "bytes per link", [memory_bytes], f"<= {LIMITS.bookkeeping_bytes:,}", ratio, ratio <= 1),
    ]


def _rate_row(name: str, rates: dict[str, list[float]]) -> WireFigure:
    if name.startswith("bare"):
        return WireFigure(name, "GB/s", rates[name])
    bare = rates[name.replace("link", "bare")]
    # Of turns next to each other, because the machine is not equally fast all the time.
    ratio = statistics.median(ours / theirs for ours, theirs in zip(rates[name], bare, strict=True))
    judged = name == "link"
    target = f">= {LEAST_SHARE:.2f} x bare" if judged else ""
    return WireFigure(name, "GB/s", rates[name], target, ratio, ratio >= LEAST_SHARE if judged else None)


# -- this side: receives and asks ------------------------------------------------------------------------------------


def _receive_bare(seconds: float, folder: str) -> float:
    """GB/s of a blocking socket."""
    message = memoryview(bytearray(MESSAGE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_START_S)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with _far_side("bare", address, folder):
            stream, _ = server.accept()
            stream.settimeout(_START_S)
            if folder:
                stream = _pair(folder, "server").server_context().wrap_socket(stream, server_side=True)
            with stream:
                return _rate(seconds, lambda: _receive_message(stream, message))


def _receive_message(stream: socket.socket, message: memoryview) -> int:
    for begin in range(0, MESSAGE_BYTES, BLOCK_BYTES):
        at, end = begin, begin + BLOCK_BYTES
        while at < end:
            size = stream.recv_into(message[at:end])
            if not size:
                raise NetworkError("Cannot measure: the other process has ended.")
            at += size
    return MESSAGE_BYTES


def _rate(seconds: float, receive: Callable[[], int]) -> float:
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < _WARM_S:
        receive()
    received, began_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        received += receive()
    return received / elapsed_s / 1e9


class _Sink:
    """A receiver that has each block of a message land at its place in one piece of memory, over and over."""

    def __init__(self) -> None:
        self.message = memoryview(bytearray(MESSAGE_BYTES))
        self.received_bytes = 0

    def accept(self, link: PeerLink) -> _Sink:
        return self

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        begin = int.from_bytes(metadata, "big") % _BLOCKS * BLOCK_BYTES
        return self.message[begin : begin + size_bytes]

    def received(self, metadata: bytes, body: memoryview) -> None:
        self.received_bytes += len(body)

    def lost(self, error: OffbeatError | None) -> None:
        """End the turn, which says so."""


def _receive_link(seconds: float, folder: str) -> float:
    """GB/s of a link."""

    async def receive() -> float:
        sink = _Sink()
        credentials = _pair(folder, "server") if folder else None
        listener = await listen("127.0.0.1", 0, accept=sink.accept, job=_JOB, credentials=credentials)
        with _far_side("link", listener.address, folder):
            await _until(lambda: sink.received_bytes > 0)
            await asyncio.sleep(_WARM_S)
            before, began_s = sink.received_bytes, time.perf_counter()
            await asyncio.sleep(seconds)
            rate = (sink.received_bytes - before) / (time.perf_counter() - began_s) / 1e9
        _end(listener.links)
        listener.close()
        return rate

    return busy_poll.run(receive())


def _ask_bare(seconds: float) -> list[float]:
    """Microseconds from question to answer of a blocking socket."""
    question, answer = bytes(_QUESTION_BYTES), bytearray(_QUESTION_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_START_S)
        with _far_side("echo", f"127.0.0.1:{server.getsockname()[1]}", ""):
            stream, _ = server.accept()
            stream.settimeout(_START_S)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def ask() -> None:
                stream.sendall(question)
                if stream.recv_into(answer, _QUESTION_BYTES, socket.MSG_WAITALL) != _QUESTION_BYTES:
                    raise NetworkError("Cannot measure: the other process has ended.")

            with stream:
                for _ in range(_WARM_QUESTIONS):
                    ask()
                latencies_us = []
                end_s = time.perf_counter() + seconds
                while (began_s := time.perf_counter()) < end_s:
                    ask()
                    latencies_us.append((time.perf_counter() - began_s) * 1e6)
                return latencies_us


async def _ask(seconds: float) -> list[float]:
    """Microseconds from question to answer of a link, one after the other."""
    asker, question = RpcClient(), bytes(_QUESTION_BYTES)
    listener = await listen("127.0.0.1", 0, accept=asker.begin, job=_JOB)
    latencies_us = []
    with _far_side("answer", listener.address, ""):
        await _until(lambda: listener.links)
        for _ in range(_WARM_QUESTIONS):
            await asker.ask(question)
        end_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < end_s:
            await asker.ask(question)
            latencies_us.append((time.perf_counter() - began_s) * 1e6)
    _end(listener.links)
    listener.close()
    return latencies_us


async def _peak_memory() -> int:
    """Bytes that one link takes at most while messages come in over several at once, the messages left out."""
    sink = _Sink()
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        listener = await listen("127.0.0.1", 0, accept=sink.accept, job=_JOB)
        with _far_side("links", listener.address, ""):
            await _until(lambda: len(listener.links) == LINKS)
            await _until(lambda: sink.received_bytes > 4 * MESSAGE_BYTES)
            _, peak_bytes = tracemalloc.get_traced_memory()
        _end(listener.links)
        listener.close()
    finally:
        tracemalloc.stop()
    return (peak_bytes - before_bytes) // LINKS


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(_START_S):
        while not condition():
            await asyncio.sleep(0.002)


def _end(links: list[PeerLink]) -> None:
    for link in links:
        link.abort()


# -- the other side: sends and answers -------------------------------------------------------------------------------


@contextlib.contextmanager
def _far_side(kind: str, address: str, folder: str) -> Iterator[None]:
    """Another process that does `kind` at `address` for as long as this block lasts."""
    code = "import sys; from offbeat.cli.wire_benchmark import far_side; far_side(*sys.argv[1:])"
    # Its own folder is no place to look for modules in.
    process = subprocess.Popen([sys.executable, "-P", "-c", code, kind, address, folder])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def far_side(kind: str, address: str, folder: str) -> None:
    """Run the other process until it is killed, or hung up on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Random, so that nothing on the way can make it smaller.
    message = memoryview(secrets.token_bytes(MESSAGE_BYTES))
    with contextlib.suppress(OSError, OffbeatError):
        if kind == "bare":
            _pour(address, folder, message)
        elif kind == "echo":
            _echo(address)
        else:
            busy_poll.run(_serve(kind, address, folder, message))
    os._exit(0)


def _pour(address: str, folder: str, message: memoryview) -> None:
    host, _, port = address.rpartition(":")
    stream = socket.create_connection((host, int(port)))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if folder:
        stream = _pair(folder, "worker").client_context().wrap_socket(stream, server_hostname=host)
    while True:
        for begin in range(0, MESSAGE_BYTES, BLOCK_BYTES):
            stream.sendall(message[begin : begin + BLOCK_BYTES])


def _echo(address: str) -> None:
    host, _, port = address.rpartition(":")
    stream = socket.create_connection((host, int(port)))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while question := stream.recv(_QUESTION_BYTES):
        stream.sendall(question)


async def _serve(kind: str, address: str, folder: str, message: memoryview) -> None:
    credentials = _pair(folder, "worker") if folder else None

    async def dial() -> PeerLink:
        return await connect(
            address,
            accept=lambda link: RpcServer(link, lambda question: question),
            job=_JOB,
            rank=0,
            credentials=credentials,
        )

    links = [await dial() for _ in range(LINKS if kind == "links" else 1)]
    if kind == "answer":
        await links[0].ended
        return
    await asyncio.gather(*(_send(link, message) for link in links))


async def _send(link: PeerLink, message: memoryview) -> None:
    blocks = [message[begin : begin + BLOCK_BYTES] for begin in range(0, MESSAGE_BYTES, BLOCK_BYTES)]
    numbers = [number.to_bytes(2, "big") for number in range(_BLOCKS)]
    while True:
        for number, block in zip(numbers, blocks, strict=True):
            link.send(number, block)
            await link.drain()


def _pair(folder: str, name: str) -> Certificates:
    path = Path(folder)
    return Certificates(path / f"{name}.pem", path / f"{name}.key", path / "authority.pem")
