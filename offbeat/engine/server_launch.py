"""A parameter server beside the workers: where it is, or how rank 0, or every rank, starts a shard of it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from offbeat.diagnosis.wait import ThreadCall, WaitContext
from offbeat.engine.sentinels import meeting_address
from offbeat.errors import NetworkError
from offbeat.server.launch import ShardAnnouncement

if TYPE_CHECKING:
    import subprocess
    from concurrent.futures import Future
    from pathlib import Path

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.fabric import Served
    from offbeat.server.launch import ShardSettings


class ServerLaunch:
    """The server of a job, started beside one worker meanwhile; the others have nothing to start.

    Args:
        beside: rank of that worker.
        settings: of the first shard; None on the others.
    """

    def __init__(self, beside: int, settings: ShardSettings | None) -> None:
        from offbeat.server.launch import start_shard

        self.beside, self._settings = beside, settings
        self._call = None if settings is None else ThreadCall(lambda: start_shard(settings), "offbeat-server")

    def done(self) -> bool:
        """Whether it is there, or cannot be."""
        return self._call is None or self._call.done()

    def where(self, waiter: BlockingWait) -> ShardAnnouncement:
        """Wait until the server is there; where that is, for all; nothing from a worker that starts none.

        Raises:
            NetworkError: if it cannot be started.
        """
        settings, call = self._settings, self._call
        if settings is None or call is None:
            return ShardAnnouncement()
        waiter.wait(call, WaitContext("starting the parameter server", alone=True, starts=True))
        _, address = call.outcome.result()
        return ShardAnnouncement(address, settings.job, settings.token)

    def abandon(self) -> None:
        """Give the server up: no worker will use it."""
        if self._call is not None:
            self._call.outcome.add_done_callback(_terminate)


def _terminate(started: Future[tuple[subprocess.Popen[bytes], str]]) -> None:
    if started.exception() is None:
        started.result()[0].terminate()


def start_beside(context: WorkerContext) -> ServerLaunch:
    """Have the first worker begin to start the first shard of a server, with its own job and token. Collective."""
    control = context.control
    bind = meeting_address(control)
    if not control.is_leader:
        return ServerLaunch(control.leader, None)
    job, token = secrets.token_hex(8), secrets.token_hex(32)
    settings = msgspec.structs.replace(context.launcher.settings, job=job, token=token, bind=bind)
    return ServerLaunch(control.rank, _with_snapshots(settings, context.run_dir, control.rank))


def addresses_of(spec: Served, context: WorkerContext, *, again: bool = False) -> tuple[str, ...]:
    """The addresses of shards that somebody else has started; empty if there are none.

    Args:
        again: the job had left a server, which has ended: it is not the one that the launcher named any more.
    """
    return spec.addresses or (() if again else context.launcher.servers)


def beside_workers(
    context: WorkerContext, starting: ServerLaunch, *, everywhere: bool
) -> tuple[tuple[str, ...], ShardSettings]:
    """Wait for the shard that one worker starts; where it is, and how to connect. Collective.

    Args:
        everywhere: the others start one each, which follows that one.

    Raises:
        NetworkError: on all workers, if one cannot be started.
    """
    control, waiter = context.control, context.waiter
    try:
        mine = starting.where(waiter)
    except NetworkError as error:
        mine = ShardAnnouncement(error=str(error))
    beside = starting.beside
    texts = control.texts("the parameter server's address", mine.to_json())
    if beside not in texts:
        raise NetworkError(f"Cannot start a parameter server: rank {beside}, beside which that was to be, is lost.")
    first = ShardAnnouncement.from_json(texts[beside])
    if first.error:
        raise NetworkError(first.error)
    settings = msgspec.structs.replace(context.launcher.settings, job=first.job, token=first.token)
    if not everywhere:
        return (first.address,), settings
    mine = ShardAnnouncement(first.address)
    bind = meeting_address(control)
    if control.rank != beside:
        try:
            fresh = msgspec.structs.replace(settings, bind=bind, coordinator=first.address)
            mine = ShardAnnouncement(_start(_with_snapshots(fresh, context.run_dir, control.rank), waiter))
        except NetworkError as error:
            mine = ShardAnnouncement(error=str(error))
    texts = control.texts("the addresses of the shards", mine.to_json())
    others = [ShardAnnouncement.from_json(text) for rank, text in texts.items() if rank != beside]
    for one in others:
        if one.error:
            raise NetworkError(one.error)
    return (first.address, *(one.address for one in others)), settings


def _start(settings: ShardSettings, waiter: BlockingWait) -> str:
    """Start a shard, which imports torch: for seconds, in which the others are told what they wait for. Its address."""
    from offbeat.server.launch import start_shard

    what = WaitContext("starting a shard of the parameter server", alone=True, starts=True)
    _, address = waiter.call(lambda: start_shard(settings), what)
    return address


def _with_snapshots(settings: ShardSettings, run_dir: Path | None, shard: int) -> ShardSettings:
    """The same, with a folder for snapshots, so that the shard can be started again if it dies."""
    from offbeat.server.launch import RESTARTS

    if run_dir is None:
        return settings
    folder = run_dir / "server" / f"shard-{shard}"
    return msgspec.structs.replace(settings, snapshots=str(folder), is_fresh=True, restarts=RESTARTS)
