"""Workload: a student learns what a teacher says, many steps of a small model.

A teacher of 64 - 48 tanh - 10 labels 8,000 random samples; a student of 64 - 64 - 10 ReLU learns them by Nesterov's
momentum. Every worker draws from all samples. `reset_toy` runs it with several plans.

    teacher.py [--steps N] [--lr L]

The first worker prints a line of JSON: the loss of the averaged model over all samples, and the bytes it has sent.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
import torch.nn.functional as F
from torch import nn

import offbeat

SAMPLES, INPUTS, HIDDEN, CLASSES, BATCH, MOMENTUM = 8000, 64, 64, 10, 32, 0.9


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [N, 64] and labels [N]."""
    generator = torch.Generator().manual_seed(0)
    teacher = nn.Sequential(nn.Linear(INPUTS, 48), nn.Tanh(), nn.Linear(48, CLASSES))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.normal_(0, 1 / math.sqrt(INPUTS) * 2, generator=generator)
        x = torch.randn(SAMPLES, INPUTS, generator=generator)
        return x, teacher(x).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    x, y = samples()
    torch.manual_seed(asked.seed)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    with offbeat.init(seed=asked.seed) as run:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=asked.lr, momentum=MOMENTUM, nesterov=True
        )
        replica, optimizer = run.prepare(model, optimizer)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [asked.steps * 3 // 4], gamma=0.1)
        generator = torch.Generator().manual_seed(1000 * asked.seed + run.rank)
        for _ in range(asked.steps):
            drawn = torch.randint(SAMPLES, (BATCH,), generator=generator)
            F.cross_entropy(replica(x[drawn]), y[drawn]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with run.averaged(), torch.no_grad():
            said = model(x)
            loss, accuracy = float(F.cross_entropy(said, y)), float((said.argmax(1) == y).float().mean())
        if run.is_first:
            sent_bytes = run._session.context.metrics.total_sent_bytes
            print(json.dumps({"loss": loss, "accuracy": accuracy, "sent_bytes": sent_bytes}))  # noqa: T201 - asked for


if __name__ == "__main__":
    main()
