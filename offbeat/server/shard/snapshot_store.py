"""The folder in which a shard keeps its snapshots: the last two, each written whole or not at all.

Beside them it is noted which workers have gone, so that nobody waits for those that a snapshot still has. Snapshots of
another job are passed over, which is said, and stay where they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import NetworkError, PeerError
from offbeat.safe_read import UnreadableError, open_file, read_file
from offbeat.safe_write import write_whole
from offbeat.server.snapshot import Snapshot, SnapshotHeader, SnapshotId, read, write

if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from pathlib import Path

_log = logging.getLogger("offbeat")
_SUFFIX = ".snapshot"
_GONE = "gone.json"


class DepartedWorkers(msgspec.Struct, frozen=True):
    """The workers of a job that have gone."""

    job: str
    workers: frozenset[int]


_gone = msgspec.json.Decoder(DepartedWorkers).decode


class SnapshotStore:
    """A shard's folder of snapshots; another shard needs another one.

    Args:
        folder: made if it is not there.
        job: whose snapshots they are.
        is_fresh: the folder is this run's own and the job begins now, so what is there is of no use any more.

    Attributes:
        before_write: called before each snapshot is written; writes the history that leads to it.

    Raises:
        NetworkError: if it cannot be used, or another shard uses it.
    """

    def __init__(self, folder: Path, job: str, *, is_fresh: bool = False) -> None:
        self._folder, self._job = folder, job
        self._failed = False
        self.before_write: Callable[[], None] = lambda: None
        self.least = 0  # what is written from now on has greater numbers
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
            raise NetworkError(f"Cannot keep snapshots in {folder}: {why}. Choose another folder.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise NetworkError(
                f"Cannot keep snapshots in {folder}: another shard does. Give each shard a folder of its own."
            ) from error
        self._stuck: set[Path] = set()  # files that could not be removed, which was said
        self._whole: dict[SnapshotId, SnapshotHeader] = {}
        self._foreign: dict[Path, str] = {}  # files of other jobs, with their names
        if is_fresh:
            self._paths()
            self.clear()
            return
        self.look()

    @property
    def held(self) -> dict[SnapshotId, SnapshotHeader]:
        """The snapshots that can be used, the newest first."""
        return self._whole

    def look(self) -> None:
        """See anew what is there: before another life, as a file may have been damaged since it was written."""
        known = set(self._foreign)
        self._whole = self._look(self._paths())
        if not known.issuperset(self._foreign):
            self._say_what_is_passed_over()

    def read(self, identity: SnapshotId) -> Snapshot:
        """Read a snapshot that is held.

        Raises:
            PeerError: if it has been damaged since.
        """
        return self._read(self._path(identity))

    def write(self, snapshot: Snapshot, keep: SnapshotId | None) -> bool:
        """Write it; whether that went well. All others but `keep` are removed.

        A full disk is no reason to end the job: it is said once.
        """
        identity = snapshot.header.identity
        self.before_write()
        try:
            write_whole(self._path(identity), lambda file: write(file, snapshot), sync=True)
        except OSError as error:
            if not self._failed:
                _log.warning(
                    "Cannot write a snapshot to %s: %s. The job continues; if this server is killed now, more is lost.",
                    self._folder,
                    error.strerror,
                )
            self._failed = True
            return False
        if self._failed:
            _log.warning("Snapshots are written to %s again.", self._folder)
        self._failed = False
        self._whole = {identity: snapshot.header} | {one: h for one, h in self._whole.items() if one == keep}
        self._remove_others()
        return True

    @property
    def gone(self) -> frozenset[int]:
        """Workers that had gone, and had not come back; nobody, if that cannot be read."""
        noted = self._noted()
        return noted.workers if noted is not None and noted.job == self._job else frozenset()

    def note_gone(self, workers: Set[int]) -> None:
        """Note which have gone. If it cannot be written, they are waited for in vain for a while.

        The note of another job stays as long as its snapshots are here.
        """
        if workers != self.gone and not self._has_foreign_note:
            part = self._folder / f"{_GONE}.new"
            with contextlib.suppress(OSError):
                part.write_bytes(msgspec.json.encode(DepartedWorkers(self._job, frozenset(workers))))
                part.replace(self._folder / _GONE)

    def clear(self) -> None:
        """Remove all: the job has ended, or another begins."""
        self._whole = {}
        self._remove_others()
        if not self._has_foreign_note:
            self._remove(self._folder / _GONE)

    def close(self) -> None:
        """Let another process use the folder."""
        os.close(self._lock)

    @property
    def _has_foreign_note(self) -> bool:
        noted = self._noted()
        return noted is not None and noted.job in self._foreign.values()

    def _noted(self) -> DepartedWorkers | None:
        try:
            return read_file(self._folder / _GONE, _gone)
        except (OSError, UnreadableError):
            return None

    def _look(self, paths: list[Path]) -> dict[SnapshotId, SnapshotHeader]:
        whole: dict[SnapshotId, SnapshotHeader] = {}
        for path in paths:
            try:
                header = self._read(path).header
            except (PeerError, OSError) as error:
                _log.warning("Cannot use the snapshot %s: %s. One before it is used, if there is one.", path, error)
                continue
            if header.job != self._job:
                self._foreign[path] = header.job
                continue
            whole[header.identity] = header
        return dict(sorted(whole.items(), reverse=True))

    def _say_what_is_passed_over(self) -> None:
        jobs = " and ".join(
            f"{', '.join(path.name for path, of in self._foreign.items() if of == job)} of job {job!r}"
            for job in dict.fromkeys(self._foreign.values())
        )
        own = f"its newest own one, {self._path(next(iter(self._whole))).name}" if self._whole else "no snapshot"
        _log.warning(
            "Passed over in %s, where it stays: %s. This shard is of job %r and begins with %s. Give each job a folder "
            "of its own.",
            self._folder, jobs, self._job, own,
        )  # fmt: skip

    def _read(self, path: Path) -> Snapshot:
        try:
            with open_file(path) as file:
                return read(file)
        except OSError as error:
            raise PeerError(error.strerror or str(error)) from error

    def _paths(self) -> list[Path]:
        paths = sorted(self._folder.glob(f"*{_SUFFIX}"))
        numbers = [path.name.partition("-")[0] for path in paths]
        self.least = max([self.least, *(int(number) for number in numbers if number.isdecimal())])
        return paths

    def _path(self, identity: SnapshotId) -> Path:
        return self._folder / f"{identity.number:012d}-{identity.life:010x}{_SUFFIX}"

    def _remove_others(self) -> None:
        stays = {self._path(identity) for identity in self._whole} | set(self._foreign)
        for path in [*self._folder.glob(f"*{_SUFFIX}"), *self._folder.glob("*.part")]:
            if path not in stays:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a file; one that cannot be is said once, and ends nothing."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if path not in self._stuck:
                _log.warning("Cannot remove %s: %s. It is of no use any more; remove it by hand.", path, error.strerror)
            self._stuck.add(path)
