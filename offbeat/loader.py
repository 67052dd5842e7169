"""Gives every worker its share of the data, and keeps all loops equally long.

* A `DataLoader` over a dataset with a length is dealt out anew: worker r of N takes every N-th sample, starting at r,
  of a permutation that is a function of seed and epoch (the one `DistributedSampler` uses, without its padding).
  A loader that is already distributed (a sampler with `num_replicas`), or over an `IterableDataset`, is left as it is.
* When this worker's data ends before another's, its last batch is repeated with weight 0: the loop, the learning-rate
  schedule and the user's own collectives stay in step, and the repetition adds nothing to any gradient.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from offbeat.engine import samples_in
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from offbeat.engine import Control

_log = logging.getLogger("offbeat")
_END = object()
_MOST_BITS = 52  # of an exact integer in float64


class Drawn(Protocol):
    """Called with each batch that is given out."""

    def __call__(self, *, real: bool, source: int, samples: int) -> None: ...


class Shard(Sampler[int]):
    """Every N-th index of a seeded permutation, no padding, nothing left out.

    Args:
        size: number of samples in the dataset.
        rank, world: worker `rank` of `world`.
        shuffle: permute anew each epoch; in order if False.
        seed: of the permutation; equal on all workers.

    >>> [list(Shard(5, rank, 2, shuffle=False)) for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    """

    def __init__(self, size: int, rank: int, world: int, *, shuffle: bool, seed: int = 0) -> None:
        self.size, self.rank, self.num_replicas = size, rank, world
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.rank, self.size, self.num_replicas))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator)
        return iter(order[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.size, self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; called by `Loader` at the start of each epoch."""
        self.epoch = epoch


class Loader:
    """What `run.prepare` returns for a loader; iterate over it as before. Other attributes are the loader's own.

    Args:
        loader: any iterable of batches.
        control: how the workers agree on the number of batches.
        drawn: called with each batch.
        seed: of the permutation.
    """

    def __init__(self, loader: Iterable[Any], *, control: Control, drawn: Drawn, seed: int = 0) -> None:
        self._control, self._drawn = control, drawn
        self._epoch, self._skip = 0, 0  # of the next iteration: which epoch, and how many batches were given out before
        self._at = (0, 0)  # epoch and batches given out in it, for a checkpoint
        self._unchecked = True  # whether the workers draw different data
        self.loader = _deal_out(loader, control.rank, control.world, seed)
        if control.world > 1:
            control.agree("data", _describe(self.loader), "Give every worker the same seed and the same dataset.")
        lengths = self._lengths() or []  # compared by all, so that all refuse
        self._longest = max(lengths, default=0)
        if 0 in lengths:
            raise ModelError(
                f"Cannot prepare a loader without batches: worker {lengths.index(0)} of {control.world} gets none. "
                "Use a smaller batch size, no drop_last, or fewer workers."
            )

    def __len__(self) -> int:
        """Batches that every worker goes through, so that a schedule made from it is the same on all."""
        return self._longest or len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __iter__(self) -> Iterator[Any]:
        sampler, epoch, skip = getattr(self.loader, "sampler", None), self._epoch, self._skip
        if isinstance(sampler, Shard):
            sampler.set_epoch(epoch)
        self._epoch, self._skip = epoch + 1, 0
        lengths = self._lengths()
        self._longest = max(lengths or [], default=0)
        return self._iterate(lengths, epoch, skip)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given out; an epoch that was left early counts as done."""
        epoch, batch = self._at
        return {"epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, int], *, seed: int) -> None:
        """Go on where `state` was taken: the next iteration begins behind the batches that were given out."""
        self._epoch, self._skip = self._at = int(state["epoch"]), int(state["batch"])
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, Shard):
            sampler.seed = seed

    def _iterate(self, lengths: list[int] | None, epoch: int, skip: int) -> Iterator[Any]:
        try:
            for index, batch in enumerate(self._all_batches(lengths, skip), skip + 1):
                self._at = (epoch, index)
                yield batch
        finally:
            self._at = (epoch + 1, 0)

    def _all_batches(self, lengths: list[int] | None, skip: int) -> Iterator[Any]:
        """This worker's batches behind the first `skip`, and then its last one again while others still have data."""
        batches, last, index = iter(self.loader), _END, skip
        for _ in range(skip):
            last = next(batches, last)
        while True:
            batch = next(batches, _END)
            real = batch is not _END
            who = self._who_has_data(real) if lengths is None else [n > index for n in lengths]
            if not any(who):
                if real:
                    raise ModelError(
                        f"The loader of rank {self._control.rank} gave more batches than its len() of {index}; "
                        "make its __len__ right, or leave it out."
                    )
                return
            last = batch if real else last
            if last is _END:
                raise ModelError(f"The loader of rank {self._control.rank} gave no batch at all while others did.")
            if self._unchecked:
                self._unchecked = False
                self._compare_first(last)
            self._drawn(real=real, source=who.index(True), samples=samples_in(last) if real else 0)
            index += 1
            yield last

    def _compare_first(self, batch: Any) -> None:
        """Warn if all workers draw the same: a loader that was left as it is may not be sharded."""
        sampler = getattr(self.loader, "sampler", None)
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        if self._control.world == 1 or any(hasattr(s, "num_replicas") for s in (sampler, batch_sampler)):
            return
        digests = self._control.texts("the comparison of first batches", _fingerprint(batch))
        if self._control.rank == 0 and digests[0] and len(set(digests)) == 1:
            _log.warning(
                "All %d workers drew the same first batch: the loader was left as it is, because it has no sampler for "
                "distributed data. Let it yield only this worker's share, such as every run.world-th sample from "
                "run.rank on.",
                self._control.world,
            )

    def _lengths(self) -> list[int] | None:
        """How many batches each rank has in this epoch; None if a rank cannot know."""
        mine = _length(self.loader)
        if self._control.world == 1:
            return [mine] if mine >= 0 else None
        lengths = [int(text) for text in self._control.texts("the agreement on the number of batches", str(mine))]
        return lengths if min(lengths) >= 0 else None

    def _who_has_data(self, mine: bool) -> list[bool]:
        world, question = self._control.world, "the agreement on who has data"
        if world > _MOST_BITS:
            return [text == "1" for text in self._control.texts(question, str(int(mine)))]
        (flags,) = self._control.sum(question, (float(mine << self._control.rank),))
        return [bool(int(flags) >> rank & 1) for rank in range(world)]


def _deal_out(loader: Iterable[Any], rank: int, world: int, seed: int) -> Iterable[Any]:
    if world == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    own = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if hasattr(own, "num_replicas") or hasattr(loader.batch_sampler, "num_replicas"):
        return loader
    size = len(loader.dataset)  # type: ignore[arg-type]
    if size < world:
        raise ModelError(
            f"Cannot deal out {size} samples to {world} workers: each needs at least one. Use fewer workers."
        )
    if type(own) not in (RandomSampler, SequentialSampler) or (
        loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    ):
        raise ModelError(
            f"Cannot deal out a loader with {type(own).__name__}: offbeat cannot know which samples it draws. Give the "
            "loader a sampler for distributed data (with num_replicas and rank, such as DistributedSampler), or none."
        )
    shard = Shard(size, rank, world, shuffle=isinstance(own, RandomSampler), seed=seed)
    # With workers forked per epoch torch draws a base seed from the generator; the loader's own is kept.
    options: Mapping[str, Any] = {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": shard,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return DataLoader(loader.dataset, **options)


def _describe(loader: Iterable[Any]) -> str:
    """What must be equal on all workers for the shares to be shares of one whole."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, Shard):
        return "a loader of its own"
    return f"{sampler.size} samples\nshuffle {sampler.shuffle}\nseed {sampler.seed}"


def _fingerprint(batch: Any) -> str:
    """Of the values in it; "" if there is no tensor."""
    tensors = [batch] if isinstance(batch, torch.Tensor) else tree_leaves(batch)
    digest = hashlib.sha256()
    found = [t.detach().cpu().contiguous() for t in tensors if isinstance(t, torch.Tensor) and t.numel()]
    for tensor in found:
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else ""


def _length(loader: Iterable[Any]) -> int:
    """Its number of batches, or -1 if it does not know."""
    if not isinstance(loader, Sized):
        return -1
    try:
        return len(loader)
    except TypeError:  # a DataLoader over an IterableDataset without a length
        return -1
