"""The files of a job: a coordinator's for each of its processes, shards', and workers'."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import HistoryError
from offbeat.history import HistoryLog

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass
class JobHistory:
    """All records of a job, of each kind in the order in which it began."""

    name: str
    coordinators: list[HistoryLog] = field(default_factory=list)
    shards: list[HistoryLog] = field(default_factory=list)
    workers: list[HistoryLog] = field(default_factory=list)


def find_jobs(paths: Iterable[Path]) -> list[JobHistory]:
    """The jobs whose files are there.

    Args:
        paths: files, folders of files, and folders of runs that have such a folder.

    Raises:
        HistoryError: if one cannot be read, or holds no history.
    """
    jobs: dict[str, JobHistory] = {}
    logs = [HistoryLog(file) for file in dict.fromkeys(file for path in paths for file in _files(path))]
    for log in sorted(logs, key=lambda log: (log.header.began_s, str(log.path))):
        job = jobs.setdefault(log.header.job, JobHistory(log.header.job))
        {"coordinator": job.coordinators, "shard": job.shards, "worker": job.workers}[log.header.kind].append(log)
    return list(jobs.values())


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise HistoryError(f"Cannot read {path}: there is no such file or folder.")
    for folder in (path, path / "history"):
        if files := [file for file in sorted(folder.glob("*.log")) if file.stat().st_size]:
            return files
    raise HistoryError(
        f"Cannot verify {path}: there is no history in it. Record one with `offbeat run --history`, or OFFBEAT_HISTORY."
    )
