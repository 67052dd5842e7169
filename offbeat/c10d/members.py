"""The members of a group, before there is one: all of them come, and run the same offbeat."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from offbeat.diagnosis.process_state import glance
from offbeat.errors import DisagreementError, NetworkError
from offbeat.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

_log = logging.getLogger("offbeat")

_PAUSE_S, _MOMENT_S, _REPORT_S = 0.005, 2.0, 10.0


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that takes part, as it tells the others."""

    host: str
    pid: int
    machine: str
    version: str

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"

    def standstill(self) -> str:
        """Say why its process stands still, as far as this machine's kernel knows."""
        if self.machine == this_machine():
            is_paused = glance(self.pid).state == "paused"
            return "it is paused (SIGSTOP)" if is_paused else "it holds the GIL in C, or gets no processor"
        return "it is paused, holds the GIL in C, or gets no processor"


def this_machine() -> str:
    """Name this boot of the machine, and the numbering of its processes that this one sees; "" if it is not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def meet_members(store: Store, place: int, ranks: Sequence[int], timeout: timedelta) -> dict[int, GroupMember]:
    """Wait until all have come; return who each is, by rank. Collective.

    Args:
        store: for this meeting alone.
        place: of this worker.
        ranks: the members' in the job, by place.

    Raises:
        NetworkError: if not all come in time.
        DisagreementError: if they do not run the same offbeat.
    """
    mine = GroupMember(host=socket.gethostname(), pid=os.getpid(), machine=this_machine(), version=__version__)
    try:
        store.set(str(place), msgspec.json.encode(mine).decode())
        _wait_for_all(store, ranks, timeout.total_seconds())
        found = {
            rank: msgspec.json.decode(store.get(str(number)), type=GroupMember) for number, rank in enumerate(ranks)
        }
    except (RuntimeError, dist.DistError, msgspec.MsgspecError) as error:
        raise NetworkError(f"Cannot make a group: torch's store does not answer ({_first_line(error)}).") from error
    for rank, one in found.items():
        if one.version != mine.version:
            _linger(store, place, len(ranks))
            raise DisagreementError(
                f"Cannot make a group: rank {rank} ({one}) runs offbeat {one.version}, and rank {ranks[place]} "
                f"{mine.version}. Install the same everywhere."
            )
    return found


def _wait_for_all(store: Store, ranks: Sequence[int], timeout_s: float) -> None:
    began_s, is_reported = time.monotonic(), False
    missing = dict(enumerate(ranks))
    while missing := {place: rank for place, rank in missing.items() if not store.check([str(place)])}:
        waited_s = time.monotonic() - began_s
        names = ", ".join(map(str, missing.values()))
        if waited_s > timeout_s:
            raise NetworkError(
                f"Cannot make a group within the timeout of {timeout_s:g} s: rank {names} has not come. All of its "
                'ranks have to ask for it, by init_process_group("offbeat") or new_group.'
            )
        if waited_s > _REPORT_S and not is_reported:
            is_reported = True
            _log.warning("Waiting for %.0f s for rank %s to make a group.", waited_s, names)
        time.sleep(_PAUSE_S)


def _linger(store: Store, place: int, world: int) -> None:
    """Wait a moment for the others to read what they all find: who ends may take the store with it."""
    deadline_s = time.monotonic() + _MOMENT_S
    with suppress(RuntimeError, dist.DistError):
        store.set(f"read/{place}", "")
        while time.monotonic() < deadline_s and not store.check([f"read/{one}" for one in range(world)]):
            time.sleep(_PAUSE_S)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
