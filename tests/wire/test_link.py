"""Links over real connections that are cut, delayed, and worse: exactly once and in order, or a clear end."""

from __future__ import annotations

import asyncio
import itertools
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.cli.certs import make
from offbeat.errors import NetworkError, PeerError
from offbeat.testing.chaos_proxy import Damage, Proxy
from offbeat.wire.credentials import Certificates
from offbeat.wire.frame import HEADER_BYTES, Frame, Kind, encode
from offbeat.wire.messages import HandshakeClaim, Hello, Join, Welcome, pack
from offbeat.wire.session import FRAME_COST_BYTES, TICKS, Limits
from tests.wire.peers import SOON, ByHand, Taker, dial, play, serving, until

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.wire.link import PeerLink
    from tests.wire.peers import Server

NONCE = b"n" * 32
JOIN_BYTES = len(pack(Join(HandshakeClaim(rank=1, job="test", session=NONCE[:16]), NONCE, NONCE)))
HELLO_BYTES = len(pack(Hello(NONCE)))
WELCOME_BYTES = len(pack(Welcome(NONCE)))

SIZES = [0, 700, 3000, 0, 40_000, 1]
FRAMES = [(b"frame %d" % number, random.Random(number).randbytes(size)) for number, size in enumerate(SIZES)]
ENDS = [JOIN_BYTES]
for metadata, body in FRAMES:
    ENDS.append(ENDS[-1] + HEADER_BYTES + len(metadata) + len(body))


async def deliver(link: PeerLink, taker: Taker) -> None:
    """Send `FRAMES`, and see them come once and in order."""
    acknowledged: list[bytes] = []
    for metadata, body in FRAMES:
        link.send(metadata, body, lambda metadata=metadata: acknowledged.append(metadata))  # type: ignore[misc]
    await until(lambda: len(acknowledged) == len(FRAMES), f"{len(acknowledged)} arrived, then: {link.trouble}")
    assert taker.frames == FRAMES
    assert acknowledged == [metadata for metadata, _ in FRAMES]
    assert taker.asked == [metadata for metadata, body in FRAMES if body], "once per body, however often it came"


def through(faults: list[list[Damage]]) -> list[PeerLink]:
    """Deliver through a proxy with `faults`; returns both links."""
    links: list[PeerLink] = []

    async def story() -> None:
        async with serving() as server, Proxy(server.address, faults) as proxy:
            link = await dial(proxy.address)
            await deliver(link, server.one)
            assert server.one.link is not None
            links.extend((link, server.one.link))
            await link.close()
            await until(lambda: server.one.losses == [None], "the good-bye does not arrive")

    play(story)
    for fault in (fault for connection in faults for fault in connection):
        assert fault.fired, fault
    return links


PLACES = sorted(
    {JOIN_BYTES // 2}
    | {end + shift for end in ENDS for shift in (-1, 0, 1, HEADER_BYTES)}
    | {(begin + end) // 2 for begin, end in itertools.pairwise(ENDS)}
)


@pytest.mark.parametrize("at", [place for place in PLACES if place <= ENDS[-1]])
def test_a_cut_anywhere_loses_nothing(at: int) -> None:
    """At every frame's end, around it, in its header, and in the middle."""
    link, _ = through([[Damage("cut", at)]])
    if at != JOIN_BYTES:  # then it depends on whether the welcome comes back in time
        assert link.counters.reconnects == (at > JOIN_BYTES)


@pytest.mark.parametrize("at", [HELLO_BYTES // 2, HELLO_BYTES, HELLO_BYTES + 5, HELLO_BYTES + WELCOME_BYTES])
def test_a_cut_on_the_way_back_loses_nothing(at: int) -> None:
    through([[Damage("cut", at, up=False)]])


def test_a_cut_again_and_again() -> None:
    """Not one connection lives for more than 5,000 bytes, so the longest body is received in one go only at the end."""
    sizes = random.Random(5)
    cuts = [[Damage("cut", JOIN_BYTES + sizes.randrange(1, 5000))] for _ in range(30)]
    link, far = through(cuts)
    assert link.counters.reconnects >= 25
    assert far.counters.repeated == 0, "what was received is not sent again"


DAMAGE = [
    Damage("flip", ENDS[2] + 3),
    Damage("flip", ENDS[1] + HEADER_BYTES + 2),
    Damage("flip", ENDS[4] + 20_000),
    Damage("drop", ENDS[1] + 10, size=100),
    Damage("drop", ENDS[1], size=ENDS[2] - ENDS[1]),
    Damage("drop", ENDS[4] + 2000, size=10),
    Damage("swap", ENDS[3], size=ENDS[4] - ENDS[3]),
    Damage("swap", ENDS[4] + 5000, size=100),
    Damage("flip", HELLO_BYTES + 4, up=False),
    Damage("flip", HELLO_BYTES + WELCOME_BYTES + HEADER_BYTES + 6, up=False),
    Damage("drop", HELLO_BYTES + WELCOME_BYTES + HEADER_BYTES, size=5, up=False),
]


@pytest.mark.parametrize("fault", DAMAGE, ids=lambda fault: f"{fault.kind} {fault.at} {'up' if fault.up else 'down'}")
def test_damage_costs_the_connection_and_nothing_else(fault: Damage) -> None:
    fault.fired = False
    link, far = through([[fault]])
    assert link.counters.reconnects + far.counters.reconnects >= (fault.up or fault.at > HELLO_BYTES + WELCOME_BYTES)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_repeated_frame_is_thrown_away(number: int) -> None:
    begin, end = ENDS[number], ENDS[number + 1]
    link, far = through([[Damage("repeat", begin, size=end - begin)]])
    assert far.counters.repeated == 1
    assert link.counters.reconnects == 0


def test_a_delay_is_only_a_delay() -> None:
    link, _ = through([[Damage("delay", ENDS[2] + 50)]])
    assert link.counters.reconnects == 0


def test_damage_without_end_is_the_end() -> None:
    async def story() -> None:
        faults = [[Damage("flip", JOIN_BYTES + 3)] for _ in range(9)]
        async with serving() as server, Proxy(server.address, faults) as proxy:
            link = await dial(proxy.address, taker := Taker())
            link.send(b"m", b"body")
            await until(lambda: server.one.losses and taker.losses, "nobody gives up")
            assert sum(connection[0].fired for connection in faults) == 3
            assert isinstance(server.one.losses[0], PeerError)
            assert "does not speak offbeat's protocol" in str(server.one.losses[0])
            assert isinstance(taker.losses[0], PeerError)
            assert server.one.frames == []

    play(story)


KINDS = ["cut", "flip", "drop", "repeat", "swap", "delay"]


@pytest.mark.parametrize("seed", range(12))
def test_anything_anywhere(seed: int) -> None:
    """In both directions, on one connection after the other: all comes once and in order, or there is a clear end."""
    chance = random.Random(seed)
    faults = [
        [
            Damage(chance.choice(KINDS), chance.randrange(JOIN_BYTES, 40_000), chance.randrange(1, 3000), up=up)
            for up in (True, False)
        ]
        for _ in range(8)
    ]
    sent = [(b"%d" % number, chance.randbytes(chance.choice([0, 10, 9000]))) for number in range(40)]

    async def story() -> None:
        async with serving() as server, Proxy(server.address, faults) as proxy:
            link = await dial(proxy.address, taker := Taker())
            far = server.takers[-1].link
            assert far is not None
            for frame in sent:
                link.send(*frame)
                far.send(*frame)
            theirs = server.takers[-1]

            def done() -> bool:
                return bool(taker.losses or theirs.losses) or taker.frames == theirs.frames == sent

            await until(done, "neither all nor an end", 20)
            for one in (taker, theirs):
                assert one.frames == sent[: len(one.frames)]
                assert not one.losses or isinstance(one.losses[0], PeerError)
            link.abort()

    play(story)
    assert sum(fault.fired for connection in faults for fault in connection) >= 1


def test_both_directions_while_everything_is_cut() -> None:
    async def story() -> None:
        async with serving() as server, Proxy(server.address) as proxy:
            link = await dial(proxy.address, taker := Taker())
            far = server.one.link
            assert far is not None
            expected = []
            for number in range(200):
                frame = (b"%d" % number, bytes([number]) * (number * 37 % 5000))
                expected.append(frame)
                link.send(*frame)
                far.send(*frame)
                if number % 20 == 19:
                    await until(lambda: link.counters.reconnects == number // 20, "it does not return")  # noqa: B023
                    await asyncio.sleep(random.Random(number).random() * 0.002)
                    proxy.cut_all()
            await until(lambda: len(taker.frames) == len(server.one.frames) == 200, "not all arrive")
            assert taker.frames == server.one.frames == expected
            assert link.counters.reconnects >= 9

    play(story)


# -- hanging up ------------------------------------------------------------------------------------------------------

GRACE_S = SOON.grace.total_seconds()


async def come_in(server: Server, **claim: Any) -> tuple[ByHand, PeerLink]:
    """One by hand, and the server's link to it."""
    peer = ByHand(HandshakeClaim(**{"rank": 1, "job": "test", "session": NONCE[:16], **claim}))
    assert isinstance(await peer.enter(server.address), Welcome)
    link = server.one.link
    assert link is not None
    return peer, link


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
def test_a_process_that_is_gone_is_missed_soon(reset: bool) -> None:
    """Its kernel says so; there is no need to wait for the whole timeout."""

    async def story() -> None:
        async with serving() as server:
            peer, _ = await come_in(server)
            peer.hang_up(reset=reset)
            took_s = await until(lambda: server.one.losses, "nobody notices")
            assert 0.6 * GRACE_S < took_s < 2 * GRACE_S
            (error,) = server.one.losses
            assert isinstance(error, NetworkError)
            assert "rank 1 with 127.0.0.1:" in str(error)
            assert "it hung up, and was not back within 0.4 s; the connection was lost: " in str(error)

    play(story)


def test_who_is_back_in_time_goes_on() -> None:
    async def story() -> None:
        async with serving() as server:
            peer, link = await come_in(server)
            peer.hang_up()
            await until(lambda: not link.connected, "it does not notice")
            await asyncio.sleep(0.4 * GRACE_S)
            peer.claim = msgspec.structs.replace(peer.claim, resumes=True)
            assert isinstance(await peer.enter(server.address), Welcome)
            await asyncio.sleep(2 * GRACE_S)
            assert link.connected
            assert server.one.losses == []
            peer.hang_up()

    play(story)


def test_who_was_hung_up_on_is_waited_for() -> None:
    """It was this side that broke the connection, so the other may need longer to find out."""

    async def story() -> None:
        async with serving() as server:
            peer, link = await come_in(server)
            peer.say(b"noise")
            await until(lambda: not link.connected, "it takes noise")
            took_s = await until(lambda: server.one.losses, "it is waited for forever")
            assert took_s > 0.7 * SOON.timeout.total_seconds()
            peer.hang_up()

    play(story)


def test_who_dials_gives_a_server_the_whole_timeout() -> None:
    """And tries several times within what would be its own grace."""

    async def story() -> None:
        tries: list[float] = []
        clock = asyncio.get_running_loop().time

        def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tries.append(clock())
            writer.transport.abort()

        async with serving() as server:
            port = int(server.address.rpartition(":")[2])
            await dial(server.address, taker := Taker())
            server.listener.close()
            busy = await asyncio.start_server(refuse, "127.0.0.1", port)
            began_s = clock()
            far = server.one.link
            assert far is not None
            far.abort()
            took_s = await until(lambda: taker.losses, "it never gives up")
            busy.close()
            assert took_s > 0.7 * SOON.timeout.total_seconds()
            assert tries[0] - began_s < 0.2 * GRACE_S, "the first at once"
            assert sum(at - began_s < GRACE_S for at in tries) >= 4

    play(story)


# -- silence ---------------------------------------------------------------------------------------------------------


def test_a_partition_shorter_than_the_timeout_heals() -> None:
    async def story() -> None:
        async with serving() as server, Proxy(server.address) as proxy:
            link = await dial(proxy.address)
            proxy.hold()
            link.send(b"m", b"x" * 1000)
            await asyncio.sleep(0.6 * SOON.timeout.total_seconds())
            assert server.one.frames == []
            proxy.release()
            await until(lambda: server.one.frames, "it does not come through")
            assert server.one.losses == []
            await link.close()

    play(story)


def test_a_partition_is_noticed_on_both_sides_in_time() -> None:
    async def story() -> None:
        async with serving() as server, Proxy(server.address) as proxy:
            await dial(proxy.address, taker := Taker())
            await asyncio.sleep(0.5)
            proxy.hold()
            took_s = await until(lambda: taker.losses and server.one.losses, "nobody notices")
            assert SOON.timeout.total_seconds() * 0.75 < took_s < SOON.timeout.total_seconds() + 0.1
            for error in (taker.losses[0], server.one.losses[0]):
                assert isinstance(error, NetworkError)
                assert "silent for 2 s" in str(error)

    play(story)


def test_a_slow_body_is_no_silence() -> None:
    """It takes longer than the timeout, and not even once comes as much as the event loop is to be woken for."""

    async def story() -> None:
        async with serving() as server, Proxy(server.address) as proxy:
            proxy.up.rate_bytes_per_s = proxy.down.rate_bytes_per_s = 80_000
            link = await dial(proxy.address)
            link.send(b"m", bytes(200_000))
            took_s = await until(lambda: server.one.frames, "it does not come")
            assert took_s > 1.1 * SOON.timeout.total_seconds()
            assert link.counters.reconnects == 0
            link.abort()

    play(story)


def test_a_small_frame_after_a_large_one_comes_at_once() -> None:
    """Who waited for the rest of a body does not wait for as much of the next frame."""

    async def story() -> None:
        async with serving() as server:
            link = await dial(server.address)
            for number in range(12):
                link.send(b"large", bytes((1 << 20) + number * 99_999))
                await until(lambda: len(server.one.frames) % 2, "it does not come")
                link.send(b"small")
                took_s = await until(lambda: len(server.one.frames) % 2 == 0, "it does not come")
                assert took_s < 0.5 * SOON.timeout.total_seconds() / TICKS, "before the next tick"
            link.abort()

    play(story)


SLOW_TICKS = Limits(timeout=timedelta(seconds=20))
AT_ONCE_S = 0.5 * SLOW_TICKS.timeout.total_seconds() / TICKS  # before the next tick could have found it
LARGE = bytes(3 << 19)  # more than the event loop is woken for at once, and no multiple of it


@pytest.mark.parametrize("last_bytes", [1, 70_000])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_last_bytes_of_a_body_come_at_once(last_bytes: int, tls: bool, tmp_path: Path) -> None:
    async def story() -> None:
        ours = theirs = None
        if tls:
            make(tmp_path)
            pairs = [
                Certificates(tmp_path / f"{name}.pem", tmp_path / f"{name}.key", tmp_path / "authority.pem")
                for name in ("server", "worker")
            ]
            ours, theirs = pairs[0], pairs[1].client_context()
        async with serving(limits=SLOW_TICKS, credentials=ours) as server:
            peer = ByHand(HandshakeClaim(rank=1, job="test", session=NONCE[:16]))
            await peer.enter(server.address, theirs)
            stream = encode(Frame(b"large", LARGE, kind=Kind.DATA, number=1))
            link = server.one.link
            assert link is not None
            peer.say(stream[:-last_bytes])
            await asyncio.sleep(0.2)
            assert server.one.asked == [b"large"]
            peer.say(stream[-last_bytes:])
            assert await until(lambda: server.one.frames, "it does not come") < AT_ONCE_S
            peer.hang_up()

    play(story)


def test_a_turn_that_ends_with_a_frame_does_not_hold_up_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has been told to wait for the rest of a body, and the body was taken in to its last byte."""
    monkeypatch.setattr("offbeat.wire.link._TURN_BYTES", 1000)

    async def story() -> None:
        async with serving(limits=SLOW_TICKS) as server:
            peer, _ = await come_in(server)
            stream = encode(Frame(b"large", LARGE, kind=Kind.DATA, number=1))
            peer.say(stream[: len(LARGE) // 2])
            await asyncio.sleep(0.2)
            peer.say(stream[len(LARGE) // 2 :])
            await until(lambda: server.one.frames, "it does not come")
            peer.say(encode(Frame(b"small", kind=Kind.DATA, number=2)))
            assert await until(lambda: len(server.one.frames) == 2, "it does not come") < AT_ONCE_S
            peer.hang_up()

    play(story)


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
def test_a_peer_that_closes_in_the_middle_of_a_body_is_noticed_at_once(reset: bool) -> None:
    async def story() -> None:
        async with serving(limits=SLOW_TICKS) as server:
            peer, link = await come_in(server)
            peer.say(encode(Frame(b"large", LARGE, kind=Kind.DATA, number=1))[:500_000])
            await until(lambda: server.one.asked, "it does not come")
            await asyncio.sleep(0.1)
            peer.hang_up(reset=reset)
            assert await until(lambda: not link.connected, "nobody notices") < AT_ONCE_S

    play(story)


@pytest.mark.slow
def test_a_body_that_trickles_in_comes_whole() -> None:
    """Never as much at once as the event loop is woken for; it is found at each tick."""

    async def story() -> None:
        async with serving() as server:
            peer, link = await come_in(server)
            stream = encode(Frame(b"large", LARGE, kind=Kind.DATA, number=1))
            peer.say(stream[:-60_000])
            for at in range(len(stream) - 60_000, len(stream), 2000):
                await asyncio.sleep(1.5 * SOON.timeout.total_seconds() / 30)
                assert server.one.frames == []
                peer.say(stream[at : at + 2000])
            assert await until(lambda: server.one.frames, "it does not come") < 0.05
            assert server.one.frames == [(b"large", LARGE)]
            assert link.connected
            peer.hang_up()

    play(story)


@pytest.mark.slow
def test_idle_links_stay() -> None:
    async def story() -> None:
        async with serving() as server:
            link = await dial(server.address, taker := Taker())
            await asyncio.sleep(1.3 * SOON.timeout.total_seconds())
            assert not server.one.losses
            assert not taker.losses
            assert link.counters.reconnects == 0
            assert 0 < link.counters.bytes_in < 1000, "and cost next to nothing"

    play(story)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_slow_reader_stops_the_sender_at_the_window() -> None:
    limits = Limits(window_bytes=1 << 20, timeout=SOON.timeout)

    async def story() -> None:
        async with serving(limits=limits) as server:
            link = await dial(server.address, limits=limits)
            far = server.one.link
            assert far is not None
            far.pause_reading()
            body, queued = bytes(64 << 10), 0
            arrived: list[int] = []

            async def pour() -> None:
                nonlocal queued
                for number in range(100):
                    link.send(b"", body, lambda number=number: arrived.append(number))  # type: ignore[misc]
                    queued += 1
                    await link.drain()

            task = asyncio.create_task(pour())
            await asyncio.sleep(1.2 * SOON.timeout.total_seconds())
            cost = len(body) + HEADER_BYTES + FRAME_COST_BYTES
            assert queued == limits.window_bytes // cost + 1, "one more than fits, then it waits"
            assert not arrived
            assert not server.one.losses, "who does not listen cannot find the other side silent"
            far.resume_reading()
            await task
            await until(lambda: len(arrived) == 100, "the rest does not arrive")
            assert link.counters.reconnects == 0

    play(story)


def test_a_reader_that_pauses_still_misses_who_has_gone() -> None:
    """It hears nothing, but what it says gets no further."""

    async def story() -> None:
        async with serving() as server, Proxy(server.address) as proxy:
            await dial(proxy.address, taker := Taker())
            far = server.one.link
            assert far is not None
            far.pause_reading()
            await asyncio.sleep(0.1)
            assert taker.link is not None
            taker.link.abort()
            took_s = await until(lambda: server.one.losses, "it is not missed")
            assert took_s < 1.5 * SOON.timeout.total_seconds()

    play(story)


def test_an_ended_link_holds_no_bodies() -> None:
    async def story() -> None:
        import weakref

        class Body(bytearray):
            pass

        async with serving() as server, Proxy(server.address) as proxy:
            link = await dial(proxy.address)
            proxy.hold()
            body = Body(1 << 20)
            gone = weakref.ref(body)
            link.send(b"", body)
            await asyncio.sleep(0.01)
            del body
            assert gone() is not None
            link.abort()
            assert gone() is None

    play(story)


def test_bodies_are_not_copied_and_memory_is_bounded() -> None:
    """A hundred bodies of one megabyte are sent from the same memory and received into the same."""
    import tracemalloc

    limits = Limits(window_bytes=4 << 20, timeout=SOON.timeout)
    body = bytearray(1 << 20)
    place = memoryview(bytearray(1 << 20))

    class Same(Taker):
        def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
            return place[:size_bytes]

        def received(self, metadata: bytes, body: memoryview) -> None:
            self.frames.append((metadata, b""))

    async def story() -> None:
        async with serving(limits=limits) as server:
            same = Same()
            server.accept = same.begin  # type: ignore[method-assign]
            server.listener._acceptor._accept = same.begin
            link = await dial(server.address, limits=limits)
            tracemalloc.start()
            for _ in range(100):
                link.send(b"m", body)
                await link.drain()
            await until(lambda: len(same.frames) == 100, "not all arrive")
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            # Both sides live in this process; the window's bodies are not theirs.
            assert peak_bytes < 2 * limits.bookkeeping_bytes - 2 * limits.window_bytes + 10 * FRAME_COST_BYTES
            await link.close()

    play(story)


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_good_bye_comes_after_everything() -> None:
    async def story() -> None:
        async with serving() as server:
            link = await dial(server.address, taker := Taker())
            for metadata, body in FRAMES:
                link.send(metadata, body)
            await link.close()
            await until(lambda: server.one.losses == [None], "no good-bye")
            assert server.one.frames == FRAMES
            assert taker.losses == [], "who closes knows"
            assert server.listener.links == []
            with pytest.raises(NetworkError, match="the link has ended"):
                link.send(b"more")
            await link.close()

    play(story)


def test_both_say_good_bye_at_once() -> None:
    async def story() -> None:
        async with serving() as server:
            link = await dial(server.address, taker := Taker())
            far = server.one.link
            assert far is not None
            await asyncio.gather(link.close(), far.close())
            assert taker.losses == server.one.losses == []

    play(story)


def test_a_good_bye_through_a_cut() -> None:
    async def story() -> None:
        async with serving() as server, Proxy(server.address) as proxy:
            link = await dial(proxy.address)
            proxy.cut_all()
            link.send(b"last words")
            await link.close()
            assert server.one.frames == [(b"last words", b"")]
            assert server.one.losses == [None]

    play(story)


def test_who_aborts_is_missed() -> None:
    """The session cannot be resumed, and the one that dials again is told so at once."""

    async def story() -> None:
        async with serving() as server:
            await dial(server.address, taker := Taker())
            assert server.one.link is not None
            server.one.link.abort()
            took_s = await until(lambda: taker.losses, "it is not noticed")
            assert took_s < 1.0
            assert isinstance(taker.losses[0], PeerError)
            assert "its session is over" in str(taker.losses[0])
            assert server.one.losses == []

    play(story)


def test_a_frame_that_is_refused_ends_the_session_with_the_reason() -> None:
    async def story() -> None:
        async with serving() as server:
            link = await dial(server.address, taker := Taker())
            server.one.refuses = PeerError("Cannot admit bucket 9: there are 4.")
            link.send(b"bucket 9", b"values")
            await until(lambda: taker.losses, "it is not told")
            assert str(server.one.losses[0]).endswith("Cannot admit bucket 9: there are 4.")
            assert "ended the session" in str(taker.losses[0])
            assert str(taker.losses[0]).endswith("Cannot admit bucket 9: there are 4.")

    play(story)


@pytest.mark.parametrize(("metadata", "body"), [(b"m" * (257 << 10), b""), (b"", bytes((16 << 20) + 1))])
def test_frames_that_are_too_long_are_not_sent(metadata: bytes, body: bytes) -> None:
    async def story() -> None:
        async with serving() as server:
            link = await dial(server.address)
            with pytest.raises(NetworkError, match="one frame takes at most"):
                link.send(metadata, body)
            link.abort()

    play(story)


def test_a_longer_frame_than_the_other_side_takes() -> None:
    async def story() -> None:
        async with serving(limits=Limits(max_body_bytes=100, timeout=SOON.timeout)) as server:
            link = await dial(server.address, taker := Taker())
            link.send(b"", b"x" * 101)
            await until(lambda: taker.losses, "it is not told")
            assert "Cannot receive a body of 101 bytes: the most that is accepted here is 100" in str(taker.losses[0])

    play(story)
