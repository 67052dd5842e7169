"""The mesh of a process for lanes, on an event loop of its own."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError
from offbeat.fabric.introduction import introduce
from offbeat.wire.lane import MAX_CHANNELS, StagingPool
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.mesh import PeerMesh
from offbeat.wire.session import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.server.launch import ShardSettings
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.mesh import MeshChannel

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
            told = introduce(meet, settings, lambda bind, credentials: self._listen(job, bind, credentials))
            self.addresses = {other: one.address for other, one in zip(members, told, strict=True)}
            self.interfaces = [one.interface for one in told]
            self.loop.run(self.mesh.meet(self.addresses, timeout))
        except BaseException:
            self.abandon()
            raise

    def _listen(self, job: str, bind: str, credentials: Credentials) -> str:
        self._mesh = self.loop.run(_made(self.rank, job, credentials))
        return self.loop.run(self._mesh.open(bind))

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


async def _made(rank: int, job: str, credentials: Credentials) -> PeerMesh:
    return PeerMesh(rank, job=job, credentials=credentials, limits=_LIMITS)
