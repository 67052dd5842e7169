"""Lightning's Trainer with a plan: what it does beside its own strategy, and what it refuses."""

from __future__ import annotations

import logging
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from tests.workers import run_workers

pl: Any = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

SERVER = offbeat.ParameterServer()
PLANS = {
    "ddp": None,
    "bsp": offbeat.Plan(),
    "server": offbeat.Plan(fabric=SERVER),
    "asp": offbeat.Plan(sync=offbeat.ASP(), fabric=SERVER),
    "local": offbeat.Plan(sync=offbeat.LocalSGD(2)),
    "reset": offbeat.Plan(codec=offbeat.ErrorReset(offbeat.GRBS(4), every=2)),
    "prophet": offbeat.Plan(scheduling=offbeat.Prophet()),
}


class Digits(pl.LightningModule):  # type: ignore[misc]
    """A small classifier."""

    def __init__(self, sync: str = "epoch", optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
        self.sync, self.made, self.automatic_optimization = sync, optimizers, optimizers == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=self.sync == "step", on_epoch=self.sync != "step", sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)
        self.log("most", float(self.global_rank), reduce_fx="max", sync_dist=True)
        self.log("samples", float(len(batch[1])), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9) for _ in range(self.made)]
        return made if len(made) > 1 else made[0]


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(96, 20, generator=generator), torch.randint(0, 4, (96,), generator=generator)
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True), torch.utils.data.DataLoader(
        data, batch_size=8
    )


def trainer(plan: offbeat.Plan | None, folder: str, **options: Any) -> Any:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if plan is None:
        strategy = pl.strategies.DDPStrategy(process_group_backend="gloo")
    else:
        from offbeat.integrations.lightning import OffbeatStrategy

        strategy = OffbeatStrategy(plan, timeout=20)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    return pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, default_root_dir=folder, **options)


def fit(plan: str, folder: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, float]]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + hash(folder) % 10000))
    pl.seed_everything(3, verbose=False)
    model, made = Digits(), trainer(PLANS[plan], folder, **options)
    made.fit(model, *loaders())
    values = {name: float(value) for name, value in made.callback_metrics.items()}
    return [parameter.detach().clone() for parameter in model.parameters()], values


def count_broadcasts(plan: str, folder: str) -> int:
    broadcast, count = torch.distributed.broadcast, 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return broadcast(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "broadcast", counting)
        fit(plan, folder, {"max_epochs": 3})
    return count


def test_no_step_waits_for_the_first_worker(tmp_path: Path) -> None:
    """Lightning itself broadcasts in each of the 18 steps whether that has got a SIGTERM."""
    assert all(count < 10 for count in run_workers(2, count_broadcasts, "local", str(tmp_path)))


def end_by_signal(folder: str) -> str:
    class Ends(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        fit("local", folder, {"callbacks": [Ends()]})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_who_gets_a_sigterm_ends_and_the_others_are_told(tmp_path: Path) -> None:
    told, ended = run_workers(2, end_by_signal, str(tmp_path))
    assert ended.startswith("SIGTERMException")
    assert "rank 1" in told.lower(), told


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 3},
    "clip": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_plan_of_all_together_has_the_bits_of_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    ours = run_workers(2, fit, "bsp", str(tmp_path / "a"), options)
    theirs = run_workers(2, fit, "ddp", str(tmp_path / "b"), options)
    for (state, values), (expected, others) in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))
        assert values == pytest.approx(others, rel=1e-6)


@pytest.mark.parametrize("plan", [name for name in PLANS if name not in ("ddp", "bsp")])
def test_any_plan_trains_and_all_evaluate_the_same(tmp_path: Path, plan: str) -> None:
    found = run_workers(2, fit, plan, str(tmp_path), {"max_epochs": 6})
    first, second = (values for _, values in found)
    assert first["val_loss"] == pytest.approx(second["val_loss"])
    assert first["val_loss"] < 1.38, "less than chance"
    assert first["most"] == 1.0
    assert first["samples"] == 96.0


def resume(plan: str, folder: str) -> list[Any]:
    warnings.simplefilter("ignore")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + hash(folder) % 10000))
    made = []
    for epochs, path in ((2, None), (4, f"{folder}/last.ckpt"), (4, None)):
        pl.seed_everything(3, verbose=False)
        model = Digits()
        saves = [pl.callbacks.ModelCheckpoint(folder, save_last=True)] if epochs == 2 else []
        one = trainer(PLANS[plan], folder, max_epochs=epochs, callbacks=saves, enable_checkpointing=epochs == 2)
        one.fit(model, *loaders(), ckpt_path=path)
        made.append([parameter.detach().clone() for parameter in model.parameters()])
    return made


@pytest.mark.parametrize("plan", ["bsp", "server", "reset"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, plan: str) -> None:
    for _, resumed, whole in run_workers(2, resume, plan, str(tmp_path)):
        assert all(torch.equal(one, other) for one, other in zip(resumed, whole, strict=True))


def test_a_trial_run_leaves_no_files(tmp_path: Path) -> None:
    run_workers(2, fit, "bsp", str(tmp_path), {"fast_dev_run": True})
    assert list(tmp_path.rglob("*")) == []


def stop_early(folder: str) -> int:
    warnings.simplefilter("ignore")
    callbacks = [
        pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0),
        pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=1),
    ]
    made = trainer(PLANS["asp"], folder, callbacks=callbacks, enable_checkpointing=True, max_epochs=9)
    made.fit(Digits(), *loaders())
    return int(made.current_epoch)


def test_all_stop_early_together_and_the_best_is_kept(tmp_path: Path) -> None:
    first, second = run_workers(2, stop_early, str(tmp_path))
    assert first == second < 9
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    assert len(list(tmp_path.glob("*.ckpt.run.pt"))) == 1, "the state of the run is kept and deleted with it"


def refused(what: str, folder: str) -> str:
    warnings.simplefilter("ignore")
    try:
        if what == "meets":
            trainer(PLANS["asp"], folder).fit(Digits(sync="step"), *loaders())
        elif what == "optimizers":
            trainer(PLANS["bsp"], folder).fit(Digits(optimizers=2), *loaders())
        elif what == "devices":
            os.environ["WORLD_SIZE"] = "4"
            trainer(PLANS["bsp"], folder).fit(Digits(), *loaders())
        elif what == "tuning":
            plan = offbeat.Plan(sync=offbeat.ASP(), fabric=SERVER, tuning=offbeat.BatchTuning())
            trainer(plan, folder).fit(Digits(), *loaders())
        else:
            from offbeat.integrations.lightning import OffbeatStrategy

            OffbeatStrategy(find_unused_parameters=True)
    except OffbeatError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("meets", r"Cannot have self.log\(..., on_step=True, sync_dist=True\) in every step under ASP\(\)"),
        ("optimizers", "Cannot train with 2 optimizers"),
        ("devices", "Cannot train with 2 devices where 4 workers were started"),
        ("tuning", "Cannot go by BatchTuning"),
        ("ddp", "Cannot pass find_unused_parameters to OffbeatStrategy"),
    ],
)
def test_what_a_plan_cannot_bear_is_refused(tmp_path: Path, what: str, told: str) -> None:
    for text in run_workers(2, refused, what, str(tmp_path)):
        assert re.search(told, text), text


def logged(folder: str) -> list[str]:
    warnings.simplefilter("ignore")
    logger = pl.loggers.CSVLogger(folder)
    trainer(PLANS["bsp"], folder, logger=logger, log_every_n_steps=2, max_epochs=4).fit(Digits(), *loaders())
    logger.save()
    return Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0].split(",")


def test_lightnings_loggers_are_told_how_the_workers_train(tmp_path: Path) -> None:
    names, _ = run_workers(2, logged, str(tmp_path))
    assert {"offbeat/wait_s", "offbeat/bytes_sent", "offbeat/samples_per_s", "offbeat/rank1/compute_s"} <= set(names)


def validate_alone(folder: str) -> list[float]:
    fit("server", folder, {"max_epochs": 1})
    made = trainer(PLANS["server"], folder)
    model, (_, held_out) = Digits(), loaders()
    found = [float(made.validate(model, held_out, verbose=False)[0]["val_loss"])]
    made.fit(model, *loaders())
    return [*found, float(made.validate(model, held_out, verbose=False)[0]["val_loss"])]


def test_validation_outside_of_fit_with_a_server(tmp_path: Path) -> None:
    (before, after), other = run_workers(2, validate_alone, str(tmp_path))
    assert (before, after) == pytest.approx(other)
    assert after < before
