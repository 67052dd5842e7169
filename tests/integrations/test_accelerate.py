"""Accelerate and the Hugging Face Trainer with a plan: what they do beside Gloo's DDP, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed")

SERVER = offbeat.ParameterServer()
PLANS = {
    "ddp": None,
    "bsp": offbeat.Plan(),
    "server": offbeat.Plan(fabric=SERVER),
    "asp": offbeat.Plan(sync=offbeat.ASP(), fabric=SERVER),
    "elastic": offbeat.Plan(fabric=offbeat.Elastic()),
    "reset": offbeat.Plan(codec=offbeat.ErrorReset(offbeat.GRBS(4), every=2)),
}


def data() -> torch.utils.data.Dataset[Any]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(96, 20, generator=generator), torch.randint(0, 4, (96,), generator=generator)
    return torch.utils.data.TensorDataset(x, y)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))


def alone() -> None:
    """As where a launcher has started this process."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    os.environ["ACCELERATE_USE_CPU"] = "true"


def made(plan: str, **options: Any) -> Any:
    alone()
    if PLANS[plan] is None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init = f"file://{os.environ['OFFBEAT_STORE']}"
        torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
        return accelerate.Accelerator(cpu=True, **options)
    from offbeat.integrations.accelerate import OffbeatAccelerator

    return OffbeatAccelerator(PLANS[plan], cpu=True, **options)


def train(plan: str, epochs: int, options: dict[str, Any], clip: float | None) -> list[torch.Tensor]:
    accelerator = made(plan, **options)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    replica, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(replica):
                accelerator.backward(nn.functional.cross_entropy(replica(x), y))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(replica.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert accelerator.unwrap_model(replica) is model
    state = [parameter.detach().clone() for parameter in model.parameters()]
    if PLANS[plan] is not None:  # now and then Gloo's own does not come to an end where DDP still holds it
        accelerator.end_training()
    return state


@pytest.mark.parametrize(
    ("options", "clip"),
    [({}, None), ({"gradient_accumulation_steps": 3}, None), ({}, 0.1), ({"mixed_precision": "bf16"}, None)],
    ids=["plain", "accumulate", "clip", "bf16"],
)
def test_a_plan_of_all_together_has_the_bits_of_ddp(options: dict[str, Any], clip: float | None) -> None:
    ours, theirs = (run_workers(2, train, plan, 2, options, clip) for plan in ("bsp", "ddp"))
    for state, expected in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))


def save_and_load(plan: str, folder: str, resumes: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    accelerator = made(plan)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    replica, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumes:
        accelerator.load_state(folder)
    for epoch in range(1 if resumes else 0, 2):
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(replica(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(folder)
    with accelerator.averaged():
        state = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.end_training()
    return state, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("plan", ["bsp", "server", "reset"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, plan: str) -> None:
    whole = run_workers(2, save_and_load, plan, str(tmp_path / "state"), False)
    resumed = run_workers(2, save_and_load, plan, str(tmp_path / "state"), True)
    for one, other in zip(whole, resumed, strict=True):
        for states in zip(one, other, strict=True):
            assert all(torch.equal(first, second) for first, second in zip(*states, strict=True))


def save_model(folder: str) -> list[str]:
    accelerator, model = made("server"), network()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_model(model, folder)
    accelerator.end_training()
    return sorted(model.module.state_dict())


def test_a_model_is_saved_whole_where_a_server_has_it(tmp_path: Path) -> None:
    names, _ = run_workers(2, save_model, str(tmp_path))
    safetensors: Any = pytest.importorskip("safetensors.torch")
    assert sorted(safetensors.load_file(tmp_path / "model.safetensors")) == names


def refused(what: str) -> str:
    try:
        accelerator = made("asp")
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if what == "alone":
            accelerator.prepare(model)
        replica, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(5):
            loss = replica(torch.randn(8, 20)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.gather(loss.detach())
    except OffbeatError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("meets", r"Cannot have Accelerator.gather in every step under ASP\(\)"),
        ("alone", "Cannot prepare 1 models with 0 optimizers"),
    ],
)
def test_what_a_plan_cannot_bear_is_refused(what: str, told: str) -> None:
    for text in run_workers(2, refused, what):
        assert re.search(told, text), text


def made_again() -> tuple[bool, int, str]:
    """As Accelerate's own test scripts do."""
    from offbeat.integrations.accelerate import OffbeatAccelerator

    first = made("bsp")
    second, third = OffbeatAccelerator(cpu=True), OffbeatAccelerator(PLANS["bsp"], cpu=True)
    replica, optimizer = second.prepare(model := network(), torch.optim.SGD(model.parameters(), lr=0.1))
    third.backward(replica(torch.randn(8, 20)).square().mean())
    optimizer.step()
    with pytest.raises(OffbeatError) as caught:
        OffbeatAccelerator(offbeat.Plan(sync=offbeat.LocalSGD(2)), cpu=True)
    first.end_training()
    return first.run is second.run is third.run, first.run.step, str(caught.value)


def test_it_may_be_made_any_number_of_times() -> None:
    for is_shared, steps, text in run_workers(2, made_again):
        assert is_shared
        assert steps == 1
        assert "Cannot begin a second run" in text


def outlive(victim: int) -> dict[str, Any]:
    """One worker is killed between two steps; what the others gather before and after."""
    accelerator = made("elastic")
    model = network()
    replica, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, found = accelerator.run.rank, dict[str, Any]()
    for step in range(4):
        if (rank, step) == (victim, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward(replica(torch.ones(2, 20)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        mine = {"x": torch.full((2, 3), float(rank)), "y": [torch.tensor(rank)]}
        found[f"gathered {step}"] = accelerator.gather_for_metrics(mine)
    found["sum"] = accelerator.reduce(torch.tensor([1, rank]))
    found["mean"] = accelerator.reduce(torch.tensor(float(rank)), "mean")
    accelerator.wait_for_everyone()
    with pytest.raises(OffbeatError) as caught:
        accelerator.gather_for_metrics([f"an object of rank {rank}"])
    found["objects"] = str(caught.value)
    accelerator.run.close()
    return found


def test_what_is_gathered_on_elastic_outlives_a_worker() -> None:
    for found in run_workers(3, outlive, 1, faulty=1)[::2]:
        assert found["gathered 0"]["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert found["gathered 3"]["x"][:, 0].tolist() == [0, 0, 2, 2]
        assert found["gathered 3"]["y"][0].tolist() == [0, 2]
        assert found["sum"].tolist() == [2, 2]
        assert float(found["mean"]) == 1.0
        assert found["objects"].startswith("Cannot finish Accelerator.gather_for_metrics: rank 1 ")
        assert "Gather tensors, which outlive a lost worker" in found["objects"]


class Classifier(nn.Module):
    """What the Trainer takes: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        )


class Rows(torch.utils.data.Dataset[Any]):
    """The same samples, as the Trainer takes them."""

    def __init__(self) -> None:
        self.data = data()

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = self.data[index]
        return {"x": x, "labels": y}


def trainer(plan: str, folder: str, **options: Any) -> Any:
    import transformers

    alone()
    accelerator = None
    if PLANS[plan] is None:
        accelerator = made(plan)
    arguments = {
        "num_train_epochs": 2.0, "per_device_train_batch_size": 8, "learning_rate": 0.05, "report_to": [],
        "save_strategy": "no", "logging_steps": 4, "eval_strategy": "epoch", "use_cpu": True, "disable_tqdm": True,
    } | options  # fmt: skip
    run = None if PLANS[plan] is None else offbeat.init(PLANS[plan], run_dir=f"{folder}/run")
    args = transformers.TrainingArguments(folder, **arguments)
    given: dict[str, Any] = {"model": Classifier(), "args": args, "train_dataset": Rows(), "eval_dataset": Rows()}
    del accelerator
    if run is None:
        return transformers.Trainer(**given)
    from offbeat.integrations.transformers import OffbeatTrainer

    return OffbeatTrainer(run=run, **given)


def fit(plan: str, folder: str, options: dict[str, Any], resume: bool = False) -> tuple[list[torch.Tensor], list[Any]]:
    one = trainer(plan, folder, **options)
    one.train(resume_from_checkpoint=resume)
    state = [parameter.detach().clone() for parameter in one.model.parameters()]
    if PLANS[plan] is not None:
        one.run.close()
    return state, one.state.log_history


HF = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("transformers"), reason="transformers is not installed"
)


@HF
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 3}, {"max_grad_norm": 0.1}, {"bf16": True}],
    ids=["plain", "accumulate", "clip", "bf16"],
)
def test_the_trainer_has_the_bits_of_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    ours = run_workers(2, fit, "bsp", str(tmp_path / "a"), options)
    theirs = run_workers(2, fit, "ddp", str(tmp_path / "b"), options)
    for (state, said), (expected, told) in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))
        losses = [
            [entry[name] for entry in one for name in ("loss", "eval_loss") if name in entry] for one in (said, told)
        ]
        assert losses[0] == losses[1]


@HF
def test_the_trainer_logs_how_the_workers_train(tmp_path: Path) -> None:
    options = {"num_train_epochs": 80.0, "eval_strategy": "no"}
    first, second = (said for _, said in run_workers(2, fit, "bsp", str(tmp_path), options))
    assert any("offbeat/wait_s" in entry for entry in first)
    assert not any("offbeat/wait_s" in entry for entry in second), "the main process tells"


@HF
@pytest.mark.parametrize("plan", ["bsp", "server", "reset"])
def test_the_trainer_resumes(tmp_path: Path, plan: str) -> None:
    options = {"save_strategy": "epoch", "save_total_limit": 1}
    short, whole = str(tmp_path / "a"), str(tmp_path / "b")
    # The learning rate falls to the end of training, so the short one is stopped in the middle of the whole.
    run_workers(2, fit, plan, short, options | {"num_train_epochs": 2.0, "lr_scheduler_type": "constant"})
    resumed = run_workers(
        2, fit, plan, short, options | {"num_train_epochs": 4.0, "lr_scheduler_type": "constant"}, True
    )
    expected = run_workers(2, fit, plan, whole, options | {"num_train_epochs": 4.0, "lr_scheduler_type": "constant"})
    for (state, _), (other, _) in zip(resumed, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(state, other, strict=True))


def best(folder: str) -> tuple[float, float, float]:
    # "Best" is the worst here, so that it is not the last.
    one = trainer(
        "server", folder, save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=True, num_train_epochs=4.0,
    )  # fmt: skip
    one.train()
    evaluated = one.evaluate()["eval_loss"]
    one.run.close()
    last = [entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry][3]
    return float(one.state.best_metric), evaluated, last


@HF
def test_the_best_model_stays_loaded_though_a_server_has_another(tmp_path: Path) -> None:
    for metric, evaluated, last in run_workers(2, best, str(tmp_path)):
        assert evaluated == pytest.approx(metric)
        assert evaluated > last
