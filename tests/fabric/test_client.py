"""What a worker says about itself when it opens a model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from offbeat.fabric.server import Client, cut
from offbeat.fabric.server.messages import Details
from offbeat.fabric.server.optimizers import Hyper, OptimizerSpec
from offbeat.layout import arrange
from offbeat.wire.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable


class Line:
    """A link's end at the worker; keeps what is sent."""

    is_open = True

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def send(self, metadata: bytes, body: bytes = b"", sent: Callable[[], None] | None = None) -> None:
        self.bodies.append(bytes(body))


@pytest.mark.parametrize(
    ("hosts", "shards", "count"),
    [((), (0, 1, 2), 1), (("a", "a", "b"), (0, 1, 2), 2), (("a", "a", "b"), (1, 1, 1), 1)],
    ids=["unknown", "two", "only one holds anything"],
)
def test_a_worker_says_on_how_many_hosts_the_parameters_are(
    hosts: tuple[str, ...], shards: tuple[int, ...], count: int
) -> None:
    loop = Loop()
    try:
        client = Client(loop, rank=0, world=1, hosts=hosts)
        lines = [Line() for _ in range(3)]
        for line in lines:
            client.accept(line)  # type: ignore[arg-type]
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
        loop.run(asyncio.sleep(0))
        said = msgspec.msgpack.decode(lines[1].bodies[0], type=Details)
        assert said.hosts == count
    finally:
        loop.close()
