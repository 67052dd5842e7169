"""The shards of a parameter server on this machine: started, watched, started again, and ended with their job.

A shard is a process that serves, and one that looks after it and starts it again when it is killed. `offbeat run`
looks after the second: it starts those that `--servers` asks for, and whoever else starts one below it leaves a note
(`offbeat.server.launch.RestartNote`), so that it knows of all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.clock import WallClock
from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat.backoff import Backoff
    from offbeat.clock import Clock
    from offbeat.server.launch import ShardProcess, ShardSettings

_LOOK_S = 0.25  # between two looks at the notes
_POLL_S = 0.1


class LocalShards:
    """The shards of one job on this machine.

    Args:
        folder: for the notes; of this user only, because the secret of the job is in them.
        environment: variables of those that are started here.
        say: called with what people should know.
        clock: the source of time for pauses.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], say: Callable[[str], None], clock: Clock | None = None
    ) -> None:
        self._folder, self._say = folder, say
        self._environment = {**os.environ, **environment}
        self._processes: list[ShardProcess] = []
        self._returning: list[tuple[ShardProcess, ShardSettings]] = []  # started again, and not there yet
        self._clock = clock or WallClock()
        self._looked_s = 0.0
        self._backoffs: dict[int, Backoff] = {}  # of each shard that was started again, by port
        self._due_s: dict[int, float] = {}  # of each that is to be

    def __len__(self) -> int:
        return len(self._processes)

    def start(self, settings: ShardSettings, *, unless: Callable[[], bool]) -> str | None:
        """Start a shard; where it is, as "host:port".

        Args:
            unless: asked meanwhile; whether nobody wants it any more, in which case there is no address.

        Raises:
            NetworkError: if it cannot be started.
        """
        started = self._begin(settings)
        while (address := started.answer(_POLL_S)) is None and not unless():
            pass
        return address

    def look(self) -> str:
        """Start again what was killed, without waiting for it; why the job cannot go on, as a sentence, or ""."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return ""
        self._looked_s = now_s
        if not self._returning and not any(self._folder.iterdir()):
            return ""
        from offbeat.server.launch import RestartNote

        try:
            self._returning = [again for again in self._returning if not self._is_there(*again)]
            for note in RestartNote.left_behind(self._folder):
                said = note.read()
                if isinstance(said, str):
                    return said
                if self._is_due(said.port):
                    self._returning = [again for again in self._returning if again[0].process.pid != note.pid]
                    self._start_again(said)
                    note.remove()
        except NetworkError as error:
            return str(error)
        return ""

    def end(self, alone_s: float, grace_s: float, *, hurry: Callable[[], bool]) -> None:
        """End those that were started here.

        Args:
            alone_s: for them to end by themselves.
            grace_s: from SIGTERM to SIGKILL.
            hurry: asked meanwhile; whether `alone_s` is over early.
        """
        self._wait(alone_s, hurry)
        for one in self._processes:
            if one.process.poll() is None:
                one.process.terminate()
        self._wait(grace_s)
        for one in self._processes:
            with contextlib.suppress(ProcessLookupError):  # also what it started
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()

    def _begin(self, settings: ShardSettings) -> ShardProcess:
        from offbeat.server.launch import ShardProcess

        started = ShardProcess(environment=self._environment, own_session=True)
        self._processes.append(started)
        started.tell(settings)
        return started

    def _is_there(self, started: ShardProcess, settings: ShardSettings) -> bool:
        """Whether one that was started again is to be waited for no more: it serves, or was killed, which is noted.

        Raises:
            NetworkError: if it has said why it cannot serve, or nothing at all for long.
        """
        from offbeat.server.launch import RestartNote

        try:
            return started.answer(0.0) is not None
        except NetworkError:
            if not started.ended_silently:
                raise
            RestartNote(self._folder / f"{started.process.pid}.json").write(settings)
            return True

    def _is_due(self, port: int) -> bool:
        """Whether the pause before this shard is started again is over."""
        from offbeat.server.launch import restart_backoff

        now_s = self._clock.now_s()
        if port not in self._due_s:
            backoff = self._backoffs.setdefault(port, restart_backoff(self._clock))
            self._due_s[port] = now_s + backoff.next_s()
        if now_s < self._due_s[port]:
            return False
        del self._due_s[port]
        return True

    def _start_again(self, settings: ShardSettings) -> None:
        shard = Path(settings.snapshots).name.replace("-", " ")
        lost = (
            f"The process that looks after {shard} of the parameter server at {settings.bind}:{settings.port} was "
            "killed, and the shard with it"
        )
        left = settings.restarts - 1
        if left < 1:
            raise NetworkError(f"{lost}, for the last time: it is not started again.")
        self._say(f"{lost}; it is started again (and {left} more times if need be).")
        again = msgspec.structs.replace(settings, restarts=left)
        self._returning.append((self._begin(again), again))

    def _wait(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        deadline_s = time.monotonic() + seconds
        while any(one.process.poll() is None for one in self._processes) and time.monotonic() < deadline_s:
            if hurry():
                return
            time.sleep(0.02)
