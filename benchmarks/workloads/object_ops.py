"""Workload: one tensor to all, a sum at one, a sum at all; by objects that tasks hand to each other, or by Gloo.

    python object_ops.py SYSTEM REPEATS SIZE,SIZE,...

Every operation begins at a moment that rank 0 has named beforehand, on the clock that all processes of the machine
share, and ends for a worker when it has read the last element of the result. Objects are where they begin before that,
and are deleted after it. What each worker saw is printed as JSON lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from offbeat.objects.client import ObjectClient, connect

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

WARM_UP = 1
_AHEAD_S = 0.05
OPS = ("broadcast", "reduce", "allreduce")


class Carrier(Protocol):
    """The Protocol of one system's way to carry tensors."""

    def prepare(self, number: int, op: str, mine: torch.Tensor) -> None:
        """Have what this worker gives where it begins."""

    def run(self, number: int, op: str) -> torch.Tensor | None:
        """Carry the operation out; the result, if this worker gets one."""

    def clean(self, number: int, op: str) -> None:
        """Let go of all of it."""

    def close(self) -> None:
        """The end."""


class Objects:
    """Stores as processes, one on each host."""

    def __init__(self, rank: int, world: int, store: Store, *, striped: bool) -> None:
        self._rank, self._world, self._striped = rank, world, striped
        address = os.environ["GLOO_ADDRESS"]
        arguments = ["--bind", address, "--memory-mib", "4096"]
        if rank == 0:
            arguments += ["--directory", "--directory-port", "4700"]
        else:
            store.wait(["directory"])
            arguments += ["--directories", store.get("directory").decode()]
        command = [sys.executable, "-m", "offbeat", "objects", "serve", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"OFFBEAT_OBJECTS=(\S+); .*--directories (\S+);", line)
        assert found is not None, line
        if rank == 0:
            store.set("directory", found[2])
        self._client: ObjectClient = connect(found[1])

    def prepare(self, number: int, op: str, mine: torch.Tensor) -> None:
        if op != "broadcast" or self._rank == 0:
            self._client.put(f"{number}/{self._rank}", mine)

    def run(self, number: int, op: str) -> torch.Tensor | None:
        sources = [f"{number}/{rank}" for rank in range(self._world)]
        if op == "broadcast":
            return self._client.get(sources[0])
        target = f"{number}/sum"
        if op == "allreduce" and self._striped:
            return self._client.allreduce(target, sources)
        if self._rank == 0:
            self._client.reduce(target, sources)
        return self._client.get(target) if self._rank == 0 or op == "allreduce" else None

    def clean(self, number: int, op: str) -> None:
        if self._rank == 0:
            for name in [*(f"{number}/{rank}" for rank in range(self._world)), f"{number}/sum"]:
                self._client.delete(name)

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(10)


class Gloo:
    """torch.distributed on Gloo."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensor = torch.empty(0)

    def prepare(self, number: int, op: str, mine: torch.Tensor) -> None:
        self._tensor = mine.clone() if op != "broadcast" or self._rank == 0 else torch.empty_like(mine)

    def run(self, number: int, op: str) -> torch.Tensor | None:
        if op == "broadcast":
            dist.broadcast(self._tensor, 0)
        elif op == "reduce":
            dist.reduce(self._tensor, 0)
            return self._tensor if self._rank == 0 else None
        else:
            dist.all_reduce(self._tensor)
        return self._tensor

    def clean(self, number: int, op: str) -> None:
        self._tensor = torch.empty(0)

    def close(self) -> None:
        """The group ends with the process."""


def main() -> None:
    system, repeats, sizes = sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3].split(",")]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    store = dist.distributed_c10d._get_default_store()
    carrier: Carrier = Gloo(rank) if system == "gloo" else Objects(rank, world, store, striped="striped" in system)
    number = 0
    for size in sizes:
        generator = torch.Generator().manual_seed(rank)
        mine = torch.randint(0, 100, (size // 4,), generator=generator).float()
        for op in OPS:
            for repeat in range(WARM_UP + repeats):
                number += 1
                carrier.prepare(number, op, mine)
                dist.barrier()
                if rank == 0:
                    store.set(f"begin/{number}", str(time.monotonic() + _AHEAD_S))
                begin_s = float(store.get(f"begin/{number}"))
                time.sleep(max(0.0, begin_s - time.monotonic()))
                found = carrier.run(number, op)
                if found is not None:
                    found[-1].item()
                took_s = time.monotonic() - begin_s
                digest = "" if found is None else hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]
                if repeat >= WARM_UP:
                    line = {"size": size, "op": op, "took_s": took_s if found is not None else 0.0, "digest": digest}
                    sys.stdout.write(json.dumps(line) + "\n")
                del found
                dist.barrier()
                carrier.clean(number, op)
    sys.stdout.write(json.dumps({"ends": True}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    carrier.close()


if __name__ == "__main__":
    main()
