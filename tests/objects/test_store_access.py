"""A client of a store in another process: what it has said last is done, too."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from offbeat.objects.client import connect, job_name
from offbeat.objects.serve import open_store
from offbeat.wire.loop_thread import LoopThread


def test_an_object_that_is_deleted_just_before_the_end_is_gone() -> None:
    with LoopThread() as loop:
        server = loop.run(
            open_store(
                "127.0.0.1", 0, 0, job=job_name("default"), credentials=None, memory_bytes=1 << 24, directories=(),
                directory_port=0, patience=timedelta(seconds=20),
            )
        )  # fmt: skip
        with connect(server.client_address) as client:
            client.put("x", torch.ones(100_000))
            assert len(server.store.objects) == 1
            client.delete("x")
        until_s = time.monotonic() + 5
        while server.store.objects and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not server.store.objects
        loop.run(server.close())
