"""Who may come back with what, and what is counted as lost."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.control import WaitThreshold
from offbeat.coordinator.policy_runner import PolicyRunner
from offbeat.coordinator.reconnect import LostUpdates, ReconnectAction, judge
from offbeat.errors import NetworkError, PeerError
from offbeat.fabric import ParameterServer
from offbeat.plan import Plan
from offbeat.protocol.data_leases import LeaseGrants, RegisterLoader
from offbeat.protocol.messages import details_of, from_coordinator, pack
from offbeat.protocol.shards import RegisterShard
from offbeat.protocol.training import OpenModel, Reconnect, ReleaseWorker
from offbeat.server.shard.shard import Shard
from offbeat.server.shard.snapshot_store import SnapshotStore
from offbeat.server.snapshot import FORMAT, Snapshot, SnapshotHeader, SnapshotId
from offbeat.sync import ASP, BSP, Apply, Ready, State
from tests.server.garbage_peer import DETAILS, FakePeer, Line, Worker
from tests.server.in_process import Parts

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.history import Record
    from offbeat.sync import Policy


def back(**what: object) -> Reconnect:
    return Reconnect(**{"life": 1, "clock": 7, "version": 20, "holds": False, "waits": False, **what})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("life", "what", "decided", "expected"),
    [
        (1, {}, 7, ReconnectAction.LATER),
        (1, {"holds": True, "waits": True}, 8, ReconnectAction.JOIN),
        (1, {"waits": True}, 7, ReconnectAction.JOIN),
        (2, {}, 5, ReconnectAction.GO_ON),
        (2, {"holds": True, "waits": True}, 8, ReconnectAction.JOIN),
        (2, {"holds": True, "waits": True}, 7, ReconnectAction.AGAIN),
        (2, {"waits": True}, 5, ReconnectAction.JOIN),
    ],
)
def test_the_table(life: int, what: dict[str, object], decided: int, expected: ReconnectAction) -> None:
    assert judge(back(**what), life=life, decided=decided) is expected


def test_who_was_never_here_just_joins() -> None:
    assert judge(None, life=3, decided=0) is ReconnectAction.JOIN


def test_what_is_lost_is_what_no_snapshot_has() -> None:
    losses = LostUpdates(40)
    assert str(losses) == "nothing is lost"
    losses.book(0, back(version=57, done=((19, 64.0), (20, 64.0), (21, 32.0))), decided=20)
    losses.book(1, back(version=50, done=((18, 64.0),)), decided=19)
    assert str(losses) == "updates 41 to 57 are lost (2 contributions, 96 samples; rank 0: 2)"
    losses.add(1, [8.0])
    assert str(losses) == "updates 41 to 57 are lost (3 contributions, 104 samples; rank 0: 2, rank 1: 1)"


def test_a_round_keeps_its_size_when_a_worker_comes_back_only_to_wait() -> None:
    """Else the others' contributions would weigh more after a restart than before."""
    coordinator = PolicyRunner(ASP(), 2, lambda: 0.0)
    coordinator.join(0, least=14, weight=32.0)
    coordinator.join(1, least=40, weight=32.0)
    coordinator.start_if_all_are_here()
    coordinator.leave(1, returns=True)
    clock = coordinator.state.members[0].step
    actions = coordinator.tell(Ready(0, clock, 0.0, 32.0))
    assert [action.rate for action in actions if isinstance(action, Apply)] == [0.5]


def test_a_contribution_is_not_lost_where_its_worker_reconnects_twice_before_it_is_welcomed() -> None:
    """First it joins with a number as high as the others', and brings nothing before its link is lost again."""
    coordinator = PolicyRunner(ASP(), 2, lambda: 0.0)
    coordinator.state = State(past={0: 12, 1: 2}, version=5)
    holds = back(clock=9, holds=True)
    for _ in range(2):
        decided = coordinator.state.past[1]
        assert judge(holds, life=2, decided=decided) is ReconnectAction.AGAIN
        coordinator.join(1, least=holds.clock, weight=1.0)
        assert coordinator.state.members[1].step == 12
        coordinator.leave(1)


def test_a_number_that_comes_back_leaves_room_for_those_that_follow() -> None:
    """Shards and snapshots take numbers below 2^40; one that grew beyond would end them, for everybody."""

    def said(clock: int) -> bytes:
        return pack(msgspec.structs.replace(DETAILS, back=back(clock=clock)))

    assert details_of(said((1 << 39) - 1)).back is not None
    with pytest.raises(PeerError, match=r"Expected `int` <= 549755813887 - at `\$\.back\.clock`"):
        details_of(said(1 << 39))


@pytest.mark.parametrize("samples", [float("nan"), float("inf"), -1.0])
def test_samples_that_are_no_number_are_in_no_report(samples: float) -> None:
    """Of what is lost all hear a sum over all workers."""
    with pytest.raises(PeerError, match=r"Expected `float` .* - at `\$\.back\.done\[0\]\[1\]`"):
        details_of(pack(msgspec.structs.replace(DETAILS, back=back(done=((7, samples),)))))


# -- while the other shards are not back yet ---------------------------------------------------------------------------

TWO_SHARDS = pack(msgspec.structs.replace(DETAILS, world=1, shards=2))


class ToShard(Line):
    """The first shard's link to the other."""

    def send(self, metadata: bytes, body: Any = b"", sent: Any = None) -> None:
        self.sent.append((from_coordinator(metadata), bytes(body)))


class Waiting:
    """The first of two shards, with a snapshot of both: its life begins when the other is there."""

    def __init__(self, folder: Path) -> None:
        snapshots = SnapshotStore(folder, "j")
        snapshots.write(Snapshot(SnapshotHeader(FORMAT, "j", SnapshotId(1, 7), 2, ()), []), None)
        self.shard = Shard(lambda plan: Parts(BSP()), snapshots=snapshots)
        assert not self.shard.begun.is_set()

    def begin(self) -> set[int]:
        """The other shard is there; which workers take part."""
        other = self.shard.accept(ToShard(0, "shard"))  # type: ignore[arg-type]
        other.received(pack(RegisterShard(((1, 7),), 1)), memoryview(b""))
        assert self.shard.begun.is_set()
        assert self.shard._coordinator is not None
        return {seen.worker for scene in self.shard._coordinator.status(0.0) for seen in scene.workers}


def test_who_was_early_and_has_gone_does_not_take_part(tmp_path: Path) -> None:
    """Nobody would ever miss it, and the others would wait for it."""

    async def story() -> set[int]:
        job = Waiting(tmp_path)
        gone, stays = FakePeer(job.shard, 0), FakePeer(job.shard, 1)
        for peer in (gone, stays):
            peer.say(pack(OpenModel(0)), TWO_SHARDS)
        gone.leave(NetworkError("it is gone"))
        return job.begin()

    assert asyncio.run(story()) == {1}


def test_who_is_early_opens_a_model_once(tmp_path: Path) -> None:
    """What is kept of a worker until then is what it may open, and not how often it says so."""

    async def story() -> set[int]:
        job = Waiting(tmp_path)
        first, second, third = (FakePeer(job.shard, 1) for _ in range(3))
        first.say(pack(OpenModel(0)), TWO_SHARDS)
        for again in (second, first):
            with pytest.raises(PeerError, match="Rank 1 opens model 0 for a second time"):
                again.say(pack(OpenModel(0)), TWO_SHARDS)
        third.say(pack(OpenModel(0)), TWO_SHARDS)  # the first was sent away
        return job.begin()

    assert asyncio.run(story()) == {1}


@pytest.mark.parametrize(
    ("policy", "brings", "others", "expected"),
    [
        (ASP(), True, False, ("is used", True)),
        (BSP(), True, True, ("is used", True)),
        (BSP(), True, False, ("is not decided on yet", False)),
        (ASP(), False, False, ("was outdated, and is not used", False)),
    ],
    ids=["used", "used by all", "open", "outdated"],
)
def test_who_was_cut_off_is_told_what_became_of_its_contribution(
    policy: Policy, brings: bool, others: bool, expected: tuple[str, bool]
) -> None:
    """It may have been cut off before it heard that its contribution is used."""

    async def story() -> tuple[str, bool]:
        shard = Shard(lambda plan: Parts(policy), patience_s=60)
        team = [Worker(shard, 0), Worker(shard, 1)]
        await pump(team)
        clock = team[1].clock
        for worker in team[0 if others else 1 :] if brings else ():
            worker.announce()
        for worker in team if others else ():
            worker.pump()  # what it was granted, it pushes
        team[1].leave(NetworkError("it is cut off"))
        peer = FakePeer(shard, 1)
        here = back(
            life=shard.life, secret=shard._secrets[1], clock=clock, version=0, holds=True, waits=True, weight=1.0
        )
        peer.say(pack(OpenModel(0, 1)), pack(msgspec.structs.replace(DETAILS, back=here)))
        (go,) = [message for message, _ in peer.line.sent if isinstance(message, ReleaseWorker)]
        assert go.step == clock + 1, "no other contribution is given the number of the one that it came back with"
        return go.fate, go.counted

    assert asyncio.run(story()) == expected


def test_what_was_used_before_says_nothing_of_what_it_was_cut_off_with() -> None:
    """Nobody had heard of that one; the worker would report it as lost when the server is killed."""

    async def story() -> ReleaseWorker:
        shard = Shard(lambda plan: Parts(ASP()), patience_s=60)
        team = [Worker(shard, 0), Worker(shard, 1)]
        await pump(team)
        clock = team[1].clock
        team[1].announce()
        while team[1].clock == clock:
            team[1].pump()
            await asyncio.sleep(0)
        team[1].leave(NetworkError("it is cut off"))
        peer = FakePeer(shard, 1)
        here = back(
            life=shard.life, secret=shard._secrets[1], clock=clock + 1, version=1, holds=True, waits=True, weight=1.0
        )
        peer.say(pack(OpenModel(0, 1)), pack(msgspec.structs.replace(DETAILS, back=here)))
        return next(message for message, _ in peer.line.sent if isinstance(message, ReleaseWorker))

    go = asyncio.run(story())
    assert (go.fate, go.counted, go.step) == ("was outdated, and is not used", False, 2)


def test_who_was_cut_off_is_told_which_data_is_others_now() -> None:
    about = RegisterLoader(loader=0, plan="", world=2, samples=40, seed=3, shuffle=True, drop_last=False, batch=4)

    async def story() -> tuple[list[LeaseGrants], list[LeaseGrants]]:
        shard = Shard(lambda plan: Parts(ASP()), patience_s=60)
        team = [Worker(shard, 0), Worker(shard, 1)]
        await pump(team)
        for worker in team:
            worker.say(pack(about))
        before = [message for message, _ in team[1].line.sent if isinstance(message, LeaseGrants)]
        team[1].leave(NetworkError("it is cut off"))
        peer = FakePeer(shard, 1)
        here = back(life=shard.life, secret=shard._secrets[1], clock=0, version=0, holds=True, waits=True, weight=1.0)
        peer.say(pack(OpenModel(0, 1)), pack(msgspec.structs.replace(DETAILS, back=here)))
        holds = tuple(deal.number for message in before for deal in message.deals)
        peer.say(pack(msgspec.structs.replace(about, holds=holds)))
        return before, [message for message, _ in peer.line.sent if isinstance(message, LeaseGrants)]

    before, after = asyncio.run(story())
    assert [message.void for message in after] == [tuple(deal.number for message in before for deal in message.deals)]
    assert len(after[0].deals) == len(before) == 1, "as much is dealt instead"


async def pump(workers: list[Worker]) -> None:
    """Until all have the parameters."""
    while any(worker.clock < 0 for worker in workers):
        for worker in workers:
            worker.pump()
        await asyncio.sleep(0)


# -- workers that have gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", [False, True])
def test_nobody_waits_for_a_worker_that_had_gone_before_the_server_was_killed(tmp_path: Path, returns: bool) -> None:
    """Also if the snapshot has it, since none was made after it had gone."""

    async def story() -> tuple[frozenset[int], bool]:
        snapshots = SnapshotStore(tmp_path, "j")
        first = Shard(lambda plan: Parts(BSP()), snapshots=snapshots)
        stays, goes = Worker(first, 0), Worker(first, 1)
        await pump([stays, goes])
        await first.be_quiet()
        (header,) = snapshots.held.values()
        assert header.models[0].progress is not None
        assert header.models[0].progress.present == (0, 1)
        goes.leave(NetworkError("it is gone"))
        while not snapshots.gone:
            await asyncio.sleep(0)
        if returns:
            Worker(first, 1)
        first.is_over = True
        second = Shard(lambda plan: Parts(BSP()), snapshots=snapshots)
        Worker(second, 0)
        assert second._coordinator is not None
        return snapshots.gone, second._coordinator.started

    assert asyncio.run(story()) == ((frozenset(), False) if returns else ({1}, True))


# -- a life that is over -----------------------------------------------------------------------------------------------

BY_WAITING = Plan(controller=WaitThreshold(), fabric=ParameterServer())


def test_of_a_life_that_is_over_nothing_stays() -> None:
    """Else the parameters of every life would be in memory as long as the process is, whose timers hold them."""

    async def story() -> bool:
        shard = Shard(Plan.from_toml, snapshots=None)
        FakePeer(shard, 0).say(pack(OpenModel(0)), pack(msgspec.structs.replace(DETAILS, plan=BY_WAITING.to_toml())))
        shard.begin_with_who_is_here_after(60.0)
        shard.stop()
        here = weakref.ref(shard)
        del shard
        await asyncio.sleep(0)
        gc.collect()
        return here() is None

    assert asyncio.run(story())


def test_a_life_that_is_over_decides_nothing_later(tmp_path: Path) -> None:
    """It would be in the history of the one behind it, which has the same file."""
    records: list[Record] = []

    async def story() -> int:
        shard = Shard(lambda plan: Parts(BSP()), record=records.append)
        FakePeer(shard, 0).say(pack(OpenModel(0)), pack(DETAILS))
        shard.begin_with_who_is_here_after(0.01)
        shard.stop()
        before = len(records)
        assert shard._coordinator is not None
        one = next(iter(shard._coordinator.models.values()))
        one.losses = LostUpdates(0)  # it had gone on from a snapshot
        await asyncio.sleep(0.05)
        return len(records) - before

    assert asyncio.run(story()) == 0
    assert records
