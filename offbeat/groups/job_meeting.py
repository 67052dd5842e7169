"""The meeting of the workers of torchrun or `offbeat run` for a fit."""

from __future__ import annotations

import contextlib
import logging
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from offbeat.clock import WallClock
from offbeat.diagnosis.wait import BlockingWait
from offbeat.fabric.generation import StoreMeeting
from offbeat.run.environment import Environment
from offbeat.run.rendezvous import join

_log = logging.getLogger("offbeat")
_PATIENCE = timedelta(seconds=60)
_met = 0  # how often the workers met for a fit


def join_job() -> None:
    """Make sure that torch's default process group exists if there is more than one worker.

    Raises:
        PlanError: if the environment names no rank of this worker.
    """
    environment = Environment()
    waiter = BlockingWait(clock=WallClock(), timeout=environment.timeout or _PATIENCE, tell=_log.warning)
    join(waiter, environment)


class JobMeeting:
    """The store of torch in which the workers of a job have met. A `MeetingPlace`; all make it equally often."""

    def __init__(self) -> None:
        global _met
        self._store = PrefixStore(f"offbeat-groups-{_met}", dist.distributed_c10d._get_default_store())
        self.tell_all = StoreMeeting(
            self._store, dist.get_rank(), dist.get_world_size(), is_over=lambda: bool(self.failure())
        )
        _met += 1

    def note_failure(self, text: str) -> None:
        """Leave a note why one's fit has failed, unless there is one."""
        with contextlib.suppress(RuntimeError):  # the first worker has ended, and its store with it
            if not self._store.check(["failure"]):
                self._store.set("failure", text)

    def failure(self) -> str:
        """Return the note; "" if there is none."""
        with contextlib.suppress(RuntimeError):
            return self._store.get("failure").decode() if self._store.check(["failure"]) else ""
        return ""
