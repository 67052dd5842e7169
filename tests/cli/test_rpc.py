"""Questions are answered once, whatever breaks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from offbeat.cli.rpc import RpcClient, RpcServer
from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.testing.chaos_proxy import Proxy
from offbeat.wire.tcp import connect, listen
from tests.wire.peers import JOB, SOON, play

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from offbeat.wire.link import PeerLink


@contextlib.asynccontextmanager
async def asking(answer: Callable[[bytes], bytes]) -> AsyncIterator[tuple[RpcClient, PeerLink, Proxy]]:
    listener = await listen("127.0.0.1", 0, accept=lambda link: RpcServer(link, answer), job=JOB, limits=SOON)
    async with Proxy(listener.address) as proxy:
        asker = RpcClient()
        link = await connect(proxy.address, accept=asker.begin, job=JOB, rank=0, limits=SOON)
        yield asker, link, proxy
        await link.close()
        listener.close()


def test_answers_find_their_questions() -> None:
    async def story() -> None:
        async with asking(lambda question: question[::-1]) as (asker, _, _):
            questions = [b"%d" % (number * 7919) for number in range(100)]
            assert await asyncio.gather(*map(asker.ask, questions)) == [question[::-1] for question in questions]

    play(story)


def test_each_is_answered_once_through_cuts() -> None:
    seen: list[bytes] = []

    def answer(question: bytes) -> bytes:
        seen.append(question)
        return question

    async def story() -> None:
        async with asking(answer) as (asker, link, proxy):
            for number in range(60):
                question = asyncio.ensure_future(asker.ask(b"%d" % number))
                if number % 5 == 0:
                    # Now before the question arrives, now before the answer does.
                    await asyncio.sleep(number * 1e-5)
                    proxy.cut_all()
                assert await question == b"%d" % number
            assert link.counters.reconnects >= 6
        assert seen == [b"%d" % number for number in range(60)]

    play(story)


def test_one_that_is_no_longer_waited_for_does_no_harm() -> None:
    async def story() -> None:
        async with asking(lambda question: question) as (asker, _, _):
            first = asyncio.ensure_future(asker.ask(b"1"))
            await asyncio.sleep(0)
            first.cancel()
            assert await asker.ask(b"2") == b"2"

    play(story)


def test_a_lost_link_is_an_answer_too() -> None:
    def answer(question: bytes) -> bytes:
        raise PeerError("Cannot answer this.")

    async def story() -> None:
        async with asking(answer) as (asker, _, _):
            with pytest.raises(OffbeatError, match="Cannot answer this"):
                await asker.ask(b"1")
            with pytest.raises(OffbeatError, match="Cannot answer this"):
                await asker.ask(b"2")

    play(story)


def test_closing_does_not_leave_anybody_waiting() -> None:
    async def story() -> None:
        async with asking(lambda question: question) as (asker, link, proxy):
            proxy.hold()
            question = asyncio.ensure_future(asker.ask(b"1"))
            await asyncio.sleep(0.05)
            link.abort()
            with pytest.raises(NetworkError, match="the link has ended"):
                await question

    play(story)


def test_without_a_link_nothing_is_asked() -> None:
    with pytest.raises(NetworkError, match="connect first"):
        asyncio.run(RpcClient().ask(b"1"))


def test_bodies_are_refused() -> None:
    async def story() -> None:
        async with asking(lambda question: question) as (asker, link, _):
            link.send(b"x" * 8, b"body")
            with pytest.raises(OffbeatError, match="a question has no body"):
                await asker.ask(b"1")

    play(story)
