"""The clocks of a table as control sees them, every few milliseconds: who waits, and how long steps take.

A switch lets a worker go on, or not, with the packet that says its step is over, and keeps no times. So a wait is
measured to within the time between two looks. Where a policy lets single workers go further than all (`most` above
`window`), it is foretold from these times how far each may go, as it is at a server (`offbeat.sync.DSSP`).

A policy without a bound (`ASP`) is carried out by a window of a few steps; whoever comes near its end is allowed as
many more by name, before it has to wait. Another policy is in effect behind what was granted, and so it is soon: behind
a window as large as the ring it would be when all have made as many steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.switch.packet import distance, is_newer, wrapped
from offbeat.switch.strategy import NEAR
from offbeat.sync import DSSP

if TYPE_CHECKING:
    from offbeat.protocol.switch_control import Strategy
    from offbeat.switch.data_plane import JobClocks


@dataclass
class WatchedClock:
    """One worker's clock.

    Args:
        finished: its last step that is over.
        brought: steps that it is ahead of the slowest.
        held: whether its step was over, and the next one not begun, before this look.
        waits: whether it may not begin the next.
        waited_s: for how long it has waited so, in all.
        last_ready_s: when its last step was over; None before the first.
        interval_s: between its last two.
        until: the clock before which it may begin steps by name, as was foretold last; None if nothing is foretold.
    """

    finished: int
    brought: int = 0
    held: bool = False
    waits: bool = False
    waited_s: float = 0.0
    last_ready_s: float | None = None
    interval_s: float | None = None
    until: int | None = None

    @property
    def pace(self) -> int:
        """The step it is at, as workers are compared."""
        return self.brought - self.held


class ClockWatch:
    """The clocks of one job."""

    def __init__(self) -> None:
        self.workers: dict[int, WatchedClock] = {}
        self._looked_s = 0.0
        self._epoch = 0

    def look(self, clocks: JobClocks, strategy: Strategy, ring: int, now_s: float) -> dict[int, int]:
        """Look at the clocks, and find whom to allow more, and before which clock it may begin steps.

        Args:
            strategy: that was set last.
            ring: as many clocks as the switch keeps track of.
        """
        past_s, self._looked_s = now_s - self._looked_s, now_s
        here = {worker: self.workers.get(worker) or WatchedClock(at) for worker, at in clocks.finished.items()}
        self.workers = here
        # Who rests says that it is as far ahead as the ring has room for.
        most = min(max(clocks.windows.old, clocks.windows.new, strategy.slack_in(ring)) + 1, ring - 3)
        for worker, one in here.items():
            steps = distance(clocks.finished[worker], one.finished)
            one.finished, one.brought = clocks.finished[worker], distance(clocks.finished[worker], clocks.low)
            one.waited_s += past_s * one.waits
            may_go_on = clocks.windows.grants(one.finished, clocks.low) or is_newer(clocks.until[worker], one.finished)
            one.held = steps > 0 or one.waits
            one.waits = not may_go_on and one.brought <= most
            if steps > 0:
                one.interval_s = None if one.last_ready_s is None else (now_s - one.last_ready_s) / steps
                one.last_ready_s = now_s
            # What is foretold holds until it is within the window again; what is allowed is not taken back.
            is_within = one.held and one.brought <= clocks.windows.of(one.finished)
            if (is_within and not is_newer(clocks.until[worker], one.finished)) or clocks.windows.epoch != self._epoch:
                one.until = None
        self._epoch = clocks.windows.epoch
        if not clocks.windows.are_in_effect(clocks.low):
            return {}
        if strategy.window is None:
            return self._near_their_end(clocks, strategy.slack_in(ring))
        return {} if strategy.most is None else self._foretold(strategy.window, strategy.most)

    def _near_their_end(self, clocks: JobClocks, most: int) -> dict[int, int]:
        """Find whom to allow more where anybody may go ahead by `most`."""
        allowed = {}
        for worker, one in self.workers.items():
            granted = max(distance(clocks.until[worker], clocks.low) - 1, clocks.windows.new)
            wanted = min(one.brought + NEAR, most)
            if one.brought < most and wanted > granted and granted - one.brought <= NEAR // 2:
                allowed[worker], one.waits = wrapped(clocks.low + wanted + 1), False
        return allowed

    def _foretold(self, window: int, most: int) -> dict[int, int]:
        policy, allowed = DSSP(window, most), {}
        for worker, one in self.workers.items():
            if not one.waits or one.until is not None or one.brought > most:
                continue
            if (extra := policy.extra(self.workers, worker)) is not None:
                one.until = wrapped(one.finished + extra)
                if extra:
                    allowed[worker], one.waits = one.until, False
        return allowed
