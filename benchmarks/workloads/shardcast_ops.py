"""Broadcasts by shardcast: files over HTTP, from an origin through two hosts that serve them on.

The origin cuts a file into shards; the middle nodes, on the first two of the other hosts, fetch and serve them; all
others fetch from these. Files lie in memory. shardcast finds new versions by asking again and again.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import shardcast.client
import torch
from shardcast import ClientNode, MiddleNode, OriginServer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PORT, _MIDDLES, _LOOK_S = 8000, 2, 0.02
_SHARD_BYTES = 4 << 20
_KEPT = 2


class Shardcast:
    """This host's part."""

    ops: tuple[str, ...] = ("broadcast",)

    def __init__(self, rank: int, world: int, store: Store) -> None:
        logging.getLogger("shardcast").setLevel(logging.WARNING)
        logging.getLogger("shardcast.utils").setLevel(logging.CRITICAL)
        self._rank, self._version, self._nbytes = rank, 0, 0
        self._folder = Path(tempfile.mkdtemp(prefix="shardcast-", dir="/dev/shm"))
        shardcast.client.__file__ = str(self._folder / "a" / "client.py")  # beside which it keeps a file of its own
        for turn in range(world):  # all have one disk, and all keep a file of the same name in it as they begin
            if turn == rank:
                self._begin(store)
                store.set(f"shardcast/{rank}", os.environ["GLOO_ADDRESS"])
            store.wait([f"shardcast/{turn}"])

    def _begin(self, store: Store) -> None:
        served = self._folder / "served"
        served.mkdir()
        (served / "data1.bin").write_bytes(b"0" * 4096)  # by which its clients measure a server
        if self._rank == 0:
            self._origin = OriginServer(str(served), _PORT, _KEPT)
            return
        if self._rank <= _MIDDLES:
            self._middle = MiddleNode([self._url(store, 0)], str(served), _PORT, check_interval=_LOOK_S)
        others = [self._url(store, rank) for rank in range(1, 1 + _MIDDLES) if rank < self._rank]
        own = [f"http://{os.environ['GLOO_ADDRESS']}:{_PORT}"] if self._rank <= _MIDDLES else []
        self._client = ClientNode(own or others, str(self._folder / "got"))

    def _url(self, store: Store, rank: int) -> str:
        return f"http://{store.get(f'shardcast/{rank}').decode()}:{_PORT}"

    def prepare(self, number: int, op: str, mine: torch.Tensor) -> None:
        self._version, self._nbytes = number, mine.nbytes

    def give(self, number: int, op: str, mine: torch.Tensor) -> None:
        if self._rank == 0:
            (self._folder / "file").write_bytes(mine.numpy().tobytes())

    def run(self, number: int, op: str) -> torch.Tensor | None:
        if self._rank == 0:
            self._origin.broadcast(str(self._folder / "file"), _SHARD_BYTES)
            return None
        path = None
        while path is None:
            if f"v{number}" in self._client.list_available_versions():
                path = self._client.download_version(f"v{number}")
            else:
                time.sleep(_LOOK_S)
        return torch.from_file(path, size=self._nbytes // 4)

    def books(self) -> dict[str, int]:
        return {}

    def clean(self, number: int, op: str) -> None:
        shutil.rmtree(self._folder / "got", ignore_errors=True)
        (self._folder / "got").mkdir()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
