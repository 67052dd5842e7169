"""A shard of a parameter server as a process of its own.

    python -m offbeat.cli.shard_main FD [kept PID]

Its settings come as JSON on standard input; its `ShardAnnouncement`, also as JSON, goes to FD.

It outlives the worker that started it: it ends when the last worker has gone, or when none has come in time. With
`ShardSettings.restarts` this process only starts another one, which serves, and whenever that is killed, or told to
stop, has a spare one serve, which has loaded torch meanwhile and waits; so the server is looked after as long as the
job lasts, whoever started it. To end it, end this process.

Below `offbeat run` it ends when that does, however that ends. There the process that looks after a shard leaves a note
in the folder OFFBEAT_SHARDS with what it takes to start it again: if it is killed itself, `offbeat run` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import select
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from offbeat.backoff import Backoff
from offbeat.clock import WallClock
from offbeat.errors import NetworkError, OffbeatError, PeerError, PlanError
from offbeat.exit_codes import how_it_ended
from offbeat.server.launch import RestartNote, ShardAnnouncement, ShardProcess, ShardSettings, restart_backoff
from offbeat.wire import busy_poll

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import FrameType

    from offbeat.clock import Clock
    from offbeat.history import Record
    from offbeat.history.records import Kind
    from offbeat.server.shard.live_image import LiveImage
    from offbeat.server.shard.shard_parts import ShardParts
    from offbeat.server.shard.snapshot_store import SnapshotStore
    from offbeat.wire.link import PeerLink

T = TypeVar("T")

# For the last words to those that are still connected: an onlooker that was stopped or killed never hears them.
_GOOD_BYE_S = 0.5
_LAST_SNAPSHOT_S = 10.0
_GONE_S, _LOOKS_S = 15.0, 0.2  # for workers that have connected, and left before they trained
_ORPHAN_S = 2.0  # for the rest when `offbeat run` is gone
_FIRST_PATIENCE = timedelta(seconds=20)
# For the workers of a snapshot to come back before it is gone on without them; the timeout may have to pass until they
# notice that the server is gone.
_RETURN_S = 15.0
_PATIENCE = timedelta(seconds=60)  # for another shard to be started again
_LIFE_PAUSES_S = (0.1, 2.0)  # before another life: the first, and the longest
_HOLDS_S = 20.0  # a life that was good for something
_LOOK_S = 0.05  # during a pause, whether to stop
_PR_SET_PDEATHSIG = 1
_STOPPED = 75  # exit code of one that was asked to stop; 0 says that the job has ended
_log = logging.getLogger("offbeat")


async def serve(settings: ShardSettings, say: Callable[[str], None]) -> bool:
    """Serve one job: until its last worker has gone, or SIGTERM or SIGINT comes, which leave a snapshot.

    Args:
        say: called with "host:port" when workers may come.

    Returns:
        Whether it was asked to stop.

    Raises:
        NetworkError: if the address, the credentials or a folder, for snapshots or the history, cannot be used, or the
            coordinator cannot be reached.
        PeerError: if the coordinator does not take it in.
    """
    from offbeat.server.shard.snapshot_store import SnapshotStore

    snapshots = None
    if settings.snapshots:
        snapshots = SnapshotStore(Path(settings.snapshots), settings.job, is_fresh=settings.is_fresh)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    backoff = Backoff(*_LIFE_PAUSES_S, holds_s=_HOLDS_S, seed=f"{settings.bind}:{settings.port}")
    backoff.next_s()  # before the first life
    with _history(settings, stop, snapshots) as record:
        image, process = None, secrets.randbits(39) + 1
        while (ended := await _live(settings, snapshots, stop, say, record, process, image)) is not None:
            address, image = ended
            settings = msgspec.structs.replace(settings, port=int(address.rpartition(":")[2]))
            say = _say_nothing
            await _unless(stop, asyncio.sleep(backoff.next_s()))
            if snapshots is not None:
                snapshots.look()
    return stop.is_set()


@contextlib.contextmanager
def _history(
    settings: ShardSettings, stop: asyncio.Event, snapshots: SnapshotStore | None
) -> Iterator[Callable[[Record], None]]:
    """Open the history of all incarnations of this process, for writing.

    Args:
        stop: set if it was asked to stop: then what it has decided last may not be made.
        snapshots: none is written before the history that leads to it.

    Raises:
        NetworkError: if its folder cannot be used.
    """
    if not settings.history:
        yield _forget
        return
    from offbeat.history import HistoryWriter

    kind: Kind = "shard" if settings.coordinator else "coordinator"
    try:
        writer = HistoryWriter(Path(settings.history), kind, kind=kind, job=settings.job)
    except OSError as error:
        why = error.strerror or error
        raise NetworkError(f"Cannot keep a history in {settings.history}: {why}. Choose another folder.") from error
    if snapshots is not None:
        snapshots.before_write = writer.flush  # a killed process has else snapshots of updates that nobody has recorded
    try:
        yield writer.append
    finally:
        writer.close("it was asked to stop" if stop.is_set() else "")


def _parts_of(text: str) -> ShardParts:
    """Read what shards carry out of a plan; one that cannot be read is refused by the shard that coordinates."""
    from offbeat.plan import Plan
    from offbeat.server.shard.shard_parts import ShardParts

    try:
        plan = Plan.from_toml(text)
    except PlanError:
        return ShardParts()
    codec = plan.pushed_codec if plan.encodes_blocks else None
    return ShardParts(rule=plan.judging_rule, codec=codec, privacy=plan.privacy)


async def _live(
    settings: ShardSettings,
    snapshots: SnapshotStore | None,
    stop: asyncio.Event,
    say: Callable[[str], None],
    record: Callable[[Record], None],
    process: int,
    image: LiveImage | None,
) -> tuple[str, LiveImage | None] | None:
    """One life of the shard (see `offbeat.coordinator.reconnect`); where it was, and what it still holds, if it is to
    begin another one.

    Args:
        process: a random number of this process.
        image: what it still holds of the life before.
    """
    from offbeat.plan import Plan
    from offbeat.server.shard.shard import Shard
    from offbeat.wire.session import Limits
    from offbeat.wire.tcp import connect, listen

    ended, again = asyncio.Event(), asyncio.Event()
    shard = Shard(
        None if settings.coordinator else Plan.from_toml,
        ended.set,
        snapshots=snapshots,
        job=settings.job,
        every=settings.every,
        again=again.set,
        patience_s=2 * settings.timeout_s,
        record=record,
        parts_of=_parts_of,
        process=process,
        image=image,
    )
    limits = Limits(timeout=timedelta(seconds=settings.timeout_s))
    credentials = settings.credentials()
    coordinator: PeerLink | None = None
    if settings.coordinator:
        dialling = connect(
            settings.coordinator,
            accept=shard.follow,
            job=settings.job,
            rank=0,
            role="shard",
            credentials=credentials,
            limits=limits,
            patience=_FIRST_PATIENCE if snapshots is None else _PATIENCE,
        )
        coordinator = await _unless(stop, dialling)
        if coordinator is None:
            return None
        await _first_of(shard.begun, ended, again, stop)
        if shard.refusal:
            raise PeerError(f"Cannot serve beside {settings.coordinator}: it refused. {shard.refusal}")
    listener = await listen(
        settings.bind, settings.port, accept=shard.accept, job=settings.job, credentials=credentials, limits=limits
    )
    shard.begin_with_who_is_here_after(max(_RETURN_S, 2 * settings.timeout_s + 1))

    async def end_if_nobody_comes() -> None:
        left_s, looks_s = settings.patience_s, min(_LOOKS_S, settings.patience_s)
        while not shard.was_visited and left_s > 0:
            await asyncio.sleep(looks_s)
            left_s -= looks_s
            # Between connecting and training a worker may prepare its data for as long as it likes. Those that leave
            # without having trained do not come back, or hardly, if their script has failed.
            if any(link.role == "worker" for link in listener.links):
                left_s = min(settings.patience_s, _GONE_S)
            elif shard.was_declined:
                left_s = 0.0
        if not shard.was_visited:
            ended.set()

    looking = asyncio.ensure_future(end_if_nobody_comes()) if settings.patience_s else None
    say(listener.address)
    await _first_of(ended, again, stop)
    if looking is not None:
        looking.cancel()
    if stop.is_set() and not again.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SNAPSHOT_S):
                await shard.save()
        shard.tell_validators_of_end()
    shard.stop()
    listener.close()
    await shard.be_quiet()
    if again.is_set() and not stop.is_set():
        for link in [*listener.links, *([] if coordinator is None else [coordinator])]:
            link.fail(NetworkError("another shard of the parameter server was lost, so that all begin anew"))
        return listener.address, shard.image
    if snapshots is not None and stop.is_set():
        for link in [link for link in listener.links if link.role == "shard"]:  # they wait for it to be started again
            link.fail(NetworkError("the shard that coordinates was asked to stop"))
    if snapshots is not None and shard.is_finished and not stop.is_set():
        snapshots.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GOOD_BYE_S):
            await asyncio.gather(*(link.close() for link in listener.links))
    return None


async def _first_of(*events: asyncio.Event) -> None:
    """Wait for one of them."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _unless(stop: asyncio.Event, coroutine: Coroutine[Any, Any, T]) -> T | None:
    """Return what the coroutine returns, or raise what it raises; None if `stop` is set before."""
    task, stopping = asyncio.ensure_future(coroutine), asyncio.ensure_future(stop.wait())
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return None


def _say_nothing(address: str) -> None:
    """Workers know it already."""


def _forget(record: Record) -> None:
    """Ignore the record: no history is kept."""


def look_after(settings: ShardSettings, say: Callable[[str], None], clock: Clock | None = None) -> None:
    """Start a shard as another process, and start it again whenever it is killed or told to stop.

    It ends when the shard has ended by itself, or when it is told to stop, which it passes on. A shard that does not
    last is started again after a pause.

    Raises:
        NetworkError: if it cannot be started for the first time.
    """
    settings, left = msgspec.structs.replace(settings, restarts=0), settings.restarts
    serving, was_stopped, clock = ShardProcess(is_kept=True), False, clock or WallClock()
    backoff = restart_backoff(clock)
    address = serving.serve(settings)

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal was_stopped
        was_stopped = True
        serving.process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    settings = msgspec.structs.replace(settings, is_fresh=False, port=int(address.rpartition(":")[2]))
    note = RestartNote.mine(os.environ.get("OFFBEAT_SHARDS"))
    note.write(msgspec.structs.replace(settings, restarts=left))
    say(address)
    while True:
        spare = _spare() if left else None
        if (code := serving.process.wait()) == 0 or was_stopped:
            break
        how = "was asked to stop" if code == _STOPPED else how_it_ended(code)
        if not left:
            told = f"The parameter server at {address} {how}, for the last time: it is not started again."
            _log.error("%s", told)
            note.give_up(told)
            return
        left -= 1
        _log.warning(
            "The parameter server at %s %s; it is started again (and %d more times if need be).", address, how, left
        )
        note.write(msgspec.structs.replace(settings, restarts=left))
        due_s = clock.now_s() + backoff.next_s()
        while clock.now_s() < due_s and not was_stopped:
            clock.sleep(_LOOK_S)
        if was_stopped:
            break
        try:
            serving = spare if spare is not None and spare.process.poll() is None else ShardProcess(is_kept=True)
            serving.serve(settings)
        except NetworkError as error:
            if was_stopped:
                note.remove()
            else:
                _log.error("%s", error)
                note.give_up(str(error))
            return
        if was_stopped:  # while it was being started
            serving.process.terminate()
    note.remove()


def _spare() -> ShardProcess | None:
    """One to take the place of the one that serves; None if there can be none now, which is no reason to end that."""
    try:
        return ShardProcess(is_kept=True)
    except NetworkError as error:
        _log.warning("None stands by in case that the parameter server is lost. %s", error)
        return None


def prepare_process() -> None:
    """Prepare the process for serving."""
    import torch

    torch.set_num_threads(1)
    # The first optimizer of a process makes torch import for seconds, in which no worker would get an answer.
    torch.optim.SGD([torch.zeros(1)], lr=0.0).step()


def main() -> None:
    """Take the settings from standard input, and serve."""
    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    fd, is_kept = int(sys.argv[1]), sys.argv[2:3] == ["kept"]
    if not is_kept:
        _end_with_launcher()
    else:
        _end_with_parent(int(sys.argv[3]))
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # of a terminal, to all: one to spare has nothing to say
        prepare_process()  # before it is told what: a server that was lost must not wait for that
    if not (said_to_us := sys.stdin.buffer.read()):  # a spare one that was not needed
        return
    settings = msgspec.json.decode(said_to_us, type=ShardSettings)

    has_announced = False

    def announce(announcement: ShardAnnouncement) -> None:
        nonlocal has_announced
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, f"{announcement.to_json()}\n".encode())
            os.close(fd)
            has_announced = True

    def say(address: str) -> None:
        announce(ShardAnnouncement(address))

    try:
        if settings.restarts:
            look_after(settings, say)
        else:
            if not is_kept:
                prepare_process()
            if busy_poll.run(serve(settings, say)) and is_kept:
                sys.exit(_STOPPED)
    except OffbeatError as error:
        if has_announced:
            _log.error("%s", error)
        else:
            announce(ShardAnnouncement(error=str(error)))


def _end_with_launcher() -> None:
    """Be told to stop when `offbeat run` is gone, if that is above this process, and end soon then."""
    launcher = os.environ.get("OFFBEAT_LAUNCHER_PID")
    if launcher is None:
        return
    try:
        handle = os.pidfd_open(int(launcher))
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([handle], [], [])
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_ORPHAN_S)
        # With all that `offbeat run` would have ended, so also with a process to be kept that does not know of us yet.
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="offbeat-launcher", daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """Be killed when the process that looks after this one is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
