"""The watch over what a worker's links carry: it notices when that is much less, or more, than it was.

What is watched is how much was sent in the time in which there was something to send. Over links that does not depend
on how long others let this worker wait; of sums by torch's group that waiting is a part, so a worker that becomes slow
may raise a false alarm. It depends on the paths, so a new plan has to be learnt anew.
"""

from __future__ import annotations

import statistics

LEARNT = 8
"""Samples that say what is usual."""
IN_A_ROW = 5
"""Samples one after the other that have to be unusual."""
_CHANGED = 1.2
_LEAST_BYTES = 256 << 10  # fewer in one step say what a message costs on this machine just then, and nothing else
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0  # before the next alarm, behind one that was false


class ThroughputWatch:
    """Call order: `sample` behind each step; `was_false` behind an alarm that nothing was the matter with."""

    def __init__(self) -> None:
        self._sent_bytes, self._busy_s = 0, 0.0
        self._learnt: list[float] = []
        self._unusual = 0
        self._pause_s, self._quiet_until_s = _FIRST_PAUSE_S, 0.0

    def is_alarming(self, now_s: float) -> bool:
        """Whether much has changed."""
        return self._unusual >= IN_A_ROW and now_s >= self._quiet_until_s

    def sample(self, sent_bytes: int, busy_s: float) -> None:
        """Take in how much was sent, and how long that took, from the beginning on."""
        size, took_s = sent_bytes - self._sent_bytes, busy_s - self._busy_s
        self._sent_bytes, self._busy_s = sent_bytes, busy_s
        if size < _LEAST_BYTES or took_s <= 0:
            return
        rate = size / took_s
        if len(self._learnt) < LEARNT:
            self._learnt.append(rate)
            return
        ratio = rate / statistics.median(self._learnt)
        self._unusual = 0 if 1 / _CHANGED < ratio < _CHANGED else self._unusual + 1

    def was_false(self, now_s: float) -> None:
        """The network is as it was: what is usual is something else now, and the next alarm has to wait."""
        self._learnt.clear()
        self._unusual = 0
        self._quiet_until_s = now_s + self._pause_s
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
