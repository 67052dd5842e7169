"""The store of this machine that tasks find without being told its address; the first of them starts it.

A record of it is in a folder that is this user's alone: where clients connect, its token, and its process id. A lock
beside it sees to it that tasks that begin together start one store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import NetworkError
from offbeat.wire.credentials import Token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat.wire.credentials import Credentials

STORE_VARIABLE = "OFFBEAT_OBJECTS"
"""The environment variable that names the store of this machine: "host:port"."""
TOKEN_VARIABLE = "OFFBEAT_TOKEN"
"""The environment variable with the token that stores and clients prove to each other."""
DIRECTORIES_VARIABLE = "OFFBEAT_DIRECTORIES"
"""The environment variable that names the directories that a store which a client starts uses: "host:port,..."."""
UNUSED_S = 600.0
"""The seconds for which a store that a client has started outlives the last process that uses it."""
_START_S = 60.0
_LAST_LINES = 5


class LocalStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store that a client has started.

    Args:
        address: where clients connect.
        process: its id.
        token: that it made for itself, if it was given none.
    """

    address: str
    process: int
    token: str = ""

    def credentials(self, given: Credentials | None) -> Credentials | None:
        """Return the credentials of its clients."""
        return Token(self.token.encode()) if self.token else given


def find(job: str) -> LocalStore | None:
    """Return the store that a client has started here for these directories, if it still runs."""
    return _read(_path(job, _directories()))


def find_or_start(job: str, token: str, memory_mib: int) -> LocalStore:
    """Return the store of this machine; start one if none runs.

    Args:
        job: of the store.
        token: that it proves to other stores and to clients; without one a store for this machine alone makes one.
        memory_mib: for the objects of a store that is started.

    Raises:
        NetworkError: if it does not start; says why.
    """
    directories = _directories()
    path = _path(job, directories)
    with _locked(path):
        if (found := _read(path)) is not None:
            return found
        own_token = "" if token or directories else secrets.token_hex(32)
        arguments = ["--job", job, "--memory-mib", str(memory_mib), "--until-unused", str(UNUSED_S)]
        if directories:
            arguments += ["--directories", directories, "--bind", _own_address(directories.split(",")[0])]
        else:
            arguments.append("--directory")
        made = LocalStore(*_start(arguments, token or own_token, path.with_suffix(".log")), own_token)
        written = path.with_suffix(".new")
        written.write_bytes(msgspec.json.encode(made))
        written.replace(path)
        return made


def _directories() -> str:
    return os.environ.get(DIRECTORIES_VARIABLE, "").strip()


def _path(job: str, directories: str) -> Path:
    """The record of a job's store in this PID namespace, beyond which no memory can be shared."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if not base.is_absolute() or not base.is_dir():  # as after `su`
        base = Path(tempfile.gettempdir())
    folder = base / f"offbeat-objects-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        raise NetworkError(
            f"Cannot look for a store of objects in {folder}: {error.strerror}. Name a store in "
            f"{STORE_VARIABLE}, or another folder in XDG_RUNTIME_DIR."
        ) from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise NetworkError(
            f"Cannot look for a store of objects in {folder}: the folder is open to other users. Remove it, or name a "
            f"store in the environment variable {STORE_VARIABLE}."
        )
    namespace = os.readlink("/proc/self/ns/pid")
    name = hashlib.sha256(f"{job}\n{directories}\n{namespace}".encode()).hexdigest()[:16]
    return folder / f"{name}.json"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> LocalStore | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=LocalStore)
    except (OSError, msgspec.MsgspecError):
        return None
    host, _, port = found.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except (OSError, ValueError, OverflowError):
        return None
    return found if _runs(found.process) else None


def _start(arguments: list[str], token: str, log: Path) -> tuple[str, int]:
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    if token:
        environment[TOKEN_VARIABLE] = token
    command = [sys.executable, "-m", "offbeat", "objects", "serve", *arguments]
    with log.open("w") as out:  # a shell in between, so that it is nobody's child
        made = subprocess.run(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            env=environment,
            cwd="/",
            start_new_session=True,
            check=True,
        )
    process, until_s = int(made.stdout), time.monotonic() + _START_S
    while time.monotonic() < until_s:
        runs, said = _runs(process), log.read_text()
        if f"{STORE_VARIABLE}=" in said and said.endswith("\n"):
            return said.partition(f"{STORE_VARIABLE}=")[2].partition(";")[0], process
        if not runs:
            break
        time.sleep(0.02)
    if _runs(process):
        os.kill(process, signal.SIGKILL)
    said = " ".join(log.read_text().split("\n")[-_LAST_LINES:]).strip()
    raise NetworkError(f"Cannot start a store of objects: {said or f'it said nothing within {_START_S:g} s'}")


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _own_address(directory: str) -> str:
    """The address of this machine from which a directory is reached."""
    host, _, port = directory.rpartition(":")
    try:
        family, kind, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as out:
            out.connect(where)  # a datagram socket sends nothing for that
            return str(out.getsockname()[0])
    except (OSError, ValueError) as error:
        raise NetworkError(
            f"Cannot use {directory!r} of {DIRECTORIES_VARIABLE}: it is no host:port that is reached ({error})."
        ) from error
