"""Shards of a loader: every worker gets its share of the data, and all loops are equally long.

* A `DataLoader` over a dataset with a length is dealt out anew: worker r of N takes every N-th sample, starting at r,
  of a permutation that is a function of seed and epoch (the one `DistributedSampler` uses, without its padding).
  A loader that is already distributed (a sampler with `num_replicas`), or over an `IterableDataset`, is left as it is.
* Every sample counts the same: a batch weighs as many samples as are in it, relative to the other workers' batches of
  the same step. Batches of equal size weigh 1, and the mean is DistributedDataParallel's, bit for bit.
* When this worker's data ends before another's, its last batch is repeated with weight 0: the loop, the learning-rate
  schedule and the user's own collectives stay in step, and the repetition adds nothing to any gradient.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from offbeat.engine import samples_in, state_checks
from offbeat.errors import ModelError
from offbeat.loading.epoch_size import EpochSize, dataset_size, epoch_size_of, relative_size
from offbeat.rng import LoopRng
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from offbeat.engine import ControlGroup, DrawnBatch

_log = logging.getLogger("offbeat")
_END = object()
MOST_LEFT = 1 << 12  # batches of a loop that was left early, from which nothing was computed
_MOST_WORKERS = 1 << 16


class OnBatch(Protocol):
    """Called with each batch that is given out; the answer is by what it can be put back."""

    def __call__(self, *, real: bool, source: int, samples: int, weight: float) -> DrawnBatch: ...


class PutBack(Protocol):
    """Called with the last batches of a loop that was left early, in order, before the next loop begins.

    Those from which nothing was computed count no more. Returns how many: always the last ones.
    """

    def __call__(self, draws: Sequence[DrawnBatch]) -> int: ...


class ShardSampler(Sampler[int]):
    """Every N-th index of a seeded permutation, no padding, nothing left out.

    Args:
        size: number of samples in the dataset.
        rank, world: worker `rank` of `world`.
        shuffle: permute anew each epoch; in order if False.
        seed: of the permutation; equal on all workers.

    >>> [list(ShardSampler(5, rank, 2, shuffle=False)) for rank in range(2)]
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
        """Choose the permutation; called by `ShardedLoader` at the start of each epoch."""
        self.epoch = epoch


class ShardedLoader:
    """The loader that `run.prepare` returns; iterate over it as before. Other attributes are the loader's own.

    Args:
        loader: any iterable of batches.
        control: how the workers agree on the number of batches.
        on_batch: called with each batch.
        put_back: called with the last batches of a loop that was left early, before the next loop begins.
        seed: of the permutation.
        together: whether all workers go through the same number of batches; else each goes by itself, and nothing is
            agreed on after this.

    Where the workers come to have a server, and leave it, `go_alone` and `go_together` are called.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        control: ControlGroup,
        on_batch: OnBatch,
        put_back: PutBack,
        seed: int = 0,
        together: bool = True,
    ) -> None:
        self._control, self._on_batch, self._put_back = control, on_batch, put_back
        self._left: tuple[DrawnBatch, ...] = ()  # the last batches of a loop that was left early
        self._apart = control.world == 1
        self._epoch, self._skip = 0, 0  # of the next iteration: which epoch, and how many batches were given out before
        self._at = (0, 0)  # epoch and batches given out in it, for a checkpoint
        self._progress = 0.0
        self._unchecked = True  # whether the workers draw different data
        self._usual: float | None = None  # samples of a batch that weighs 1, where sizes are not known beforehand
        self.loader = _deal_out(loader, control.rank, control.world, seed)
        self.loop_rng = LoopRng(self.loader)
        if control.world > 1:
            control.check_equal("data", _describe(self.loader), "Give every worker the same seed and the same dataset.")
        self._goes_alone = False  # the workers have a server since, and agree on nothing more
        # The epoch of each rank that was there, as it was agreed on last; empty if lengths are not known.
        self._ranks: tuple[int, ...] = (0,)
        self._agreed: list[EpochSize] = []
        lengths = [one.length for one in self._epoch_sizes()]  # compared by all, so that all refuse
        self._longest = max(lengths, default=0)
        if 0 in lengths:
            raise ModelError(
                f"Cannot prepare a loader without batches: worker {lengths.index(0)} of {control.world} gets none. "
                "Use a smaller batch size, no drop_last, or fewer workers."
            )
        self._apart = self._apart or not together

    def __len__(self) -> int:
        """Batches that every worker goes through, so that a schedule made from it is the same on all."""
        return self._longest or len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __iter__(self) -> Iterator[Any]:
        sampler, epoch, skip = getattr(self.loader, "sampler", None), self._epoch, self._skip
        if isinstance(sampler, ShardSampler):
            sampler.set_epoch(epoch)
        self._epoch, self._skip = epoch + 1, 0
        epoch_sizes = self._epoch_sizes()
        self._longest = max((one.length for one in epoch_sizes), default=0)
        return self._iterate(epoch_sizes, epoch, skip)

    def go_alone(self) -> None:
        """The workers have a server from now on: nothing is agreed on, and loops stay as long as they were."""
        self._goes_alone = True

    def go_together(self) -> None:
        """The workers have no server any more, as before `go_alone`; all are at the same batch."""
        self._goes_alone = False

    @property
    def can_go_together(self) -> bool:
        """Whether all workers go through the same number of batches, in each loop."""
        return self._control.world == 1 or (not self._apart and bool(self._agreed))

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches were given out to each of how many workers, and samples of a usual one.

        An epoch that was left early counts as done.
        """
        epoch, batch = self._at
        usual = -1.0 if self._usual is None else self._usual
        state: dict[str, Any] = {"epoch": epoch, "batch": batch, "usual": usual, "world": self._control.world}
        if isinstance(shard := getattr(self.loader, "sampler", None), ShardSampler):
            state |= {"samples": shard.size, "sizes": self._sizes()}
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, seed: int) -> None:
        """Go on where `state` was taken: the next iteration begins behind the batches that were given out.

        Raises:
            ModelError: if it is damaged, or of another dataset.
        """
        epoch, batch = state_checks.whole(state["epoch"], "epoch"), self._carried_over(state)
        self._epoch, self._skip = self._at = epoch, batch
        self._left = ()
        self._progress = self._reached()
        usual = state_checks.number(state.get("usual", -1.0), "samples of a usual batch", least=-1.0)
        self._usual = None if usual < 0 else usual
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, ShardSampler):
            sampler.seed = seed

    def _carried_over(self, state: Mapping[str, Any]) -> int:
        """Count the batches of the epoch that are left out here, so that none that was given out is lost."""
        batch, now = state_checks.whole(state["batch"], "batches of the epoch"), self._control.world
        then = state_checks.whole(state.get("world", now), "number of workers", least=1, most=_MOST_WORKERS)
        shard, here = getattr(self.loader, "sampler", None), self._sizes()
        is_dealt = isinstance(shard, ShardSampler)
        was_dealt = "sizes" in state or (is_dealt and then > 1)
        if was_dealt is not is_dealt:  # who is alone draws in the loader's own order
            if batch and self._control.rank == 0:
                _log.warning(
                    "The checkpoint was made by %d workers, and this run has %d: the data is in another order, "
                    "and epoch %d begins anew.",
                    then, now, state["epoch"],
                )  # fmt: skip
            return 0
        if not isinstance(shard, ShardSampler):
            return batch
        if state.get("samples", shard.size) != shard.size:
            raise ModelError(
                f"Cannot resume the data with {shard.size} samples: the checkpoint was made with "
                f"{state['samples']!r}. Use the same dataset, or load only the model and the optimizer."
            )
        sizes = state_checks.counts(state.get("sizes", here if then == now else [here[0]] * then), "batch sizes", then)
        if batch > shard.size or not all(sizes):
            raise ModelError(
                f"Cannot resume the data behind {batch} batches of {sizes} samples: an epoch has {shard.size}. The "
                "checkpoint is damaged: use another one."
            )
        if (then, sizes) == (now, here):
            return batch
        # The first batches of all workers together are the beginning of the epoch's order, with any number of them: as
        # far as the smallest had come, and not further than the largest leaves out here.
        skip = batch * then * min(sizes) // (now * max(here))
        twice = min(batch * sum(sizes), shard.size) - skip * sum(here)
        again = f", but for {twice} samples that come twice" if twice > 0 else ""
        if self._control.rank == 0:
            _log.warning(
                "The checkpoint was made by %d workers with batches of %s, and this run has %d with %s: the position "
                "in the data carries over%s. Each keeps its batch, so that a step has as many samples more or fewer; "
                "the learning rate is as it was saved.",
                then, _listed(sizes), now, _listed(here), again,
            )  # fmt: skip
        return skip

    def _sizes(self) -> list[int]:
        """Samples of a full batch, by worker, as they were agreed on last."""
        return [one.batch or 1 for one in self._agreed]

    @property
    def progress(self) -> float:
        """Epochs so far, with the part of the present one whose batches were given out, if its length is known."""
        return self._progress

    def _iterate(self, epoch_sizes: list[EpochSize], epoch: int, skip: int) -> Iterator[Any]:
        # Only now, and not when it was left: what was drawn may have been computed since.
        self._put_back(self._left)
        self._left = ()
        given: deque[DrawnBatch] = deque(maxlen=MOST_LEFT)
        try:
            for index, (batch, draw) in enumerate(self._all_batches(epoch_sizes, skip), skip + 1):
                self._at = (epoch, index)
                self._progress = max(self._progress, self._reached())
                given.append(draw)
                yield batch
            given.clear()
        finally:
            self._left = tuple(given)
            self.loop_rng.end()
            self._at = (epoch + 1, 0)
            self._progress = max(self._progress, self._reached())

    def _reached(self) -> float:
        epoch, batch = self._at
        return epoch + min(1.0, batch / length) if (length := self._longest) else float(epoch)

    def _all_batches(self, epoch_sizes: list[EpochSize], skip: int) -> Iterator[tuple[Any, DrawnBatch]]:
        """Yield this worker's batches behind the first `skip`, and then its last one again while others still have
        data.
        """
        self.loop_rng.begin()
        batches, last, index = iter(self.loader), _END, skip
        for _ in range(skip):
            if (batch := next(batches, _END)) is _END:
                break  # of a loader that has fewer than when the checkpoint was made
            last = batch
        self.loop_rng.go_on()
        while True:
            batch = next(batches, _END)
            real = batch is not _END
            if epoch_sizes:
                who = tuple(rank for rank, one in zip(self._ranks, epoch_sizes, strict=True) if one.length > index)
            else:
                who = self._who_has_data(real)
            if not who:
                if real:
                    raise ModelError(
                        f"The loader of rank {self._control.rank} gave more batches than its len() of {index}; "
                        "make its __len__ right, or leave it out."
                    )
                return
            last = batch if real else last
            if last is _END:
                raise ModelError(f"The loader of rank {self._control.rank} gave no batch at all while others did.")
            if self._unchecked and not self._goes_alone:
                self._unchecked = False
                self._compare_first(last)
            weight = self._weight(last, real, relative_size(epoch_sizes, index, self._place))
            samples = samples_in(last) if real else 0
            draw = self._on_batch(real=real, source=min(who), samples=samples, weight=weight)
            index += 1
            yield last, draw

    @property
    def _place(self) -> int:
        """The place of this worker among those whose epoch sizes it knows."""
        return 0 if self._apart else self._ranks.index(self._control.rank)

    def _weight(self, batch: Any, real: bool, relative: float | None) -> float:
        if relative is not None or self._apart or self._goes_alone:
            return (1.0 if relative is None else relative) if real else 0.0
        samples = samples_in(batch) if real else 0
        if self._usual is None:
            # The first batches are taken for the usual ones; from then on nobody needs to ask.
            total, those = self._control.sum("the comparison of batch sizes", (samples, float(samples > 0)))
            self._usual = total / those if those else 0.0
        if not real:
            return 0.0
        return samples / self._usual if samples and self._usual else 1.0

    def _compare_first(self, batch: Any) -> None:
        """Warn if all workers draw the same: a loader that was left as it is may not be sharded."""
        sampler = getattr(self.loader, "sampler", None)
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        if self._apart or any(hasattr(s, "num_replicas") for s in (sampler, batch_sampler)):
            return
        digests = self._control.texts("the comparison of first batches", _fingerprint(batch))
        if self._control.rank == 0 and digests[0] and len(set(digests.values())) == 1:
            _log.warning(
                "All %d workers drew the same first batch: the loader was left as it is, because it has no sampler for "
                "distributed data. Let it yield only this worker's share, such as every run.world-th sample from "
                "run.rank on.",
                self._control.world,
            )

    def _epoch_sizes(self) -> list[EpochSize]:
        """Each rank's epoch; empty if a rank does not know its length."""
        if self._goes_alone:
            return self._agreed
        mine = epoch_size_of(self.loader)
        self._ranks, epoch_sizes = (0,), [mine]
        if not self._apart:
            texts = self._control.texts("the agreement on the number of batches", mine.to_text())
            self._ranks, epoch_sizes = tuple(texts), [EpochSize.from_text(text) for text in texts.values()]
        self._agreed = epoch_sizes if all(one.length >= 0 for one in epoch_sizes) else []
        return self._agreed

    def _who_has_data(self, mine: bool) -> tuple[int, ...]:
        """The ranks of the workers that have a batch; of one that goes alone 0. Collective, unless it does."""
        if self._apart or self._goes_alone:
            return (0,) if mine else ()
        return self._control.ranks_that("the agreement on who has data", mine)


def _listed(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else ", ".join(map(str, sizes))


def _deal_out(loader: Iterable[Any], rank: int, world: int, seed: int) -> Iterable[Any]:
    if world == 1 or (own := sampler_of(loader)) is None:
        return loader
    assert isinstance(loader, DataLoader)
    size = dataset_size(loader)
    if size < world:
        raise ModelError(
            f"Cannot split {size} samples among {world} workers: each needs at least one. Use fewer workers."
        )
    shard = ShardSampler(size, rank, world, shuffle=isinstance(own, RandomSampler), seed=seed)
    batch_size, drop_last = batching_of(loader)
    return rebuilt(loader, batch_size=batch_size, drop_last=drop_last, sampler=shard)


def batching_of(loader: DataLoader[Any]) -> tuple[int | None, bool]:
    """Samples of a full batch, None for no batches, and whether a shorter one is left out; also of a batch sampler."""
    batches = loader.batch_sampler
    return (batches.batch_size, bool(batches.drop_last)) if isinstance(batches, BatchSampler) else (None, False)


def sampler_of(loader: Iterable[Any]) -> RandomSampler | SequentialSampler | None:
    """The sampler of this loader, if it is for offbeat to lease its samples; else it is left as it is.

    Raises:
        ModelError: if it should be dealt out, but nobody can know which samples it draws.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    own = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if hasattr(own, "num_replicas") or hasattr(loader.batch_sampler, "num_replicas"):
        return None
    if type(own) not in (RandomSampler, SequentialSampler) or (
        loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    ):
        unknown = own if type(own) not in (RandomSampler, SequentialSampler) else loader.batch_sampler
        raise ModelError(
            f"Cannot split a loader with {type(unknown).__name__}: offbeat cannot know which samples it draws. "
            "Give the loader a sampler for distributed data (with num_replicas and rank, such as DistributedSampler), "
            "or none."
        )
    assert isinstance(own, RandomSampler | SequentialSampler)
    size = dataset_size(loader)
    if len(own) != size or getattr(own, "replacement", False):
        how = "with replacement" if getattr(own, "replacement", False) else f"{len(own)} of {size}"
        raise ModelError(
            f"Cannot split a loader whose {type(own).__name__} draws {how}: offbeat uses each sample of the "
            "dataset once. Take a torch.utils.data.Subset, or a sampler for distributed data."
        )
    return own


def rebuilt(loader: DataLoader[Any], **draws: Any) -> DataLoader[Any]:
    """The same loader, but for how it draws samples.

    Args:
        draws: `sampler` with `batch_size` and `drop_last`, or `batch_sampler`.
    """
    # With workers forked per epoch torch draws a base seed from the generator; the loader's own is kept.
    options: Mapping[str, Any] = {
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
    return DataLoader(loader.dataset, **draws, **options)


def _describe(loader: Iterable[Any]) -> str:
    """Describe what must be equal on all workers for the shares to be shares of one whole."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ShardSampler):
        return "a loader of its own"
    return f"{sampler.size} samples\nshuffle {sampler.shuffle}\nseed {sampler.seed}"


def _fingerprint(batch: Any) -> str:
    """The fingerprint of the values in a batch; "" if there is no tensor."""
    tensors = [batch] if isinstance(batch, torch.Tensor) else tree_leaves(batch)
    digest = hashlib.sha256()
    found = [t.detach().cpu() for t in tensors if isinstance(t, torch.Tensor) and t.numel()]
    for tensor in found:
        digest.update(bytes_of(tensor))
    return digest.hexdigest() if found else ""
