"""Actions: the decisions of a synchronization policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Push = tuple[int, int]  # worker, clock: one contribution


@dataclass(frozen=True)
class Grant:
    """The worker may push what it has; one that computes, and pushes early, what it has so far and what follows."""

    worker: int


@dataclass(frozen=True)
class Apply:
    """Update the parameters once, with the weighted mean of these contributions.

    They may still be arriving: each block of the parameters is updated when that block of all of them is there. What a
    worker that is lost has not delivered is left out of the mean, and nobody waits for it.

    Args:
        pushes: pending ones; at least one.
        rate: the learning rate is multiplied by it: the share of a whole round that these contributions are.
        in_order: each block is updated only after all earlier updates of it.
    """

    pushes: tuple[Push, ...]
    rate: float = 1.0
    in_order: bool = True


@dataclass(frozen=True)
class Drop:
    """Leave these contributions out; they are counted.

    If the worker was already granted its push, what is still on the way is not waited for: it is discarded, and the
    worker may stop sending. Its clock moves on at once, as if the contribution had arrived.
    """

    pushes: tuple[Push, ...]


@dataclass(frozen=True)
class Release:
    """The worker may pull the parameters and go on to its next step.

    It is given each block once the update that holds its own contribution is in it; all updates so far, if its
    contribution was dropped.
    """

    worker: int


@dataclass(frozen=True)
class Evict:
    """The worker is not waited for any longer; it may join again."""

    worker: int


@dataclass(frozen=True)
class Wake:
    """Ask again at `at_s`; replaces an earlier `Wake`."""

    at_s: float


@dataclass(frozen=True)
class Remember:
    """Keep `memory` in the state, for this policy's own use; it must be immutable."""

    memory: Any


Action = Grant | Apply | Drop | Release | Evict | Wake | Remember
