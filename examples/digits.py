"""Train a small CNN on scikit-learn's handwritten digits, on as many workers as `offbeat run` starts.

offbeat run --workers 4 examples/digits.py

With --checkpoints FOLDER it saves after each epoch, and goes on from there when it is started again.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 real images of 8 x 8 grey values, a fifth of them held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:360], order[360:]
    return TensorDataset(images[rest], labels[rest]), TensorDataset(images[held_out], labels[held_out])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    model.eval()
    with torch.no_grad():
        right = int((model(images).argmax(1) == labels).sum())
    model.train()
    return right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--checkpoints", help="folder to save to after each epoch, and to go on from")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = digits()
    run = offbeat.init()
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(train, batch_size=16, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.expect(epochs=options.epochs)  # so that `offbeat top` can tell how much is left
    checkpoints = None
    if options.checkpoints:
        checkpoints = offbeat.Checkpoints(run, options.checkpoints, model=model, optimizer=optimizer)
        checkpoints.load()
    while run.progress < options.epochs and run.step != options.steps:
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if run.step == options.steps:
                break
        share = accuracy(model, test)
        run.log(accuracy=share)
        if run.is_first:
            print(f"epoch {run.progress:.0f}: {share:.1%} of the held-out digits are right")
        if checkpoints is not None:
            run.settle()  # where replicas may differ, as with a server
            checkpoints.save()
    run.close()


if __name__ == "__main__":
    main()
