"""The mesh of a process for lanes, on an event loop of its own.

Workers that know each other already (by a process group, or a store) tell each other where they listen. Where no token
and no certificates were given, the first worker draws a token for all.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.errors import NetworkError
from offbeat.payload import Gather, Total
from offbeat.wire.credentials import Certificates, Token
from offbeat.wire.interfaces import address_for_peers, interface_of, nominal_mbps
from offbeat.wire.lane import MAX_CHANNELS, StagingPool
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.mesh import PeerMesh
from offbeat.wire.session import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.fabric.fabric import Fabric
    from offbeat.server.launch import ShardSettings
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.mesh import MeshChannel

_POLL = timedelta(milliseconds=20)
# A peer that hung up, as a process that is killed does, is lost after a fifth of it. One that is silent is lost after
# all of it if its machine is silent, too. Else whoever waits decides: a worker may well hold the GIL for some seconds.
# Silence is counted from the last word of the peer's kernel, and everybody is to know within 5 s.
_TIMEOUT = timedelta(seconds=4.7)
_SILENT_S = 1.0
_MEASUREMENT = timedelta(seconds=20)  # at least: the slowest link takes so long for the least that tells something
_LIMITS = Limits(max_metadata_bytes=4 << 10, max_body_bytes=4 << 20, timeout=_TIMEOUT)


class LaneNetwork:
    """The mesh, and the thread that it lives on.

    Args:
        rank: of this worker.
        members: the ranks that take part, each at its place.
        job: the name of the group's generation.
        meet: tells the others what this worker has to say, and returns what all say, by place.
        settings: the credentials; None for a token of the first worker's.
        timeout: for how long the others are waited for.

    Attributes:
        patience: for how long a measurement, or a trial of paths, may take.
        interfaces: by place, over which each has its links, for people.

    Raises:
        NetworkError, PeerError: if there is no link with one of them.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        job: str,
        meet: Callable[[str], list[str]],
        settings: ShardSettings | None,
        timeout: timedelta,
    ) -> None:
        self.rank, self.members, self.place, self.world = rank, tuple(members), members.index(rank), len(members)
        self.name, self._measured = job, 0
        self._mesh: PeerMesh | None = None
        self.patience = max(timeout, _MEASUREMENT)
        self.loop, self.pool = LoopThread("offbeat-lanes"), StagingPool()
        self._numbers = itertools.count()
        try:
            said = [json.loads(text) for text in meet(json.dumps({"token": secrets.token_hex(32)}))]
            credentials = None if settings is None else settings.credentials()
            bind = address_for_peers(os.environ)
            if credentials is None:
                credentials = Token(str(said[0]["token"]).encode())
            elif isinstance(credentials, Certificates):
                credentials.check_serves(bind)
            mesh = self._mesh = self.loop.run(_made(rank, job, credentials))
            address = self.loop.run(mesh.open(bind))
            told = [json.loads(text) for text in meet(json.dumps({"address": address, "interface": _interface(bind)}))]
            self.addresses = {other: str(one["address"]) for other, one in zip(members, told, strict=True)}
            self.interfaces = [str(one["interface"]) for one in told]
            self.loop.run(mesh.meet(self.addresses, timeout))
        except BaseException:
            self.abandon()
            raise

    @property
    def mesh(self) -> PeerMesh:
        """The links."""
        assert self._mesh is not None, "it was made"
        return self._mesh

    @property
    def lost(self) -> dict[int, str]:
        """The reasons why those are lost that are, by rank; who has left in order is not."""
        mesh = self.mesh
        return {rank: str(error) for rank, error in list(mesh.lost.items()) if rank not in mesh.left}

    @property
    def is_broken(self) -> bool:
        """Whether there is no connection with one of the others just now."""
        return self.mesh.is_broken

    @property
    def stalled(self) -> dict[int, float]:
        """The ranks that stand still, and for how many seconds; see `PeerMesh.stalled`."""
        return self.mesh.stalled()

    def channel(self) -> MeshChannel:
        """A channel for one more user; users come in the same order on all workers."""
        return self.mesh.channel(next(self._numbers))

    def measurements(self, count: int) -> tuple[MeshChannel, int]:
        """The channel of measurements, and the number of the first of so many exchanges; in the same order on all."""
        first, self._measured = self._measured, self._measured + count
        return self.mesh.channel(MAX_CHANNELS - 1), first

    def silence_of(self, rank: int) -> str:
        """Say that nothing was heard of a worker lately; "" if something was."""
        silent_s = self.mesh.silent_s(rank)
        return f"; rank {rank} has been silent for {silent_s:.1f} s" if silent_s > _SILENT_S else ""

    def close(self) -> None:
        """Say good-bye, once all that was sent has arrived; again does nothing."""
        try:
            self.loop.run(self.mesh.close())
        except NetworkError:  # it is closed
            return
        self.loop.close()

    def abandon(self) -> None:
        """Let go at once."""
        try:
            if self._mesh is not None:
                self.loop.call(self._mesh.abort)
        except NetworkError:
            return
        self.loop.close()


def _interface(address: str) -> str:
    """The interface with an address, and what it says it carries, for people."""
    name = interface_of(address)
    rate_mbps = nominal_mbps(name) if name else None
    return name + (f", which says it has {rate_mbps:,}" if rate_mbps else "")


async def _made(rank: int, job: str, credentials: Credentials) -> PeerMesh:
    return PeerMesh(rank, job=job, credentials=credentials, limits=_LIMITS)


def first_unlike(mine: str, meet: Callable[[str], list[str]]) -> tuple[int, str] | None:
    """Compare a text with the others'. Collective; returns the first place that says something else, and what."""
    return next(((place, text) for place, text in enumerate(meet(mine)) if text != mine), None)


def texts_of_all(companion: Fabric, text: str, patience: timedelta) -> list[str]:
    """Tell the others a text, and hear theirs, over a fabric that is there. Collective.

    Raises:
        NetworkError: if not all say theirs within `patience`.
    """
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    pending = companion.start(Gather((mine,)))
    deadline_s = time.monotonic() + patience.total_seconds()
    while not pending.wait(_POLL):
        if time.monotonic() > deadline_s:
            raise NetworkError(
                "Cannot open and measure the links between the workers: within "
                f"{patience.total_seconds():g} s not all of them have told each other what they found. A longer "
                "--timeout gives them longer."
            )
    reply = pending.result()
    assert not isinstance(reply, Total)
    return [bytes(part.tensors[0].tolist()).decode() for part in reply]
