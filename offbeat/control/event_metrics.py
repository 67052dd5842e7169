"""The metrics of one model, from events and actions alone.

A worker waits for others while it holds a contribution that it may not push yet, or that has arrived; and while it
pulls an update in which another's contribution is still missing. While it computes, and while its own bytes are on
their way, it is at work, and others may wait for it.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.control.controller import Reading
from offbeat.control.metrics_history import MetricsHistory
from offbeat.float_sum import add_up
from offbeat.sync import Adopted, Apply, Drop, Evict, Grant, Joined, Left, Pushed, Ready, Release

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from offbeat.control.controller import Metrics
    from offbeat.sync import Action, Event, Member, Policy, Push, State

_PACED = 6  # contributions of a worker, in a pace


@dataclass(eq=False)
class _Page:
    """The record of one worker.

    Args:
        left_out: contributions that came too late, and were dropped.
        waits: whether it does, since `since_s`.
        update: contributions that are missing in the update that its own is in, and in those before it; one set for
            all whose update it is.
        brought: when it had its last contributions under the present policy, and of how many samples.
    """

    waited_s: float = 0.0
    left_out: int = 0
    waits: bool = False
    since_s: float = 0.0
    update: set[Push] = field(default_factory=set)
    brought: collections.deque[tuple[float, float]] = field(
        default_factory=lambda: collections.deque(maxlen=_PACED + 1)
    )


class EventMetrics:
    """The metrics of one model. Call order: `hear` after every event; `metrics` now and then."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._now_s = 0.0
        self._open: list[tuple[set[Push], bool]] = []  # of each update what is missing, and whether it is in order
        self._arrived: dict[int, int] = {}  # worker: its last contribution that was there
        self._past = MetricsHistory()

    def hear(self, event: Event | None, actions: Iterable[Action], state: State) -> None:
        """Record an event and its actions.

        Args:
            event: None if more was decided after the last one.
            state: after that.
        """
        self._now_s = max(self._now_s, state.now_s)
        # Only these may begin or end to wait: there may be hundreds, and something happens to one of them at a time.
        touched = set(self._pages) if isinstance(event, Adopted) else {getattr(event, "worker", -1)}
        match event:
            case Pushed(worker=worker, clock=clock):
                self._arrived[worker] = clock
                touched |= self._is_there({(worker, clock)})
            case Ready(worker=worker, at_s=at_s, weight=weight) if worker in self._pages:
                self._pages[worker].brought.append((at_s, weight))
            case Joined(worker=worker):
                self._pages.setdefault(worker, _Page(since_s=self._now_s)).update = set()
            case Left(worker=worker):
                touched |= self._is_there({push for missing, _ in self._open for push in missing if push[0] == worker})
        for action in actions:
            match action:
                case Apply(pushes=pushes, in_order=in_order):
                    self._applied(pushes, in_order)
                    touched |= {worker for worker, _ in pushes}
                case Drop(pushes=pushes):
                    for worker, _ in pushes:
                        if worker in self._pages:
                            self._pages[worker].left_out += 1
                    touched |= self._is_there(set(pushes)) | {worker for worker, _ in pushes}
                case Grant(worker=worker) | Release(worker=worker) | Evict(worker=worker):
                    touched.add(worker)
        for worker in touched & self._pages.keys():
            page = self._pages[worker]
            page.waited_s, page.since_s = self._waited_s(page), self._now_s
            page.waits = self._waits(page, state.members.get(worker))

    def swapped(self, before: Policy, at_s: float, *, by_controller: bool) -> None:
        """Another policy than `before` decides from now on."""
        self._past.swapped(before, at_s, by_controller=by_controller)
        for page in self._pages.values():
            page.brought.clear()

    def metrics(
        self, at_s: float, state: State, sync: Policy, looks_back_s: float, staleness: Mapping[int, float]
    ) -> Metrics:
        """The metrics as of now.

        Args:
            looks_back_s: readings that are older are forgotten, but for one.
            staleness: mean of it, by worker.
        """
        self._now_s = max(self._now_s, at_s)
        self._look_at_pace(state.members)
        steps = {worker: member.step + member.held for worker, member in state.members.items()}
        now = Reading(
            at_s,
            steps,
            {worker: self._waited_s(self._pages[worker]) for worker in state.members},
            brought=steps,
            left_out={worker: self._pages[worker].left_out for worker in state.members},
        )
        self._past.note(now, looks_back_s)
        computing_s = {worker: m.computing_s for worker, m in state.members.items() if m.computing_s is not None}
        return self._past.metrics(sync, now, computing_s, dict(staleness))

    def _look_at_pace(self, workers: Iterable[int]) -> None:
        """Measure from contribution to contribution, since all may come at the same time, and seldom."""
        each = [tuple(self._pages[worker].brought) for worker in workers]
        if not each or any(len(brought) <= _PACED or brought[-1][0] <= brought[0][0] for brought in each):
            return
        per_s = add_up(
            add_up(weight for _, weight in later) / (later[-1][0] - first_s) for (first_s, _), *later in each
        ) / len(each)
        self._past.brought(per_s)

    def _waited_s(self, page: _Page) -> float:
        """Seconds that a worker has waited until now."""
        return page.waited_s + (self._now_s - page.since_s) * page.waits

    def _applied(self, pushes: tuple[Push, ...], in_order: bool) -> None:
        missing = {push for push in pushes if push[0] in self._pages and self._arrived.get(push[0], -1) < push[1]}
        before = [rest for rest, ordered in self._open if ordered and in_order]
        update = missing.union(*before)  # one for all of them
        for worker, _ in pushes:
            if worker in self._pages:
                self._pages[worker].update = update
        if missing:
            self._open.append((missing, in_order))

    def _is_there(self, pushes: set[Push]) -> set[int]:
        """End the waits for these contributions; a worker that waits for no others ends its own, too."""
        emptied = set()
        for update in {id(page.update): page.update for page in self._pages.values() if page.update}.values():
            update -= pushes
            if not update:
                emptied.add(id(update))
        for missing, _ in self._open:
            missing -= pushes
        self._open = [one for one in self._open if one[0]]
        return {worker for worker, page in self._pages.items() if id(page.update) in emptied} if emptied else set()

    def _waits(self, page: _Page, member: Member | None) -> bool:
        if member is None:
            return False
        if member.held:
            return member.granted_s is None or member.arrived
        return member.released_s is not None and not member.owes and bool(page.update)
