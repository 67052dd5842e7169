"""Asynchronous parallel: nobody waits for anybody (Dean et al., "Large scale distributed deep networks", NIPS 2012)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.sync.actions import Apply, Release
from offbeat.sync.bsp import grant_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync.actions import Action
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import State


@dataclass(frozen=True)
class ASP:
    """Asynchronous training: nobody waits, and each contribution is applied as it comes.

    With N equal workers a contribution is N-1 updates old on average.

    What to know:

    * The learning rate of one update is the worker's share of a round (1/N for equal batches), so that N updates move
      the parameters as far as one of BSP: a swap changes no step size. Schedules that count updates should count N of
      them as one.
    * Early gradients tolerate little staleness: begin with `BSP`, for as long as the learning rate warms up.
    * Staleness acts like additional momentum of about 1 - 1/N (Mitliagkas et al., 2016): lower an optimizer's own
      momentum, to max(0, momentum - (1 - 1/N)) as a first guess. The server keeps one momentum for all workers.
    * Stale gradients hurt deep models and adaptive optimizers such as Adam more than small models and SGD. No gradient
      is damped or dropped for its age here, and a worker that is far slower than the others brings gradients of any
      age: prefer `SSP`, unless no worker ever is.

    >>> ASP()
    ASP()
    """

    @property
    def replicated(self) -> bool:
        return False

    @property
    def bound(self) -> int | None:
        return None

    @property
    def drops(self) -> bool:
        return False

    @property
    def gated(self) -> bool:
        return False

    def contributes(self, step: int) -> Contributes:
        """The gradient of every step."""
        return "gradient"

    def decide(self, state: State) -> Sequence[Action]:
        """Let every worker push its contribution, and go on."""
        return [*apply_each(state), *map(Release, state.held)]


def apply_each(state: State) -> list[Action]:
    """Let everyone push, and apply each contribution by itself."""
    applies = [Apply((push,), rate=state.share(push), in_order=False) for push in sorted(state.pending)]
    return [*grant_all(state), *applies]
