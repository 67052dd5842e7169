"""The launch of a shard of a parameter server as a process of its own, with its settings.

Below `offbeat run` the process that looks after a shard leaves a note in the folder OFFBEAT_SHARDS with what it takes
to start it again: if it is killed itself, `offbeat run` does. What the process does is in `offbeat.cli.shard_main`.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import msgspec

from offbeat.backoff import Backoff
from offbeat.diagnosis.process_state import glance
from offbeat.diagnosis.startup_barrier import startup_limit
from offbeat.errors import NetworkError
from offbeat.safe_write import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat.clock import Clock
    from offbeat.wire.credentials import Credentials

RESTARTS = 5  # of a server that is looked after
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 4.0  # between two restarts: what kills it at once must not use them all up
_HOLDS_S = 60.0


def restart_backoff(clock: Clock) -> Backoff:
    """Pauses before a shard is started again."""
    return Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, holds_s=_HOLDS_S, seed=str(os.getpid()), clock=clock)


class ShardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one shard.

    Args:
        job: name of the job; workers of another are refused.
        bind: address to listen on.
        port: 0 for one of the kernel's choice.
        coordinator: "host:port" of the first shard; "" if this is it.
        token: secret that the workers know; "" for none.
        validator_token: secret that validators know, and workers do not; "" for none.
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
    validator_token: str = ""
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
        """The credentials of both sides.

        Raises:
            NetworkError: if they cannot be used.
        """
        from offbeat.wire.credentials import Certificates, Token

        if self.validator_token and not self.token:
            raise NetworkError("Cannot use a token for validators alone: set OFFBEAT_TOKEN, too, which all know.")
        token = Token(self.token.encode(), self.validator_token.encode()) if self.token else None
        files = (self.certificate, self.key, self.authority)
        if not any(files):
            return token
        if not all(files):
            raise NetworkError("Cannot use TLS with a part of its files: name certificate, key and authority.")
        return Certificates(Path(self.certificate), Path(self.key), Path(self.authority), token)


class ShardAnnouncement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The announcement of where a shard serves, or of why it does not, to whoever waits for it; travels as JSON.

    Args:
        address: "host:port"; "" if there is none.
        job, token: of the shard; "" where whoever waits knows them.
        error: why there is no address.
    """

    address: str = ""
    job: str = ""
    token: str = ""
    error: str = ""

    def to_json(self) -> str:
        """The announcement in one line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> ShardAnnouncement:
        """Read what `to_json` wrote."""
        return msgspec.json.decode(text, type=cls)


def settings_from(variables: Mapping[str, str], job: str, timeout: timedelta) -> ShardSettings:
    """Read from the environment how a worker, or a shard started by hand, connects."""
    name = variables.get
    return ShardSettings(
        job=name("OFFBEAT_JOB", job),
        token=name("OFFBEAT_TOKEN", ""),
        validator_token=name("OFFBEAT_VALIDATOR_TOKEN", ""),
        certificate=name("OFFBEAT_CERTIFICATE", ""),
        key=name("OFFBEAT_KEY", ""),
        authority=name("OFFBEAT_AUTHORITY", ""),
        timeout_s=timeout.total_seconds(),
        history=name("OFFBEAT_HISTORY", ""),
    )


def start_shard(
    settings: ShardSettings,
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
        command = [sys.executable, "-P", "-m", "offbeat.cli.shard_main", str(theirs)]
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
        self._pipe, self._said, self._told_s, self._limit_s = mine, b"", 0.0, 0.0
        self.ended_silently = False  # before it had answered

    def tell(self, settings: ShardSettings) -> None:
        """Have it serve."""
        assert self.process.stdin is not None
        self._limit_s = startup_limit(timedelta(seconds=settings.timeout_s)).total_seconds()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(settings))
            self.process.stdin.close()
        self._told_s = time.monotonic()

    def answer(self, within_s: float) -> str | None:
        """The address where it serves, as "host:port", once it has its settings; None if it has not answered so soon.

        Raises:
            NetworkError: if it cannot, or has not answered within `startup_limit` of its timeout.
        """
        is_closed = False
        if select.select([self._pipe], [], [], within_s)[0]:
            more = os.read(self._pipe, 4096)
            is_closed = not more
            self._said += more
            if more and not more.endswith(b"\n"):
                return None
        elif time.monotonic() < self._told_s + self._limit_s:
            return None
        os.close(self._pipe)
        if self._said.endswith(b"\n"):
            announcement = ShardAnnouncement.from_json(self._said)
        elif is_closed:  # also where it cannot be waited for yet: the kernel closes what a process has open before
            announcement, self.ended_silently = ShardAnnouncement(error="it ended at once."), True
        else:
            is_paused = glance(self.process.pid).state == "paused"
            announcement = ShardAnnouncement(
                error=f"it has not said within {self._limit_s:g} s where it serves, and "
                f"{'is paused (SIGSTOP)' if is_paused else 'is still starting'}. A longer --timeout gives it longer."
            )
        if announcement.error:
            self.process.kill()
            self.process.wait()
            raise NetworkError(f"Cannot start a parameter server: {announcement.error}")
        return announcement.address

    def serve(self, settings: ShardSettings) -> str:
        """Have it serve; "host:port".

        Raises:
            NetworkError: if it cannot.
        """
        self.tell(settings)
        while (address := self.answer(1.0)) is None:
            pass
        return address


class RestartNote:
    """A note for `offbeat run` on how to start a shard again if the process that looks after it is killed.

    The process that looks after a shard writes it, and removes it when it ends; what is left behind by a process that
    is gone tells that it was killed.

    Args:
        path: where the note lies, named by the pid of its writer; None for nowhere.
    """

    _LOST = ".lost"  # in place of .json where the writer has ended because the shard cannot be started again

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def mine(cls, folder: str | None) -> RestartNote:
        """The note of this process, below `offbeat run`; elsewhere one that nobody reads."""
        return cls(Path(folder) / f"{os.getpid()}.json" if folder else None)

    @classmethod
    def left_behind(cls, folder: Path) -> list[RestartNote]:
        """Find the notes of processes that are gone, and those on a shard that is."""
        gone = [path for path in folder.glob("*.json") if glance(int(path.stem)).state == "dead"]
        return [cls(path) for path in (*gone, *folder.glob(f"*{cls._LOST}")) if path.exists()]

    @property
    def pid(self) -> int:
        """The process that wrote it, or for which it was written."""
        assert self._path is not None
        return int(self._path.stem)

    def write(self, settings: ShardSettings) -> None:
        """Note that the shard is started again with these settings."""
        self._put(".json", msgspec.json.encode(settings))

    def give_up(self, why: str) -> None:
        """Note that the shard is not started again."""
        self._put(self._LOST, why.encode())
        self.remove()

    def read(self) -> ShardSettings | str:
        """Read the settings to start it with again; or why it is not."""
        assert self._path is not None
        said = self._path.read_bytes()
        return said.decode() if self._path.suffix == self._LOST else msgspec.json.decode(said, type=ShardSettings)

    def remove(self) -> None:
        """Remove the note."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _put(self, suffix: str, said: bytes) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # the folder has gone with `offbeat run`, or the disk is full
            write_whole(self._path.with_suffix(suffix), said)  # the token is in it, and the folder private
