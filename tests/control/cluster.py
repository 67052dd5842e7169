"""A cluster in virtual time on which things go wrong, and a convex problem that is trained on it with real gradients.

Eight workers compute a tenth of a second per step and send a few hundred kilobytes to one server. When and in which
order updates are made is the simulator's word; what they do to the parameters is computed afterwards, from that.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from offbeat.fabric import ParameterServer
from offbeat.plan import Plan
from offbeat.sim.compute_time import ComputeTimes
from offbeat.sim.disturbances import Disturbances, Slowed, Stopped
from offbeat.sim.links import Links
from offbeat.sim.parameter_server import SimulatedServer
from offbeat.straggler_model import jitter

if TYPE_CHECKING:
    from offbeat.control import Controller
    from offbeat.sim.result import SimResult
    from offbeat.sync import Policy, Push

WORLD, COMPUTE_S, BATCH = 8, 0.1, 64
SIZE_BYTES, RATE = 250_000.0, 12.5e6
BEGIN_S = 8.1  # worker 3 computes then
TROUBLES: dict[str, Stopped | Slowed] = {
    "stopped for 0.5 s": Stopped(3, BEGIN_S, 0.5),
    "stopped for 3 s": Stopped(3, BEGIN_S, 3.0),
    "stopped for 20 s": Stopped(3, BEGIN_S, 20.0),
    "a link at a fiftieth for 10 s": Slowed(3, BEGIN_S, 10.0, to=0.02),
}


class Steps(ComputeTimes):
    """A tenth of a second, with a little jitter."""

    def __init__(self, rank: int, sigma: float) -> None:
        self._rank, self._sigma, self._step = rank, sigma, 0

    def next_s(self, samples: int | None = None) -> tuple[float, float]:
        self._step += 1
        return COMPUTE_S * jitter(self._sigma, self._rank, self._step), 0.0


def play(
    sync: Policy,
    controller: Controller | None = None,
    trouble: str = "",
    *,
    steps: int = 330,
    sigma: float = 0.05,
    servers: float = WORLD * RATE,
) -> SimResult:
    """All steps of all workers.

    Args:
        servers: bytes per second of the server's link.
    """
    return SimulatedServer(
        Plan(sync=sync, controller=controller, fabric=ParameterServer()),
        [Steps(rank, sigma) for rank in range(WORLD)],
        Links(worker=(RATE,) * WORLD, servers=servers, shards=1, queue_s=0.0),
        size_bytes=SIZE_BYTES,
        pull_bytes=SIZE_BYTES,
        steps=steps,
        batch=BATCH,
        troubles=Disturbances((TROUBLES[trouble],) if trouble else ()),
    ).play()


def throughput(played: SimResult, until_s: float) -> float:
    """Samples per second in the updates made by then."""
    return sum(len(pushes) for at_s, pushes, _ in played.updates if at_s <= until_s) * BATCH / until_s


@cache
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Features [n, d] of very unequal scale and labels [n] of a logistic regression, which is convex."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(4000, 30, generator=generator, dtype=torch.float64) * torch.logspace(
        0, -2, 30, dtype=torch.float64
    )
    truth = torch.randn(30, generator=generator, dtype=torch.float64) * 10
    labels = (torch.rand(4000, generator=generator, dtype=torch.float64) < torch.sigmoid(features @ truth)).double()
    return features, labels


def loss(weight: torch.Tensor) -> float:
    """Over all samples."""
    features, labels = problem()
    return float(torch.nn.functional.binary_cross_entropy_with_logits(features @ weight, labels))


def gradient(weight: torch.Tensor, push: Push) -> torch.Tensor:
    """Of the batch that this contribution is computed from."""
    features, labels = problem()
    generator = torch.Generator().manual_seed(100_000 * push[0] + push[1])
    chosen = torch.randint(len(labels), (BATCH,), generator=generator)
    x, y = features[chosen], labels[chosen]
    return x.T @ (torch.sigmoid(x @ weight) - y) / BATCH


def curve(played: SimResult, until_s: float, lr: float, momentum: float) -> list[tuple[float, float]]:
    """Seconds and loss after each update: SGD at the server, each gradient of the parameters that its worker read."""
    weight = torch.zeros(30, dtype=torch.float64)
    velocity = torch.zeros_like(weight)
    seen, told = [weight.clone()], []
    for at_s, pushes, rate in played.updates:
        if at_s > until_s:  # some workers are done soon, and rounds are smaller
            break
        mean = sum(gradient(seen[played.read[push]], push) for push in pushes) / len(pushes)
        velocity = momentum * velocity + mean
        weight = weight - lr * rate * velocity
        seen.append(weight.clone())
        told.append((at_s, weight))
    return [(at_s, loss(weight)) for at_s, weight in told]


def seconds_to(curve: list[tuple[float, float]], target: float) -> float:
    """From when on the loss is no higher than that for good; infinite if it never is."""
    above = [at_s for at_s, value in curve if value > target]
    later = [at_s for at_s, _ in curve if not above or at_s > above[-1]]
    return later[0] if later else float("inf")
