"""A shard of a parameter server as a process of its own.

    python -m offbeat.serve FD [kept PID]   (settings as JSON on standard input; its address, or why not, goes to FD)

It outlives the worker that started it: it ends when the last worker has gone, or when none has come in time. With
`Settings.restarts` this process only starts another one, which serves, and whenever that is killed, or told to stop,
has a spare one serve, which has loaded torch meanwhile and waits; so the server is looked after as long as the job
lasts, whoever started it. To end it, end this process.

Below `offbeat run` it ends when that does, however that ends. There the process that looks after a shard leaves a note
in the folder OFFBEAT_SHARDS with what it takes to start it again: if it is killed itself, `offbeat run` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.exits import how_it_ended
from offbeat.wire import eager
from offbeat.wire.process import glance

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping
    from types import FrameType

    from offbeat.fabric.server.shard.archive import Archive
    from offbeat.history import Record
    from offbeat.history.records import Kind
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import Link

T = TypeVar("T")

_START_S = 60.0
# For the last words to those that are still connected: an onlooker that was stopped or killed never hears them.
_GOOD_BYE_S = 0.5
_LAST_SNAPSHOT_S = 10.0
_ORPHAN_S = 2.0  # for the rest when `offbeat run` is gone
_FIRST_PATIENCE = timedelta(seconds=20)
# For the workers of a snapshot to come back before it is gone on without them; the timeout may have to pass until they
# notice that the server is gone.
_RETURN_S = 15.0
_PATIENCE = timedelta(seconds=60)  # for another shard to be started again
_PR_SET_PDEATHSIG = 1
RESTARTS = 5  # of a server that is looked after
_STOPPED = 75  # exit code of one that was told to stop; 0 says that the job has ended
_log = logging.getLogger("offbeat")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one shard.

    Args:
        job: name of the job; workers of another are refused.
        bind: address to listen on.
        port: 0 for one of the kernel's choice.
        coordinator: "host:port" of the first shard; "" if this is it.
        token: secret that the workers know; "" for none.
        certificate, key, authority: PEM files for mutual TLS; "" for none.
        timeout_s: a worker that has been silent for longer is gone.
        patience_s: for how long to wait for the first worker; 0 for ever.
        snapshots: folder for snapshots, of this shard alone; "" for none.
        every: updates between two snapshots.
        is_fresh: the job begins, so snapshots that are there are of no use.
        restarts: how often it is started again when it is killed.
        history: folder for its history; "" for none.
    """

    job: Annotated[str, msgspec.Meta(max_length=256)]
    bind: str = "127.0.0.1"
    port: int = 0
    coordinator: str = ""
    token: str = ""
    certificate: str = ""
    key: str = ""
    authority: str = ""
    timeout_s: float = 5.0
    patience_s: float = 120.0
    snapshots: str = ""
    every: Annotated[int, msgspec.Meta(ge=1)] = 100
    is_fresh: bool = False
    restarts: int = 0
    history: str = ""

    def credentials(self) -> Credentials | None:
        """What both sides have to prove.

        Raises:
            NetworkError: if they cannot be used.
        """
        from offbeat.wire.credentials import Certificates, Token

        token = Token(self.token.encode()) if self.token else None
        files = (self.certificate, self.key, self.authority)
        if not any(files):
            return token
        if not all(files):
            raise NetworkError("Cannot use TLS with a part of its files: name certificate, key and authority.")
        return Certificates(Path(self.certificate), Path(self.key), Path(self.authority), token)


def from_environment(job: str, timeout: timedelta) -> Settings:
    """What a worker, or a shard started by hand, finds in the environment about how to connect."""
    name = os.environ.get
    return Settings(
        job=name("OFFBEAT_JOB", job),
        token=name("OFFBEAT_TOKEN", ""),
        certificate=name("OFFBEAT_CERTIFICATE", ""),
        key=name("OFFBEAT_KEY", ""),
        authority=name("OFFBEAT_AUTHORITY", ""),
        timeout_s=timeout.total_seconds(),
        history=name("OFFBEAT_HISTORY", ""),
    )


def start_shard(
    settings: Settings,
    *,
    wrap: Callable[[list[str]], list[str]] = lambda command: command,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a shard on this machine; the process, and "host:port".

    Args:
        wrap: makes of the command one that runs it elsewhere, such as in a network namespace.
        environment: variables; ours if None.
        output: where its output goes; to ours if None.

    Raises:
        NetworkError: if it cannot be started.
    """
    started = ShardProcess(wrap, environment, output)
    return started.process, started.serve(settings)


class ShardProcess:
    """A process that is to serve once it has been told what.

    Args:
        wrap, environment, output: as of `start_shard`.
        is_kept: it ends when this thread does, and loads what it needs before it is told.
        own_session: it gets no signal of the terminal.

    Raises:
        NetworkError: if there can be no other process.
    """

    def __init__(
        self,
        wrap: Callable[[list[str]], list[str]] = lambda command: command,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
        *,
        is_kept: bool = False,
        own_session: bool = False,
    ) -> None:
        try:
            mine, theirs = os.pipe()
        except OSError as error:  # no more file descriptors
            raise NetworkError(f"Cannot start a parameter server: {error.strerror}.") from error
        command = [sys.executable, "-P", "-m", "offbeat.serve", str(theirs)]
        if is_kept:
            command += ["kept", str(os.getpid())]
        try:
            self.process = subprocess.Popen(
                wrap(command),
                stdin=subprocess.PIPE,
                pass_fds=(theirs,),
                stdout=output,
                stderr=output,
                env={**(os.environ if environment is None else environment), "OMP_NUM_THREADS": "1"},
                start_new_session=own_session,
            )
        except OSError as error:
            os.close(mine)
            raise NetworkError(f"Cannot start a parameter server: {error}.") from error
        finally:
            os.close(theirs)
        self._pipe, self._said, self._told_s = mine, b"", 0.0

    def tell(self, settings: Settings) -> None:
        """Have it serve."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(settings))
            self.process.stdin.close()
        self._told_s = time.monotonic()

    def answer(self, within_s: float) -> str | None:
        """Where it serves, as "host:port", once it has been told to; None if it has not answered so soon.

        Raises:
            NetworkError: if it cannot, or has not answered for long.
        """
        if select.select([self._pipe], [], [], within_s)[0]:
            more = os.read(self._pipe, 4096)
            self._said += more
            if more and not more.endswith(b"\n"):
                return None
        elif time.monotonic() < self._told_s + _START_S:
            return None
        os.close(self._pipe)
        said = self._said.decode(errors="replace").strip()
        if said.startswith("!") or not self._said.endswith(b"\n"):
            why = said[1:].strip() or "it ended at once."
            if self.process.poll() is None and not said:
                why = f"it has not answered for {_START_S:g} s."
            self.process.kill()
            self.process.wait()
            raise NetworkError(f"Cannot start a parameter server: {why}")
        return said

    def serve(self, settings: Settings) -> str:
        """Have it serve; "host:port".

        Raises:
            NetworkError: if it cannot.
        """
        self.tell(settings)
        while (address := self.answer(1.0)) is None:
            pass
        return address


async def serve(settings: Settings, say: Callable[[str], None]) -> bool:
    """Serve one job: until its last worker has gone, or SIGTERM or SIGINT comes, which leave a snapshot.

    Args:
        say: called with "host:port" when workers may come.

    Returns:
        Whether it was told to stop.

    Raises:
        NetworkError: if the address, the credentials or a folder, for snapshots or the history, cannot be used, or the
            coordinator cannot be reached.
        PeerError: if the coordinator does not take it in.
    """
    from offbeat.fabric.server.shard.archive import Archive

    archive = None
    if settings.snapshots:
        archive = Archive(Path(settings.snapshots), settings.job, is_fresh=settings.is_fresh)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with _history(settings, stop) as record:
        while (address := await _live(settings, archive, stop, say, record)) is not None:
            settings = msgspec.structs.replace(settings, port=int(address.rpartition(":")[2]))
            say = _say_nothing
            if archive is not None:
                archive.look()
    return stop.is_set()


@contextlib.contextmanager
def _history(settings: Settings, stop: asyncio.Event) -> Iterator[Callable[[Record], None]]:
    """What writes the history of all lives of this process.

    Args:
        stop: set if it was told to stop: then what it has decided last may not be made.

    Raises:
        NetworkError: if its folder cannot be used.
    """
    if not settings.history:
        yield _forget
        return
    from offbeat.history import Writer

    kind: Kind = "shard" if settings.coordinator else "coordinator"
    try:
        writer = Writer(Path(settings.history), kind, kind=kind, job=settings.job)
    except OSError as error:
        why = error.strerror or error
        raise NetworkError(f"Cannot keep a history in {settings.history}: {why}. Choose another folder.") from error
    try:
        yield writer.append
    finally:
        writer.close("it was told to stop" if stop.is_set() else "")


async def _live(
    settings: Settings,
    archive: Archive | None,
    stop: asyncio.Event,
    say: Callable[[str], None],
    record: Callable[[Record], None],
) -> str | None:
    """One life of the shard (see `offbeat.fabric.server.lead.resume`); where it was, if it is to begin another one."""
    from offbeat.fabric.server import Shard
    from offbeat.plan import Plan
    from offbeat.wire.session import Limits
    from offbeat.wire.tcp import connect, listen

    ended, again = asyncio.Event(), asyncio.Event()
    shard = Shard(
        None if settings.coordinator else Plan.from_toml,
        ended.set,
        archive=archive,
        job=settings.job,
        every=settings.every,
        again=again.set,
        patience_s=2 * settings.timeout_s,
        record=record,
    )
    limits = Limits(timeout=timedelta(seconds=settings.timeout_s))
    credentials = settings.credentials()
    chief: Link | None = None
    if settings.coordinator:
        dialling = connect(
            settings.coordinator,
            accept=shard.follow,
            job=settings.job,
            rank=0,
            role="shard",
            credentials=credentials,
            limits=limits,
            patience=_FIRST_PATIENCE if archive is None else _PATIENCE,
        )
        chief = await _unless(stop, dialling)
        if chief is None:
            return None
        await _first_of(shard.begun, ended, again, stop)
        if shard.refusal:
            raise PeerError(f"Cannot serve beside {settings.coordinator}: it refused. {shard.refusal}")
    listener = await listen(
        settings.bind, settings.port, accept=shard.accept, job=settings.job, credentials=credentials, limits=limits
    )
    shard.begin_with_who_is_here_after(max(_RETURN_S, 2 * settings.timeout_s + 1))

    async def end_if_nobody_comes() -> None:
        await asyncio.sleep(settings.patience_s)
        # Between connecting and training a worker may prepare its data for as long as it likes.
        while any(link.role == "worker" for link in listener.links):
            await asyncio.sleep(settings.patience_s)
        if not shard.was_visited:
            ended.set()

    looking = asyncio.ensure_future(end_if_nobody_comes()) if settings.patience_s else None
    say(listener.address)
    await _first_of(ended, again, stop)
    if looking is not None:
        looking.cancel()
    if stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SNAPSHOT_S):
                await shard.save()
    shard.stop()
    listener.close()
    await shard.be_quiet()
    if again.is_set() and not stop.is_set():
        for link in [*listener.links, *([] if chief is None else [chief])]:
            link.fail(NetworkError("another shard of the parameter server was lost, so that all begin anew"))
        return listener.address
    if archive is not None and stop.is_set():
        for link in [link for link in listener.links if link.role == "shard"]:  # they wait for it to be started again
            link.fail(NetworkError("the shard that coordinates was told to stop"))
    if archive is not None and shard.is_finished and not stop.is_set():
        archive.clear()
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
    """What it returns, or raises; None if `stop` is set before."""
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
    """Nobody wants a history."""


def look_after(settings: Settings, say: Callable[[str], None]) -> None:
    """Start a shard as another process, and start it again whenever it is killed or told to stop.

    It ends when the shard has ended by itself, or when it is told to stop, which it passes on.

    Raises:
        NetworkError: if it cannot be started for the first time.
    """
    settings, left = msgspec.structs.replace(settings, restarts=0), settings.restarts
    serving, was_told = ShardProcess(is_kept=True), False
    address = serving.serve(settings)

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal was_told
        was_told = True
        serving.process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    settings = msgspec.structs.replace(settings, is_fresh=False, port=int(address.rpartition(":")[2]))
    note = RestartNote.mine()
    note.write(msgspec.structs.replace(settings, restarts=left))
    say(address)
    while True:
        spare = _spare() if left else None
        if (code := serving.process.wait()) == 0 or was_told:
            note.remove()
            return
        how = "was told to stop" if code == _STOPPED else how_it_ended(code)
        if not left:
            told = f"The parameter server at {address} {how}, for the last time: it is not started again."
            _log.error("%s", told)
            note.give_up(told)
            return
        left -= 1
        _log.warning("The parameter server at %s %s; it is started again (%d times more).", address, how, left)
        note.write(msgspec.structs.replace(settings, restarts=left))
        try:
            serving = spare if spare is not None and spare.process.poll() is None else ShardProcess(is_kept=True)
            serving.serve(settings)
        except NetworkError as error:
            if was_told:
                note.remove()
            else:
                _log.error("%s", error)
                note.give_up(str(error))
            return
        if was_told:  # while it was being started
            serving.process.terminate()


class RestartNote:
    """Tells `offbeat run` how to start a shard again if the process that looks after it is killed.

    The process that looks after a shard writes it, and removes it when it ends; what is left behind by a process that
    is gone tells that it was killed.

    Args:
        path: where the note lies, named by the pid of its writer; None for nowhere.
    """

    _LOST = ".lost"  # in place of .json where the writer has ended because the shard cannot be started again

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def mine(cls) -> RestartNote:
        """That of this process, below `offbeat run`; elsewhere one that nobody reads."""
        folder = os.environ.get("OFFBEAT_SHARDS")
        return cls(Path(folder) / f"{os.getpid()}.json" if folder else None)

    @classmethod
    def left_behind(cls, folder: Path) -> list[RestartNote]:
        """Those of processes that are gone, and those that tell of a shard that is."""
        gone = [path for path in folder.glob("*.json") if glance(int(path.stem)).state == "dead"]
        return [cls(path) for path in (*gone, *folder.glob(f"*{cls._LOST}")) if path.exists()]

    def write(self, settings: Settings) -> None:
        """It is started again with these."""
        self._put(".json", msgspec.json.encode(settings))

    def give_up(self, why: str) -> None:
        """It is not started again."""
        self._put(self._LOST, why.encode())
        self.remove()

    def read(self) -> Settings | str:
        """With what it is started again; or why it is not."""
        assert self._path is not None
        said = self._path.read_bytes()
        return said.decode() if self._path.suffix == self._LOST else msgspec.json.decode(said, type=Settings)

    def remove(self) -> None:
        """There is nothing to tell any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _put(self, suffix: str, said: bytes) -> None:
        if self._path is None:
            return
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):  # the folder has gone with `offbeat run`, or the disk is full
            part.write_bytes(said)  # whoever reads it must see it whole; the token is in it, and the folder private
            part.replace(self._path.with_suffix(suffix))


def _spare() -> ShardProcess | None:
    """One to take the place of the one that serves; None if there can be none now, which is no reason to end that."""
    try:
        return ShardProcess(is_kept=True)
    except NetworkError as error:
        _log.warning("None stands by in case that the parameter server is lost. %s", error)
        return None


def prepare_process() -> None:
    """What a process needs before it serves."""
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
    settings = msgspec.json.decode(said_to_us, type=Settings)

    def say(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, f"{text}\n".encode())
            os.close(fd)
            said.append(text)

    said: list[str] = []
    try:
        if settings.restarts:
            look_after(settings, say)
        else:
            if not is_kept:
                prepare_process()
            if eager.run(serve(settings, say)) and is_kept:
                sys.exit(_STOPPED)
    except OffbeatError as error:
        if said:
            _log.error("%s", error)
        else:
            say(f"! {error}")


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
