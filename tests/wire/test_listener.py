"""Who may come in: token, certificate, job, version; and what strangers can do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import socket
import ssl
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.cli.certs import make
from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.testing.chaos_proxy import Damage, Proxy
from offbeat.wire import connector, handshake, listener
from offbeat.wire.credentials import Certificates, Token
from offbeat.wire.frame import VERSION, Frame, Reader, encode
from offbeat.wire.messages import HandshakeClaim, HandshakeRefused, Hello, Message, pack, unpack
from offbeat.wire.tcp import connect, listen
from tests.wire.peers import SOON, Taker, dial, play, serving, until

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = Token(b"t" * 32)
QUICK = timedelta(seconds=0.5)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of certificates, of two authorities."""
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    make(ours)
    make(theirs)
    return ours, theirs


def pair(folder: Path, name: str, token: Token | None = None) -> Certificates:
    return Certificates(folder / f"{name}.pem", folder / f"{name}.key", folder / "authority.pem", token)


def works(server_side: Any, client_side: Any, **options: Any) -> None:
    async def story() -> None:
        async with serving(credentials=server_side, **options) as server:
            link = await dial(server.address, credentials=client_side)
            link.send(b"m", b"x" * 300_000)
            await until(lambda: server.one.frames, "nothing arrives")
            assert server.one.frames == [(b"m", b"x" * 300_000)]
            assert server.one.link is not None
            assert server.one.link.rank == 1
            await link.close()
            await until(lambda: server.one.losses == [None], "no good-bye")

    play(story)


def refused(server_side: Any, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[str, str]:
    """What the one that dials is told, and what is logged."""
    told = ""

    async def story() -> None:
        nonlocal told
        async with serving(credentials=server_side) as server:
            with pytest.raises(OffbeatError) as error:
                await dial(server.address, patience=QUICK, **options)
            told = str(error.value)
            assert server.takers == []
            assert server.listener.links == []

    with caplog.at_level(logging.WARNING):
        play(story)
    assert "127.0.0.1:" in caplog.text
    return told, caplog.text


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, TOKEN])
def test_the_same_token(token: Token | None) -> None:
    works(token, token)


@pytest.mark.parametrize(("server_side", "client_side"), [(TOKEN, Token(b"x" * 32)), (TOKEN, None), (None, TOKEN)])
def test_another_token(server_side: Any, client_side: Any, caplog: pytest.LogCaptureFixture) -> None:
    told, logged = refused(server_side, caplog, credentials=client_side)
    assert "its token is wrong" in logged
    assert "it hung up when it saw who we are (another token, certificate or job?)" in told
    assert "token is wrong" not in told, "it is not told why"


def test_another_job(caplog: pytest.LogCaptureFixture) -> None:
    told, logged = refused(TOKEN, caplog, credentials=TOKEN, job="other")
    assert "it belongs to job 'other', this is 'test'" in logged
    assert "'test'" not in told


def test_a_server_that_does_not_know_the_token() -> None:
    """It says welcome to everybody, in the hope of gradients."""

    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said = handshake.hello()
            writer.write(pack(said))
            frames = Reader()
            (frame,) = frames.feed(await reader.read(1000))
            join: Any = unpack(frame)
            writer.write(pack(handshake.welcome(b"wrong", said, join)))
            with contextlib.suppress(asyncio.CancelledError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        with pytest.raises(PeerError, match="it does not know the token"):
            await dial(f"{host}:{port}", credentials=TOKEN)
        server.close()

    play(story)


def test_not_everybody_may_say_no() -> None:
    """A refusal ends the session, so it has to be proved as well."""

    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said = handshake.hello()
            writer.write(pack(said))
            (frame,) = Reader().feed(await reader.read(1000))
            join: Any = unpack(frame)
            writer.write(pack(handshake.refuse(b"wrong", said, join, "go away")))
            with contextlib.suppress(asyncio.CancelledError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        with pytest.raises(PeerError, match="it does not know the token"):
            await dial(f"{host}:{port}", credentials=TOKEN)
        server.close()

    play(story)


def test_a_token_is_no_guess_and_no_secret_in_a_log() -> None:
    with pytest.raises(NetworkError, match="it could be guessed"):
        Token(b"short")
    assert "ttt" not in repr(TOKEN)


def test_accept_may_refuse(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        def accept(link: Any) -> Taker:
            raise PeerError("there are only two workers")

        listener = await listen("127.0.0.1", 0, accept=accept, job="j")
        with pytest.raises(PeerError, match="it refused: there are only two workers"):
            await connect(listener.address, accept=Taker, job="j", rank=7)
        assert listener.links == []
        listener.close()

    play(story)


def test_a_session_belongs_to_its_rank() -> None:
    async def story() -> None:
        async with serving() as server:
            link = await dial(server.address)
            (session,) = server.listener._acceptor.links
            answer = await say(server.address, lambda hello: join(hello, rank=2, session=session))
            assert isinstance(answer, HandshakeRefused)
            assert link.connected, "the one it belongs to is not disturbed"
            assert not server.one.losses
            link.abort()

    play(story)


# -- certificates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, TOKEN])
def test_certificates(certificates: tuple[Path, Path], token: Token | None) -> None:
    works(pair(certificates[0], "server", token), pair(certificates[0], "worker", token))


def test_certificates_and_another_token(certificates: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    worker = pair(certificates[0], "worker", Token(b"x" * 32))
    _, logged = refused(pair(certificates[0], "server", TOKEN), caplog, credentials=worker)
    assert "its token is wrong" in logged


def test_a_worker_of_a_foreign_authority(certificates: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = certificates
    worker = dataclasses.replace(pair(theirs, "worker"), authority=ours / "authority.pem")
    told, logged = refused(pair(ours, "server"), caplog, credentials=worker)
    assert "its certificate is not accepted" in logged
    assert "Cannot" in told


def test_a_server_of_a_foreign_authority(certificates: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = certificates
    told, _ = refused(pair(theirs, "server"), caplog, credentials=pair(ours, "worker"))
    assert re.search(r"its certificate is not accepted: .*(authority|issuer|signature|self.signed)", told), told


def test_a_worker_cannot_pass_for_a_server(certificates: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = certificates
    told, _ = refused(pair(ours, "worker"), caplog, credentials=pair(ours, "worker"))
    assert "certificate" in told


def test_a_server_under_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, ["parameters.example"])
    told, _ = refused(pair(tmp_path, "server"), caplog, credentials=pair(tmp_path, "worker"))
    assert "its certificate is not accepted: IP address mismatch, certificate is not valid for '127.0.0.1'" in told


def test_no_certificate_at_all(certificates: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """A client that trusts the server and shows nothing."""

    async def story() -> None:
        async with serving(credentials=pair(certificates[0], "server")) as server:
            context = ssl.create_default_context(cafile=str(certificates[0] / "authority.pem"))
            host, _, port = server.address.rpartition(":")
            heard = b""
            with contextlib.suppress(OSError):  # a reset, or an alert
                reader, _ = await asyncio.open_connection(host, int(port), ssl=context)
                heard = await reader.read()
            assert heard == b""
            assert server.takers == []

    play(story)


def test_old_tls_is_refused(certificates: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    context = pair(certificates[0], "server").server_context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert pair(certificates[0], "worker").client_context().check_hostname


def test_plain_to_tls_and_back(
    certificates: tuple[Path, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "STRANGER_S", 0.2)
    server = pair(certificates[0], "server")
    told, _ = refused(server, caplog)
    assert "hung up" in told or "does it expect TLS?" in told
    told, _ = refused(None, caplog, credentials=pair(certificates[0], "worker"))
    assert "it speaks no TLS" in told


@pytest.mark.parametrize("missing", ["certificate", "key", "authority"])
def test_a_file_that_is_not_there(certificates: tuple[Path, Path], missing: str, tmp_path: Path) -> None:
    whole, none = pair(certificates[0], "server"), tmp_path / "none.pem"
    broken = {
        "certificate": dataclasses.replace(whole, certificate=none),
        "key": dataclasses.replace(whole, key=none),
        "authority": dataclasses.replace(whole, authority=none),
    }[missing]
    with pytest.raises(NetworkError, match="offbeat certs FOLDER"):
        broken.server_context()


def test_a_cut_under_tls(certificates: tuple[Path, Path]) -> None:
    faults = [[Damage("cut", 60_000)], [Damage("flip", 50_000)], [Damage("drop", 40_000, size=7)]]

    async def story() -> None:
        credentials = pair(certificates[0], "server")
        async with serving(credentials=credentials) as server, Proxy(server.address, faults) as proxy:
            link = await dial(proxy.address, credentials=pair(certificates[0], "worker"))
            sent = [(b"%d" % number, bytes([number]) * 50_000) for number in range(20)]
            for frame in sent:
                link.send(*frame)
            await until(lambda: len(server.one.frames) == 20, "not all arrives")
            assert server.one.frames == sent
            assert link.counters.reconnects == 3

    play(story)
    assert all(connection[0].fired for connection in faults)


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "10.1.2.3"])
def test_an_open_door_without_credentials(bind: str) -> None:
    async def story() -> None:
        with pytest.raises(NetworkError, match="without a token or certificates: anybody could join"):
            await listen(bind, 0, accept=Taker, job="j")

    play(story)


def test_with_a_token_it_opens() -> None:
    async def story() -> None:
        listener = await listen("0.0.0.0", 0, accept=Taker, job="j", credentials=TOKEN)
        assert listener.address.startswith("0.0.0.0:")
        listener.close()

    play(story)


@pytest.mark.parametrize("tls", [False, True])
def test_ipv6(certificates: tuple[Path, Path], tls: bool) -> None:
    ours = certificates[0]
    works(pair(ours, "server") if tls else None, pair(ours, "worker") if tls else None, bind="::1")


@pytest.mark.parametrize("address", ["", "host", "host:", ":7000", "host:port", "host:99999"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(NetworkError, match="an address is host:port"):
        asyncio.run(dial(address))


def test_a_name_that_is_no_address() -> None:
    with pytest.raises(NetworkError, match="it is no IP address"):
        asyncio.run(listen("localhost", 0, accept=Taker, job="j"))


def test_a_port_that_is_taken() -> None:
    async def story() -> None:
        async with serving() as server:
            port = int(server.address.rpartition(":")[2])
            with pytest.raises(NetworkError, match="Choose another"):
                await listen("127.0.0.1", port, accept=Taker, job="j")

    play(story)


def test_nobody_there_says_what_was_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(NetworkError, match=r"in \d+ attempts within 0.5 s: .*Connect call failed.*\)\. Is"):
        asyncio.run(dial(address, patience=QUICK))


def test_one_attempt_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_FIRST_PAUSE_S", 600.0)  # longer than the patience
    monkeypatch.setattr(connector, "_LONGEST_PAUSE_S", 600.0)
    says = r"^Cannot reach \S+ at the first attempt: .*\)\. Is the server running, and is this its address\?$"
    with socket.socket() as taken:  # nobody else may listen there meanwhile
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(NetworkError, match=says):
            asyncio.run(dial(f"127.0.0.1:{taken.getsockname()[1]}", patience=timedelta(seconds=60)))


def test_a_server_may_start_later() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        dialling = asyncio.create_task(dial(f"127.0.0.1:{port}"))
        await asyncio.sleep(0.3)
        listener = await listen("127.0.0.1", port, accept=Taker, job="test", limits=SOON)
        link = await dialling
        link.abort()
        listener.close()

    play(story)


# -- strangers -------------------------------------------------------------------------------------------------------


def join(hello: Hello, *, rank: int = 1, session: bytes = b"s" * 16, job: str = "test") -> bytes:
    return pack(handshake.join(b"", hello, HandshakeClaim(rank=rank, job=job, session=session)))


def flip_the_last_bit(data: bytes) -> bytes:
    """Damage a message whose last bytes are a random proof: a fixed byte would be the right one in 1 of 256 runs."""
    return data[:-1] + bytes((data[-1] ^ 1,))


async def say(address: str, answer: Any) -> Message | None:
    """Dial, answer the hello with bytes, and return what comes back; None if it hangs up."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    (frame,) = Reader().feed(await reader.read(1000))
    hello = unpack(frame)
    assert isinstance(hello, Hello)
    writer.write(answer(hello))
    frames = Reader(max_metadata_bytes=10_000)
    try:
        while data := await asyncio.wait_for(reader.read(1000), 3):
            for frame in frames.feed(data):
                return unpack(frame)
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return None


STRANGE = {
    "http": lambda hello: b"GET / HTTP/1.1\r\n\r\n",
    "another version": lambda hello: b"OFFB" + bytes((VERSION + 1,)) + join(hello)[5:],
    "another message": lambda hello: pack(hello),
    "a long message": lambda hello: b"OFFB" + bytes((VERSION, 0, 0, 0)) + (1 << 30).to_bytes(4, "big") + bytes(28),
    "a body": lambda hello: b"OFFB" + bytes((VERSION, 0, 0, 0)) + bytes(4) + (1 << 30).to_bytes(4, "big") + bytes(24),
    "a replayed join": lambda hello: join(handshake.hello()),
    "a changed rank": lambda hello: join(hello, rank=1).replace(b"rank\x01", b"rank\x02"),
    "no text": lambda hello: encode(Frame(b"\x81\xa4type\xa2\xff\xfe")),
    "damaged": lambda hello: flip_the_last_bit(join(hello)),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_a_stranger_is_cut_off_without_a_word(strange: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with serving() as server:
            assert await say(server.address, STRANGE[strange]) is None
            assert server.takers == []
            link = await dial(server.address)
            link.abort()

    with caplog.at_level(logging.WARNING):
        play(story)
    assert "Refused 127.0.0.1:" in caplog.text


def test_a_flood_of_strangers_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle ones take every place; the oldest make room, and none stays longer than its time."""
    monkeypatch.setattr(listener, "STRANGER_S", 0.6)

    async def story() -> None:
        async with serving() as server:
            host, _, port = server.address.rpartition(":")
            idle = [await asyncio.open_connection(host, int(port)) for _ in range(3 * listener.STRANGERS)]
            await asyncio.sleep(0.05)
            assert len(server.listener._strangers) <= listener.STRANGERS
            link = await dial(server.address)
            await until(lambda: not server.listener._strangers, "strangers stay", 3)
            assert link.connected
            link.abort()
            for _, writer in idle:
                writer.transport.abort()

    play(story)


def test_a_stranger_that_is_slow_runs_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "STRANGER_S", 0.3)

    async def story() -> None:
        async with serving() as server:
            host, _, port = server.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            began_s = time.monotonic()
            await reader.read(1000)
            try:
                for byte in b"OFFB\x02\x00":  # a byte now and then, for ever
                    writer.write(bytes((byte,)))
                    await asyncio.sleep(0.1)
                assert await reader.read() == b""
            except ConnectionError:
                pass
            assert time.monotonic() - began_s < 1.0
            writer.transport.abort()

    play(story)
