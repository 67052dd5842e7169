"""Workload: what tasks do with tensors, by stores of objects, plain Ray or shardcast; a host that leads, eight others.

    python object_apps.py SYSTEM APP,APP,...

* sgd: asynchronous SGD; the first host sums the first four gradients that are there, and gives their workers weights
* ensemble: eight models answer a query of 8 MiB each; the first host wants the mean of their answers
* deltas: readers load each version of bfloat16 weights, of which 2 % differ from the version before
* readers: they load versions that differ everywhere; during one of them a reader is killed and another one joins

JSON lines on the standard output say what was seen: the seconds of each round, or when each reader had a version.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.workloads.digit_models import Learner, Voter, accuracy, query
from offbeat.lab import ray_cluster
from offbeat.lab.object_load import StoreProcess, say
from offbeat.objects.client import connect

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from offbeat.objects.client import ObjectClient

APPS = ("sgd", "ensemble", "deltas", "readers")
UPDATES, FIRST = 12, 4
QUERIES = 10
VERSIONS, NUMEL, SHARE = 4, 8 << 20, 0.02
"""Versions that are measured; elements of two bytes each; the share of them that a version changes."""
KILLED_IN, KILLED_AFTER_S = 3, 0.5
"""The version during which a reader is killed, and how long after it was published."""
_PATIENCE_S, _RAY_MIB = 120.0, 768


def change_(weights: torch.Tensor, share: float, generator: torch.Generator) -> None:
    """Give a share of the elements other bits; all of them if it is 1."""
    words = weights.view(torch.int16)
    count = int(share * words.numel())
    chosen = torch.randint(0, words.numel(), (count,), generator=generator) if share < 1 else slice(None)
    words[chosen] ^= torch.randint(1, 1 << 15, (count,), generator=generator, dtype=torch.int16)


# -- asynchronous SGD --------------------------------------------------------------------------------------------


def serve_gradients(client: ObjectClient, world: int) -> None:
    """Sum the first gradients that are there, and hand new weights to the workers that they came from."""
    learner = Learner(0)
    weights = learner.weights()
    optimizer = learner.optimizer(weights)
    client.put("weights/0", weights)
    pending = {f"gradient/{rank}/0": (rank, 0) for rank in range(1, world)}
    based = dict.fromkeys(range(1, world), 0)  # which weights each worker has
    client.reduce("sum/1", list(pending), num_objects=FIRST)
    for number in range(1, 1 + UPDATES):
        began_s = time.monotonic()
        weights.grad = client.get(f"sum/{number}", timeout=_PATIENCE_S) / FIRST
        used = {name: pending.pop(name) for name in client.reduced_set(f"sum/{number}")}
        pending |= {f"gradient/{rank}/{count + 1}": (rank, count + 1) for rank, count in used.values()}
        if number < UPDATES:  # gradients that are there already are added meanwhile, as Ray fetches them
            client.reduce(f"sum/{number + 1}", list(pending), num_objects=FIRST)
        optimizer.step()
        client.put(f"weights/{number}", weights)
        for name, (rank, count) in used.items():
            client.put(f"turn/{rank}/{count}", torch.tensor([number]))
            client.delete(name)
            old, based[rank] = based[rank], number
            if old not in based.values():
                client.delete(f"weights/{old}")
        client.delete(f"sum/{number}")
        say(app="sgd", number=number, took_s=time.monotonic() - began_s)
    for rank, count in pending.values():
        client.put(f"turn/{rank}/{count}", torch.tensor([-1]))
    say(app="sgd", loss=learner.loss(weights))


def send_gradients(client: ObjectClient, rank: int) -> None:
    """Make gradients of the weights that the server says."""
    learner, count, number = Learner(rank), 0, 0
    while number >= 0:
        weights = client.get(f"weights/{number}", timeout=_PATIENCE_S)
        client.put(f"gradient/{rank}/{count}", learner.gradient(weights))
        number = int(client.get(f"turn/{rank}/{count}", timeout=_PATIENCE_S).item())
        count += 1


# -- an ensemble -------------------------------------------------------------------------------------------------


def ask_ensemble(client: ObjectClient, world: int) -> None:
    """Ask all models, and have the mean of their answers made on the way."""
    for rank in range(1, world):
        client.get(f"ready/{rank}", timeout=_PATIENCE_S)
    right = []
    for number in range(1 + QUERIES):
        images, labels = query(number)
        began_s = time.monotonic()
        client.put(f"query/{number}", images)
        answers = [f"answer/{number}/{rank}" for rank in range(1, world)]
        client.reduce(f"mean/{number}", answers, op="mean")
        mean = client.get(f"mean/{number}", timeout=_PATIENCE_S)
        if number:
            say(app="ensemble", number=number, took_s=time.monotonic() - began_s)
        right.append(accuracy(mean, labels))
        for name in (f"query/{number}", *answers, f"mean/{number}"):
            client.delete(name)
    say(app="ensemble", accuracy=sum(right) / len(right))


def answer_queries(client: ObjectClient, rank: int) -> None:
    """Answer by one model."""
    voter = Voter(rank)
    client.put(f"ready/{rank}", torch.ones(1))
    for number in range(1 + QUERIES):
        client.put(f"answer/{number}/{rank}", voter.answer(client.get(f"query/{number}", timeout=_PATIENCE_S)))


# -- versions of weights -----------------------------------------------------------------------------------------


def publish_versions(client: ObjectClient, world: int, app: str, store: Store) -> None:
    """Publish, and wait until all readers have loaded it."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(NUMEL, generator=generator).bfloat16()
    publisher = client.publisher(app)
    for rank in range(1, world):
        client.get(f"{app}-ready/{rank}", timeout=_PATIENCE_S)
    for number in range(1 + VERSIONS):
        if number:
            change_(weights, SHARE if app == "deltas" else 1.0, generator)
        began_s, before = time.monotonic(), sent_bytes()
        store.set(f"{app}/{number}", "")
        publisher.publish({"w": weights}, version=number)
        for rank in range(1, world):
            total = client.get(f"{app}-done/{number}/{rank}", timeout=_PATIENCE_S)
            assert int(total) == total_of(weights), f"reader {rank} has other bytes"
        if number:
            say(app=app, number=number, began_s=began_s, sent_bytes=sent_bytes() - before)


def total_of(weights: torch.Tensor) -> int:
    """By which versions are compared."""
    return int(weights.view(torch.int16).long().sum())


def sent_bytes() -> int:
    """Return the bytes that this host has sent, headers included."""
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(fields[9]) for fields in lines if fields[0] != "lo:")


def load_versions(client: ObjectClient, rank: int, app: str, joins: Any = None) -> None:
    """Load each version; one that joins late begins when it is told to."""
    weights = {"w": torch.zeros(NUMEL, dtype=torch.bfloat16)}
    follower = client.follow(app, weights)
    if joins is None:
        client.put(f"{app}-ready/{rank}", torch.ones(1))
    else:
        joins.wait()
    version = None
    while version is None or version < VERSIONS:
        version = follower.update(timeout=_PATIENCE_S)
        if version is not None:
            say(app=app, number=version, ended_s=time.monotonic())
            client.put(f"{app}-done/{version}/{rank}", torch.tensor([total_of(weights["w"])]))


def read_and_be_replaced(rank: int, store: Store) -> None:
    """Read until this reader and its store are killed; another one, with a store of its own, takes its place."""
    spawned = multiprocessing.get_context("spawn")
    stores = [StoreProcess(rank, store) for _ in range(2)]
    joins = spawned.Event()
    readers = [
        spawned.Process(target=_reader, args=(one.address, rank, event))
        for one, event in zip(stores, (None, joins), strict=True)
    ]
    for reader in readers:
        reader.start()
    store.wait([f"readers/{KILLED_IN}"], timedelta(seconds=_PATIENCE_S))
    time.sleep(KILLED_AFTER_S)
    for pid in (readers[0].pid, stores[0].process.pid):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    joins.set()
    readers[1].join()
    stores[0].process.wait()
    stores[1].end()


def _reader(address: str, rank: int, joins: Any) -> None:
    torch.set_num_threads(1)
    with connect(address) as client:
        load_versions(client, rank, "readers", joins)


def run_shardcast(rank: int, world: int, store: Store) -> None:
    """Send whole versions as files; the part of deltas alone."""
    from benchmarks.workloads.shardcast_ops import Shardcast

    carrier, generator = Shardcast(rank, world, store), torch.Generator().manual_seed(1)
    weights = torch.randn(NUMEL, generator=generator).bfloat16()
    loaded = torch.zeros_like(weights)
    for number in range(1, 2 + VERSIONS):
        change_(weights, SHARE, generator)  # the same on all hosts, so that each sees whether it has got it
        carrier.prepare(number, "broadcast", weights.view(torch.float32))
        dist.barrier()
        began_s, before = time.monotonic(), sent_bytes()
        carrier.give(number, "broadcast", weights.view(torch.float32))
        found = carrier.run(number, "broadcast")
        if found is not None:
            loaded.copy_(found.view(torch.bfloat16))
            assert total_of(loaded) == total_of(weights), "it has other bytes"
        ended_s = time.monotonic()
        dist.barrier()
        if number > 1 and rank == 0:
            say(app="deltas", number=number - 1, began_s=began_s, sent_bytes=sent_bytes() - before)
        elif number > 1:
            say(app="deltas", number=number - 1, ended_s=ended_s)
        del found
        carrier.clean(number, "broadcast")
    carrier.close()


def run_stores(apps: list[str], rank: int, world: int, store: Store) -> None:
    """Do all that is asked for by stores of objects."""
    with ExitStack() as around:
        node = StoreProcess(rank, store)
        client = around.enter_context(node.connect())
        around.callback(node.end)
        for app in apps:
            dist.barrier()
            if app == "sgd":
                serve_gradients(client, world) if rank == 0 else send_gradients(client, rank)
            elif app == "ensemble":
                ask_ensemble(client, world) if rank == 0 else answer_queries(client, rank)
            elif rank == 0:
                publish_versions(client, world, app, store)
            elif app == "readers" and rank == world - 1:
                read_and_be_replaced(rank, store)
            else:
                load_versions(client, rank, app)
        dist.barrier()


def main() -> None:
    system, apps = sys.argv[1], sys.argv[2].split(",")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    store = dist.distributed_c10d._get_default_store()
    if system == "offbeat":
        run_stores(apps, rank, world, store)
    elif system == "shardcast":
        run_shardcast(rank, world, store)
        dist.barrier()
    else:
        from benchmarks.workloads import ray_apps

        head, own = os.environ["MASTER_ADDR"], os.environ["GLOO_ADDRESS"]
        with ray_cluster.node(store, rank=rank, world=world, head=head, own=own, memory_mib=_RAY_MIB):
            if rank == 0:
                ray_apps.run(apps, world)
            dist.barrier()  # the others keep their nodes until then


if __name__ == "__main__":
    main()
