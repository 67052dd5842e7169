"""A watch over contributions that were announced: nobody waits for ever for one that does not come.

A worker that says nothing is lost with its link (`offbeat.wire.session`). One that announces, is alive, and never
pushes would hold up every update of all workers (`BSP`), or of those behind it. A worker of ours pushes at once, so
whoever brings nothing more of such a contribution for the whole of `timeout_s`, while its link is alive, is overdue.
Any byte of it is enough to go on waiting: a slow link is none of this. Time in which this process or the link was away
counts for nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from offbeat.sync import Push

_LOOKS = 10  # per timeout

Mark = tuple[int, int]
"""How far a worker's pushes have come; another one with every byte."""


class PushWatch:
    """The watch over one shard's contributions, which looks only while one is awaited.

    Args:
        timeout_s: without a byte, after which one is overdue; 0 for never.
        awaited: the contributions that updates wait for, with their models.
        mark: how far a worker's pushes have come; None if its link is not alive at the moment.
        overdue: called with the model and the contribution.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        awaited: Callable[[], Iterable[tuple[int, Push]]],
        mark: Callable[[int], Mark | None],
        overdue: Callable[[int, Push], None],
    ) -> None:
        self._timeout_s, self._awaited, self._mark, self._overdue = timeout_s, awaited, mark, overdue
        self._idle: dict[tuple[int, Push], tuple[Mark | None, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on, as long as something is awaited."""
        if self._timeout_s and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s / _LOOKS, self._on_timer)

    def stop(self) -> None:
        """Look no more."""
        self._timeout_s = 0.0
        if self._timer is not None:
            self._timer.cancel()

    def look(self, elapsed_s: float) -> None:
        """Look again, so much time after the last look."""
        before, self._idle = self._idle, {}
        for model, push in tuple(self._awaited()):
            seen, idle_s = before.get((model, push), (None, 0.0))
            mark = self._mark(push[0])
            if mark is not None:
                seen, idle_s = mark, idle_s + elapsed_s if mark == seen else 0.0
            if idle_s >= self._timeout_s:
                self._overdue(model, push)
            else:
                self._idle[(model, push)] = seen, idle_s

    def _on_timer(self) -> None:
        self._timer = None
        self.look(self._timeout_s / _LOOKS)
        if self._idle:
            self.start()
