"""The coordinator on the first shard: hears events, and has what it says carried out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING, Protocol

from offbeat.coordinator.events import LifeOver, PushLost, TimePassed
from offbeat.coordinator.instructions import (
    AppendHistory,
    RejectPeer,
    SendReply,
    SendToAll,
    SendToShards,
    SendToWorker,
    SetTimer,
    WriteLog,
)
from offbeat.server.shard.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.coordinator.coordinator import Coordinator
    from offbeat.coordinator.events import CoordinatorEvent
    from offbeat.coordinator.instructions import Timer
    from offbeat.history import Record
    from offbeat.protocol.messages import Decision, ToWorker
    from offbeat.protocol.plan_swap import AdoptPlan
    from offbeat.server.shard.job_clock import JobClock
    from offbeat.sync import Push

_log = logging.getLogger("offbeat")
_A_MOMENT_S = 1e-3  # by which event loops may be early


class InstructionHandler(Protocol):
    """The shard, as far as the coordinator has it do something."""

    def send(self, worker: int, message: ToWorker) -> None:
        """Send a message to a worker; nothing if it is not connected."""

    def send_to_shards(self, decision: Decision) -> Push | None:
        """Have all shards carry out a decision; returns what this one lost by it."""

    def send_to_all(self, adopt: AdoptPlan) -> None:
        """Tell all shards and workers which plan holds."""


class CoordinatorHost:
    """Runs one coordinator on an event loop.

    Args:
        shard: carries out what is for workers and shards.
        record: writes the history.
        clock: of the job.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        shard: InstructionHandler,
        record: Callable[[Record], None],
        clock: JobClock,
    ) -> None:
        self._coordinator, self._shard, self._record, self._clock = coordinator, shard, record, clock
        self._timers: dict[Timer, asyncio.TimerHandle] = {}

    def hear(self, event: CoordinatorEvent) -> None:
        """Have the coordinator hear of an event, and do what it says.

        Raises:
            PeerError: if whoever the event came from is to blame for it.
        """
        self._hear(dataclasses.replace(event, at_s=self._clock.job_s(event.at_s)))

    def _hear(self, event: CoordinatorEvent) -> None:
        shard = self._shard
        for instruction in self._coordinator.handle(event):
            match instruction:
                case SendToWorker(worker=worker, message=message):
                    shard.send(worker, message)
                case SendToShards(decision=decision):
                    if (lost := shard.send_to_shards(decision)) is not None:
                        self._hear(PushLost(event.at_s, decision.model, lost))
                case SendToAll(message=adopt):
                    shard.send_to_all(adopt)
                case SendReply(asker=Peer() as asker, message=message):
                    asker.say(message)
                case SetTimer(timer=timer, at_s=at_s):
                    self._set_timer(timer, at_s)
                case AppendHistory(record=record):
                    self._record(record)
                case WriteLog(text=text, level=level):
                    _log.log(level, "%s", text)
                case RejectPeer(error=error):
                    raise error

    def stop(self) -> None:
        """Have nothing decided any more, nor anything happen later."""
        for timer in self._timers.values():
            timer.cancel()
        self.hear(LifeOver(now_s()))

    def _set_timer(self, timer: Timer, at_s: float | None) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()
        if at_s is not None and not self._coordinator.is_over:
            loop_s = self._clock.loop_s(at_s)
            self._timers[timer] = asyncio.get_running_loop().call_at(loop_s, self._on_timer, timer, at_s)

    def _on_timer(self, timer: Timer, at_s: float) -> None:
        del self._timers[timer]
        if self._clock.job_s(now_s()) < at_s - _A_MOMENT_S:  # the clock stood still meanwhile
            self._set_timer(timer, at_s)
        else:
            self.hear(TimePassed(now_s(), timer))


def now_s() -> float:
    """Monotonic seconds, as the running loop counts them."""
    return asyncio.get_running_loop().time()
