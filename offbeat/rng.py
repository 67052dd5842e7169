"""The state of the random generators of one process, and how a loop over data goes on with the same random numbers.

What draws without a generator of its own (dropout, augmentation, a shuffled order) draws from one of Python's `random`,
NumPy's global generator, torch's for the CPU, or torch's for a GPU. A `RngState` is all of them at one moment, as plain
numbers and tensors.

    a loop:      begins | draws a base seed and the order | batch 1 | ... | batch k | saved
    it goes on:  begins | the state of its beginning | the same seed, the same order, batches 1 to k again
                        | the state at which it was saved | batch k + 1 ...
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PYTHON_FORMAT = 3  # of `random.getstate()`
_WORDS = 624  # of the Mersenne Twister


@dataclass(frozen=True)
class RngState:
    """The generators of a process at one moment.

    Args:
        python: as `random.getstate()` has it.
        numpy: as `numpy.random.get_state(legacy=False)` has it; None if its global generator is no Mersenne Twister.
        cpu: of torch.
        cuda: of torch, on the GPU that was asked for; None if none was.
        own: of generators that belong to loaders.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    cpu: torch.Tensor
    cuda: torch.Tensor | None = None
    own: tuple[torch.Tensor, ...] = ()

    @classmethod
    def capture(cls, own: Sequence[torch.Generator] = (), device: torch.device | None = None) -> RngState:
        """The state of this process now.

        Args:
            own: further generators.
            device: a GPU, whose generator belongs to it; None for none.
        """
        numpy = np.random.get_state(legacy=False)
        return cls(
            random.getstate(),
            numpy if isinstance(numpy, dict) and numpy["bit_generator"] == "MT19937" else None,
            torch.get_rng_state(),
            None if device is None else torch.cuda.get_rng_state(device),
            tuple(generator.get_state() for generator in own),
        )

    def restore(self, own: Sequence[torch.Generator] = (), device: torch.device | None = None) -> None:
        """Have the generators go on from here.

        Args:
            own, device: as for `capture`.
        """
        random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if device is not None and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
        for generator, state in zip(own, self.own, strict=True):
            generator.set_state(state)

    def to_plain(self) -> dict[str, Any]:
        """Numbers and tensors, which `torch.load(weights_only=True)` takes."""
        _, words, gauss = self.python
        numpy = self.numpy
        return {
            "python": {"words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": None
            if numpy is None
            else {
                "words": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
                "place": int(numpy["state"]["pos"]),
                "gauss": float(numpy["gauss"]) if numpy["has_gauss"] else None,
            },
            "cpu": self.cpu,
            "cuda": self.cuda,
            "own": list(self.own),
        }

    @classmethod
    def from_plain(
        cls, plain: Any, own: Sequence[torch.Generator] = (), device: torch.device | None = None
    ) -> RngState:
        """Read what `to_plain` returned, and try it out on generators that nobody draws from.

        Args:
            own, device: those that it is to be restored to.

        Raises:
            ValueError: if it is damaged, or of other generators.
        """
        try:
            python, numpy = plain["python"], plain["numpy"]
            state = cls(
                (_PYTHON_FORMAT, tuple(_words(python["words"], _WORDS + 1)), _gauss(python["gauss"])),
                None if numpy is None else _numpy(numpy),
                plain["cpu"],
                None if device is None else plain["cuda"],
                tuple(plain["own"]),
            )
            if len(state.own) != len(own):
                raise ValueError(f"its loaders had {len(state.own)} generators of their own, here they have {len(own)}")
            _try_python(state.python)
            torch.Generator().set_state(state.cpu)
            if device is not None and state.cuda is not None:
                torch.Generator(device).set_state(state.cuda)
            for generator, tensor in zip(own, state.own, strict=True):
                torch.Generator(generator.device).set_state(tensor)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
            raise ValueError(f"it holds no state of generators ({str(error)[:100] or type(error).__name__})") from error
        return state


class LoopRng:
    """The random numbers of the loops over one loader.

    Call order: 1) `begin` when a loop begins, before anything is drawn for it; 2) `go_on` when it has again what was
    drawn before it was saved; 3) `end`. `resume` before 1), if the loop was under way when a checkpoint was made.

    Args:
        loader: that is drawn from; its own generators are those of the loader and of its sampler.
    """

    def __init__(self, loader: object) -> None:
        found = [getattr(one, "generator", None) for one in (loader, getattr(loader, "sampler", None))]
        self.own = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self.began: RngState | None = None  # the loop that is under way
        self._resumes: tuple[RngState, Callable[[], None]] | None = None

    def resume(self, began: RngState, go_on: Callable[[], None]) -> None:
        """The next loop is one that began at that state, and goes on from where `go_on` brings the generators."""
        self._resumes = began, go_on

    def begin(self) -> None:
        """A loop begins."""
        if self._resumes is not None:
            self._resumes[0].restore(self.own)
        self.began = RngState.capture(self.own)

    def go_on(self) -> None:
        """The loop is where it was when it was saved."""
        if self._resumes is not None:
            _, go_on = self._resumes
            self._resumes = None
            go_on()

    def end(self) -> None:
        """The loop is over."""
        self.began = None


def _try_python(state: tuple[Any, ...]) -> None:
    try:
        random.Random().setstate(state)
    except ValueError as error:
        raise ValueError(f"it holds no state of Python's generator ({error})") from error


def _words(tensor: Any, number: int) -> list[int]:
    if (
        tensor.shape != (number,)
        or tensor.dtype != torch.int64
        or not 0 <= int(tensor.min()) <= int(tensor.max()) < 1 << 32
    ):
        raise ValueError(f"it holds no {number} words of a generator")
    words: list[int] = tensor.tolist()
    return words


def _gauss(value: Any) -> float | None:
    if value is not None and type(value) is not float:
        raise ValueError(f"it holds a {type(value).__name__} in place of a random number")
    return value


def _numpy(plain: Mapping[str, Any]) -> dict[str, Any]:
    place, gauss = plain["place"], _gauss(plain["gauss"])
    if type(place) is not int or not 0 <= place <= _WORDS:  # NumPy reads there, whatever it is
        raise ValueError("it holds a place that NumPy's generator does not have")
    return {
        "bit_generator": "MT19937",
        "state": {"key": np.array(_words(plain["words"], _WORDS), dtype=np.uint32), "pos": place},
        "has_gauss": int(gauss is not None),
        "gauss": gauss or 0.0,
    }
