"""A loop over the loader that `prepare` was given, instead of the one that it returned.

Each worker then goes through all of the data, though nothing fails. It is said once, in the first steps. An evaluation
over a loader that is not prepared is no such thing: it makes no step, or the prepared loader was drawn from before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from offbeat.loading.epoch_size import dataset_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STEPS = 3
"""Steps behind which it is said; fewer are no training, such as a calibration's."""


class LoaderCheck:
    """A check that the loaders that were prepared are drawn from.

    Call order: `prepared` for each, `stepped` before each step of a prepared optimizer, `drawn` with the first batch.

    Args:
        tell: called once with what is wrong.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._steps = tell, 0
        self._given: list[tuple[Iterable[Any], bool]] = []  # what `prepare` was given, and whether it was dealt out

    def prepared(self, given: Iterable[Any], *, is_dealt: bool) -> None:
        """A loader was prepared.

        Args:
            is_dealt: whether `given` goes through samples of other workers, too.
        """
        self._given.append((given, is_dealt))

    def drawn(self) -> None:
        """A prepared loader has given out a batch."""
        self._given.clear()

    def stepped(self) -> None:
        """A prepared optimizer is about to step."""
        if not self._given:
            return
        self._steps += 1
        if self._steps < STEPS:
            return
        drawn = [(given, is_dealt) for given, is_dealt in self._given if _is_drawn_from(given)]
        self._given.clear()
        text = f"{STEPS} steps are made, and the loader that run.prepare returned was never drawn from"
        if drawn:
            given, is_dealt = drawn[0]
            wrong = (
                "each worker goes through all of its data" if is_dealt else "batches count alike, whatever their size"
            )
            text += f"; the one it was given, {_name(given)}, was: {wrong}"
        else:
            text += ": with batches from elsewhere, all workers may train on the same"
        self._tell(
            f"{text}, and run.progress stays 0. Loop over what is returned: model, optimizer, loader = "
            "run.prepare(model, optimizer, loader)."
        )


def _is_drawn_from(loader: Iterable[Any]) -> bool:
    """Whether a loop over it is under way; of a loader that keeps its place itself nobody can know."""
    if isinstance(loader, DataLoader):
        sampler = loader._index_sampler
        loops = [one for one in gc.get_objects() if issubclass(type(one), _BaseDataLoaderIter)]
        return any(getattr(one, "_index_sampler", None) is sampler for one in loops)
    return any(isinstance(one, Iterator) for one in gc.get_referrers(loader))


def _name(loader: Iterable[Any]) -> str:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    data = loader.dataset
    samples = "" if isinstance(data, IterableDataset) else f" of {dataset_size(loader)} samples"
    return f"the DataLoader over {type(data).__name__}{samples}"
