"""Workload: a small CNN on MNIST, or a perceptron, timed to a test accuracy.

Reads MNIST's 10,000 test images, t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz (gzipped or not) of
https://ossci-datasets.s3.amazonaws.com/mnist/, from the scenario's data folder and trains on 8,000 of them; where they
are missing it takes the 8 x 8 digits that come with scikit-learn. The result says which.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import race
from offbeat.lab.recorder import Work

if TYPE_CHECKING:
    from collections.abc import Iterable

HELD_OUT = {28: 2000, 8: 360}  # by the images' side
_IDX_DTYPE = 0x08  # unsigned bytes, the only kind MNIST has

Data = tuple[torch.Tensor, torch.Tensor]


def cnn(side: int) -> nn.Sequential:
    """About 110,000 parameters for images of 28 x 28."""
    left = side // 4
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * left * left, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def mlp(side: int) -> nn.Sequential:
    """Side * side - 100 - 10, 79,510 parameters for images of 28 x 28: that of Nunes et al. (2025)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 100), nn.ReLU(), nn.Linear(100, 10))


_MODELS = {"cnn": cnn, "mlp": mlp}


def load(folder: str | None) -> tuple[Data, Data, str]:
    """Training and test images [N, 1, H, W] with labels [N], and a note that says what they are."""
    found = _mnist(Path(folder)) if folder is not None else None
    if found is not None:
        images, labels = found
        note = "8,000 of MNIST's t10k images trained on, 2,000 held out"
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        note = f"no MNIST files in {folder}: trained on scikit-learn's 8x8 digits instead"
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split([HELD_OUT[images.shape[-1]], len(order) - HELD_OUT[images.shape[-1]]])
    return (images[train], labels[train]), (images[test], labels[test]), note


def _mnist(folder: Path) -> Data | None:
    images, labels = _idx(folder, "t10k-images*"), _idx(folder, "t10k-labels*")
    if images is None or labels is None:
        return None
    return images.unsqueeze(1).float() / 255, labels.long()


def _idx(folder: Path, pattern: str) -> torch.Tensor | None:
    """The first file of that pattern below `folder`, as a tensor."""
    for path in sorted(folder.rglob(pattern)):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, dtype, dims = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{dims}I", data, 4)
        if zero == 0 and dtype == _IDX_DTYPE and len(data) == 4 + 4 * dims + torch.Size(shape).numel():
            return torch.frombuffer(bytearray(data[4 + 4 * dims :]), dtype=torch.uint8).view(shape)
    return None


class Digits:
    """Which digit an image shows; the last `trusted` ones are a validator's."""

    def __init__(self, folder: str | None, model: str = "cnn", trusted: int = 0) -> None:
        (self._images, self._labels), (self._test, self._answers), self.note = load(folder)
        self.samples, self.trusted = len(self._labels) - trusted, trusted
        if trusted:
            self.note += f"; {trusted:,} of those to train on are trusted, for a validator alone"
        torch.manual_seed(0)
        self.model: nn.Module = _MODELS[model](self._images.shape[-1])

    def loss(self, model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Cross entropy."""
        return F.cross_entropy(model(self._images[indices]), self._labels[indices])

    def metric(self, model: nn.Module) -> float:
        """Share of right answers on images that were held out."""
        with torch.no_grad():
            return float((model(self._test).argmax(1) == self._answers).float().mean())


def main() -> None:
    options = race.options(__doc__, batch=32, every=20)
    options.add_argument("--lr", type=float, default=0.05)
    options.add_argument("--momentum", type=float, default=0.9)
    options.add_argument("--model", choices=sorted(_MODELS), default="cnn")
    options.add_argument("--trusted", type=int, default=0, help="samples for a validator, which no worker trains on")
    asked = options.parse_args()
    torch.set_num_threads(1)
    work = Work.from_environment()

    def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=asked.lr, momentum=asked.momentum)

    race.run(Digits(work.data, asked.model, asked.trusted), sgd, asked, work)


if __name__ == "__main__":
    main()
