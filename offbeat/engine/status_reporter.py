"""The reporter of this worker's training status, about once a second, on a thread of its own.

What the training thread leaves in `StepMetrics` and in the run is read here without a lock: single numbers, and copies
of small collections. A script that holds the GIL is late with it, and whoever looks sees its last words instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from offbeat.protocol.worker_status import (
    MOST_EVENT,
    MOST_NAME,
    MOST_TEXT,
    MOST_VALUES,
    StatusEvent,
    TrainingStatus,
    pack_status,
    read_status,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_log = logging.getLogger("offbeat")
_EVERY_S = 1.0
_SPAN = 10  # times that, over which rates are taken


class StatusReporter:
    """A thread that makes a status about once a second, and hands it on.

    Args:
        collect: the present status, but for the rates.
        outlets: who takes it, as an object and as bytes; asked for anew each time.
    """

    def __init__(
        self,
        collect: Callable[[], TrainingStatus],
        outlets: Callable[[], Iterable[Callable[[TrainingStatus, bytes], None]]],
    ) -> None:
        self._collect, self._outlets = collect, outlets
        self._before: deque[tuple[float, TrainingStatus]] = deque(maxlen=_SPAN)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offbeat-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say it for the last time; again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_EVERY_S)
        self._tell()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._tell()

    def _tell(self) -> None:
        try:
            status = self._with_rates(self._collect())
            data = pack_status(status)
            if read_status(data) is None:  # whoever hears it would take it for an attack
                return
            for outlet in self._outlets():
                outlet(status, data)
        except Exception as error:  # nothing that is only looked at is a reason to end anything
            _log.debug("Cannot say how the training goes: %s", error)

    def _with_rates(self, status: TrainingStatus) -> TrainingStatus:
        now_s = time.monotonic()
        then_s, then = self._before[0] if self._before else (now_s, status)
        self._before.append((now_s, status))
        if now_s <= then_s:
            return status
        past_s, steps = now_s - then_s, status.step - then.step
        return msgspec.structs.replace(
            status,
            steps_per_s=max(0, steps) / past_s,
            computing_s=max(0.0, status.computed_s - then.computed_s) / steps if steps > 0 else 0.0,
            samples_per_s=max(0, status.samples - then.samples) / past_s,
            epochs_per_s=max(0.0, status.epochs - then.epochs) / past_s if then.epochs >= 0 else 0.0,
        )


def named_values(values: Mapping[str, float]) -> dict[str, float]:
    """Select from what a script logged as much as a status has room for; the loss first."""
    names = sorted(values, key=lambda name: name != "loss")  # stable: else in the order in which they came
    return {name: values[name] for name in names[:MOST_VALUES] if len(name) <= MOST_NAME}


def happenings(events: Iterable[tuple[float, str]]) -> tuple[StatusEvent, ...]:
    """Make status events of what was logged, each in one line."""
    return tuple(StatusEvent(time_s, shortened(text.partition("\n")[0], MOST_EVENT)) for time_s, text in events)


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """The beginning of a text, if it is long."""
    return text if len(text) <= most else text[: most - 1] + "…"
