"""Workload: objects among six stores, one of which is struck in the middle. Run by benchmarks/object_faults.py.

    python object_struck.py OP FAULT SIZE

The last host keeps the directory. OP is "broadcast" (host 0 has the object, hosts 1 to 4 read it, one after the other
in a chain) or "reduce" (host 0 sums the first three of four sources, of hosts 1 to 4, along a chain). Host 2 is the
victim: once it has received half of the object it strikes its own store, or says so for its link to be cut. Each worker
looks every few milliseconds how much its store has, and prints what it saw as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.objects.client import ObjectClient, connect, job_name
from offbeat.objects.remote_store import RemoteStore
from offbeat.wire.credentials import Token

VICTIM, DIRECTORY, WORLD = 2, 5, 6
READERS = (1, 2, 3, 4)
STRUCK = ("SIGKILL", "SIGSTOP", "cut link")
_LOOK_S, _AHEAD_S, _APART_S, _TIMEOUT_S = 0.005, 0.2, 0.02, 120.0


class Host:
    """The store of one host, and a client of it."""

    def __init__(self, rank: int, told: TCPStore) -> None:
        self.rank, self._told = rank, told
        if rank != DIRECTORY:
            told.wait(["directory"])
        self.process, self.address = self._serve()
        self.client: ObjectClient = connect(self.address)
        self._eyes = RemoteStore(
            self.address,
            job=job_name("default"),
            credentials=Token(os.environ["OFFBEAT_TOKEN"].encode()),
            patience=timedelta(seconds=20),
            role="onlooker",
        )
        self.seen: list[tuple[float, int, int]] = []  # when, bytes of the object, bytes received in all

    def restart_when_struck(self) -> None:
        """Kill the store once the victim says so, and start it again at the same addresses."""
        self._told.wait(["strike"], timedelta(minutes=5))
        self.process.kill()
        self.process.wait()
        self.process, _ = self._serve()

    def look(self, name: str) -> None:
        """Note how much of an object there is, and all that was received."""
        try:
            status = self._eyes.status()
        except Exception:
            return
        have = next((stored.have_bytes for stored in status.objects if stored.name.id == name), 0)
        self.seen.append((time.time(), have, status.received_bytes))

    def _serve(self) -> tuple[subprocess.Popen[str], str]:
        arguments = ["--bind", os.environ["GLOO_ADDRESS"], "--memory-mib", "2048"]
        if self.rank == DIRECTORY:
            arguments += ["--directory", "--directory-port", "4700"]
        else:
            arguments += ["--directories", self._told.get("directory").decode()]
        command = [sys.executable, "-m", "offbeat", "objects", "serve", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        found = re.search(r"OFFBEAT_OBJECTS=(\S+); .*--directories (\S+);", process.stdout.readline())
        assert found is not None
        if self.rank == DIRECTORY:
            self._told.set("directory", found[2])
        return process, found[1]


def strike(host: Host, fault: str, told: TCPStore) -> None:
    """Strike this host's store."""
    say(struck_s=time.time())
    if fault == "directory":
        told.set("strike", str(time.time()))
    elif fault != "cut link":  # which the benchmark cuts
        os.kill(host.process.pid, getattr(signal, fault))


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    op, fault, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    told = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, WORLD, rank == 0)
    host = Host(rank, told)
    tensor = torch.full((size // 4,), float(2**rank))
    name = "w" if op == "broadcast" else "sum"
    if (op, rank) == ("broadcast", 0):
        host.client.put("w", tensor)
    if op == "reduce" and rank in READERS:
        told.wait([f"put/{rank - 1}"] if rank > 1 else ["directory"])  # so that they are in this order in the chain
        host.client.put(f"g{rank}", tensor)
        told.set(f"put/{rank}", "")
    told.add("ready", 1)
    while int(told.add("ready", 0)) < WORLD:
        time.sleep(0.01)
    if rank == 0:
        told.set("begin", str(time.time() + _AHEAD_S))
    begin_s = float(told.get("begin"))
    time.sleep(max(0.0, begin_s + (_APART_S * rank if op == "broadcast" else 0.0) - time.time()))

    gets = (op == "broadcast" and rank in READERS and not (fault == "absent" and rank == VICTIM)) or (
        op == "reduce" and rank == 0
    )
    if op == "reduce" and rank == 0:
        host.client.reduce("sum", [f"g{reader}" for reader in READERS], num_objects=3)
    future = host.client.start_get(name) if gets else None
    if rank == DIRECTORY and fault == "directory":
        threading.Thread(target=host.restart_when_struck, daemon=True).start()
    getters = [one for one in READERS if one != VICTIM or fault not in (*STRUCK, "absent")]
    needed = [f"got/{one}" for one in (getters if op == "broadcast" else (0,))]
    strikes = rank == VICTIM and fault in (*STRUCK, "directory")
    until_s = time.time() + _TIMEOUT_S
    while time.time() < until_s:
        host.look(name)
        if strikes and host.seen[-1][2] >= size // 2:
            strikes = False
            strike(host, fault, told)
            if fault in STRUCK:
                time.sleep(_TIMEOUT_S)  # the benchmark ends it
        if future is not None and future.done():
            break
        if not strikes and told.check(needed):
            break
        time.sleep(_LOOK_S)
    took_s, digest = None, ""
    if future is not None and future.done():
        took_s = time.time() - begin_s
        digest = hashlib.sha256(future.outcome().numpy().tobytes()).hexdigest()[:16]
        told.set(f"got/{rank}", "")
    told.wait(needed, timedelta(seconds=_TIMEOUT_S))
    host.look(name)
    say(took_s=took_s, digest=digest, seen=host.seen)
    time.sleep(_TIMEOUT_S)  # the benchmark ends it


if __name__ == "__main__":
    main()
