"""Train with the Hugging Face Trainer and a plan: the Trainer's class is all that is offbeat's.

torchrun --nproc-per-node 2 examples/trainer_digits.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from digits import cnn, digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import TrainingArguments

import offbeat
from offbeat.integrations.transformers import OffbeatTrainer


class Images(Dataset[dict[str, torch.Tensor]]):
    """Samples as the Trainer takes them."""

    def __init__(self, data: TensorDataset) -> None:
        self.images, self.labels = data.tensors

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """A small CNN that returns its loss, as the Trainer's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cnn()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    torch.manual_seed(0)
    train, test = digits()
    arguments = TrainingArguments(
        "runs/trainer_digits", num_train_epochs=6, per_device_train_batch_size=16, learning_rate=2e-3,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, report_to=[], use_cpu=True,
    )  # fmt: skip
    trainer = OffbeatTrainer(  # was: Trainer(
        Classifier(),
        arguments,
        train_dataset=Images(train),
        eval_dataset=Images(test),
        compute_metrics=accuracy,
        plan=offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.ParameterServer()),
    )
    trainer.train()
    trainer.run.close()


if __name__ == "__main__":
    main()
