"""The metrics where all workers exchange at the same time, from how long each of them computed.

Whoever comes to an exchange first waits for the last one there: for as long as that one has computed longer since the
exchange before. What is on its way then is nobody's waiting. So no two clocks have to agree.

On a switch's table nobody meets: what the switch knows of all workers is read from it instead.

With steps of the workers' own luck evens out: they wait less than if they met in every step. What they would wait then
is kept beside what they do.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from offbeat.control.controller import Reading
from offbeat.control.metrics_history import MetricsHistory
from offbeat.float_sum import add_up

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from offbeat.control.controller import Metrics
    from offbeat.sync import Policy

_PACED = 6  # exchanges, in a pace
_LATEST = 0.1  # part that the last step has in the average of what a worker computes


class RoundMetrics:
    """The metrics of one model. Call order: `hear` behind every exchange, or `read` now and then; `metrics`.

    Args:
        at_s: when the first policy began to decide.

    >>> from offbeat.sync import BSP
    >>> metrics = RoundMetrics()
    >>> for second in range(5):
    ...     metrics.hear(float(second), {0: [1.0], 1: [0.5]}, samples=8, looks_back_s=4.0)
    >>> metrics.metrics(BSP(), step=5).waiting(2.0)
    0.25
    """

    def __init__(self, at_s: float = 0.0) -> None:
        self._waited_s: dict[int, float] = {}
        self._would_s: dict[int, float] = {}
        self._computing_s: dict[int, float] = {}
        self._brought: dict[int, int] = {}
        self._left_out: dict[int, int] = {}
        self._past, self._last = MetricsHistory(at_s), Reading(at_s)
        self._made = 0.0  # steps of each worker since the pace was looked at
        self._rounds: collections.deque[tuple[float, float]] = collections.deque(maxlen=_PACED + 1)

    def hear(
        self,
        at_s: float,
        times: Mapping[int, Sequence[float]],
        *,
        samples: float,
        looks_back_s: float,
        late: Collection[int] = (),
    ) -> None:
        """An exchange is over.

        Args:
            times: by rank, of those that took part: seconds that each step since the last exchange took it by itself;
                equally many of all.
            samples: of a worker, since then.
            looks_back_s: readings that are older are forgotten, but for one.
            late: ranks of those who came too late to take part; they waited for nobody.
        """
        there = [*times, *late]
        # What somebody did before it was heard of for the first time, such as to start, is no part of a step.
        known = {rank: steps_s for rank, steps_s in times.items() if rank in self._waited_s}
        for totals_s, waits in ((self._waited_s, _at_the_end(known)), (self._would_s, _in_every_step(known))):
            mine = {rank: totals_s.get(rank, 0.0) + waits.get(rank, 0.0) for rank in there}
            totals_s.clear()
            totals_s.update(mine)
        for rank, steps_s in known.items():
            each_s = add_up(steps_s) / max(1, len(steps_s))
            before_s = self._computing_s.get(rank, each_s)
            self._computing_s[rank] = before_s + _LATEST * (each_s - before_s)
        self._look_at_pace(at_s, samples)
        self._brought = {rank: self._brought.get(rank, 0) + 1 for rank in there}
        self._left_out = {rank: self._left_out.get(rank, 0) + (rank in late) for rank in there}
        self._last = Reading(
            at_s, {}, dict(self._waited_s), dict(self._would_s), dict(self._brought), dict(self._left_out)
        )
        self._past.note(self._last, looks_back_s)

    @property
    def at_s(self) -> float:
        """The time of the last reading."""
        return self._last.at_s

    def read(self, reading: Reading, *, batch: float, looks_back_s: float) -> None:
        """Take in how far workers are, and how long each has waited, as a switch knows it.

        Args:
            batch: samples of a step.
            looks_back_s: as of `hear`.
        """
        before, self._last = self._last, reading
        past_s = reading.at_s - before.at_s
        for rank in reading.steps.keys() & before.steps.keys() & before.waited_s.keys():
            steps = reading.steps[rank] - before.steps[rank]
            if steps > 0:
                each_s = max(0.0, past_s - reading.waited_s[rank] + before.waited_s[rank]) / steps
                before_s = self._computing_s.get(rank, each_s)
                self._computing_s[rank] = before_s + _LATEST * (each_s - before_s)
        self._waited_s = dict(reading.waited_s)
        here = reading.steps.keys() & before.steps.keys()
        self._made += add_up(reading.steps[rank] - before.steps[rank] for rank in sorted(here)) / max(1, len(here))
        if self._made >= 1 or not self._rounds:
            self._look_at_pace(reading.at_s, self._made * batch)
            self._made = 0.0
        self._past.note(reading, looks_back_s)

    def begin_anew(self) -> None:
        """Forget the readings: what is heard or read from now on is not to be compared with them."""
        self._waited_s, self._would_s, self._made = {}, {}, 0.0
        self._last = Reading(self._last.at_s)
        self._rounds.clear()
        self._past.begin_anew()

    def swapped(self, before: Policy, at_s: float, *, by_controller: bool) -> None:
        """Another policy than `before` decides from now on."""
        self._past.swapped(before, at_s, by_controller=by_controller)
        self._rounds.clear()

    def metrics(self, sync: Policy, step: int) -> Metrics:
        """The metrics: times as of the last exchange, since nobody can know more; steps as of now.

        Args:
            sync: decides at present.
            step: that each worker has made.
        """
        now = self._last
        if not now.steps:
            now = dataclasses.replace(now, steps=dict.fromkeys(self._waited_s or (0,), step))
        computing_s = {rank: self._computing_s[rank] for rank in self._waited_s if rank in self._computing_s}
        return self._past.metrics(sync, now, computing_s, {})

    def _look_at_pace(self, at_s: float, samples: float) -> None:
        self._rounds.append((at_s, samples))
        (first_s, _), *later = self._rounds
        if len(later) == _PACED and at_s > first_s:
            self._past.brought(add_up(count for _, count in later) / (at_s - first_s))


def _at_the_end(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Seconds that each waited for the last one, if all met behind these steps."""
    whole_s = {rank: add_up(steps_s) for rank, steps_s in times.items()}
    longest_s = max(whole_s.values(), default=0.0)
    return {rank: longest_s - own_s for rank, own_s in whole_s.items()}


def _in_every_step(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Seconds that each would have waited if all had met behind each of these steps."""
    longest_s = add_up(map(max, zip(*times.values(), strict=True)))
    return {rank: longest_s - add_up(steps_s) for rank, steps_s in times.items()}
