"""Workload: the same training by way of DDP, Accelerate, the Trainer, Lightning or Ray Train, as their users write it.

The row says what carries it: "ddp" is the framework's own DDP on Gloo; "offbeat" with the default plan the same script
on the backend "offbeat"; "offbeat" with another plan the framework's adapter. A perceptron of one million parameters
learns random vectors; steps are counted where the optimizer makes them, which is the same under all.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import offbeat
from offbeat.lab import ray_cluster
from offbeat.lab.recorder import Recorder, Work
from offbeat.straggler_model import Straggler

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, FEATURES, CLASSES = 16, 64, 10
_RAY_PORT = 6379
_WAITS = 0.02
"""Seconds that a step computes at least, so that stragglers have something to be late by."""


class Vectors(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random vectors and their classes.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Perceptron(nn.Module):
    """994,570 parameters, and how long computing takes.

    Args:
        straggler: of this worker.
    """

    def __init__(self, straggler: Straggler) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 960), nn.ReLU(), nn.Linear(960, 960), nn.ReLU(), nn.Linear(960, CLASSES)
        )
        self._straggler = straggler
        self.last_loss = 0.0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(_WAITS + self._straggler.lost_s(_WAITS))
        loss = F.cross_entropy(self.net(x), labels)
        self.last_loss = loss.item()
        return {"loss": loss}


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}


class Asked:
    """What this process is to do.

    Args:
        work: of the lab.
    """

    def __init__(self, work: Work) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.steps = work.warmup_steps + work.steps
        self.model = Perceptron(Straggler(work.straggle, self.rank))
        self.data = Vectors(BATCH * self.world * self.steps)
        plan = offbeat.Plan.from_toml(os.environ["OFFBEAT_PLAN"]) if work.system == "offbeat" else offbeat.Plan()
        self.backend = _backend(work)
        self.plan = None if plan == offbeat.Plan() else plan

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)


def ddp(asked: Asked) -> None:
    """A loop of one's own."""
    if asked.plan is not None:
        _learn_by_plan(asked, asked.plan)
        return
    dist.init_process_group(asked.backend)
    _learn(asked, nn.parallel.DistributedDataParallel(asked.model), asked.optimizer())
    dist.barrier()
    dist.destroy_process_group()


def ray(asked: Asked) -> None:
    """The loop of a worker of Ray Train, which has made the group."""
    from ray.train.torch import prepare_model

    if asked.plan is not None:
        _learn_by_plan(asked, asked.plan)
    else:
        _learn(asked, prepare_model(asked.model), asked.optimizer())


def _learn_by_plan(asked: Asked, plan: offbeat.Plan) -> None:
    with offbeat.init(plan) as run:
        _learn(asked, *run.prepare(asked.model, asked.optimizer()))
        run.settle()


def _learn(asked: Asked, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(asked.data, shuffle=False)
    for batch in DataLoader(asked.data, batch_size=BATCH, sampler=sampler, collate_fn=collate):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerate(asked: Asked) -> None:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    if asked.plan is not None:
        from offbeat.integrations.accelerate import OffbeatAccelerator

        accelerator = OffbeatAccelerator(asked.plan, cpu=True)
    else:
        dist.init_process_group(asked.backend)
        accelerator = Accelerator(cpu=True)
    loader = DataLoader(asked.data, batch_size=BATCH, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(asked.model, asked.optimizer(), loader)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def trainer(asked: Asked) -> None:
    """The Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    run = None
    if asked.plan is not None:
        run = offbeat.init(asked.plan)
    else:
        dist.init_process_group(asked.backend)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=1, per_device_train_batch_size=BATCH, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_steps=1000, max_grad_norm=0.0,
    )  # fmt: skip
    given: dict[str, Any] = {
        "model": asked.model, "args": arguments, "train_dataset": asked.data, "data_collator": collate,
        "optimizers": (asked.optimizer(), None),
    }  # fmt: skip
    if run is None:
        Trainer(**given).train()
        return
    from offbeat.integrations.transformers import OffbeatTrainer

    OffbeatTrainer(run=run, **given).train()
    run.settle()
    run.close()


def lightning(asked: Asked) -> None:
    """Lightning."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = asked.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return asked.optimizer()

    if asked.plan is not None:
        from offbeat.integrations.lightning import OffbeatStrategy

        strategy: Any = OffbeatStrategy(asked.plan)
    else:
        strategy = pl.strategies.DDPStrategy(process_group_backend=asked.backend)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=asked.world, strategy=strategy, max_epochs=1,
        enable_checkpointing=False, default_root_dir=tempfile.mkdtemp(), **quiet,
    ).fit(Module(), DataLoader(asked.data, batch_size=BATCH, collate_fn=collate))  # fmt: skip


FRAMEWORKS: dict[str, Callable[[Asked], None]] = {
    "ddp": ddp,
    "accelerate": accelerate,
    "trainer": trainer,
    "lightning": lightning,
    "ray": ray,
}


def start_ray() -> None:
    """Make this host a node of a Ray cluster, with its head on the first one, which has Ray Train do the work."""
    rank, head = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    world, patience = int(os.environ["WORLD_SIZE"]), timedelta(seconds=200)
    store = TCPStore(head, int(os.environ["MASTER_PORT"]), world, rank == 0, timeout=patience)
    with ray_cluster.node(store, rank=rank, world=world, head=head):
        if rank == 0:
            _train_on_ray(world)
            store.set("over", "")
        store.wait(["over"])


def _train_on_ray(world: int) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with tempfile.TemporaryDirectory(prefix="train-", ignore_cleanup_errors=True) as folder:
        TorchTrainer(
            train,
            train_loop_config={"framework": "ray"},
            scaling_config=ScalingConfig(num_workers=world, placement_strategy="STRICT_SPREAD"),
            torch_config=TorchConfig(backend=_backend(Work.from_environment())),
            run_config=RunConfig(storage_path=folder),
        ).fit()


def _backend(work: Work) -> str:
    is_ours = work.system == "offbeat" and offbeat.Plan.from_toml(os.environ["OFFBEAT_PLAN"]) == offbeat.Plan()
    return "offbeat" if is_ours else "gloo"


def train(config: dict[str, str]) -> None:
    """Train by way of the framework that `config` names, and record it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    work = Work.from_environment()
    asked = Asked(work)
    gradient_bytes = sum(p.numel() * p.element_size() for p in asked.model.parameters())
    recorder = Recorder(compute_s=_WAITS, gradient_bytes=gradient_bytes, work=work)
    ours = {id(parameter) for parameter in asked.model.parameters()}

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            recorder.step(BATCH, asked.model.last_loss)

    hook = register_optimizer_step_post_hook(stepped)
    FRAMEWORKS[config["framework"]](asked)
    hook.remove()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in asked.model.parameters())).hexdigest()
    recorder.finish(digest=digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("framework", choices=sorted(FRAMEWORKS))
    options = parser.parse_args()
    if options.framework == "ray":
        start_ray()
    else:
        train({"framework": options.framework})
    sys.stdout.flush()
    os._exit(0)  # some frameworks keep threads that end with a group that is gone


if __name__ == "__main__":
    main()
