"""Workload: 300 small parameters, so that a step is little but the work of whoever keeps them equal.

    many_parameters.py SYSTEM STEPS

SYSTEM is "alone", "ddp", "offbeat", or the scheduler of a plan as Python. It prints a line of JSON (`Cost`).
"""

from __future__ import annotations

import statistics
import sys
import time

import msgspec
import torch
from torch import nn

LAYERS, WIDTH, BATCH = 150, 64, 4
PARAMETERS = 2 * LAYERS
WARMUP_STEPS = 20


class Cost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processor time of a step, in microseconds; medians, but for `process_us`.

    Args:
        thread_us: of the thread that trains.
        forward_us, backward_us, step_us: of it, in the two passes, and in the optimizer's step with `zero_grad`.
        process_us: mean of all threads of the process: those that send and receive, too.
        blocks: in which gradients are sent.
    """

    thread_us: float
    forward_us: float
    backward_us: float
    step_us: float
    process_us: float
    blocks: int


def measure(system: str, steps: int) -> Cost:
    """Train so many steps, behind those to warm up. Collective."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    bound = None
    if system != "alone":
        from offbeat.lab.systems import bind

        bound = bind("ddp" if system == "ddp" else "offbeat", model, optimizer, bucket_bytes=None)
        model, optimizer = bound.model, bound.optimizer
    x, times = torch.randn(BATCH, WIDTH), list[tuple[float, ...]]()
    process_s = 0.0
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            process_s = time.process_time()
        began_s = time.thread_time()
        loss = model(x).square().mean()
        forward_s = time.thread_time()
        loss.backward()
        backward_s = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        stepped_s = time.thread_time()
        times.append((stepped_s - began_s, forward_s - began_s, backward_s - forward_s, stepped_s - backward_s))
    process_s = time.process_time() - process_s
    thread, forward, backward, stepped = (
        round(1e6 * statistics.median(one), 1) for one in zip(*times[WARMUP_STEPS:], strict=True)
    )
    blocks = 0
    if bound is not None and bound.run is not None:
        (synchronizer,) = bound.run._session.models.synchronizers
        blocks = len(synchronizer.layout.buckets)
    if bound is not None:
        bound.close()
    return Cost(
        thread_us=thread,
        forward_us=forward,
        backward_us=backward,
        step_us=stepped,
        process_us=round(1e6 * process_s / steps, 1),
        blocks=blocks,
    )


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(measure(sys.argv[1], int(sys.argv[2]))).decode() + "\n")
