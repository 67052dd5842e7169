"""A worker that speaks garbage to a shard, made of any bytes; hypothesis and the fuzzer bring them.

The others train in step meanwhile. Whatever is said, the one that says it is closed by a `PeerError` at most, nothing
but a `PeerError` is raised, and the others go on, with exactly the parameters of a job without it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from offbeat.errors import NetworkError, PeerError
from offbeat.protocol.checkpoints import FetchState, PutState, PutStateDone, RequestReplacement
from offbeat.protocol.data_leases import GetDataState, MemoryExhausted, RequestLease, ReturnLease
from offbeat.protocol.messages import pack, to_worker
from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec
from offbeat.protocol.shards import ModelFilled, PushDone, PushNearlyDone, RegisterShard, UpdateMeasured
from offbeat.protocol.status import GetStatus
from offbeat.protocol.training import (
    Announce,
    AskAllWorkers,
    BlockOf,
    CastPayload,
    ContributionInfo,
    DensePayload,
    Granted,
    InitBlock,
    ModelInfo,
    ModelOpened,
    OpenModel,
    PieceOf,
    PullBlock,
    PullDone,
    PullOrder,
    PushBlock,
    ReleaseWorker,
)
from offbeat.server.shard.shard import Shard
from offbeat.sync import ASP, BSP, SSP, KSync
from offbeat.wire.session import Limits
from tests.server.in_process import Parts

if TYPE_CHECKING:
    from offbeat.protocol.status import ModelStatus
    from offbeat.sync import Policy

POLICIES: tuple[Policy, ...] = (BSP(), ASP(), SSP(1), KSync(2), KSync(2, late="carry"))
SIZES = (4, 2)  # of the blocks, in elements
LR = 0.5
HYPER: Hyper = {"lr": LR, "momentum": 0.0}
DETAILS = ModelInfo(
    world=2,
    shards=1,
    holders=1,
    plan="p",
    layout="l",
    names=("a", "b"),
    blocks=(BlockOf(0, "float32", (PieceOf(0, 0, 4),)), BlockOf(1, "float32", (PieceOf(0, 4, 1), PieceOf(1, 0, 1)))),
    optimizer=OptimizerSpec("SGD", (HYPER,), (("a", "b"),)),
)


class Line:
    """A link's end at the shard; keeps what is sent."""

    def __init__(self, rank: int, role: str) -> None:
        self.rank, self.role, self.peer, self.connected = rank, role, f"127.0.0.1:{rank}", True
        self.is_trusted, self.silent_s, self.limits, self.has_hung_up = False, 0.0, Limits(), False
        self.sent: list[tuple[Any, bytes]] = []

    @property
    def is_open(self) -> bool:
        return self.connected

    def send(self, metadata: bytes, body: Any = b"", sent: Any = None) -> None:
        if not self.connected:
            raise NetworkError("it has ended")
        self.sent.append((to_worker(metadata), bytes(body)))

    def abort(self) -> None:
        self.connected = False


class FakePeer:
    """Who speaks to the shard, as a link would hand it on."""

    def __init__(self, shard: Shard, rank: int, role: str = "worker") -> None:
        self.line = Line(rank, role)
        self._guest = shard.accept(self.line)  # type: ignore[arg-type]

    def say(self, metadata: bytes, body: bytes = b"") -> None:
        """One frame.

        Raises:
            PeerError: if it is refused; then it is closed.
        """
        try:
            place = memoryview(b"")
            if body:
                place = self._guest.destination(metadata, len(body))
                place[:] = body
            self._guest.received(metadata, place)
        except PeerError as error:
            self.leave(error)
            raise

    def leave(self, error: PeerError | NetworkError | None = None) -> None:
        if self.line.connected:
            self.line.connected = False
            self._guest.lost(error)


class Worker(FakePeer):
    """One that does what it should, with gradients of 1."""

    def __init__(self, shard: Shard, rank: int) -> None:
        super().__init__(shard, rank)
        self.clock, self.values = -1, dict[int, float]()
        self._go: ReleaseWorker | None = None
        self._waits = True
        self.say(pack(OpenModel(0)), pack(DETAILS))

    def announce(self) -> None:
        self.say(pack(Announce(0, self.clock, ContributionInfo(1.0, (HYPER,)))))
        if not self._waits:
            self._push()

    def _push(self) -> None:
        for block, numel in enumerate(SIZES):
            self.say(pack(PushBlock(0, self.clock, block, DensePayload())), torch.ones(numel).numpy().tobytes())

    def pump(self) -> None:
        """Answer what has come."""
        sent, self.line.sent = self.line.sent, []
        for message, body in sent:
            match message:
                case ModelOpened(wants_values=True):
                    for block, numel in enumerate(SIZES):
                        self.say(pack(InitBlock(0, block)), torch.zeros(numel).numpy().tobytes())
                case Granted():
                    self._push()
                case ReleaseWorker():
                    self._go = message
                case PullBlock(block=block):
                    (self.values[block],) = set(torch.frombuffer(bytearray(body), dtype=torch.float32).tolist())
        if self._go is not None and len(self.values) == len(SIZES):
            self.clock, self._waits, self._go = self._go.step, self._go.waits, None
            self.say(pack(PullDone(0, self.clock)))


class Choices:
    """Decisions, taken from bytes; all of them the first when there are no more.

    Args:
        data: any.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __bool__(self) -> bool:
        return bool(self._data)

    def number(self, most: int) -> int:
        first, self._data = self._data[:1], self._data[1:]
        return first[0] % (most + 1) if first else 0

    def one(self, of: tuple[Any, ...]) -> Any:
        return of[self.number(len(of) - 1)]

    def bytes(self, size: int) -> bytes:
        taken, self._data = self._data[:size], self._data[size:]
        return taken


def torment(data: bytes) -> None:
    """Play what `data` says, and see that the others do not notice."""
    asyncio.run(_torment(Choices(data)))


async def _torment(choices: Choices) -> None:
    policy = choices.one(POLICIES)
    ended: list[None] = []
    shard = Shard(lambda plan: Parts(policy), lambda: ended.append(None))
    early = choices.number(1)
    mad = FakePeer(shard, 0, choices.one(("worker", "worker", "worker", "onlooker"))) if early else None
    if mad is not None and choices.number(1):
        _rage(mad, choices)
    good = [Worker(shard, rank) for rank in (1, 2)]
    if mad is not None and mad.line.connected and mad.line.role == "worker":
        mad.leave(NetworkError("it is gone"))  # else they wait for it, as they should
        mad = None
    ended.clear()  # it may have been the first and only one for a while
    await _step(good)
    for _ in range(2):
        if mad is None or not mad.line.connected:
            mad = FakePeer(shard, 0, choices.one(("worker", "worker", "worker", "onlooker")))
        _rage(mad, choices)
        mad.leave(NetworkError("it is gone"))
        await _step(good)
    assert not ended, "the job goes on"
    coordinator = shard._coordinator
    assert coordinator is not None
    (scene,) = [scene for scene in coordinator.status(0.0) if scene.model == 0]
    _compare(scene, good)


def _compare(scene: ModelStatus, good: list[Worker]) -> None:
    """The parameters are what was applied of the good ones, if nothing else was."""
    applied = {seen.worker: seen.applied for seen in scene.workers}
    if applied.get(0):
        return
    for worker in good:
        assert len(set(worker.values.values())) == 1, "the same in all blocks"
    if scene.policy == "BSP()":
        (value,) = {value for worker in good for value in worker.values.values()}
        assert value == -LR * scene.version


def _rage(mad: FakePeer, choices: Choices) -> None:
    """Have it say things until it is closed, or there is nothing more to say."""
    if choices.number(1):
        with _refusable():
            mad.say(pack(OpenModel(0)), pack(DETAILS))
            if any(isinstance(message, ModelOpened) and message.wants_values for message, _ in mad.line.sent):
                for block, numel in enumerate(SIZES):
                    mad.say(pack(InitBlock(0, block)), bytes(4 * numel))
    for _ in range(choices.number(12)):
        if not mad.line.connected:
            return
        with _refusable():
            mad.say(*_frame(choices))


def _frame(choices: Choices) -> tuple[bytes, bytes]:
    """Something to say: sensible, nearly so, or noise."""
    model, clock, block = choices.one((0, 0, 0, 1, 255)), choices.number(4), choices.one((0, 1, 0, 1, 7))
    hyper = choices.one((HYPER, HYPER, {}, {"lr": None}, {"lr": -1.0, "params": 1}, {"lr": 0.5, "momentum": (0.1,)}))
    message = choices.one(
        (
            OpenModel(model),
            InitBlock(model, block),
            Announce(model, clock, ContributionInfo(float(choices.number(2)), (hyper,) * choices.one((1, 1, 0, 2)))),
            PushBlock(
                model,
                clock,
                block,
                choices.one((DensePayload(), *map(CastPayload, ("bfloat16", "float64", "int8", "")))),
            ),
            PullDone(model, clock, bool(block)) if clock % 2 else PullOrder(model, (clock // 2, block)),
            GetStatus(clock),
            AskAllWorkers(clock, choices.one(("a", "b")), bool(clock), (1.0,) * choices.number(8)),
            RegisterShard(),
            ModelFilled(model),
            PushDone(model, block, clock),
            PushNearlyDone(model, block, clock),
            UpdateMeasured(model, clock, (), bytes(block)),
            FetchState(model, clock),
            RequestReplacement(model, clock),
            PutState(model, block),
            PutStateDone(model, clock),
            GetDataState(clock),
            RequestLease(block),
            ReturnLease(block, (clock,)),
            MemoryExhausted(block, clock),
            None,
        )
    )
    metadata = choices.bytes(choices.number(30)) if message is None else pack(message)
    if choices.number(7) == 1:
        at = choices.number(255) % max(1, len(metadata))
        metadata = metadata[:at] + choices.bytes(1) + metadata[at + 1 :]
    if isinstance(message, OpenModel) and choices.number(3):
        return metadata, _details(choices)
    body = bytes(choices.one((0, 16, 8, 32, 1))) if choices.number(3) else choices.bytes(choices.number(40))
    return metadata, body


def _details(choices: Choices) -> bytes:
    changes: dict[str, Any] = choices.one(
        (
            {},
            {"world": choices.number(3)},
            {"layout": "other"},
            {"plan": "other"},
            {"names": ("a", "a")},
            {"blocks": DETAILS.blocks * 2},
            {"blocks": (BlockOf(0, "float64", (PieceOf(1, 0, 1 << 39),)),)},
            {"blocks": ()},
            {"optimizer": OptimizerSpec("Adam", ({"betas": (1.0, 1.0)},), (("a",),))},
            {"optimizer": OptimizerSpec("object", (), ())},
        )
    )
    body = msgspec.msgpack.encode({**msgspec.to_builtins(DETAILS), **changes})
    return body if choices.number(2) else body[: choices.number(255)]


async def _step(workers: list[Worker]) -> None:
    """All bring a contribution, and get the next parameters."""
    for _ in range(4):
        await asyncio.sleep(0)  # values are sent at the end of a turn of the loop
        for worker in workers:
            worker.pump()
    for worker in workers:
        assert worker.clock >= 0, "it has the parameters"
        worker.values = {}
        worker.announce()
    before = [worker.clock for worker in workers]
    for _ in range(4):
        await asyncio.sleep(0)  # values are sent at the end of a turn of the loop
        for worker in workers:
            worker.pump()
    for worker, clock in zip(workers, before, strict=True):
        assert worker.clock == clock + 1, "it is let go on"
        assert worker.line.connected


class _refusable:
    """A refusal is as it should be; everything else is not."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        return isinstance(error, PeerError)
