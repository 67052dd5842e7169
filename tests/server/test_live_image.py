"""A server that was only stopped or cut off continues from its memory: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.errors import NetworkError
from offbeat.history import ContributionsWithdrawn, LifeBegan, UpdateMade
from offbeat.protocol.messages import pack
from offbeat.protocol.training import (
    AllWorkersAnswer,
    Announce,
    AskAllWorkers,
    ContributionInfo,
    ModelOpened,
    OpenModel,
    Reconnect,
    ReleaseWorker,
)
from offbeat.server.shard.job_clock import JobClock
from offbeat.server.shard.shard import Shard
from offbeat.server.shard.snapshot_store import SnapshotStore
from offbeat.sync import ASP, BSP
from tests.server.garbage_peer import DETAILS, HYPER, LR, FakePeer, Worker
from tests.server.in_process import Parts

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.history import Record
    from offbeat.sync import Policy


class Survivor(Worker):
    """A worker that dials again when it has lost the server."""

    def __init__(self, shard: Shard, rank: int) -> None:
        self.rank, self.entry, self.life, self.version, self.secret = rank, 0, shard.life, 0, b""
        self.made, self.holds, self.done = 0, False, list[tuple[int, float]]()
        super().__init__(shard, rank)

    def announce(self) -> None:
        self.made, self.holds = self.made + 1, True
        super().announce()

    def dial(self, shard: Shard) -> None:
        """Open the model again, with all that it knows."""
        FakePeer.__init__(self, shard, self.rank)
        self.entry += 1
        self.values, self._go = {}, None
        back = Reconnect(
            life=self.life,
            clock=self.clock,
            version=self.version,
            holds=self.holds,
            waits=self.holds,
            weight=1.0,
            done=tuple(self.done),
            secret=self.secret,
        )
        self.say(pack(OpenModel(0, self.entry)), pack(msgspec.structs.replace(DETAILS, back=back)))

    def pump(self) -> None:
        for message, _ in self.line.sent:
            if isinstance(message, ModelOpened):
                assert message.kept or message.life == self.life
                self.life, self.secret = message.life, message.secret or self.secret
            if isinstance(message, ReleaseWorker):
                self.version, self._is_counted = message.version, message.counted
        before = self.clock
        super().pump()
        if self.clock != before:  # it has all blocks
            self.done += [(before, 1.0)] if self._is_counted else []
            self.holds, self.values = False, {}
        elif self._go is not None and not self._go.values:
            self.clock, self._waits, self._go = self._go.step, self._go.waits, None
            if self.holds:
                self.say(pack(Announce(0, self.clock, ContributionInfo(1.0, (HYPER,)))))


class Server:
    """The only shard of a server, which begins one life after another."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.records: list[Record] = []
        self.snapshots, self.policy, self.goes_again = SnapshotStore(folder, "j"), policy, False
        self.shard = self._begin(None)

    def _begin(self, image: Any) -> Shard:
        return Shard(
            lambda plan: Parts(self.policy),
            snapshots=self.snapshots,
            every=10_000,
            again=lambda: setattr(self, "goes_again", True),
            patience_s=60,
            record=self.records.append,
            image=image,
        )

    def cut_off(self, workers: list[Survivor]) -> None:
        """No worker can be heard any more."""
        for worker in workers:
            worker.line.silent_s = worker.line.limits.timeout.total_seconds()
        workers[0].leave(NetworkError("it has been silent"))
        assert self.goes_again
        assert self.shard.is_over
        self.shard = self._begin(self.shard.image)
        assert self.shard.begun.is_set(), "nobody else is waited for"

    def stop(self) -> None:
        self.shard.stop()


async def settle(workers: list[Survivor], *, steps: int) -> None:
    """Train until all have made so many steps."""
    for _ in range(1000):
        for worker in workers:
            worker.pump()
            if not worker.holds and worker.clock >= 0 and worker.made < steps and worker._go is None:
                worker.announce()
        await asyncio.sleep(0)
        if all(worker.made >= steps and not worker.holds for worker in workers):
            return
    raise AssertionError([(worker.clock, worker.made, worker.holds) for worker in workers])


@pytest.mark.parametrize("policy", [BSP(), ASP()])
@pytest.mark.parametrize("holding", [(), (0,), (0, 1)], ids=["none", "one", "both"])
@pytest.mark.parametrize("heard", [False, True])
def test_a_server_that_was_cut_off_loses_nothing(
    tmp_path: Path, policy: Policy, holding: tuple[int, ...], heard: bool
) -> None:
    """Whatever workers were about: computing, or waiting for an update that may have been made."""

    async def story() -> tuple[list[Record], list[dict[int, float]]]:
        server = Server(tmp_path, policy)
        team = [Survivor(server.shard, rank) for rank in range(2)]
        await settle(team, steps=3)
        for rank in holding:
            team[rank].announce()
            if heard:
                team[rank].pump()
        server.cut_off(team)
        for worker in team:
            worker.dial(server.shard)
        await settle(team, steps=6)
        assert server.shard.model_shard(0).finish()
        server.stop()
        values = server.shard.model_shard(0)._store.values
        return server.records, [{block: value[0].item() for block, value in values.items()}]

    records, values = asyncio.run(story())
    assert [type(one) for one in records].count(LifeBegan) == 2
    assert values == [{0: -LR * 6, 1: -LR * 6}], "each contribution counts once, as one of two"
    used = [(one.worker, one.clock) for made in records if isinstance(made, UpdateMade) for one in made.used]
    assert len(set(used)) == len(used) == 12


def test_what_has_arrived_in_part_is_withdrawn_and_pushed_again(tmp_path: Path) -> None:
    """Its update was decided, and one block of it was even made."""

    async def story() -> list[Record]:
        server = Server(tmp_path, ASP())
        team = [Survivor(server.shard, rank) for rank in range(2)]
        await settle(team, steps=2)
        say = FakePeer.say
        pushed = []

        def say_one_block(self: FakePeer, metadata: bytes, body: bytes = b"") -> None:
            if body:
                pushed.append(metadata)
            if len(pushed) < 2:
                say(self, metadata, body)

        team[0].say = say_one_block.__get__(team[0])  # type: ignore[method-assign]
        team[0].announce()
        while len(pushed) < 2:
            team[0].pump()
            await asyncio.sleep(0)
        del team[0].say
        server.cut_off(team)
        for worker in team:
            worker.dial(server.shard)
        await settle(team, steps=4)
        server.stop()
        values = server.shard.model_shard(0)._store.values
        assert [value[0].item() for value in values.values()] == [-LR * 4, -LR * 4]
        return server.records

    records = asyncio.run(story())
    assert [one.pushes for one in records if isinstance(one, ContributionsWithdrawn)] == [((0, 2),)]


def test_one_worker_that_is_lost_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    async def story() -> None:
        server = Server(tmp_path, ASP())
        team = [Survivor(server.shard, rank) for rank in range(2)]
        await settle(team, steps=2)
        team[0].leave(NetworkError("it has been silent"))
        assert not server.goes_again
        server.stop()

    asyncio.run(story())


def test_workers_that_all_fail_are_gone(tmp_path: Path) -> None:
    """Their processes have ended: the server is not cut off, and ends as well if none comes back."""

    async def story() -> None:
        server = Server(tmp_path, ASP())
        team = [Survivor(server.shard, rank) for rank in range(2)]
        await settle(team, steps=2)
        for worker in team:
            worker.line.connected, worker.line.has_hung_up = False, True
        for worker in team:
            worker.leave(NetworkError("it hung up"))
        assert not server.goes_again
        server.stop()

    asyncio.run(story())


def test_who_asks_waits_for_a_worker_that_comes_over_a_new_link(tmp_path: Path) -> None:
    """Between its two links nobody else is there: this is no moment for an answer without it."""

    async def story() -> None:
        server = Server(tmp_path, ASP())
        team = [Survivor(server.shard, rank) for rank in range(2)]
        await settle(team, steps=2)
        team[0].say(pack(AskAllWorkers(0, "the newest parameters", refresh=True)))
        team[1].line.connected = False
        team[1].dial(server.shard)
        assert not any(isinstance(message, AllWorkersAnswer) for message, _ in team[0].line.sent)
        team[1].say(pack(AskAllWorkers(0, "the newest parameters", refresh=True)))
        answers: list[int] = []
        for _ in range(10):
            for worker in team:
                answers += [one.workers for one, _ in worker.line.sent if isinstance(one, AllWorkersAnswer)]
                worker.pump()
            await asyncio.sleep(0)
        assert answers == [2, 2]
        server.stop()

    asyncio.run(story())


def test_time_in_which_the_server_is_away_is_no_time_of_the_job() -> None:
    async def story() -> None:
        is_away = False
        clock = JobClock(4.0, lambda: is_away, lambda found: None)
        loop = asyncio.get_running_loop()
        clock.start()
        began_s = clock.job_s(loop.time())
        stopped_s = loop.time() + 100
        assert clock.job_s(stopped_s) < began_s + 1, "this process was stopped"
        is_away = True
        before_s = clock.job_s(stopped_s + 0.1)
        clock._seen_s = loop.time()
        await asyncio.sleep(0.35)
        assert clock.job_s(loop.time()) <= max(before_s, began_s) + 0.35
        clock.stop()

    asyncio.run(story())
