"""Workload: an MLP of one million parameters on random vectors, in steps of a few milliseconds.

Nearly nothing is computed and nothing is on the wire but loopback, so what is measured is what a system itself costs.
"""

from __future__ import annotations

import copy
import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.lab.recorder import Recorder, Work, alone_s
from offbeat.lab.systems import bind

BATCH = 16


def mlp() -> nn.Sequential:
    """987,402 parameters in ten tensors."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    work = Work.from_environment()
    torch.set_num_threads(1)
    model = mlp()
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    x, y = torch.randn(BATCH, 256, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
    twin = copy.deepcopy(model)
    twins = torch.optim.SGD(twin.parameters(), lr=0.01)
    compute_s = alone_s(lambda: step(twin, twins, x, y))
    bound = bind(work.system, model, torch.optim.SGD(model.parameters(), lr=0.01), bucket_bytes=work.bucket_bytes)
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    recorder = Recorder(compute_s=compute_s, gradient_bytes=gradient_bytes, work=work)
    for _ in range(work.warmup_steps + work.steps):
        step(bound.model, bound.optimizer, x, y)
        recorder.step(BATCH)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    recorder.finish(digest=digest)
    bound.close()


if __name__ == "__main__":
    main()
