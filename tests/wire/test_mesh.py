"""Who gets into a mesh, and what exchanges over it do when others do not do as they should."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from typing import Any

import pytest

from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PeerError
from offbeat.wire import tcp
from offbeat.wire.lane import CopyingSink, GrowingBuffer, LaneKey, OutgoingLane, block_metadata
from offbeat.wire.mesh import MeshChannel, MeshExchange, PeerMesh
from tests.wire.meshes import TOKEN, in_loop, mesh, meshes


class Nothing:
    """Takes in nothing."""

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        raise AssertionError("nothing is sent to it")

    def received(self, metadata: bytes, body: memoryview) -> None:
        raise AssertionError("nothing is sent to it")

    def lost(self, error: OffbeatError | None) -> None:
        """Let go."""


async def dial(address: str, rank: int, job: str = "test/0", role: Any = "peer") -> None:
    await tcp.connect(
        address,
        accept=lambda _: Nothing(),
        job=job,
        rank=rank,
        credentials=TOKEN,
        role=role,
        patience=timedelta(seconds=2),
    )


@pytest.mark.parametrize(
    ("rank", "job", "role", "says"),
    [
        (0, "test/0", "worker", "comes as a worker: here are links between workers alone"),
        (2, "test/0", "peer", "rank 2 has no link to open with rank 2"),
        (7, "test/0", "peer", "rank 7 has no link to open with rank 2"),
        (0, "test/1", "peer", "hung up when it saw who we are"),
    ],
)
@in_loop
async def test_who_is_not_taken_in(rank: int, job: str, role: Any, says: str) -> None:
    one = mesh(2)
    address = await one.open("127.0.0.1")
    with pytest.raises(PeerError, match=re.escape(says)):
        await dial(address, rank, job, role)
    one.abort()


@in_loop
async def test_a_rank_is_there_once() -> None:
    async with meshes(2) as (made, _):
        assert made[1]._listener is not None
        with pytest.raises(PeerError, match="rank 0 is here already"):
            await dial(made[1]._listener.address, 0)


@in_loop
async def test_who_does_not_come_is_named() -> None:
    one = mesh(2)
    await one.open("127.0.0.1")
    with pytest.raises(NetworkError, match=r"within 0\.2 s no link came from rank 0, 1\. Can it reach 127"):
        await one.meet({0: "127.0.0.1:1", 1: "127.0.0.1:1", 2: "127.0.0.1:1"}, timedelta(seconds=0.2))
    one.abort()


class Copy:
    """One exchange in which rank 0 gives rank 1 some bytes; what both ends see of it."""

    def __init__(self, made: list[PeerMesh], size: int = 100, number: int = 0) -> None:
        self.errors: dict[int, OffbeatError] = {}
        self.sent, self.received = asyncio.Event(), asyncio.Event()
        self.source = GrowingBuffer(memoryview(bytes(range(256)) * (size // 256 + 1))[:size])
        self.target = GrowingBuffer(memoryview(bytearray(size)), 0)
        self.channels: list[MeshChannel] = [one.channel(0) for one in made]
        self.number = number

    def begin(self, rank: int, terms: str = "a copy") -> None:
        def failed(error: OffbeatError) -> None:
            self.errors.setdefault(rank, error)

        if rank == 0:
            lane = OutgoingLane(LaneKey(0, self.number, 3), self.source, (0,), sent=self.sent.set)
            self.channels[0].begin(self.number, MeshExchange(terms, {}, [(1, lane)], failed))
        else:
            sinks = {(0, 3): CopyingSink(self.target, self.received.set)}
            self.channels[1].begin(self.number, MeshExchange(terms, sinks, [], failed))


@pytest.mark.parametrize("size", [1, 70_000, 3_000_001])
@pytest.mark.parametrize("first", [0, 1])
@in_loop
async def test_bytes_come_whoever_begins(size: int, first: int) -> None:
    async with meshes(2) as (made, _):
        copy = Copy(made, size)
        copy.begin(first)
        await asyncio.sleep(0.05)
        assert not copy.received.is_set()
        copy.begin(1 - first)
        await asyncio.wait_for(asyncio.gather(copy.sent.wait(), copy.received.wait()), 5)
        assert copy.target.memory == copy.source.memory
        assert not copy.errors


@in_loop
async def test_what_is_large_waits_for_the_other_end() -> None:
    """Nothing of it is on its way before there is memory for it."""
    async with meshes(2) as (made, _):
        copy = Copy(made, 3_000_000)
        copy.begin(0)
        await asyncio.sleep(0.05)
        assert made[0].peer(1).scheduler.sent_bytes == 0


@in_loop
async def test_what_may_go_early_is_bounded() -> None:
    """An end that is behind gets some bytes of exchanges to come; the rest when it has begun them."""
    async with meshes(2) as (made, _):
        copies = [Copy(made, 60_000, number) for number in range(20)]
        for copy in copies:
            copy.begin(0)
        await asyncio.sleep(0.1)
        assert 0 < made[0].peer(1).scheduler.sent_bytes <= 256 << 10
        for copy in copies:
            copy.begin(1)
        await asyncio.wait_for(asyncio.gather(*(copy.received.wait() for copy in copies)), 5)
        assert all(copy.target.memory == copy.source.memory for copy in copies)
        assert made[0].peer(1).eager_bytes == 0
        assert made[1].peer(0).early_bytes == 0


@in_loop
async def test_small_blocks_that_come_early_are_bounded_by_what_they_cost() -> None:
    """A byte is kept with its name, its place and memory of its own: some 500 bytes."""
    async with meshes(2) as (made, _):
        link = made[0].peer(1).link
        for op in range(5000):
            link.send(block_metadata(LaneKey(0, 5, op), 0), b"x")
        for _ in range(500):
            await asyncio.sleep(0.01)
            if 0 in made[1].lost:
                break
        assert "Cannot keep more than 524288 bytes of exchanges that were not begun here" in str(made[1].lost[0])
        assert len(made[1].channel(0)._early[5]) <= 1024


@in_loop
async def test_many_small_lanes_come_early_and_all_arrive() -> None:
    """What one end may send is never more than the other keeps."""
    async with meshes(2) as (made, _):
        copies = [Copy(made, 1, number) for number in range(2000)]
        for copy in copies:
            copy.begin(0)
        await asyncio.sleep(0.1)
        for copy in copies:
            copy.begin(1)
        await asyncio.wait_for(asyncio.gather(*(copy.received.wait() for copy in copies)), 10)
        assert made[0].peer(1).eager_bytes == made[1].peer(0).early_bytes == 0


@in_loop
async def test_unlike_calls_are_named_on_both_sides() -> None:
    async with meshes(2) as (made, _):
        copy = Copy(made)
        copy.begin(0, "a sum of 3 float32")
        copy.begin(1, "a sum of 4 float32")
        await asyncio.sleep(0.1)
        assert isinstance(copy.errors[1], DisagreementError)
        assert "this worker calls a sum of 4 float32, and rank 0 calls a sum of 3 float32" in str(copy.errors[1])
        assert "this worker calls a sum of 3 float32, and rank 1 calls a sum of 4 float32" in str(copy.errors[0])


@in_loop
async def test_a_lost_peer_fails_what_it_takes_part_in() -> None:
    async with meshes(3) as (made, _):
        copy, began_s = Copy(made, 3_000_000), asyncio.get_running_loop().time()
        copy.begin(1)
        made[0].abort()
        while 1 not in copy.errors:
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began_s < 1  # a fifth of the timeout, and a little
        assert "rank 0" in str(copy.errors[1])
        later = Copy(made, 10, number=1)
        later.begin(1)
        assert later.errors[1] is copy.errors[1]


@in_loop
async def test_a_flood_ends_the_link() -> None:
    async with meshes(2) as (made, _):
        link = made[0].peer(1).link
        for number in range(10):
            link.send(block_metadata(LaneKey(0, number, 0), 0), bytes(60_000))
        await asyncio.sleep(0.2)
        assert "more than 524288 bytes of exchanges that were not begun here" in str(made[1].lost[0])


@pytest.mark.parametrize(
    ("key", "offset", "size", "says"),
    [
        (LaneKey(0, 0, 9), 0, 10, "Cannot take in lane 9 of exchange 0 (a copy): there is none"),
        (LaneKey(0, 0, 3), 5, 10, "Cannot take in bytes 5 to 15 of a lane of 100 bytes: 0 is where it goes on"),
        (LaneKey(0, 0, 3), 0, 101, "Cannot take in bytes 0 to 101 of a lane of 100 bytes"),
    ],
)
@in_loop
async def test_a_block_that_does_not_belong(key: LaneKey, offset: int, size: int, says: str) -> None:
    async with meshes(2) as (made, _):
        copy = Copy(made)
        copy.begin(1)
        made[0].peer(1).link.send(block_metadata(key, offset), bytes(size))
        await asyncio.sleep(0.1)
        assert says in str(made[1].lost[0])
        assert says in str(copy.errors[1])


@pytest.mark.parametrize(
    ("metadata", "body", "says"),
    [
        (b"", b"", "Cannot understand this peer"),
        (b"\xc1", b"12", "Cannot understand this peer"),
        (b"\x93\xa5begun\x00\x00", b"", "Cannot understand this peer"),
        (b"\x94\xa5begun\x00\x00\xa1x", b"12", "Cannot take in a body with the word that an exchange was begun"),
        (b"\x94\xa5begun\x00\xcd\x20\x00\xa1x", b"", "Cannot follow: exchange 8192 was begun, and 0 is next here"),
        (b"\x96\xa5block\x00\x00\x00\x00\x00", b"", "Cannot take in a block without a body"),
    ],
)
@in_loop
async def test_words_that_make_no_sense(metadata: bytes, body: bytes, says: str) -> None:
    async with meshes(2) as (made, _):
        made[0].peer(1).link.send(metadata, body)
        await asyncio.sleep(0.1)
        assert says in str(made[1].lost[0])


@in_loop
async def test_who_closes_waits_for_those_who_are_behind() -> None:
    """A small message was sent at once, and is of use to whom has not asked for it yet."""
    async with meshes(2) as (made, _):
        copy = Copy(made)
        copy.begin(0)
        closing = asyncio.create_task(made[0].close())
        await asyncio.sleep(0.2)
        assert not closing.done()
        copy.begin(1)
        await asyncio.wait_for(copy.received.wait(), 2)
        await asyncio.wait_for(closing, 2)
