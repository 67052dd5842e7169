"""One generation of an elastic group, and what its exchanges are carried by; the next one has its own.

A fabric that can be connected anew among other workers has a `Reconnector`, which makes a worker's `GroupCollectives`
for each generation. A rank is a worker's for as long as it lives; its *place* is where it is among
the members of a generation, from 0 on.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

    from offbeat.pending import Pending

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


@dataclass(frozen=True)
class Generation:
    """One generation, for one fabric of one of its workers.

    Args:
        number: from 0, that which the job began with.
        name: of the generation and the fabric; no other has it.
        rank: of this worker.
        members: ranks, in the order of places.
        group: torch's, over Gloo; its ranks are places.
        meet: tells the others what this worker has to say, and returns what all say, by place. Raises NetworkError if
            the generation ends meanwhile.
    """

    number: int
    name: str
    rank: int
    members: tuple[int, ...]
    group: dist.ProcessGroup
    meet: Callable[[str], list[str]]


class GroupCollectives(Protocol):
    """The Protocol of what carries a generation's exchanges; begun in the same order on all."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Torch's group, for exchanges of other kinds."""

    @property
    def is_suspicious(self) -> bool:
        """Whether a connection is broken just now, so that somebody may be gone."""

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Begin to sum a tensor [D] in place.

        Raises:
            RuntimeError: if a connection is known to be broken.
        """

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending:
        """Begin to overwrite a tensor [D] with that of the worker at a place; raises as `all_reduce`."""

    def wants_reroute(self) -> bool:
        """See `Reroutes`."""

    def reroute(self, meet: Callable[[str], list[str]]) -> str:
        """See `Reroutes`."""

    def close(self) -> None:
        """Let go, when nothing is under way."""

    def abandon(self) -> None:
        """Let go of what may be under way."""


class Reconnector(Protocol):
    """The Protocol of what connects one fabric of a worker in each generation."""

    def connect(self, generation: Generation, before: GroupCollectives | None) -> GroupCollectives:
        """Connect a generation. Collective among its members.

        Args:
            before: of the last generation that this worker took part in; None for none.

        Raises:
            NetworkError: if one of them cannot be reached.
        """


class StoreMeeting:
    """The members of a generation tell each other texts, by the store.

    Args:
        store: for this meeting alone.
        place, world: of this worker; of how many.
        is_over: asked now and then, whether the others need not be waited for any more.
    """

    def __init__(self, store: Store, place: int, world: int, is_over: Callable[[], bool]) -> None:
        self._store, self._place, self._world, self._is_over = store, place, world, is_over
        self._numbers = itertools.count()

    def __call__(self, text: str) -> list[str]:
        """Tell a text, and hear those of all, by place.

        Raises:
            NetworkError: if it is over before all have told theirs.
        """
        number = next(self._numbers)
        self._store.set(f"{number}/{self._place}", text)
        keys, pause_s = [f"{number}/{place}" for place in range(self._world)], _FIRST_PAUSE_S
        while not self._store.check(keys):
            if self._is_over():
                missing = [place for place, key in enumerate(keys) if not self._store.check([key])]
                raise NetworkError(
                    f"Cannot connect the workers: of {self._world} those at {', '.join(map(str, missing)) or 'none'} "
                    "(from 0 on) have not come in time, or one was lost. Start all of them, and see what each said."
                )
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        return [self._store.get(key).decode() for key in keys]
