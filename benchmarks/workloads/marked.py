"""Workload: a small model on real digits in which every contribution leaves a mark of its own.

Beside the weights there are marks: worker r's step k has the gradient 1 in mark [r, k] and 0 in all others, at a
learning rate of 1. So a mark is minus the weight with which that contribution counts: 0 if it does not, about twice a
worker's share if it is applied twice. There are two copies, before and behind the weights, so that a contribution of
which a part got lost shows, too.

Steps go on until the faults are over (`offbeat.testing.faults`); then all settle, and each writes what it holds.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.diagnosis.wait import WaitContext
from offbeat.fault_spec import LASTING, LOG, read_fired

RANKS, STEPS = 6, 3000
BATCH = 32
NEWCOMER = "newcomer"
_BEGAN_WITH = 3
_NEWCOMERS_STEPS = 10
_FIRST_PHASE_S = 0.3
_PACE_S = 0.02


class Held(msgspec.Struct, kw_only=True):
    """What a worker holds at the end.

    Args:
        began: at this step: 0, but for who joins a job in which all step together.
        done: steps of its loop, and those before it began.
        idle: those of them for which it had no data, and that weigh nothing.
        marks: [rank][step], of the first copy, up to the last that is not 0; `torn` counts those that differ in the
            second one.
        digest: of all parameters.
        seen: what the server says of each worker.
    """

    rank: int
    done: int
    marks: list[list[float]]
    torn: int
    digest: str
    seen: list[dict[str, Any]]
    loss: float | None
    idle: list[int] = []
    began: int = 0


class Marked(nn.Module):
    """Weights between two copies of the marks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(RANKS, STEPS))
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.last = nn.Parameter(torch.zeros(RANKS, STEPS))

    def forward(self, x: torch.Tensor, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x), self.first[rank, step] + self.last[rank, step]


@dataclass
class Asked:
    """When to end, and what to do before.

    Args:
        exactly: so many steps, on data that each rank has for itself, so that two jobs can be compared; 0 for as many
            as the faults take, on leased data.
    """

    exactly: int
    steps: int
    after_s: float
    swap_at: int
    save_every: int

    def awaits_newcomer(self) -> bool:
        """Whether a newcomer is on its way."""
        log = Path(os.environ[LOG])
        return any(one.fault.kind == "join" for one in read_fired(log)) and not (log.parent / NEWCOMER).exists()

    def is_over(self, rank: int, done: int, began: int) -> bool:
        """Whether a worker has done enough: so many steps, and until so long after the faults."""
        if done >= (self.exactly or STEPS):
            return True
        if self.exactly:
            return False
        if done - began < (2 * _NEWCOMERS_STEPS if rank >= _BEGAN_WITH else self.steps):
            return False
        fired = read_fired(Path(os.environ[LOG]))
        if any(one.fault.kind == "join" for one in fired):
            return not self.awaits_newcomer()
        ends_s = [one.time_s + self.after_s + one.fault.seconds * (one.fault.kind in LASTING) for one in fired]
        return bool(fired) and time.time() > max(ends_s)


def train(asked: Asked, run: offbeat.Run) -> None:
    """Train until it is over, and write what came of it."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).reshape(-1, 64) / 16
    module, folder = Marked(), Path(os.environ[LOG]).parent
    groups: list[dict[str, Any]] = [
        {"params": module.net.parameters()},
        {"params": [module.first, module.last], "lr": 1.0},
    ]
    optimizer: Any = torch.optim.SGD(groups, lr=0.05)
    data = TensorDataset(images, torch.tensor(digits.target))
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    if asked.exactly:
        loader = [data[(own := 2 * step + run.rank) : own + BATCH] for step in range(asked.exactly)]
        model, optimizer = run.prepare(module, optimizer)
    else:
        model, optimizer, loader = run.prepare(module, optimizer, loader)
    began = run.step if run._session.server is None else 0  # who joins a server's job counts its own
    done, loss, idle = began, torch.tensor(0.0), list[int]()
    is_over = False
    while not is_over:
        for x, y in loader:
            output, mark = model(x, run.rank, done)
            loss = F.cross_entropy(output, y)
            (loss + mark).backward()
            optimizer.step()
            optimizer.zero_grad()
            idle += [] if run.has_data else [done]
            done += 1
            if run.rank >= _BEGAN_WITH and done - began == _NEWCOMERS_STEPS:
                (folder / NEWCOMER).touch()
            if run.rank == 0 and done == asked.swap_at:
                while not read_fired(Path(os.environ[LOG])):  # somebody who cannot agree any more
                    time.sleep(0.01)
                threading.Thread(target=run.swap, kwargs={"sync": offbeat.SSP(bound=3)}, daemon=True).start()
                time.sleep(_FIRST_PHASE_S)  # what is to strike between the two phases strikes in the next step
            if run.rank == 0 and done % asked.save_every == 0:
                _save(module, folder / "checkpoint.pt")
            if asked.awaits_newcomer():
                time.sleep(_PACE_S)  # starting takes a newcomer long, and there are marks for so many steps only
            is_over = _all_are_over(asked, run, done, began)
            if is_over:
                break
    run.settle()
    held = _held(run, module, done, began, float(loss.detach()), idle)
    (folder / f"held{run.rank}.json").write_bytes(msgspec.json.encode(held))
    run.mean(0.0)  # nobody leaves before all have written


def _all_are_over(asked: Asked, run: offbeat.Run, done: int, began: int) -> bool:
    """Whether this worker has done enough; without a server all end behind the same step."""
    is_over = asked.is_over(run.rank, done, began)
    return is_over if run._session.server is not None else run.mean(float(is_over)) > 0


def _held(run: offbeat.Run, module: Marked, done: int, began: int, loss: float, idle: list[int]) -> Held:
    first, last = module.first.detach(), module.last.detach()
    used = int(first.abs().sum(0).nonzero().max()) + 1 if bool(first.any()) else 0
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
    server, seen = run._session.server, []
    if server is not None:
        look = server.client.look()
        run._session.waiter.wait(look, WaitContext("a look at the server", through_server=True))
        seen = [msgspec.to_builtins(one) for one in look.value[0].workers]
    return Held(
        rank=run.rank,
        done=done,
        marks=first[:, :used].tolist(),
        torn=int((first != last).sum()),
        digest=digest,
        seen=seen,
        loss=loss,
        idle=idle,
        began=began,
    )


def _save(module: nn.Module, path: Path) -> None:
    """A checkpoint, as a script would write it that knows that disks may be full."""
    try:
        torch.save(module.state_dict(), path)
    except (OSError, RuntimeError) as error:
        path.with_suffix(".failed").touch()
        logging.getLogger("offbeat").warning("no checkpoint: %s", error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exactly", type=int, default=0, help="so many steps, on data of each worker's own")
    parser.add_argument("--steps", type=int, default=30, help="at least so many")
    parser.add_argument("--after-s", type=float, default=1.0, help="and until so long after the faults")
    parser.add_argument("--swap-at", type=int, default=-1, help="have another policy decide after this step of rank 0")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    torch.set_num_threads(1)
    with offbeat.init() as run:
        train(Asked(**vars(parser.parse_args())), run)


if __name__ == "__main__":
    main()
