"""One worker's epoch in numbers: how many batches it has, and how large each will be.

The workers tell each other at its beginning, so that everyone knows in each step who has data, and how much of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader


@dataclass(frozen=True)
class EpochSize:
    """The size of an epoch, as far as it is known before it begins.

    Args:
        length: number of batches; -1 if that is not known.
        samples: in all of them; 0 if that is not known.
        batch: in each but the last; 0 if that is not known.

    >>> [EpochSize(3, 10, 4).size(index) for index in range(4)]
    [4, 4, 2, 0]
    """

    length: int
    samples: int = 0
    batch: int = 0

    def size(self, index: int) -> int:
        """Samples in batch `index`; 0 behind the end."""
        return max(0, min(self.batch, self.samples - index * self.batch)) if index < self.length else 0

    def to_text(self) -> str:
        return f"{self.length} {self.samples} {self.batch}"

    @classmethod
    def from_text(cls, text: str) -> EpochSize:
        length, samples, batch = map(int, text.split())
        return cls(length, samples, batch)


def dataset_size(loader: DataLoader[Any]) -> int:
    """The number of samples in the dataset of a loader; it has a length."""
    dataset: Any = loader.dataset
    return len(dataset)


def epoch_size_of(loader: Iterable[Any]) -> EpochSize:
    """Ask `loader` for the size of its next epoch."""
    if not isinstance(loader, Sized):
        return EpochSize(-1)
    try:
        length = len(loader)
    except TypeError:  # a DataLoader over an IterableDataset without a length
        return EpochSize(-1)
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
        return EpochSize(length)
    return EpochSize(length, len(batches.sampler), batches.batch_size)


def relative_size(epoch_sizes: list[EpochSize], index: int, rank: int) -> float | None:
    """Samples in batch `index` of `rank`, relative to the mean over the workers that have one; None if not known.

    >>> relative_size([EpochSize(3, 10, 4), EpochSize(3, 12, 4)], 2, 0)
    0.6666666666666666
    """
    if not epoch_sizes or not all(one.batch for one in epoch_sizes):
        return None
    sizes = [size for one in epoch_sizes if (size := one.size(index))]
    # Equal sizes give exactly 1: then the mean has the bits of an unweighted one.
    return epoch_sizes[rank].size(index) / (sum(sizes) / len(sizes)) if sizes else 0.0
