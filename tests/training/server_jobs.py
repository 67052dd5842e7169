"""A server of a test's own, which it can kill, and what the workers push to it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import offbeat
from offbeat.fabric import ParameterServer
from offbeat.protocol.messages import pack
from offbeat.protocol.training import DensePayload, PushBlock
from offbeat.report.job_events import OF_SERVER
from offbeat.server.pushed_block import body_of
from offbeat.tensors import bytes_of
from tests.cli.commands import descendants

if TYPE_CHECKING:
    from offbeat.protocol.status import WorkerStatus
    from offbeat.server.client.model_state import ModelState
    from offbeat.sync import Policy

TOKEN = "t" * 32
TIMEOUT_S = 2.0


def serve(folder: Path, shards: int = 1, **settings: Any) -> list[int]:
    """Rank 0 starts a server, the others wait for it; everyone finds it in the environment. Its processes, on rank 0.

    Args:
        settings: of each shard; `snapshots` is a folder that holds one for each.
    """
    from offbeat.server.launch import ShardSettings, start_shard

    where, pids = folder / "addresses", []
    if os.environ["RANK"] == "0":
        addresses: list[str] = []
        for number in range(shards):
            own = dict(settings)
            if "snapshots" in own:
                own["snapshots"] = f"{own['snapshots']}/{number}"
            chief = addresses[0] if addresses else ""
            process, address = start_shard(
                ShardSettings(job="j", token=TOKEN, timeout_s=TIMEOUT_S, coordinator=chief, **own)
            )
            addresses.append(address)
            pids.append(process.pid)
        where.with_suffix(".new").write_text(",".join(addresses))
        where.with_suffix(".new").rename(where)
    while not where.exists():
        time.sleep(0.01)
    os.environ.update(OFFBEAT_SERVERS=where.read_text(), OFFBEAT_JOB="j", OFFBEAT_TOKEN=TOKEN)
    return pids


def kept(keeper: int) -> int:
    """The process that serves, below the one that looks after it: the elder of two, of which the other is to spare."""
    return min(descendants(keeper), key=_started)


def _started(pid: int) -> int:
    """When it was, in clock ticks (proc_pid_stat(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def join(policy: Policy, run_dir: Path | None = None, patience_s: float = 30.0) -> offbeat.Run:
    """Join a job of this policy."""
    plan = offbeat.Plan(sync=policy, fabric=ParameterServer(block_bytes=4096, patience_s=patience_s))
    return offbeat.init(plan, timeout=timedelta(seconds=TIMEOUT_S), run_dir=run_dir)


class Counter:
    """A model whose parameters count contributions: each moves every element by -1 in all of a round."""

    def __init__(self, run: offbeat.Run, numel: int = 3000) -> None:
        self.model = nn.Linear(numel, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        _, self.optimizer = run.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0))

    def step(self, times: float = 1.0) -> None:
        (times * self.model.weight.sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def count(self) -> float:
        """Rounds; all elements agree about it."""
        values = self.model.weight.detach().unique()
        assert len(values) == 1, values
        return -float(values[0])


def die_half_way(run: offbeat.Run) -> None:
    """The next contribution comes without its last block, and with what came back for the others this worker dies."""
    server = run._session.server
    assert server is not None
    client, hear = server.client, server.client.hear

    def push(state: ModelState, clock: int) -> None:
        assert state.parts is not None
        state.await_all()
        for block, part in list(state.parts.items())[:-1]:
            link = client._links[state.shards[block]]
            link.send(pack(PushBlock(state.model, clock, block, DensePayload())), bytes_of(body_of(part)))

    def hear_and_die(shard: int, message: Any) -> None:
        hear(shard, message)
        if client.state(0).missing == {len(client.state(0).blocks) - 1}:
            kill(os.getpid())

    client._models._push, client.hear = push, hear_and_die  # type: ignore[method-assign]


def told(folder: Path, rank: int) -> list[str]:
    """What this worker was told about the server; not that another is back, which only who was back before is told."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    texts = [e["text"] for e in events if e["kind"] == "event" and e["what"] in OF_SERVER and e["rank"] == rank]
    return [text for text in texts if not re.fullmatch(r"Rank \d+ is back\.", text)]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def wait_for_snapshot(folder: Path) -> None:
    """Until every shard has one."""
    shards = list(folder.iterdir())
    while not all(list(shard.glob("*.snapshot")) for shard in shards):
        time.sleep(0.005)


def look(run: offbeat.Run) -> list[WorkerStatus]:
    """What the server knows of each worker."""
    server = run._session.server
    assert server is not None
    exchange = server.client.look()
    assert exchange.wait(timedelta(seconds=30))
    return list(exchange.value[0].workers)


def wait_for_end(folder: Path) -> None:
    """Until no shard uses its folder for snapshots any more."""
    for shard in folder.iterdir():
        with (shard / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
