"""A shard that does not coordinate: what it is told may come later than what workers do because of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from offbeat.protocol.messages import from_peer, pack
from offbeat.protocol.shards import (
    AdmitWorker,
    ApplyContributions,
    BeginLife,
    PushDone,
    PushNearlyDone,
    ReleaseFromShard,
    WithdrawContribution,
    WorkerDrained,
    WorkerRemoved,
)
from offbeat.protocol.training import (
    ContributionInfo,
    DensePayload,
    InitBlock,
    ModelOpened,
    OpenModel,
    PullBlock,
    PushBlock,
    Reconnect,
)
from offbeat.server.shard.shard import Shard
from tests.server.garbage_peer import DETAILS, HYPER, LR, SIZES, FakePeer, Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.protocol.messages import Decision

HERE = msgspec.structs.replace(DETAILS, world=1, shards=2)


class ToChief(Line):
    """The link to the coordinator; keeps what the shard tells it."""

    def send(self, metadata: bytes, body: Any = b"", sent: Any = None) -> None:
        self.sent.append((from_peer(metadata), bytes(body)))


class Job:
    """One worker, rank 1, that has filled the shard; the test says what the coordinator decides, and when."""

    def __init__(self) -> None:
        self.shard = Shard(None)
        self.chief = ToChief(0, "shard")
        self.shard.follow(self.chief)  # type: ignore[arg-type]
        self.shard.begin(BeginLife(7))
        self.come(entry=0)
        for block, numel in enumerate(SIZES):
            self.worker.say(pack(InitBlock(0, block)), torch.zeros(numel).numpy().tobytes())

    def come(self, entry: int) -> None:
        """The worker opens the model, over a new link."""
        self.worker = FakePeer(self.shard, 1)
        secret = self.shard._secrets.get(1, b"")
        back = (
            Reconnect(life=7, clock=0, version=0, holds=True, waits=False, weight=1.0, secret=secret) if entry else None
        )
        self.worker.say(pack(OpenModel(0, entry)), pack(msgspec.structs.replace(HERE, back=back)))

    def push(self, clock: int) -> None:
        for block, numel in enumerate(SIZES):
            self.worker.say(pack(PushBlock(0, clock, block, DensePayload())), torch.ones(numel).numpy().tobytes())

    def decide(self, *decisions: Decision) -> None:
        for decision in decisions:
            self.shard.decide(decision)

    def apply(self, clock: int) -> None:
        """The contribution is an update, and the worker may go on."""
        update = ApplyContributions(0, ((1, clock),), (ContributionInfo(1.0, ()),), (HYPER,), 1.0, False)
        self.decide(update, ReleaseFromShard(0, 1, clock + 1))

    async def values(self) -> list[float]:
        """What the worker has been given, block by block."""
        await asyncio.sleep(0)
        given = [body for message, body in self.worker.line.sent if isinstance(message, PullBlock)]
        return [torch.frombuffer(bytearray(body), dtype=torch.float32)[0].item() for body in given]


def play(story: Callable[[Job], None]) -> list[float]:
    async def run() -> list[float]:
        job = Job()
        story(job)
        return await job.values()

    return asyncio.run(run())


def in_order(job: Job) -> None:
    job.decide(AdmitWorker(0, 1, 0, 0))
    job.push(0)
    job.apply(0)


def before_it_was_admitted(job: Job) -> None:
    job.push(0)
    job.decide(AdmitWorker(0, 1, 0, 0))
    job.apply(0)


def out_and_in_again(job: Job) -> None:
    job.decide(AdmitWorker(0, 1, 0, 0))
    job.push(0)  # it was told to go on before this shard was told that it had been out
    job.decide(WorkerRemoved(0, 1), AdmitWorker(0, 1, 0, 0))
    job.apply(0)


def out_and_the_rest_later(job: Job) -> None:
    job.decide(AdmitWorker(0, 1, 0, 0), WorkerRemoved(0, 1))
    job.push(0)
    job.decide(AdmitWorker(0, 1, 0, 0))
    job.apply(0)


def back_over_a_new_link(job: Job) -> None:
    job.decide(AdmitWorker(0, 1, 0, 0))
    job.push(0)  # nobody has heard of this one when the link is lost
    job.come(entry=1)
    job.push(0)
    job.decide(WorkerRemoved(0, 1), AdmitWorker(0, 1, 0, 1))
    job.apply(0)


STORIES = [in_order, before_it_was_admitted, out_and_in_again, out_and_the_rest_later, back_over_a_new_link]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_no_contribution_is_lost_on_the_way(story: Callable[[Job], None]) -> None:
    assert play(story) == [-LR, -LR]


def test_the_coordinator_is_told_how_far_contributions_are() -> None:
    async def run() -> list[object]:
        job = Job()
        in_order(job)
        return [message for message, _ in job.chief.sent]

    told = asyncio.run(run())
    assert [message for message in told if isinstance(message, PushNearlyDone | PushDone)] == [
        PushNearlyDone(0, 1, 0),
        PushDone(0, 1, 0),
    ]


def test_what_is_half_here_waits_for_the_coordinators_word() -> None:
    """It says that nothing more is taken of the worker; only who knows of all shards can say what becomes of it."""

    async def run() -> tuple[list[object], list[float]]:
        job = Job()
        job.decide(AdmitWorker(0, 1, 0, 0))
        job.apply(0)
        job.worker.say(pack(PushBlock(0, 0, 0, DensePayload())), torch.ones(SIZES[0]).numpy().tobytes())
        job.decide(WorkerRemoved(0, 1, number=3))
        told = [message for message, _ in job.chief.sent]
        job.worker.say(pack(PushBlock(0, 0, 1, DensePayload())), torch.ones(SIZES[1]).numpy().tobytes())
        values = [job.shard.model_shard(0).values(block)[0].item() for block in range(2)]
        job.decide(WithdrawContribution(0, 1, 0))
        values += [job.shard.model_shard(0).values(block)[0].item() for block in range(2)]
        return told[-1:], values

    assert asyncio.run(run()) == ([WorkerDrained(0, 3)], [-LR, 0.0, 0.0, 0.0])


def test_the_first_worker_fills_it() -> None:
    async def run() -> bool:
        (opened,) = [message for message, _ in Job().worker.line.sent if isinstance(message, ModelOpened)]
        return (opened.model, opened.wants_values, opened.life) == (0, True, 7)

    assert asyncio.run(run())


def test_who_loses_its_place_before_the_life_has_begun_hears_of_it() -> None:
    """Nobody has a secret yet; but a worker whose place is another's is not to wait for ever."""

    async def run() -> tuple[bool, bool]:
        shard = Shard(None)
        one, other = FakePeer(shard, 1), FakePeer(shard, 1)
        one.say(pack(OpenModel(0, 0)), pack(HERE))
        back = Reconnect(life=1, clock=0, version=0, holds=False, waits=True)
        other.say(pack(OpenModel(0, 1)), pack(msgspec.structs.replace(HERE, back=back)))
        return one.line.connected, other.line.connected

    assert asyncio.run(run()) == (False, True)


def test_a_worker_that_has_hung_up_is_not_here_when_the_life_begins() -> None:
    """It has lost another shard, and dials all again: a life that began with it would at once lose it."""

    async def run() -> tuple[bool, set[int]]:
        shard = Shard(None)
        team = [FakePeer(shard, rank) for rank in (1, 2)]
        for one in team:
            one.say(pack(OpenModel(0, 0)), pack(HERE))
        team[0].line.has_hung_up = True
        shard.begin(BeginLife(7))
        return team[0].line.connected, set(shard._peers)

    assert asyncio.run(run()) == (False, {2})
