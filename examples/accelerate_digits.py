"""Train with Accelerate and a plan: the accelerator is all that is offbeat's.

torchrun --nproc-per-node 2 examples/accelerate_digits.py
"""

import torch
import torch.nn.functional as F
from digits import accuracy, cnn, digits
from torch.utils.data import DataLoader

import offbeat
from offbeat.integrations.accelerate import OffbeatAccelerator


def main() -> None:
    accelerator = OffbeatAccelerator(offbeat.Plan(sync=offbeat.LocalSGD(4)), cpu=True)  # was: Accelerator(cpu=True)
    torch.manual_seed(0)
    train, test = digits()
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(train, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(6):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        with accelerator.averaged():
            share = accuracy(accelerator.unwrap_model(model), test)
        accelerator.print(f"epoch {epoch + 1}: {share:.1%} of the held-out digits are right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
