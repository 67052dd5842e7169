"""Workload: a small CNN on MNIST, timed to a test accuracy.

Reads MNIST's 10,000 test images (IDX, gzipped or not) from the scenario's data folder and trains on 8,000 of them;
where they are missing it takes the 8 x 8 digits that come with scikit-learn. The result says which.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import hashlib
import os
import struct
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.lab.peers import bind
from offbeat.lab.recorder import Recorder, Work, alone_s
from offbeat.lab.straggler import Straggler

BATCH = 32
EVALUATE_EVERY = 20
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


def accuracy(model: nn.Module, test: Data) -> float:
    """Share of right answers."""
    images, labels = test
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lr", type=float, default=0.05)
    options.add_argument("--momentum", type=float, default=0.9)
    options.add_argument("--compute-s", type=float, default=0.0, help="stretch each step's computation to so long")
    asked = options.parse_args()
    work = Work.from_environment()
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    (images, labels), test, note = load(work.data)
    torch.manual_seed(0)
    model = cnn(images.shape[-1])
    twin = copy.deepcopy(model)
    twins = torch.optim.SGD(twin.parameters(), lr=asked.lr, momentum=asked.momentum)
    compute_s = alone_s(lambda: step(twin, twins, images[:BATCH], labels[:BATCH]))
    compute_s = max(compute_s, asked.compute_s * work.compute_factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr, momentum=asked.momentum)
    bound = bind(work.system, model, optimizer, bucket_bytes=work.bucket_bytes)
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    recorder = Recorder(compute_s=compute_s, gradient_bytes=gradient_bytes, work=work)
    recorder.note(note)
    straggler = Straggler(work.straggle, rank)
    generator = torch.Generator().manual_seed(1)  # the same order of samples for every system
    order = torch.empty(0, dtype=torch.int64)
    snapshots = []
    for index in range(work.warmup_steps + work.steps):
        if len(order) < BATCH * world:
            order = torch.randperm(len(labels), generator=generator)
        mine, order = order[rank * BATCH : (rank + 1) * BATCH], order[BATCH * world :]
        began_s = time.perf_counter()
        F.cross_entropy(bound.model(images[mine]), labels[mine]).backward()
        # Many workers on few cores: each computes for as long as a machine of its own would.
        time.sleep(max(0.0, began_s + asked.compute_s * work.compute_factor - time.perf_counter()))
        straggler.pause(compute_s)
        bound.optimizer.step()
        bound.optimizer.zero_grad()
        recorder.step(BATCH)
        # Evaluated at the end: a worker that evaluates while the others train would be a straggler.
        if rank == 0 and (index + 1) % EVALUATE_EVERY == 0:
            snapshots.append((recorder.moment, copy.deepcopy(model.state_dict())))
    if bound.run is not None:
        bound.run.settle()
    snapshots.append((recorder.moment, model.state_dict()))
    for moment, state in snapshots if rank == 0 else ():
        twin.load_state_dict(state)
        recorder.metric(accuracy(twin, test), moment)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    recorder.finish(digest=digest)
    bound.close()


if __name__ == "__main__":
    main()
