"""Train under Lightning with a plan: the strategy is all that is offbeat's.

python examples/lightning_digits.py --sync LocalSGD        (or under torchrun, or `offbeat run`, with as many)
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from digits import cnn, digits
from torch.utils.data import DataLoader

import offbeat
from offbeat.integrations.lightning import OffbeatStrategy

PLANS = {
    "BSP": offbeat.Plan(),
    "LocalSGD": offbeat.Plan(sync=offbeat.LocalSGD(8)),
    "ASP": offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.ParameterServer()),
}


class Digits(pl.LightningModule):  # type: ignore[misc]
    """A small CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cnn()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sync", choices=sorted(PLANS), default="BSP")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    train, test = digits()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=asked.workers,
        strategy=OffbeatStrategy(PLANS[asked.sync]),
        max_epochs=6,
        logger=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=90))
    if trainer.is_global_zero:
        print(f"{float(trainer.callback_metrics['accuracy']):.1%} of the held-out digits are right")


if __name__ == "__main__":
    main()
