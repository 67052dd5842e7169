"""Workload: unmodified DDP, until something goes wrong; what it was, and when this worker knew, is printed as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT_S = 30.0


def main() -> None:
    backend = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        for step in range(10_000):
            model(torch.ones(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 10:
                print(json.dumps({"trains": time.time()}), flush=True)  # noqa: T201
    except Exception as error:
        said = str(error).strip().splitlines()
        print(json.dumps({"knows": time.time(), "said": said[0] if said else ""}), flush=True)  # noqa: T201
        os._exit(1)


if __name__ == "__main__":
    main()
