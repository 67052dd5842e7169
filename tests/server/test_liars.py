"""Workers of the job that lie: what is no contribution is refused, and what is one moves no more than it may."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from offbeat.errors import PeerError
from offbeat.protocol.data_leases import LeaseGrants, RegisterLoader
from offbeat.protocol.messages import pack
from offbeat.protocol.training import Announce, ContributionInfo, DensePayload, Notice, OpenModel, PushBlock, Reconnect
from offbeat.robust import Median, TrimmedMean
from offbeat.server.shard.shard import Shard
from offbeat.server.shard.shard_parts import ShardParts
from offbeat.sync import BSP
from tests.server.garbage_peer import DETAILS, HYPER, LR, SIZES, FakePeer, Worker
from tests.server.in_process import Parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.robust import Rule

BATCH = 4
LOADER = RegisterLoader(
    loader=0, plan="", world=3, samples=1000, seed=3, shuffle=True, drop_last=False, batch=BATCH, ahead=2
)


class Member(Worker):
    """A worker that may say anything of its contribution, and push anything; honest gradients are of 1."""

    value, weight, lr, loads = 1.0, 1.0, LR, False
    granted: list[int]

    def announce(self) -> None:
        used = ((0, self.granted.pop(0)),) if self.loads else ()
        self.say(pack(Announce(0, self.clock, ContributionInfo(self.weight, ({**HYPER, "lr": self.lr},), used=used))))
        self._push()

    def _push(self) -> None:
        for block in range(len(SIZES)):
            self.push(block)

    def push(self, block: int, clock: int | None = None) -> None:
        body = torch.full((SIZES[block],), self.value).numpy().tobytes()
        self.say(pack(PushBlock(0, self.clock if clock is None else clock, block, DensePayload())), body)

    def load(self) -> None:
        self.loads, self.granted = True, []
        self.say(pack(LOADER))

    def pump(self) -> None:
        for message, _ in self.line.sent:
            if isinstance(message, LeaseGrants):
                self.granted += [deal.number for deal in message.deals]
        super().pump()


class Job:
    """Three workers in step, the last of which may lie; the parameters begin at 0."""

    def __init__(self, rule: Rule | None = None) -> None:
        details = {"world": 3}
        self.shard = Shard(lambda plan: Parts(BSP()), parts_of=lambda plan: ShardParts(rule))
        whole = msgspec.structs.replace(DETAILS, **details)
        self.workers = [self._join(rank, whole) for rank in range(3)]
        self.liar = self.workers[2]
        self.told: list[str] = []

    def _join(self, rank: int, details: Any) -> Member:
        worker = Member.__new__(Member)
        FakePeer.__init__(worker, self.shard, rank)
        worker.clock, worker.values, worker._go, worker._waits = -1, {}, None, True
        worker.say(pack(OpenModel(0)), pack(details))
        return worker

    async def pump(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
            for worker in self.workers:
                self.told += [message.text for message, _ in worker.line.sent if isinstance(message, Notice)]
                if worker.line.connected:
                    worker.pump()

    async def step(self, *workers: Member) -> float:
        """All bring a contribution; where the parameters are then."""
        await self.pump()
        for worker in workers or self.workers:
            worker.values = {}
            worker.announce()
        await self.pump()
        (value,) = {value for worker in (workers or self.workers) for value in worker.values.values()}
        return value


def play(story: Callable[[Job], Any], rule: Rule | None = None) -> None:
    async def whole() -> None:
        await story(Job(rule))

    asyncio.run(whole())


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(1)], ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -3e38])
def test_numbers_that_are_none_or_absurd_move_nothing_under_a_rule(rule: Rule, value: float) -> None:
    """Those that are none are rejected before any arithmetic; a rule of three that has two left is left out."""

    async def story(job: Job) -> None:
        job.liar.value = value
        moves = math.isfinite(value) or not rule.check(2)
        for step in range(1, 4):
            assert await job.step() == pytest.approx(-LR * step if moves else 0.0)

    play(story, rule)


@pytest.mark.parametrize("lr", [1e9, 0.0])
def test_a_learning_rate_of_one_is_outvoted_under_a_rule(lr: float) -> None:
    async def story(job: Job) -> None:
        job.liar.lr = lr
        job.workers.reverse()  # an update of the mean goes by what is announced first
        for step in range(1, 4):
            assert await job.step() == pytest.approx(-LR * step)
        assert any("uses other hyper-parameters" in text for text in job.told)

    play(story, Median())


def test_a_block_that_comes_twice_is_refused_and_counts_once() -> None:
    async def story(job: Job) -> None:
        await job.pump()
        honest, liar = job.workers[:2], job.liar
        liar.say(pack(Announce(0, liar.clock, ContributionInfo(1.0, (HYPER,)))))
        liar.push(0)
        with pytest.raises(
            PeerError, match=r"^Cannot take block 0 of contribution 0 of rank 2: what is left of number 0"
        ):
            liar.push(0)
        assert not liar.line.connected
        assert await job.step(*honest) == -LR, "of those two: nothing of it is left"

    play(story)


def test_an_older_round_is_not_played_again() -> None:
    async def story(job: Job) -> None:
        assert await job.step() == -LR
        with pytest.raises(
            PeerError, match=r"^Cannot take block 0 of contribution 0 of rank 2: .* number 1 is next\.$"
        ):
            job.liar.push(0, clock=0)
        assert await job.step(*job.workers[:2]) == -2 * LR

    play(story)


def test_an_older_round_is_not_announced_again() -> None:
    async def story(job: Job) -> None:
        assert await job.step() == -LR
        with pytest.raises(PeerError, match=r"^Cannot accept contribution 0 of rank 2: .*number 1 is next\.$"):
            job.liar.say(pack(Announce(0, 0, ContributionInfo(1.0, (HYPER,)))))
        assert await job.step(*job.workers[:2]) == -2 * LR

    play(story)


def test_nobody_speaks_in_anothers_name() -> None:
    """No message says whose it is: a rank is its link's. Another link of that rank is turned away, also with a life."""

    async def story(job: Job) -> None:
        assert await job.step() == -LR
        for back in (None, Reconnect(life=job.shard.life, clock=1, version=1, holds=False, waits=True)):
            twin = FakePeer(job.shard, 0)
            with pytest.raises(PeerError, match=r"^Cannot admit rank 0: one is here already, from 127\.0\.0\.1:0\.$"):
                twin.say(pack(OpenModel(0)), pack(msgspec.structs.replace(DETAILS, world=3, back=back)))
        stranger = FakePeer(job.shard, 0)
        with pytest.raises(PeerError, match=r"^Rank 0 does not take part in model 0\.$"):
            stranger.say(pack(PushBlock(0, 1, 0, DensePayload())), bytes(16))
        assert await job.step() == -2 * LR

    play(story)


def test_a_number_of_samples_is_no_more_than_was_leased() -> None:
    """The mean by samples: without a limit the parameters would move by 10^12 to 2."""

    async def story(job: Job) -> None:
        for worker in job.workers:
            worker.load()
            worker.weight = float(BATCH)
        job.liar.value, job.liar.weight = 4.0, 1e12
        for step in range(1, 4):
            assert await job.step() == pytest.approx(-LR * (1 + 1 + 4) / 3 * step)
        (text,) = {text for text in job.told if "samples" in text}
        assert text == (
            "Rank 2 says that its contribution 0 is of 1e+12 samples, and was leased 4: its contributions weigh no "
            "more than what it was leased."
        )

    play(story)


def test_a_number_of_samples_makes_no_difference_under_a_rule_that_counts_all_alike() -> None:
    async def story(job: Job) -> None:
        job.liar.value, job.liar.weight = -50.0, 1e12
        assert await job.step() == pytest.approx(-LR)

    play(story, Median())


def test_without_leases_a_worker_is_believed_how_many_samples_it_has() -> None:
    """Nothing is known here of data that each worker reads by itself: take a rule that counts all alike."""

    async def story(job: Job) -> None:
        job.liar.value, job.liar.weight = 4.0, 1e12
        assert await job.step() == pytest.approx(-LR * 4, rel=1e-6)

    play(story)


def test_the_first_to_open_a_model_names_no_plans_that_were_there_before() -> None:
    """With one that knows of later swaps than all others a liar could have its own plan hold."""

    async def story(job: Job) -> None:
        lie = msgspec.structs.replace(DETAILS, world=3, former=("a plan of its own",), swaps=7)
        shard = Shard(lambda plan: Parts(BSP()), parts_of=lambda plan: ShardParts(None))
        liar, honest = FakePeer(shard, 2), FakePeer(shard, 0)
        liar.say(pack(OpenModel(0)), pack(lie))
        honest.say(pack(OpenModel(0)), pack(msgspec.structs.replace(DETAILS, world=3)))
        assert shard._model_shards[0].details.former == ()
        assert shard._model_shards[0].details.swaps == 0
        assert honest.line.connected

    play(story)


def test_one_that_deals_a_model_over_another_number_of_shards_is_turned_away() -> None:
    async def story(job: Job) -> None:
        assert await job.step() == -LR
        stranger = FakePeer(job.shard, 3)
        with pytest.raises(PeerError, match="number of shards that hold it"):
            stranger.say(pack(OpenModel(0)), pack(msgspec.structs.replace(DETAILS, world=3, holders=2)))
        assert await job.step() == -2 * LR

    play(story)
