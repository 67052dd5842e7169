"""What a worker says about itself when it opens a model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from offbeat.layout import arrange
from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec
from offbeat.protocol.training import ModelInfo, ModelOpened, PullBlock, ReleaseWorker
from offbeat.server.blocks import cut
from offbeat.server.client.client import Client
from offbeat.wire.loop_thread import LoopThread
from tests.server.in_process import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Line:
    """A link's end at the worker; keeps what is sent."""

    is_open = True

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.kinds: list[str] = []

    def send(self, metadata: bytes, body: bytes = b"", sent: Callable[[], None] | None = None) -> None:
        self.bodies.append(bytes(body))
        self.kinds.append(kind_of(metadata))


@pytest.mark.parametrize(
    ("hosts", "shards", "count"),
    [((), (0, 1, 2), 1), (("a", "a", "b"), (0, 1, 2), 2), (("a", "a", "b"), (1, 1, 1), 1)],
    ids=["unknown", "two", "only one holds anything"],
)
def test_a_worker_says_on_how_many_hosts_the_parameters_are(
    hosts: tuple[str, ...], shards: tuple[int, ...], count: int
) -> None:
    loop = LoopThread()
    try:
        client = Client(loop, rank=0, world=1, hosts=hosts)
        lines = [Line() for _ in range(3)]
        for line in lines:
            client.accept(line)  # type: ignore[arg-type]
        open_one(client, shards)
        loop.run(asyncio.sleep(0))
        said = msgspec.msgpack.decode(lines[1].bodies[0], type=ModelInfo)
        assert said.hosts == count
    finally:
        loop.close()


def test_who_comes_back_asks_again_when_it_has_the_parameters() -> None:
    """Who asks steps out; if the parameters are on their way then, nobody says that they have come."""
    loop = LoopThread()
    try:
        client, line = Client(loop, rank=0, world=1), Line()
        client.accept(line)  # type: ignore[arg-type]
        open_one(client, (0, 0, 0))
        client.ask("the mean")
        go = ReleaseWorker(0, step=4, version=7, staleness=0)
        hear = [ModelOpened(0, wants_values=False, life=1), go, *(PullBlock(0, 4, block, 7) for block in range(3))]
        for message in hear:
            loop.call(client.hear, 0, message)
        loop.run(asyncio.sleep(0))
        assert line.kinds == ["OpenModel", "PullDone", "AskAllWorkers"]
    finally:
        loop.close()


def open_one(client: Client, shards: Sequence[int]) -> None:
    """Open a model of three blocks."""
    blocks = cut(arrange({"a": torch.zeros(3)}, bucket_bytes=64), 4)
    hyper: Hyper = {"lr": 0.1}
    client.open(
        0,
        plan="",
        layout="l",
        blocks=blocks,
        shards=shards,
        values=[torch.zeros(1) for _ in blocks],
        optimizer=OptimizerSpec("SGD", (hyper,), (("a",),)),
    )
