"""Train a policy while readers follow its weights: two from the start, one of which leaves, and one that comes late.

python examples/weight_sync.py

Starts two stores, as on two machines: the trainer's and the readers'. Each step publishes the weights as bfloat16; a
small step changes few of their bits, and only those travel. See docs/objects.md.
"""

import argparse
import multiprocessing
import os
import re
import secrets
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from offbeat.objects.client import connect
from offbeat.wire.credentials import Token


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))


def total(model: nn.Module) -> float:
    return sum(weight.detach().double().sum().item() for weight in model.parameters())


def read(store: str, token: str, last: int, says: Any) -> None:
    """Follow the policy until this version, and say what was loaded first and last."""
    model = policy().bfloat16()
    with connect(store, credentials=Token(token.encode())) as client:
        follower = client.follow("policy", model)
        version = follower.update(timeout=60)
        says.put(("begins", version, total(model)))
        while version is None or version < last:
            version = follower.update(timeout=60)
        says.put(("leaves", version, total(model)))


def start_store(token: str, *arguments: str) -> tuple["subprocess.Popen[str]", str, str]:
    """Start a store; with its address for tasks, and that of the directory."""
    command = [sys.executable, "-m", "offbeat", "objects", "serve", *arguments]
    environment = os.environ | {"OFFBEAT_TOKEN": token}
    store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    line = store.stdout.readline() if store.stdout else ""
    found = re.search(r"OFFBEAT_OBJECTS=(\S+);.*--directories (\S+);", line)
    if found is None:
        sys.exit(f"The store has not started: {line}")
    return store, found[1], found[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    steps, token = parser.parse_args().steps, secrets.token_hex(32)
    here, mine, directory = start_store(token, "--directory")
    there, theirs, _ = start_store(token, "--directories", directory)
    spawned = multiprocessing.get_context("spawn")
    says, readers, heard = spawned.Queue(), [], []
    totals: list[float] = []

    def start_reader(last: int) -> None:
        readers.append(spawned.Process(target=read, args=(theirs, token, last, says)))
        readers[-1].start()

    def hear(until: str) -> None:
        does = ""
        while does != until:
            does, version, its_total = says.get(timeout=120)
            assert its_total == totals[version], "a reader has other weights than the trainer"
            print(f"A reader {does} with version {version}.")
            heard.append(does)

    model, copy = policy(), policy().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    with connect(mine, credentials=Token(token.encode())) as client:
        publisher = client.publisher("policy")
        for step in range(steps):
            states = torch.randn(256, 64)
            loss = -(model(states).log_softmax(1)[:, 0] * states.mean(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            copy.load_state_dict(model.state_dict())
            totals.append(total(copy))
            publisher.publish(copy)
            for last in {0: [steps // 2, steps - 1], steps // 2: [steps - 1]}.get(step, []):
                start_reader(last)
                hear("begins")
        while heard.count("leaves") < len(readers):
            hear("leaves")
    with connect(theirs, credentials=Token(token.encode())) as client:
        received = client.status().received_bytes
    for reader in readers:
        reader.join()
    whole = sum(weight.nbytes for weight in copy.parameters())
    print(f"{steps} versions of {whole:,} bytes each: the readers' store received {received:,} bytes.")
    for store in (there, here):
        store.terminate()
        store.wait()


if __name__ == "__main__":
    main()
