"""The registry of labs: one file per lab, so that what a dead lab left behind can be removed and nothing else is
touched.

A lab writes its `LabRecord` before it builds anything and deletes it after it has removed everything. A claim whose
owner no longer lives is a leftover. The owner is known by process id *and* start time, because ids are used again.

Three things end a lab, each enough alone: the lab itself (leaving its `with` block, also by Ctrl-C), its `reaper` (when
the lab is killed), and `offbeat lab clean` (when both are). Processes are killed only if they run in one of the lab's
namespaces and carry its mark in their environment.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from offbeat.errors import NetworkError
from offbeat.lab import memory_cgroup
from offbeat.lab.namespace import DIRECTORY
from offbeat.safe_write import write_whole

RUN_DIRECTORY = Path("/run/offbeat")
"""Where claims are kept: emptied by a reboot, as namespaces are."""
MARK = "OFFBEAT_LAB"
"""Environment variable that every process of a lab carries, with the lab's identity."""

_ENDING_S = 2.0
_LAB = re.compile(r"[0-9a-f]{8}")


class LabRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The possessions of one lab: `lab` is 8 hex digits, `owner_started_ticks` is the start time in /proc/PID/stat."""

    lab: str
    owner_pid: int
    owner_started_ticks: int
    namespaces: list[str]
    created: str

    @classmethod
    def mine(cls, lab: str, namespaces: list[str]) -> LabRecord:
        """The claim of the calling process."""
        started_ticks = _started_ticks(os.getpid())
        assert started_ticks is not None
        return cls(lab, os.getpid(), started_ticks, namespaces, time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @property
    def owner_lives(self) -> bool:
        """Whether the process that made this claim still runs."""
        return _started_ticks(self.owner_pid) == self.owner_started_ticks


def path_of(lab: str, directory: Path = RUN_DIRECTORY) -> Path:
    """The file of a lab's claim."""
    return directory / f"lab-{lab}.json"


def scratch_of(lab: str, directory: Path = RUN_DIRECTORY) -> Path:
    """The folder of a lab's logs and records, which goes when the lab goes."""
    return directory / f"lab-{lab}"


def write(claim: LabRecord, directory: Path = RUN_DIRECTORY) -> Path:
    """Put the claim on record, whole or not at all, and return its file.

    Raises:
        NetworkError: if the folder cannot be written.
    """
    path = path_of(claim.lab, directory)
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(claim))
    except OSError as error:
        raise NetworkError(
            f"Cannot build a lab: its record {path} cannot be written ({error.strerror}). Run as root."
        ) from error
    return path


def read(path: Path) -> LabRecord | None:
    """The claim in a file, or None if the file is gone.

    Raises:
        NetworkError: if the file is not a claim of the lab it is named after.
    """
    try:
        claim = msgspec.json.decode(path.read_bytes(), type=LabRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise NetworkError(f"Cannot read the record {path} of a lab: {error}. Remove the file by hand.") from error
    own = f"offbeat-{claim.lab}-"
    strangers = [name for name in claim.namespaces if not name.startswith(own) or "/" in name]
    if _LAB.fullmatch(claim.lab) is None or path_of(claim.lab, path.parent) != path or strangers:
        raise NetworkError(
            f"Cannot trust the record {path}: it claims {strangers or claim.lab!r}, which no lab of that name makes. "
            "Remove the file by hand."
        )
    return claim


def remove(claim: LabRecord, directory: Path = RUN_DIRECTORY) -> None:
    """End the processes of a lab, remove its namespaces (and with them every link) and cgroups, its
    scratch, then its record.

    What is gone already is no error, so that a lab and its reaper may both do it.
    """
    # Imported here: `lab show` and the workers need neither root rights nor pyroute2.
    from pyroute2 import netns

    for process in _processes_of(claim):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for name in claim.namespaces:
        with suppress(FileNotFoundError):
            netns.remove(name)
        memory_cgroup.remove(name)
    _remove_folder(scratch_of(claim.lab, directory))
    path_of(claim.lab, directory).unlink(missing_ok=True)


def leftovers(directory: Path = RUN_DIRECTORY) -> list[LabRecord]:
    """All claims on record, of labs alive and dead, oldest first."""
    found = [read(path) for path in sorted(directory.glob("lab-*.json"))]
    return sorted((claim for claim in found if claim is not None), key=lambda claim: claim.created)


def clean(*, force: bool = False, directory: Path = RUN_DIRECTORY) -> tuple[list[LabRecord], list[LabRecord]]:
    """Remove what dead labs left (with `force`: what living ones hold as well); return (removed, kept)."""
    removed: list[LabRecord] = []
    kept: list[LabRecord] = []
    for claim in leftovers(directory):
        if claim.owner_lives and not force:
            kept.append(claim)
        else:
            remove(claim, directory)
            removed.append(claim)
    return removed, kept


def _remove_folder(folder: Path) -> None:
    # A process that was killed a moment ago may still be writing its last file.
    deadline_s = time.monotonic() + _ENDING_S
    while folder.exists() and time.monotonic() < deadline_s:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.05)


def _processes_of(claim: LabRecord) -> list[int]:
    inodes = set()
    for name in claim.namespaces:
        with suppress(FileNotFoundError):
            inodes.add((DIRECTORY / name).stat().st_ino)
    mark = f"{MARK}={claim.lab}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if (entry / "ns/net").stat().st_ino in inodes and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _started_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may hold anything, so count the fields after the last one.
    state, *fields = text[text.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(fields[18])
