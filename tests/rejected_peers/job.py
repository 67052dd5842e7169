"""A job in a process of its own, and wrong peers that come to it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

import offbeat
from offbeat.errors import OffbeatError, PeerError
from offbeat.layout import arrange
from offbeat.protocol.messages import pack, to_worker
from offbeat.protocol.training import (
    Announce,
    BlockOf,
    CastPayload,
    ContributionInfo,
    DensePayload,
    ModelInfo,
    OpenModel,
    PieceOf,
    PullBlock,
    PullDone,
    PushBlock,
    ReleaseWorker,
)
from offbeat.server.blocks import cut
from offbeat.server.client.client import Client
from offbeat.server.launch import ShardSettings, start_shard
from offbeat.server.optimizers import describe
from offbeat.wire.credentials import Token
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.tcp import connect
from tests.server.test_shard import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink
    from offbeat.wire.messages import Role

JOB, SECRET = "digits", "a secret of more than sixteen bytes"
TOKEN = Token(SECRET.encode())
PLAN = offbeat.Plan(sync=offbeat.BSP(), fabric=offbeat.ParameterServer()).to_toml()
OTHER_PLAN = offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.ParameterServer()).to_toml()
WORLD = 2
SEED = 3
GOOD, BAD = (1, 2), 0  # ranks; of several contributions the lowest rank's hyper-parameters are taken


class Job:
    """A server, and workers that train through it in step.

    Args:
        folder: where its log goes.
        credentials: of the workers.
        settings: of the server, if not the usual ones.
    """

    def __init__(self, folder: Path, credentials: Credentials = TOKEN, **settings: Any) -> None:
        self._log, self._credentials = folder / "server.log", credentials
        known: Any = {"job": JOB, "token": SECRET, "patience_s": 20.0, **settings}
        with self._log.open("wb") as log:
            self.process, self.address = start_shard(ShardSettings(**known), output=log)
        self.loop = LoopThread()
        self.clients: list[Client] = []
        self.workers: list[Worker] = []
        self._velocity, self._seen = 0.0, 0

    def begin(self, world: int = WORLD, *, after_s: float = 0.0) -> None:
        """Have the workers make three steps, so long after they have come."""
        self.clients = [Client(self.loop, rank=rank, world=world, seed=SEED) for rank in GOOD]
        for client in self.clients:
            self.dial(accept=client.accept, rank=client.rank)
        time.sleep(after_s)
        with ThreadPoolExecutor(len(GOOD)) as pool:
            self.workers = list(pool.map(lambda client: Worker(client, plan=PLAN), self.clients))
        self.step(3)

    def step(self, steps: int) -> float:
        """All step together; with gradients of 1, what they have moved by tells what was applied."""
        moved = 0.0
        with ThreadPoolExecutor(len(self.workers)) as pool:
            for _ in range(steps):
                list(pool.map(Worker.step, self.workers, [torch.ones(100)] * len(self.workers)))
                self._velocity = 0.5 * self._velocity + 1
                moved += 0.5 * self._velocity
        return moved

    def dial(self, accept: Callable[[PeerLink], Any], rank: int, **options: Any) -> PeerLink:
        known = {"job": JOB, "credentials": self._credentials, **options}
        link: PeerLink = self.loop.run(connect(self.address, accept=accept, rank=rank, **known))
        return link

    def goes_on(self) -> None:
        """The workers step on, and nothing that somebody else said is in their parameters."""
        before = self.workers[0].values.clone()
        moved = self.step(2)
        for worker in self.workers:
            torch.testing.assert_close(before - worker.values, torch.full((100,), moved), rtol=1e-4, atol=1e-4)
        assert self.process.poll() is None

    def log(self) -> str:
        text, seen = self._log.read_text(), self._seen
        self._seen = len(text)
        assert "Traceback" not in text[seen:], text[seen:]
        return text

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if not self.clients:
            self.process.terminate()
        assert self.process.wait(10) == 0
        self.loop.close()
        self.log()


class Heard:
    """What a peer by itself hears, until it is lost."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.error: OffbeatError | None = None
        self.over = threading.Event()

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        return memoryview(bytearray(size_bytes))

    def received(self, metadata: bytes, body: memoryview) -> None:
        self.messages.append(to_worker(metadata))

    def lost(self, error: OffbeatError | None) -> None:
        self.error = error
        self.over.set()


def told(job: Job, *frames: tuple[Any, bytes], rank: int = BAD, role: Role = "worker") -> tuple[str, str]:
    """Say `frames` over a link, and be closed: what is told, and the address that it came from."""
    heard = Heard()
    link = job.dial(lambda link: heard, rank, role=role)
    address = own_address(link)
    for message, body in frames:
        job.loop.call(link.send, message if isinstance(message, bytes) else pack(message), body)
    assert heard.over.wait(10), "it is not closed"
    assert isinstance(heard.error, PeerError)
    return str(heard.error), address


def own_address(link: PeerLink) -> str:
    assert link._stream is not None
    host, port = link._stream.sock.getsockname()
    return f"{host}:{port}"


def wait_for(condition: Callable[[], object], otherwise: str) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.01)


def in_log(job: Job, address: str, says: str) -> None:
    """It stands there in one line, with the peer's address."""

    def lines() -> list[str]:
        return [line for line in job.log().splitlines() if address in line]

    wait_for(lambda: any(says in line for line in lines()), f"{says!r} is not logged of {address}")


def details(**changes: Any) -> ModelInfo:
    """What a `Worker` says when it opens its model."""
    parameters = {"a": torch.nn.Parameter(torch.zeros(30)), "b": torch.nn.Parameter(torch.zeros(70))}
    layout = arrange(parameters, bucket_bytes=1 << 20)
    blocks = cut(layout, 64)
    names = tuple(dict.fromkeys(piece.name for block in blocks for piece in block.pieces))
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5, momentum=0.5)
    known: dict[str, Any] = {
        "world": WORLD,
        "shards": 1,
        "holders": 1,
        "plan": PLAN,
        "seed": SEED,
        "layout": layout.digest,
        "names": names,
        "blocks": tuple(
            BlockOf(b.index, b.dtype, tuple(PieceOf(names.index(p.name), p.start, p.numel) for p in b.pieces))
            for b in blocks
        ),
        "optimizer": describe(optimizer, {id(p): name for name, p in parameters.items()}),
    }
    return ModelInfo(**{**known, **changes})


HYPER = details().optimizer.groups


def block(index: int = 0, dtype: str = "float32", *pieces: PieceOf) -> BlockOf:
    return BlockOf(index, dtype, pieces or (PieceOf(0, 0, 4),))


def announce(clock: int, **changes: Any) -> Announce:
    return Announce(0, clock, ContributionInfo(**{"weight": 1.0, "hyper": HYPER, **changes}))


def part(clock: int, block: int = 0, dtype: str = "float32") -> PushBlock:
    return PushBlock(0, clock, block, DensePayload() if dtype == "float32" else CastPayload(dtype))


# What it says when its contribution n is next, and what is said to that; block 0 has 14 elements of 4 bytes.


def join(job: Job, rank: int = BAD) -> tuple[PeerLink, Heard, int]:
    """A worker that comes later, and has got the parameters; the number of its next contribution."""
    heard = Heard()
    link = job.dial(lambda link: heard, rank)
    job.loop.call(link.send, pack(OpenModel(0)), pack(details()))
    wait_for(
        lambda: sum(isinstance(message, PullBlock) for message in heard.messages) == len(details().blocks), "no values"
    )
    (go,) = [message for message in heard.messages if isinstance(message, ReleaseWorker)]
    job.loop.call(link.send, pack(PullDone(0, go.step)))
    return link, heard, go.step
