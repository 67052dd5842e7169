"""Strangers who connect to the ports of a running job end no worker."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.fabric.gloo_listener import stop_listening_at
from tests.training.server_jobs import serve
from tests.workers import run_workers

PLANS = {
    "process-group": offbeat.Plan(),
    "elastic": offbeat.Plan(fabric=offbeat.Elastic()),
    "routed": offbeat.Plan(fabric=offbeat.Routed()),
    "elastic-routed": offbeat.Plan(fabric=offbeat.Elastic(over=offbeat.Routed())),
    "server": offbeat.Plan(sync=offbeat.BSP(), fabric=offbeat.ParameterServer()),
}
SPARE = 60  # descriptors that a worker may still open
STRANGER = """
import select, socket, sys
for port in sys.argv[2:]:
    for _ in range(int(sys.argv[1])):
        with socket.socket() as one:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", int(port)))
            connected = select.poll()
            connected.register(one, select.POLLOUT)
            connected.poll(5)
"""


def sockets() -> list[str]:
    """The inodes of this process's sockets."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link[len("socket:[") : -1] for link in links if link.startswith("socket:")]


def ports() -> list[int]:
    """The TCP ports of IPv4 at which this process listens."""
    own, rows = sockets(), [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in own]


def attack() -> int:
    """Have a stranger connect to each port more often than this process may open files; returns how many it keeps."""
    most = len(os.listdir("/proc/self/fd")) + SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    before, own = len(sockets()), [str(port) for port in ports()]
    assert own, "there is nothing to attack"
    subprocess.run([sys.executable, "-SEc", STRANGER, str(2 * SPARE), *own], check=True)
    return len(sockets()) - before


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_plan(plan: offbeat.Plan, folder: Path) -> int:
    if isinstance(plan.fabric, offbeat.ParameterServer):
        serve(folder)
    run = offbeat.init(plan, timeout=timedelta(seconds=10))
    model = nn.Linear(8, 8)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(prepared, optimizer)
    kept = attack()
    train(prepared, optimizer)
    run.close()
    return kept


def of_backend() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("offbeat", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    kept = attack()
    train(model, optimizer)
    dist.destroy_process_group()
    return kept


@pytest.mark.parametrize("name", PLANS)
def test_strangers_end_no_worker(name: str, tmp_path: Path) -> None:
    assert max(run_workers(2, of_plan, PLANS[name], tmp_path)) <= 1, "they are kept open"


def test_strangers_end_no_worker_of_the_backend() -> None:
    assert max(run_workers(2, of_backend)) <= 1, "they are kept open"


def gloo(store: Store, rank: int, size: int, into: list[Any]) -> None:
    into[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=10))


def pair(store: Store) -> list[Any]:
    """Two groups of one process that are connected."""
    groups: list[Any] = [None, None]
    threads = [threading.Thread(target=gloo, args=(store, rank, 2, groups)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def test_another_listener_hears_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as other:
        groups = pair(store)
        assert stop_listening_at(store, 0, 2)
        socket.create_connection(other.getsockname()[:2], 5).close()
    assert groups[0].rank() == 0, "its socket is open all the time"


def test_a_group_that_connects_later_hears_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under TORCH_GLOO_LAZY_INIT: without its socket it would wait for ever."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    groups = pair(store)
    assert not stop_listening_at(store, 0, 3), "it looks as if one of three was not connected yet"
    assert not stop_listening_at(PrefixStore("other", store), 0, 2), "this group is not known there"
    assert [group.rank() for group in groups] == [0, 1]
