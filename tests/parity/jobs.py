"""Training jobs that run both ways: with DistributedDataParallel and with offbeat."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import offbeat

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[], nn.Module]
    Batch = Callable[[torch.Generator], tuple[Any, torch.Tensor]]

# Shapes: B batch, D features, T sequence.


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 5))


class CNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 16, 5),
        )


class Transformer(nn.Module):
    """A small language model whose embedding and output layer share their weight."""

    def __init__(self, vocabulary: int = 30, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        length = tokens_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        out: torch.Tensor = self.head(self.encoder(self.embed(tokens_BT), mask=mask, is_causal=True))
        return out.flatten(0, 1)


def vectors(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 20, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def sentences(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 30, (4, 11), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].flatten()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Job:
    """What to train.

    Args:
        model, batch, optimizer: how to make them.
        loss: of the model and a batch.
        ddp: further arguments of DistributedDataParallel.
        accumulate: micro-batches per step.
        by_flag: whether `require_backward_grad_sync` accumulates them, in place of `no_sync()`.
        before_step: called between backward and step.
    """

    model: Make
    batch: Batch
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    loss: Callable[[nn.Module, Any, torch.Tensor], torch.Tensor] | None = None
    ddp: dict[str, Any] | None = None
    plan: offbeat.Plan | None = None
    is_ahead: bool | None = None  # whether steps are hidden behind the next one in the end; None for either
    steps: int = 50
    accumulate: int = 1
    by_flag: bool = False
    before_step: Callable[[nn.Module], object] | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    set_to_none: bool = True


def cross_entropy(model: nn.Module, x: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


@contextlib.contextmanager
def wrapped(system: str, *pairs: Any, plan: offbeat.Plan | None = None, ddp: dict[str, Any] | None = None) -> Any:
    """Models with their optimizers (model, optimizer, model, optimizer ...) as `system` wraps them."""
    models, optimizers = pairs[::2], pairs[1::2]
    if system == "ddp":
        replicas: list[nn.Module] = [nn.parallel.DistributedDataParallel(model, **(ddp or {})) for model in models]
        yield replicas[0] if len(replicas) == 1 else replicas
        return
    with offbeat.init(plan) as run:
        replicas = [run.prepare(m, o)[0] for m, o in zip(models, optimizers, strict=True)]
        yield replicas[0] if len(replicas) == 1 else replicas


def train(job: Job, system: str) -> dict[str, Any]:
    """Train on this rank's own random batches; returns the final state and the losses."""
    torch.manual_seed(1)
    model = job.model()
    optimizer = job.optimizer(model)
    with wrapped(system, model, optimizer, plan=job.plan, ddp=job.ddp) as replica:
        schedule = job.schedule(optimizer) if job.schedule else None
        generator = torch.Generator().manual_seed(100 + _rank())
        compute_loss = job.loss or cross_entropy
        losses = []
        for _ in range(job.steps):
            for micro in range(job.accumulate):
                x, y = job.batch(generator)
                quiet = micro < job.accumulate - 1
                if job.by_flag:
                    replica.require_backward_grad_sync = not quiet
                with replica.no_sync() if quiet and not job.by_flag else contextlib.nullcontext():
                    loss = compute_loss(replica, x, y) / job.accumulate
                    loss.backward()
            losses.append(loss.detach().clone())
            if job.before_step:
                job.before_step(replica)
            optimizer.step()
            if schedule:
                schedule.step()
            optimizer.zero_grad(set_to_none=job.set_to_none)
        if system != "ddp" and job.is_ahead is not None:
            assert is_ahead(replica) == job.is_ahead, job
        state = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
        return {"state": state, "losses": losses, "optimizer": optimizer.state_dict()}


def is_ahead(replica: Any) -> bool:
    """Whether the steps of what `prepare` returned are hidden behind the next one by now."""
    return bool(getattr(replica._synchronizer._gradients, "is_ahead", False))


def _rank() -> int:
    return int(os.environ["RANK"])


def both(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """The job with DDP and with offbeat, one after the other in the same processes."""
    return all_of({"": job})[""]


def all_of(jobs: dict[str, Job]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Each job with DDP and with offbeat, in the same processes: to start them costs more than to train."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['OFFBEAT_STORE']}",
        rank=_rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    try:
        return {name: (train(job, "ddp"), train(job, "offbeat")) for name, job in jobs.items()}
    finally:
        dist.destroy_process_group()
