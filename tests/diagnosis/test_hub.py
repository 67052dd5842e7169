"""The hub and its door: who may speak, who is silent, who is gone."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.diagnosis import hub as hub_module
from offbeat.diagnosis.hub import Hub
from offbeat.diagnosis.hub_client import HubClient, enter
from offbeat.errors import NetworkError, PeerError
from offbeat.protocol.worker_status import TrainingStatus
from offbeat.wire import handshake
from offbeat.wire.frame import Frame, Reader, encode
from offbeat.wire.message_stream import MessageStream
from offbeat.wire.messages import (
    AskAll,
    AskRoster,
    Bye,
    ClusterReport,
    HandshakeClaim,
    Hello,
    Join,
    Overview,
    ReportWords,
    WorkerReport,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TOKEN = b"t" * 32
streams: list[MessageStream] = []  # of those who look; closed with the hub


def with_hub(story: Callable[[Hub, str], Awaitable[None]], world: int = 3) -> None:
    async def play() -> None:
        hub = Hub(token=TOKEN, world=world)
        address = await hub.serve("127.0.0.1")
        try:
            await story(hub, address)
        finally:
            hub.close()
            for stream in streams:
                stream.close()
            streams.clear()
            await settle()

    asyncio.run(play())


async def join(
    address: str, rank: int, token: bytes = TOKEN, shown: Any = None
) -> tuple[HubClient, asyncio.Task[None]]:
    uplink = HubClient(address, token=token, rank=rank)
    uplink.on_show = shown or uplink.on_show
    task = asyncio.create_task(uplink.run())
    for _ in range(200):
        if uplink.lost_since_s is None:
            break
        await asyncio.sleep(0.005)
    return uplink, task


async def settle() -> None:
    await asyncio.sleep(0.05)


def test_reports_meet_in_the_roster() -> None:
    async def story(hub: Hub, address: str) -> None:
        one, task_one = await join(address, 1)
        two, task_two = await join(address, 2)
        one.report(WorkerReport(rank=1, host="b", phase="computing", step=4))
        two.report(WorkerReport(rank=2, host="c", phase="exchanging", step=5))
        await settle()
        words = await one.ask(())
        assert [(w.rank, w.phase, w.step) for w in words[1:]] == [(1, "computing", 4), (2, "exchanging", 5)]
        assert words[0].process == "unreachable", "rank 0 has never reported"
        task_one.cancel()
        task_two.cancel()

    with_hub(story)


def test_a_wrong_token_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def story(hub: Hub, address: str) -> None:
        with caplog.at_level(logging.WARNING):
            uplink, task = await join(address, 1, token=b"x" * 32)
        assert uplink.lost_since_s is not None
        assert hub.peers == 0
        with pytest.raises(NetworkError):
            await uplink.ask(())
        assert "its token is wrong" in caplog.text
        task.cancel()

    with_hub(story)


async def speak(address: str, data: bytes) -> bytes:
    """Connect, say `data` after the hub's hello, and return what else comes until the hub hangs up."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.read(1000)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        pack(ReportWords(WorkerReport(rank=1))),
        pack(Join(HandshakeClaim(rank=9), b"n" * 32, b"p" * 32)),
        pack(Join(HandshakeClaim(rank=1), b"n" * 32, b"p" * 32)),
        encode(Frame(b"\x81\xa4type\xa2\xff\xfe")),
        b"OFFB\x02\x00\x00\x00" + (2**31).to_bytes(4, "big") + bytes(28),
    ],
    ids=["http", "report without joining", "rank out of range", "wrong proof", "no text", "two gigabytes"],
)
def test_a_stranger_is_cut_off_and_the_hub_lives(data: bytes) -> None:
    async def story(hub: Hub, address: str) -> None:
        assert await speak(address, data) == b""
        uplink, task = await join(address, 1)
        assert uplink.lost_since_s is None
        task.cancel()

    with_hub(story)


def test_strangers_that_were_sent_away_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_MAX_STRANGERS", 2)

    async def story(hub: Hub, address: str) -> None:
        for _ in range(3):
            assert await speak(address, b"GET / HTTP/1.1\r\n\r\n") == b""
        uplink, task = await join(address, 1)
        assert uplink.lost_since_s is None
        task.cancel()

    with_hub(story)


def test_a_proof_cannot_be_used_again() -> None:
    async def story(hub: Hub, address: str) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        (frame,) = Reader().feed(await reader.read(1000))
        hello = unpack(frame)
        assert isinstance(hello, Hello)
        recorded = pack(handshake.join(TOKEN, hello, HandshakeClaim(rank=1)))
        writer.write(recorded)
        assert await reader.read(1000), "the first time it is welcome"
        writer.close()
        assert await speak(address, recorded) == b"", "the second time the hub's nonce is another"

    with_hub(story)


def test_a_rank_speaks_for_itself_only() -> None:
    async def story(hub: Hub, address: str) -> None:
        one, task = await join(address, 1)
        one.report(WorkerReport(rank=2, phase="raised", traceback="forged"))
        await settle()
        assert (await hub.ask_all())[2].phase == "starting"
        assert hub.peers == 0, "and is cut off"
        task.cancel()

    with_hub(story)


def test_silence_becomes_unreachable_but_good_byes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "SILENCE_S", 0.05)

    async def story(hub: Hub, address: str) -> None:
        for rank, last in ((1, None), (2, Bye())):
            uplink, task = await join(address, rank)
            uplink.report(WorkerReport(rank=rank, host="h", phase="computing", step=3))
            await settle()
            await uplink.leave(well=last is not None)
            task.cancel()
        await asyncio.sleep(0.2)
        _, one, two = await hub.ask_all()
        assert (one.process, one.phase) == ("unreachable", "computing")
        assert (two.process, two.phase) == ("running", "finished")

    with_hub(story)


def test_stacks_are_asked_for_and_waited_for() -> None:
    async def story(hub: Hub, address: str) -> None:
        def show() -> None:
            one.report(WorkerReport(rank=1, stack="in f"))

        one, task = await join(address, 1, shown=show)
        words = await hub.ask_all((1,))
        assert words[1].stack == "in f"
        task.cancel()

    with_hub(story)


def test_the_uplink_comes_back() -> None:
    async def story(hub: Hub, address: str) -> None:
        one, task = await join(address, 1)
        one.report(WorkerReport(rank=1, step=3))
        await settle()
        hub._links[1].close()  # the fault: the connection breaks
        await settle()
        assert one.lost_since_s is not None
        await asyncio.sleep(1.3)
        assert one.lost_since_s is None
        assert (await one.ask(()))[1].step == 3, "the latest words were said again"
        task.cancel()

    with_hub(story)


def test_an_open_door_without_token_is_refused() -> None:
    async def play() -> None:
        with pytest.raises(NetworkError, match="without a token"):
            await Hub(token=b"", world=2).serve("0.0.0.0")

    asyncio.run(play())


def test_questions_faster_than_answers_are_cut_off() -> None:
    async def story(hub: Hub, address: str) -> None:
        one, task = await join(address, 1)
        assert one._stream is not None
        for number in range(50):
            one._stream.send(AskRoster(number, (1,)))  # each waits for a stack that never comes
        await asyncio.sleep(0.2)
        assert hub.peers == 0
        task.cancel()

    with_hub(story)


def test_roster_of_the_hub_has_every_rank() -> None:
    async def story(hub: Hub, address: str) -> None:
        hub.report(WorkerReport(rank=0, phase="computing"))
        cluster = ClusterReport(1, await hub.ask_all())
        assert [w.rank for w in cluster.words] == [0, 1, 2]

    with_hub(story)


def test_a_stranger_is_named_by_its_address(caplog: pytest.LogCaptureFixture) -> None:
    async def story(hub: Hub, address: str) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        mine = writer.get_extra_info("sockname")[1]
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 8)
        while await asyncio.wait_for(reader.read(4096), 3):
            pass
        writer.close()
        assert f"Refused {host}:{mine} on the control connection: " in caplog.text

    with_hub(story)


class Onlooker:
    """Somebody who only looks, over a connection of its own."""

    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream

    @classmethod
    async def come(cls, address: str, token: bytes = TOKEN, role: Any = "onlooker") -> Onlooker:
        host, _, port = address.rpartition(":")
        stream = MessageStream(*await asyncio.open_connection(host, int(port)), max_bytes=1 << 20)
        streams.append(stream)
        await enter(stream, token, HandshakeClaim(rank=0, role=role))
        return cls(stream)

    async def look(self, number: int = 1) -> Overview:
        self.stream.send(AskAll(number))
        told = await asyncio.wait_for(self.stream.recv(), 3)
        assert isinstance(told, Overview)
        return told


def test_who_looks_sees_all_and_is_no_peer() -> None:
    async def story(hub: Hub, address: str) -> None:
        one, task = await join(address, 1)
        one.report(
            WorkerReport(rank=1, host="b", phase="computing", step=4), TrainingStatus(step=4, values={"loss": 0.5})
        )
        hub.report(WorkerReport(rank=0, host="a", phase="exchanging", step=5), TrainingStatus(step=5))
        onlooker = await Onlooker.come(address)
        await settle()
        assert hub.peers == 1
        told = await onlooker.look(7)
        assert (told.number, told.world) == (7, 3)
        assert [(w.rank, w.phase, w.process) for w in told.words] == [
            (0, "exchanging", "running"), (1, "computing", "running"), (2, "starting", "unreachable")
        ]  # fmt: skip
        assert told.statuses == {0: TrainingStatus(step=5), 1: TrainingStatus(step=4, values={"loss": 0.5})}
        one.report(WorkerReport(rank=1, host="b", phase="exchanging", step=4))
        await settle()
        assert (await onlooker.look()).statuses[1].step == 4, "who says nothing new of it has said it before"
        hub.leave(0)
        hub.close()
        assert isinstance(await asyncio.wait_for(onlooker.stream.recv(), 3), Bye), "the job has ended"
        task.cancel()

    with_hub(story)


@pytest.mark.parametrize(
    "message", [AskRoster(1), ReportWords(WorkerReport(rank=1)), Bye()], ids=lambda message: type(message).__name__
)
def test_who_looks_may_say_nothing_else(message: Any) -> None:
    async def story(hub: Hub, address: str) -> None:
        onlooker = await Onlooker.come(address)
        await onlooker.look()
        onlooker.stream.send(message)
        assert await asyncio.wait_for(onlooker.stream.recv(), 3) is None
        assert hub._words == {}
        await (await Onlooker.come(address)).look()

    with_hub(story)


def test_who_does_not_know_the_token_sees_nothing() -> None:
    async def story(_: Hub, address: str) -> None:
        with pytest.raises(PeerError):
            await Onlooker.come(address, token=b"x" * 32)
        for role in ("shard", "operator"):
            with pytest.raises(PeerError):
                await Onlooker.come(address, role=role)

    with_hub(story)


def test_a_peer_cannot_look_and_only_some_can_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_MAX_ONLOOKERS", 2)

    async def story(_: Hub, address: str) -> None:
        peer = await Onlooker.come(address, role="worker")
        peer.stream.send(AskAll(1))
        assert await asyncio.wait_for(peer.stream.recv(), 3) is None
        first, second = await Onlooker.come(address), await Onlooker.come(address)
        await first.look()
        await second.look()
        third = await Onlooker.come(address)
        assert await asyncio.wait_for(third.stream.recv(), 3) is None
        first.stream.close()
        await settle()
        await (await Onlooker.come(address)).look()

    with_hub(story)


def test_a_status_that_cannot_be_closes_its_own_connection_only() -> None:
    async def story(hub: Hub, address: str) -> None:
        one, task = await join(address, 1)
        one.report(WorkerReport(rank=1, host="b"), TrainingStatus(step=-5))
        await settle()
        assert hub.peers == 0
        assert (await (await Onlooker.come(address)).look()).statuses == {}
        task.cancel()

    with_hub(story)
