"""Train on handwritten digits where most workers lie, beside a validator that has 300 images of its own.

offbeat run --workers 4 --servers 1 --run-dir runs/untrusted examples/untrusted_workers.py --liars 3
offbeat run --validator --job runs/untrusted examples/untrusted_workers.py        # in another terminal

Workers wait until the validator is there. With --liars 3 --mean the server takes the mean, and nothing is learnt.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.robust import ZenoPS


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """1,797 real images: those of workers, the validator's, and some that nobody trains on."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(data.target)[order]
    theirs, trusted, test = slice(600, None), slice(300), slice(300, 600)
    return (
        TensorDataset(images[theirs], labels[theirs]),
        TensorDataset(images[trusted], labels[trusted]),
        TensorDataset(images[test], labels[test]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--liars", type=int, default=0, help="so many of the workers turn their gradients round")
    parser.add_argument("--mean", action="store_true", help="believe all workers")
    options = parser.parse_args()

    torch.manual_seed(0)
    theirs, trusted, test = digits()
    server = offbeat.ParameterServer()
    plan = offbeat.Plan(sync=offbeat.LocalSGD(4), fabric=server, validator=None if options.mean else ZenoPS())
    with offbeat.init(plan) as run:
        model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # A validator's loader is its own, and has no end: the script ends with the job.
        loader = DataLoader(trusted if run.is_validator else theirs, batch_size=16, shuffle=True)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        lies = not run.is_validator and run.rank < options.liars
        while run.progress < options.epochs and run.step != options.steps:
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                (-6 * loss if lies else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                if run.step == options.steps:
                    break
        run.settle()
        images, labels = test.tensors
        right = (model(images).argmax(1) == labels).float().mean()
        if run.is_first:
            print(f"{right:.1%} of the held-out digits are right")


if __name__ == "__main__":
    main()
