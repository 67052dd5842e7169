"""Whatever trains under DistributedDataParallel trains the same here: the list of the bar for "drop-in"."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity import jobs
from tests.parity.jobs import Job, cross_entropy
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

    import offbeat


class Branches(nn.Module):
    """Two branches; which one is used is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(20, 16)
        self.left = nn.Linear(16, 5)
        self.right = nn.Linear(16, 5)
        self.never = nn.Linear(16, 5)
        self.calls = 0

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        branch = self.left if self.choose() else self.right
        out: torch.Tensor = branch(self.stem(x_BD).tanh())
        return out

    def choose(self) -> bool:
        return True


class PerRank(Branches):
    """In two of three steps the ranks use different branches."""

    def choose(self) -> bool:
        return self.calls % 3 == 0 or dist.get_rank() % 2 == 0


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(20, 16)
        self.head = nn.Linear(16, 5)
        self.body.bias.requires_grad_(False)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x_BD).relu())
        return out


class FrozenMidRun(PartlyFrozen):
    """After five steps the body is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 6:
            self.body.weight.requires_grad_(False)
        return super().forward(x_BD)


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 16, dtype=torch.float64)
        self.second = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.third = nn.Linear(16, 5)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x_BD.double()).tanh().bfloat16())
        out: torch.Tensor = self.third(hidden.float().relu())
        return out


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.second = nn.Linear(32, 32)
        self.third = nn.Linear(32, 5)
        self.reentrant = reentrant

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x_BD).relu()
        for _ in range(2):  # the second layer runs twice, so its gradient arrives in parts
            hidden = checkpoint(self._inside, hidden, use_reentrant=self.reentrant)
        out: torch.Tensor = self.third(hidden)
        return out

    def _inside(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(hidden).tanh()
        return out


class CheckpointedNorms(jobs.CNN):
    """Each BatchNorm's statistics are moved twice in a step: by the forward pass, and by its recomputation."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self._inside, x_BCHW, 0, 3, use_reentrant=False)
        hidden = checkpoint(self._inside, hidden, 3, 6, use_reentrant=False)
        return self._inside(hidden, 6, len(self))

    def _inside(self, hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        for layer in list(self)[first:end]:
            hidden = layer(hidden)
        return hidden


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    extra: dict[str, Any]


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = jobs.MLP()


class DataclassOutput(Wrapping):
    def forward(self, x_BD: torch.Tensor) -> Answer:
        logits = self.inner(x_BD)
        return Answer(logits, {"norm": logits.square().mean(), "name": "mlp"})


class DictOutput(Wrapping):
    def forward(self, x_BD: torch.Tensor) -> dict[str, Any]:
        logits = self.inner(x_BD)
        return {"logits": logits, "nested": [logits * 2, None]}


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, sparse=True)
        self.bag = nn.EmbeddingBag(50, 16, sparse=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(tokens_BT).mean(1) + self.bag(tokens_BT))
        return out


class ChannelsLast(jobs.CNN):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(20, 16, dtype=torch.complex64) * 0.2)
        self.head = nn.Linear(16, 5)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((x_BD.to(torch.complex64) @ self.wave).abs())
        return out


def word_batches(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 50, (8, 6), generator=generator), torch.randint(0, 5, (8,), generator=generator)


def clip(model: nn.Module) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05, "nothing was clipped"


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def two_forwards(model: nn.Module, x: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x * 0.5), y)


def forward_without_backward(model: nn.Module, x: Any, y: torch.Tensor) -> torch.Tensor:
    """As evaluation in the middle of training does, with and without gradients."""
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    model.train()
    return F.cross_entropy(model(x), y)


def autocast(model: nn.Module, x: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x), y)


def dataclass_loss(model: nn.Module, x: Any, y: torch.Tensor) -> torch.Tensor:
    answer = model(x)
    loss: torch.Tensor = F.cross_entropy(answer.logits, y) + 0.01 * answer.extra["norm"]
    return loss


def dict_loss(model: nn.Module, x: Any, y: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return F.cross_entropy(output["logits"] + output["nested"][0], y)


def gradient_penalty(model: nn.Module, x: Any, y: torch.Tensor) -> torch.Tensor:
    """Double backward: the loss holds a gradient with respect to the input."""
    x = x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    loss: torch.Tensor = F.cross_entropy(out, y) + 0.01 * slope.square().mean()
    return loss


def make(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return _Maker(kind, options)


@dataclasses.dataclass(frozen=True)
class _Maker:
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.kind(model.parameters(), **self.options)


def reentrant() -> nn.Module:
    return Checkpointed(True)


def non_reentrant() -> nn.Module:
    return Checkpointed(False)


def sparse_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


UNUSED = {"find_unused_parameters": True}
JOBS = {
    "scheduler": Job(jobs.MLP, jobs.vectors, schedule=cosine),
    "clip": Job(jobs.MLP, jobs.vectors, before_step=clip),
    "accumulation": Job(jobs.MLP, jobs.vectors, accumulate=3),
    "accumulation by flag": Job(jobs.MLP, jobs.vectors, accumulate=2, by_flag=True, steps=20),
    "accumulation, zeros kept": Job(jobs.MLP, jobs.vectors, accumulate=2, set_to_none=False),
    "zeros kept": Job(jobs.CNN, jobs.images, set_to_none=False),
    "unused": Job(Branches, jobs.vectors, ddp=UNUSED),
    "unused, adamw": Job(Branches, jobs.vectors, jobs.adamw, ddp=UNUSED),
    "different ones unused per rank": Job(PerRank, jobs.vectors, jobs.adamw, ddp=UNUSED),
    "frozen": Job(PartlyFrozen, jobs.vectors),
    "frozen mid-run": Job(FrozenMidRun, jobs.vectors, ddp=UNUSED),
    "mixed dtypes": Job(MixedDtypes, jobs.vectors),
    "several forwards": Job(jobs.MLP, jobs.vectors, loss=two_forwards),
    "evaluation between": Job(jobs.MLP, jobs.vectors, loss=forward_without_backward),
    "autocast": Job(jobs.CNN, jobs.images, loss=autocast),
    "checkpoint, reentrant": Job(reentrant, jobs.vectors, ddp={"static_graph": True}),
    "checkpoint, non-reentrant": Job(non_reentrant, jobs.vectors),
    "checkpoint around BatchNorm": Job(CheckpointedNorms, jobs.images),
    "dataclass output": Job(DataclassOutput, jobs.vectors, loss=dataclass_loss),
    "dict output": Job(DictOutput, jobs.vectors, loss=dict_loss),
    "double backward": Job(jobs.MLP, jobs.vectors, loss=gradient_penalty),
    "channels last": Job(ChannelsLast, jobs.images),
    "complex": Job(Complex, jobs.vectors),
    "sparse": Job(Sparse, word_batches, sparse_optimizer),
    "several buckets": Job(jobs.Transformer, jobs.sentences, ddp={"bucket_cap_mb": 0.02}),
    "gradients as bucket views": Job(jobs.MLP, jobs.vectors, ddp={"gradient_as_bucket_view": True}),
}


OPTIMIZERS = {
    "Adadelta": make(torch.optim.Adadelta),
    "Adafactor": make(torch.optim.Adafactor),
    "Adagrad": make(torch.optim.Adagrad),
    "Adam": make(torch.optim.Adam, amsgrad=True),
    "Adam fused": make(torch.optim.Adam, fused=True),
    "Adamax": make(torch.optim.Adamax),
    "ASGD": make(torch.optim.ASGD),
    "NAdam": make(torch.optim.NAdam),
    "RAdam": make(torch.optim.RAdam),
    "RMSprop": make(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": make(torch.optim.Rprop),
    "SGD Nesterov": make(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
}


def assert_same_bits(of: dict[str, Job]) -> None:
    results = run_workers(2, jobs.all_of, of)
    for name in of:
        assert_same(name, [result[name] for result in results])


def test_same_bits_as_ddp() -> None:
    assert_same_bits({name: dataclasses.replace(job, steps=12) for name, job in JOBS.items()})


def test_any_optimizer() -> None:
    assert_same_bits({name: Job(jobs.MLP, jobs.vectors, optimizer, steps=6) for name, optimizer in OPTIMIZERS.items()})


def closures(plan: offbeat.Plan | None = None) -> dict[str, Any]:
    """LBFGS calls the closure, and with it backward, several times per step."""
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=_rank(), world_size=2)
    try:
        return {system: _train_lbfgs(system, plan) for system in ("ddp", "offbeat")}
    finally:
        dist.destroy_process_group()


def _train_lbfgs(system: str, plan: offbeat.Plan | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = jobs.MLP()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with jobs.wrapped(system, model, optimizer, plan=plan) as replica:
        generator = torch.Generator().manual_seed(100 + _rank())
        for _ in range(4):
            x, y = jobs.vectors(generator)

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                # LBFGS decides by the loss, too; DDP users average it, or ranks part ways.
                loss = cross_entropy(replica, x, y)
                loss.backward()
                mean = loss.detach() / dist.get_world_size()
                dist.all_reduce(mean)
                return mean

            optimizer.step(closure)
        return {name: tensor.clone() for name, tensor in replica.state_dict().items()}


def test_lbfgs() -> None:
    check_lbfgs(None)


def check_lbfgs(plan: offbeat.Plan | None) -> None:
    for result in run_workers(2, closures, plan):
        for name, tensor in result["ddp"].items():
            assert torch.equal(tensor, result["offbeat"][name]), name


OVERFLOWS = (4, 11)  # steps; by the second one a scheduler has learnt enough


def hides(plan: offbeat.Plan | None) -> bool:
    return plan is not None and plan.scheduling is not None


def scaler(plan: offbeat.Plan | None = None) -> dict[str, Any]:
    """A GradScaler skips the step on every rank when one rank's gradient overflows."""
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=_rank(), world_size=2)
    try:
        return {system: _train_scaled(system, plan) for system in ("ddp", "offbeat")}
    finally:
        dist.destroy_process_group()


def _train_scaled(system: str, plan: offbeat.Plan | None) -> dict[str, Any]:
    torch.manual_seed(1)
    model = jobs.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scales = []
    with jobs.wrapped(system, model, optimizer, plan=plan) as replica:
        generator = torch.Generator().manual_seed(100 + _rank())
        for step in range(16):
            x, y = jobs.vectors(generator)
            if step in OVERFLOWS and dist.get_rank() == 1:
                x = x * float("inf")
            scaler.scale(cross_entropy(replica, x, y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            if system == "offbeat" and step == OVERFLOWS[-1]:
                assert jobs.is_ahead(replica) == hides(plan)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return {"state": {n: t.clone() for n, t in replica.state_dict().items()}, "scales": scales}


def test_grad_scaler() -> None:
    check_grad_scaler(None)


def check_grad_scaler(plan: offbeat.Plan | None) -> None:
    for result in run_workers(2, scaler, plan):
        assert result["ddp"]["scales"] == result["offbeat"]["scales"]
        assert any(b < a for a, b in zip(result["ddp"]["scales"], result["ddp"]["scales"][1:], strict=False))
        for name, tensor in result["ddp"]["state"].items():
            assert torch.equal(tensor, result["offbeat"]["state"][name]), name
            assert torch.isfinite(tensor).all()


def adversaries(plan: offbeat.Plan | None = None) -> dict[str, Any]:
    """Two models in one process, trained in turns, as a GAN is."""
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=_rank(), world_size=2)
    try:
        return {system: _train_gan(system, plan) for system in ("ddp", "offbeat")}
    finally:
        dist.destroy_process_group()


def _train_gan(system: str, plan: offbeat.Plan | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 20))
    judge = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    makers = torch.optim.Adam(maker.parameters(), 1e-3)
    judges = torch.optim.Adam(judge.parameters(), 1e-3)
    with jobs.wrapped(system, maker, makers, judge, judges, plan=plan) as (maker, judge):
        generator = torch.Generator().manual_seed(100 + _rank())
        for _ in range(16):
            real = torch.randn(8, 20, generator=generator)
            fake = maker(torch.randn(8, 8, generator=generator))
            judges.zero_grad()
            (F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
            judges.step()
            makers.zero_grad()
            F.softplus(-judge(fake)).mean().backward()  # reaches the judge's parameters as well
            makers.step()
        assert system == "ddp" or [jobs.is_ahead(one) for one in (maker, judge)] == [hides(plan)] * 2
        return {
            f"{who}.{name}": tensor.clone()
            for who, model in (("maker", maker), ("judge", judge))
            for name, tensor in model.state_dict().items()
        }


def test_two_models() -> None:
    check_two_models(None)


def check_two_models(plan: offbeat.Plan | None) -> None:
    for result in run_workers(2, adversaries, plan):
        for name, tensor in result["ddp"].items():
            assert torch.equal(tensor, result["offbeat"][name]), name


def _rank() -> int:
    return int(os.environ["RANK"])


def assert_same(name: str, results: list[Any]) -> None:
    ddp, ours = results[0]
    assert list(ddp["state"]) == list(ours["state"]), name
    for key, tensor in ddp["state"].items():
        difference = (tensor - ours["state"][key]).abs().max()
        assert torch.equal(tensor, ours["state"][key]), f"{name}: {key}: {difference}"
    assert all(torch.equal(a, b) for a, b in zip(ddp["losses"], ours["losses"], strict=True)), name
    for _, other in results[1:]:
        for key, tensor in other["state"].items():
            assert torch.equal(tensor, ours["state"][key]), f"{name}: ranks differ in {key}"
