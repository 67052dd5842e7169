"""The check that workers bring the same hyper-parameters: an update goes by those of its first contribution.

Scripts that are the same have the same learning rate in the same step, whichever policy decides; who differs has
another script, has been told another schedule, or lies. It is said once of each worker, and nobody is refused: which of
two is right cannot be known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STEPS = 64  # the last ones, in which workers are compared
_MOST_SHOWN = 3


class HyperparameterCheck:
    """The hyper-parameters of the workers of one model, step by step of their scripts."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # by worker: its last step
        self._first: dict[int, tuple[int, tuple[Mapping[str, Any], ...]]] = {}  # by step: who came first, and with what
        self._named: set[int] = set()

    def hear(
        self,
        worker: int,
        step: int,
        hyper: tuple[Mapping[str, Any], ...],
        goes_by: str = "those of its first contribution",
    ) -> str:
        """A worker brings a gradient; what is to be said of it, as a sentence, or "".

        Args:
            step: of its script.
            hyper: the optimizer's hyper-parameters, by group.
            goes_by: whose are used, in words.
        """
        if step < self._last.get(worker, 0):  # its script has gone back
            self.forget()
        self._last[worker] = step
        if step not in self._first:
            self._first[step] = (worker, hyper)
            if len(self._first) > _STEPS:
                del self._first[min(self._first)]
            return ""
        other, theirs = self._first[step]
        if other == worker or hyper == theirs or worker in self._named:
            return ""
        self._named.add(worker)
        return (
            f"Rank {worker} uses other hyper-parameters in its step {step} than rank {other}: "
            f"{_differences(hyper, theirs)}. Each update goes by {goes_by}; give all workers the same schedule."
        )

    def forget(self) -> None:
        """Training continues somewhere else, with whatever hyper-parameters: nobody is compared with before."""
        self._first.clear()
        self._last.clear()
        self._named.clear()


def _differences(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str:
    found = [
        f"{key}={_shown(one.get(key))} and not {_shown(other.get(key))}"
        + (f" in group {number}" if len(mine) > 1 else "")
        for number, (one, other) in enumerate(zip(mine, theirs, strict=False))
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key)
    ]
    more = len(found) - _MOST_SHOWN
    return ", ".join(found[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shown(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
