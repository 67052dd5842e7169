"""The sentinels of all workers, started and connected with each other."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from offbeat.diagnosis.sentinel_client import SentinelClient
from offbeat.errors import NetworkError
from offbeat.wire.interfaces import address_for_peers

if TYPE_CHECKING:
    from offbeat.engine.control_group import ControlGroup

_log = logging.getLogger("offbeat")
_HEARD_S = 10.0  # for a newcomer's sentinel to be heard
_ASK_PATIENCE = timedelta(seconds=0.2)


class HubAnnouncement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rank 0's announcement of its hub to the other workers; travels as JSON.

    Args:
        address: "host:port"; "" if there is none.
        token: of the run, hexadecimal.
        error: why there is no address.
    """

    address: str = ""
    token: str = ""
    error: str = ""


def meeting_address(control: ControlGroup) -> str:
    """Find an address where this worker can listen so that all others reach it: loopback if all are on one machine.
    Collective.
    """
    here = control.texts("the comparison of machines", _machine())
    return "127.0.0.1" if len(set(here.values())) == 1 else address_for_peers(os.environ)


def start_watch(control: ControlGroup, *, stays_without_worker: bool = False) -> SentinelClient | None:
    """Give this worker a sentinel, and connect it with the others'. Collective.

    The hub's address and the run's token, fresh for each run, travel over the control group: who can read there could
    read the gradients as well.

    Args:
        stays_without_worker: the hub stays when its worker is lost, since the job goes on.

    Returns:
        None if the hub or the sentinel cannot be started; training works without, only silently.
    """
    bind = meeting_address(control)
    token, watch, announcement = secrets.token_bytes(32), None, HubAnnouncement()
    if control.rank == 0:
        try:
            watch = SentinelClient.start(
                rank=0, world=control.world, token=token, hub=None, bind=bind, stays_without_worker=stays_without_worker
            )
            announcement = HubAnnouncement(watch.hub, token.hex())
        except NetworkError as error:
            announcement = HubAnnouncement(error=str(error))
    texts = control.texts("the hub's address", msgspec.json.encode(announcement).decode())
    hub = msgspec.json.decode(texts[0], type=HubAnnouncement)
    if hub.error:
        _log.warning("Stalls will not be explained in this run: %s", hub.error)
        return None
    if watch is not None:
        return watch
    try:
        return SentinelClient.start(
            rank=control.rank, world=control.world, token=bytes.fromhex(hub.token), hub=hub.address
        )
    except NetworkError as error:
        _log.warning("Rank %d cannot say where it is, and will not hear why it waits: %s", control.rank, error)
        return None


def join_watch(rank: int, world: int, *, hub: str, token: bytes) -> SentinelClient:
    """Give a newcomer a sentinel that those of the others hear.

    Args:
        rank: of this worker, beyond those of the beginning.
        hub, token: as the others have them.

    Raises:
        NetworkError: if that cannot be: nobody would know if this worker was lost.
    """
    watch = SentinelClient.start(rank=rank, world=world, token=token, hub=hub)
    deadline_s = time.monotonic() + _HEARD_S
    while time.monotonic() < deadline_s:
        with suppress(NetworkError):  # on a crowded machine it may take longer to answer, just when it has started
            cluster = watch.ask_all(_ASK_PATIENCE)
            if cluster.hub_lost_s is None and any(words.rank == rank and words.host for words in cluster.words):
                return watch
        time.sleep(_ASK_PATIENCE.total_seconds() / 4)
    watch.close(well=False)
    raise NetworkError(
        f"Cannot join: the hub of the job, at {hub}, cannot be reached from here, so nobody would know if "
        "this worker was lost. Start it where that address can be reached."
    )


def _machine() -> str:
    """Equal for workers that can reach each other over loopback: same host, same network namespace."""
    return f"{socket.gethostname()} {os.stat('/proc/self/ns/net').st_ino}"
