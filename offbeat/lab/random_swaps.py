"""Random changes of a job's policy at a switch, and what the workers' histories say of them.

An operator has another window hold, every few milliseconds, while workers count clocks (`switch_load`) and record by
what each step was granted. `SwapProof` is what `offbeat verify-run` says of these histories, and whether they are about
the windows that were set, from the steps on that the switch named.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from offbeat.audit import verify
from offbeat.history import HistoryLog, StepGranted
from offbeat.lab.namespace import inside
from offbeat.protocol.switch_control import SetSwitchStrategy, Strategy, SwitchStrategySet
from offbeat.switch.control_client import ControlClient
from offbeat.wire.credentials import Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WINDOWS = (0, 1, 4, 16)
_LEAST_S, _MOST_S = 0.001, 0.005  # between two changes
_AGAIN_S = 0.0005  # before a change is asked for again that had to wait for the one before


class WindowChange(NamedTuple):
    """One change of the windows.

    Args:
        epoch: its number, from 1 on.
        old, new: steps ahead of the slowest, before and from `effective` on.
        took_s: from the request to its answer.
    """

    epoch: int
    old: int
    new: int
    effective: int
    took_s: float


class RandomSwaps:
    """The operator, who changes the windows of one job for as long as the `with` block lasts.

    Args:
        namespace: in which the switch's control is reached.
        switch: OFFBEAT_SWITCH and OFFBEAT_TOKEN, as `SwitchProcess.environment`.
        job: whose policy it is.
        window: with which that has begun.
        seed: decides which windows, and when.

    Attributes:
        made: the changes, in order.
        asked_again: how often one had to wait for the one before.
    """

    def __init__(self, namespace: str, switch: Mapping[str, str], job: str, *, window: int, seed: int = 0) -> None:
        self.made: list[WindowChange] = []
        self.asked_again = 0
        self._job, self._window, self._chance = job, window, random.Random(seed)
        credentials = Token(switch["OFFBEAT_TOKEN"].encode())
        self._control = inside(
            namespace, lambda: ControlClient(switch["OFFBEAT_SWITCH"], role="operator", credentials=credentials)
        )
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="random-swaps", daemon=True)

    def __enter__(self) -> RandomSwaps:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._control.close()
        if self._error is not None and not any(error):
            raise self._error

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._chance.uniform(_LEAST_S, _MOST_S)):
                new = self._chance.choice([window for window in WINDOWS if window != self._window])
                while not self._set(new) and not self._is_over.wait(_AGAIN_S):
                    self.asked_again += 1
        except BaseException as error:
            self._error = error

    def _set(self, window: int) -> bool:
        began_s = time.perf_counter()
        told = self._control.ask(lambda number: SetSwitchStrategy(number, self._job, Strategy("table", window=window)))
        took_s = time.perf_counter() - began_s
        assert isinstance(told, SwitchStrategySet)
        if told.is_set:
            self.made.append(WindowChange(told.epoch, self._window, window, told.effective, took_s))
            self._window = window
        return told.is_set


class SwapProof(msgspec.Struct, frozen=True):
    """The findings about a job whose windows were changed.

    Args:
        swaps, asked_again: changes that were made, and requests that had to wait for the change before.
        us_per_swap: microseconds from a request to its answer, over control's TCP: the median.
        grants: how often a worker went on; by_lead: of these, by how many steps it was ahead of the slowest.
        mixed: clocks that were granted by two windows to workers that were ahead of the slowest.
        other_windows: grants by another window than was set for that clock.
        violations: what `offbeat verify-run` found.
        clocks_to_effect: the most that a change took until it decided, as the first worker that knew of it had it.
        too_late: changes that took more than the window before and one clock.
    """

    swaps: int
    asked_again: int
    us_per_swap: float
    grants: int
    by_lead: dict[int, int]
    mixed: int
    other_windows: int
    violations: int
    clocks_to_effect: int
    too_late: int

    @property
    def grants_ahead(self) -> int:
        """Grants to workers that were ahead of the slowest, which a window decided about."""
        return self.grants - self.by_lead.get(0, 0)

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.mixed or self.other_windows or self.violations or self.too_late)


def prove(folder: Path, changes: Sequence[WindowChange], *, window: int, asked_again: int = 0) -> SwapProof:
    """Read the histories in a folder, of a job whose windows were changed.

    Args:
        changes: in order.
        window: before the first.

    Raises:
        HistoryError: if one cannot be read.
    """
    granted = [one for path in sorted(folder.glob("*.log")) for one in HistoryLog(path) if isinstance(one, StepGranted)]
    set_to = {0: WindowChange(0, window, window, 0, 0.0)} | {one.epoch: one for one in changes}
    windows, known_at = defaultdict[int, set[int]](set), dict[int, int]()
    other_windows = 0
    for one in granted:
        change = set_to.get(one.epoch)
        is_set = change is not None and one.window == (change.new if one.clock >= change.effective else change.old)
        other_windows += not is_set
        known_at[one.epoch] = min(known_at.get(one.epoch, one.low), one.low)
        if one.clock > one.low:
            windows[one.clock].add(one.window)
    to_effect = {one: one.effective - known_at[one.epoch] for one in changes if one.epoch in known_at}
    return SwapProof(
        swaps=len(changes),
        asked_again=asked_again,
        us_per_swap=round(1e6 * statistics.median(one.took_s for one in changes), 1) if changes else 0.0,
        grants=len(granted),
        by_lead=dict(sorted(Counter(one.clock - one.low for one in granted).items())),
        mixed=sum(len(by) > 1 for by in windows.values()),
        other_windows=other_windows,
        violations=verify(folder).broken,
        clocks_to_effect=max(to_effect.values(), default=0),
        too_late=sum(clocks > one.old + 1 for one, clocks in to_effect.items()),
    )
