"""A loader whose batches are leased: nobody owns a part of the data, and each batch may have another size.

Used where workers go through the data at their own speed (a parameter server), or where batches follow the machines
(`Plan(tuning=BatchTuning())`). Every sample is computed exactly once in each epoch, whatever the sizes of batches and
whoever comes and goes; see `offbeat.batching.leases`.

* A loop over it ends when the epoch has nothing more to give. Workers that are fast go through more batches than slow
  ones; `len(loader)` is what a worker goes through on average, so that schedules can be made from it.
* A loop that is left early goes on in the same epoch the next time, with the batch that it was left with if nothing was
  computed from that.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Sampler

from offbeat.errors import ModelError
from offbeat.loading.epoch_size import dataset_size
from offbeat.loading.replicated_source import ReplicatedSource
from offbeat.loading.sharded_loader import MOST_LEFT, batching_of, rebuilt, sampler_of
from offbeat.rng import LoopRng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from offbeat.engine import DrawnBatch
    from offbeat.loading.batch_source import Batch, BatchSource
    from offbeat.loading.sharded_loader import OnBatch, PutBack

SEEDS = 1 << 62  # that are told apart
_NORMALIZED = 2  # samples of a batch at least, for BatchNorm; and of one that only keeps up with the others


class Batches(Sampler[list[int]]):
    """The indices of each batch, as the source gives them.

    Args:
        source: decides.
        length: batches of an epoch, on average over the workers.
    """

    def __init__(self, source: BatchSource, length: int) -> None:
        self.source, self._length = source, length
        self.asked: deque[Batch] = deque()  # for, and not yet loaded
        self._last = list(range(min(_NORMALIZED, source.leases.samples)))

    def __iter__(self) -> Iterator[list[int]]:
        while (batch := self.source.next()) is not None:
            self.asked.append(batch)
            if batch.lease is not None:
                self._last = self.source.leases.indices(batch.lease).tolist()
            yield self._last

    def __len__(self) -> int:
        return self._length


class LeasedLoader:
    """The loader that `run.prepare` returns where data is leased. Other attributes are the loader's own.

    Args:
        loader: a `DataLoader` over a dataset with a length.
        source: decides who computes what.
        on_batch: called with each batch.
        put_back: called with the last batches of a loop that was left early, before the next loop begins.
        world: number of workers.
        on_loop: called when a loop begins, before anything is asked for; it may `change_source`.
        before_draw: called before each batch is asked for, with this.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        source: BatchSource,
        on_batch: OnBatch,
        put_back: PutBack,
        world: int,
        on_loop: Callable[[], None] = lambda: None,
        before_draw: Callable[[LeasedLoader], None] = lambda loader: None,
    ) -> None:
        self._source, self._on_batch, self._put_back = source, on_batch, put_back
        self._on_loop, self._before_draw = on_loop, before_draw
        self._loop = 0  # the present one
        self.is_open = False  # it is under way
        self._given: deque[tuple[Batch, DrawnBatch]] = deque(maxlen=MOST_LEFT)  # in it
        self._left: tuple[tuple[Batch, DrawnBatch], ...] = ()  # the last batches of a loop that was left early
        self._drawing = threading.Lock()  # held while one is counted: another thread may notice that a worker is lost
        together = world * batch_of(loader)
        samples, rest = divmod(source.leases.samples, together)
        self._batches = Batches(source, max(1, samples + bool(rest and not drops_last(loader))))
        self.loader = rebuilt(loader, batch_sampler=self._batches)
        self.loop_rng = LoopRng(self.loader)

    def __len__(self) -> int:
        """Batches of an epoch, on average over the workers."""
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __iter__(self) -> Iterator[Any]:
        self._leave()  # there is one loop at a time
        self._give_back_left()
        self._on_loop()
        asked, given = self._batches.asked, self._given
        self._loop += 1
        loop, self.is_open = self._loop, True
        try:
            self._before_draw(self)
            self.loop_rng.begin()
            drawing = iter(self.loader)
            self.loop_rng.go_on()
            for data in drawing:
                batch = asked.popleft()
                real, count = batch.lease is not None, 0 if batch.lease is None else batch.lease.count
                with self._drawing:
                    self._source.drawn(batch)
                    draw = self._on_batch(real=real, source=batch.first, samples=count, weight=batch.weight)
                given.append((batch, draw))
                yield data
                if self._loop != loop:
                    raise ModelError(
                        f"Cannot continue loop {loop} over this loader: loop {self._loop} has begun since, and "
                        "batches go to one at a time. End one before the next, or use another loader in it."
                    )
                self._before_draw(self)
            self._source.ended()
            given.clear()
        finally:
            if self._loop == loop:
                self._leave()

    @property
    def source(self) -> BatchSource:
        """The source of its batches."""
        return self._source

    def change_source(self, source: BatchSource) -> None:
        """Have another one decide from the next loop on; the place in the data is for it to know."""
        self._source = self._batches.source = source

    def _leave(self) -> None:
        """The loop is over."""
        self.is_open = False
        self.loop_rng.end()
        self._left += tuple(self._given)
        self._given.clear()
        self._source.give_back(tuple(self._batches.asked))
        self._batches.asked.clear()

    @property
    def progress(self) -> float:
        """Epochs that all workers together have been dealt, as far as this one knows."""
        return self._source.progress

    def _give_back_left(self) -> None:
        """Give back what the last loop was left with; not when it was left, for it may have been computed since."""
        count = self._put_back([draw for _, draw in self._left])
        self._source.give_back([batch for batch, _ in self._left[len(self._left) - count :]])
        self._left = ()

    @property
    def is_through(self) -> bool:
        """Whether a loop that draws now is told the end of its epoch, where all work out alike who computes what."""
        return not self._batches.asked and isinstance(self._source, ReplicatedSource) and self._source.is_through

    def hand_over(self) -> dict[str, Any]:
        """Collect what a new worker has to know, where all work out alike who computes what."""
        assert isinstance(self._source, ReplicatedSource)
        return self._source.hand_over(tuple(self._batches.asked))

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Take over what `hand_over` returned on another worker."""
        assert isinstance(self._source, ReplicatedSource)
        self._source.take_over(state)

    def joined(self, ranks: Iterable[int]) -> None:
        """Admit these workers from now on, where all work out alike who computes what."""
        assert isinstance(self._source, ReplicatedSource)
        self._source.joined(ranks)

    def lost(self, ranks: Iterable[int], *, unused: Callable[[], int]) -> None:
        """Go on without these workers; the last `unused` batches of the loop are in no step yet. On any thread."""
        with self._drawing:
            self._source.lost(ranks, unused=unused())

    def out_of_memory(self) -> None:
        """Handle that there was no memory for the batch at hand."""
        self._source.out_of_memory()

    def explain(self) -> str:
        """Say which worker paces the rounds and why; "" if somebody else knows."""
        return self._source.explain()

    def state_dict(self) -> dict[str, Any]:
        """The place in the data."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, seed: int) -> None:
        """Go on where `state` was taken."""
        self._left = ()
        self._source.load_state_dict(state, seed=seed % SEEDS)


def can_lease(loader: Any) -> bool:
    """Whether offbeat may deal out the samples of this loader one by one.

    Raises:
        ModelError: if it has to be dealt out, and cannot be.
    """
    return sampler_of(loader) is not None


def batch_of(loader: DataLoader[Any]) -> int:
    """Samples of a full batch."""
    size, _ = batching_of(loader)
    if size is None:
        raise ModelError("Cannot lease batches of a loader without batches: give it a batch_size.")
    return size


def drops_last(loader: DataLoader[Any]) -> bool:
    """Whether a shorter batch at the end of an epoch is left out.

    Raises:
        ModelError: if there would be no other.
    """
    size, drops = batching_of(loader)
    count = dataset_size(loader)
    if drops and size is not None and count < size:
        raise ModelError(
            f"Cannot prepare a loader without batches: {count} samples are fewer than a batch of {size}, and with "
            "drop_last that is left out. Use a smaller batch size, or no drop_last."
        )
    return drops


def least_of(loader: DataLoader[Any], models: Iterable[torch.nn.Module]) -> int:
    """Samples that a batch has at least: BatchNorm cannot train on one, unless that is what the user asks for."""
    normalizes = any(isinstance(m, _BatchNorm) and m.training for model in models for m in model.modules())
    return min(_NORMALIZED if normalizes else 1, batch_of(loader))


def ahead_of(loader: DataLoader[Any]) -> int:
    """Count the batches that the loader asks for before the loop has the first."""
    return 1 + loader.num_workers * (loader.prefetch_factor or 0)
