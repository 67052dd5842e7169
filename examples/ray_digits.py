"""Train under Ray Train with a plan: `offbeat.init()` in the loop of each worker; Ray starts and restarts them.

python examples/ray_digits.py --workers 2
"""

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from digits import accuracy, cnn, digits
from ray import train as ray_train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader

import offbeat


def loop(config: dict[str, Any]) -> None:
    train, test = digits()
    torch.manual_seed(0)
    with offbeat.init(offbeat.Plan(sync=offbeat.LocalSGD(4))) as run:  # in the process group that Ray has made
        model = cnn()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loader = DataLoader(train, batch_size=16, shuffle=True)
        replica, optimizer, loader = run.prepare(model, optimizer, loader)
        checkpoints = offbeat.Checkpoints(run, config["checkpoints"], model=model, optimizer=optimizer)
        checkpoints.load()  # there is one where Ray has started the workers again
        while run.progress < config["epochs"]:
            for images, labels in loader:
                F.cross_entropy(replica(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            run.settle()
            checkpoints.save()
            share = accuracy(model, test)
            ray_train.report({"epoch": round(run.progress), "accuracy": share})
            if run.is_first:
                print(f"epoch {run.progress:.0f}: {share:.1%} of the held-out digits are right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoints", help="folder that all workers see; a temporary one if left out")
    asked = parser.parse_args()
    folder = os.path.abspath(asked.checkpoints or tempfile.mkdtemp(prefix="ray_digits-"))
    trainer = TorchTrainer(
        loop,
        train_loop_config={"epochs": asked.epochs, "checkpoints": folder},
        scaling_config=ScalingConfig(num_workers=asked.workers),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
