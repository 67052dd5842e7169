"""The turn of an exchange: what every worker that takes part in it knows, so that all can draw the same numbers.

Random numbers of a codec are a function of the turn alone. They never come from the process's own generators: one more
draw on one worker, such as another order of dropout, would have workers send different parts of a gradient, unseen.
The generator is counter-based (Philox4x64-10; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    key = (seed of the run, step, purpose, what lies in the bucket, [rank])

The bucket counts by the names and elements in it and never by its index, which another arrangement changes.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from offbeat.layout import Bucket

Purpose = Literal["gradient", "change", "reset"]


@dataclass(frozen=True)
class Turn:
    """One exchange of one bucket.

    Args:
        bucket: what lies in the vector.
        step: of the exchange; the same on all workers that are added up.
        rank: of this worker, or of the one whose contribution is decoded.
        world: how many workers there are.
        seed: of the run, as given to `offbeat.init`.
        purpose: what the vector is: a gradient, what a worker's own steps have changed, or a residual that is reset.
    """

    bucket: Bucket
    step: int = 0
    rank: int = 0
    world: int = 1
    seed: int = 0
    purpose: Purpose = "gradient"
    # What was chosen, since who encodes decodes as well, what it has sent and what all have.
    _chosen: dict[tuple[int, int, str, bool], NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of(self, rank: int) -> Turn:
        """The same turn on another worker."""
        return self if rank == self.rank else dataclasses.replace(self, rank=rank)

    def random(self, count: int, *, what: str = "", private: bool = False) -> NDArray[np.uint64]:
        """Draw numbers that are the same wherever this turn is.

        Args:
            count: how many.
            what: they are for; others are drawn for something else.
            private: whether each rank draws its own.

        Returns:
            [count] uniform over 64 bits.
        """
        return np.random.Philox(key=self._key(what, private=private, bits=128)).random_raw(count)

    def chosen(self, count: int, numel: int, *, what: str = "", private: bool = False) -> NDArray[np.int64]:
        """Choose so many of the numbers below `numel`, all sets of them alike.

        Returns:
            [count] ascending; the same array each time.
        """
        asked = (count, numel, what, private)
        if asked not in self._chosen:
            self._chosen[asked] = self._choose(count, numel, what, private=private)
        return self._chosen[asked]

    def _choose(self, count: int, numel: int, what: str, *, private: bool) -> NDArray[np.int64]:
        if 4 * count > numel:
            keys = self.random(numel, what=what, private=private)
            return np.sort(np.argpartition(keys, count - 1)[:count])
        drawn = count + count // 4 + 64  # some come twice
        while True:
            values, first = np.unique(self.random(drawn, what=what, private=private) % numel, return_index=True)
            if len(values) >= count:
                return np.sort(values[np.argpartition(first, count - 1)[:count]]).astype(np.int64)
            drawn *= 2  # the first ones are the same again

    def noise(self, numel: int, device: torch.device) -> torch.Tensor:
        """Draw numbers [numel] float32 above 0 and at most 1, in steps of 2^-32; each rank draws its own.

        The steps decide which probabilities there are: with steps of 2^-16 nothing less likely ever happens.
        """
        if device.type != "cpu":
            return torch.rand(numel, generator=self.generator(device, private=True), device=device)
        words = self.random(-(-numel // 2), what="noise", private=True).view(np.uint32)[:numel]
        return torch.from_numpy(words.astype(np.float32)).add_(0.5).mul_(2**-32)

    def generator(self, device: torch.device, *, what: str = "", private: bool = False) -> torch.Generator:
        """Make a generator of torch on `device`, for as many numbers as the vector has elements."""
        return torch.Generator(device).manual_seed(self._key(what, private=private, bits=64))

    def _key(self, what: str, *, private: bool, bits: int) -> int:
        digest = xxh3_128_intdigest if bits == 128 else xxh3_64_intdigest
        own = self.rank if private else ""
        return digest(f"{self.seed}/{self.step}/{self.purpose}/{what}/{own}/{_contents(self.bucket)}".encode())


@functools.lru_cache(maxsize=4096)
def _contents(bucket: Bucket) -> int:
    return xxh3_64_intdigest("\n".join(f"{slot.name} {slot.start} {slot.numel}" for slot in bucket.slots).encode())
