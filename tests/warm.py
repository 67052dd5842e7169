"""Processes of offbeat's that have torch from the beginning: to import it takes longer than most tests.

    python -m tests.warm FD     (a server that has loaded all there is, and forks; requests come over the socket FD)

`WarmPopen` is `subprocess.Popen` for the commands that offbeat starts (`offbeat ...`, its workers, their sentinels, its
shards): instead of a new interpreter the child is a fork, with the arguments, the environment, the files and the
session that it would have had. It is a child of who started it, so it can be waited for, signalled and killed, and dies
with its parent where it would have. Any other command starts an interpreter as always.

A process that has threads is not forked: for pytest, and for workers, the fork comes from a server beside them. That
forks twice, and the child is inherited by who asked for it, which is a subreaper in that moment. What has to be a new
interpreter (for its imports, for variables that torch reads when it is loaded, for what a user meets) is started with
`ColdPopen`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import logging
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from offbeat.diagnosis import sentinel_client

_PR_SET_CHILD_SUBREAPER = 36
_COMMAND = "from offbeat.cli import main; main()"
_KNOWN = sys.version_info[:2] == (3, 11)  # what `subprocess.Popen._execute_child` is given; elsewhere nothing is warm
_HARMLESS = {"offbeat-launcher"}  # threads that hold nothing: they only wait for a process to end
_lock = threading.Lock()


@dataclass(frozen=True)
class Request:
    """A process to be.

    Args:
        arguments: of the interpreter, without its own name.
        folder: it works in.
        environment: all variables.
        own_session: it gets one.
        fds: that it is to have, and under which numbers.
    """

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    own_session: bool
    fds: tuple[int, ...]


def is_ours(command: Any) -> bool:
    """Whether it is one of offbeat's, in this interpreter."""
    if not isinstance(command, list) or len(command) < 3 or command[0] != sys.executable:
        return False
    options = [one for one in command[1:] if one not in ("-u", "-P")]
    if options[:2] == ["-c", sentinel_client.PROGRAM]:
        return os.getpid() != _pid_of_pytest  # a test that starts one by itself is a test of sentinels
    return options[:2] in (["-m", "offbeat.cli.shard_main"], ["-m", "offbeat.cli.worker_main"], ["-c", _COMMAND])


ColdPopen = subprocess.Popen
"""A new interpreter in any case."""


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, which forks where that is the same."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others = rest
        start_new_session = _KNOWN and bool(others[5])
        if not _KNOWN or shell or preexec_fn is not None or not is_ours(args) or not _can_fork(env):
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        given = {0: p2cread, 1: c2pwrite, 2: errwrite}
        request = Request(
            args[1:],
            os.fspath(cwd or os.getcwd()),
            dict(os.environ if env is None else env),
            start_new_session,
            tuple(pass_fds),
        )
        fds = {number: fd if fd != -1 else number for number, fd in given.items()} | {fd: fd for fd in pass_fds}
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self.pid = _from_server(request, fds) if _server() is not None else _fork(request, fds)
        except (EOFError, OSError):  # it was killed, with the group of this process
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def everywhere() -> None:
    """Whatever this process starts from now on is warm, if it can be."""
    subprocess.Popen = WarmPopen  # type: ignore[misc]


# -- where the child comes from ----------------------------------------------------------------------------------------


def _can_fork(environment: Any) -> bool:
    """Whether a fork is the same as a new interpreter."""
    if environment is not None and environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        return False
    if _server() is not None:
        return True
    others = [one for one in threading.enumerate() if one is not threading.main_thread()]
    return (
        "torch" in sys.modules
        and all(one.name in _HARMLESS for one in others)
        and len(os.listdir("/proc/self/task")) == 1 + len(others)
        and threading.current_thread() is threading.main_thread()
    )


def _fork(request: Request, fds: dict[int, int]) -> int:
    pid = os.fork()
    if not pid:
        _become(request, fds)
    return pid


_MOST_NAME = 4096  # characters of a command
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_servers: dict[int, socket.socket] = {}  # by the process that asks
_pid_of_pytest = 0


def in_pytest() -> None:
    """Whatever pytest starts is warm, if it can be; its children come from a server, started when it is needed."""
    global _pid_of_pytest
    _pid_of_pytest = os.getpid()
    everywhere()


def _start_server() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    # Its children's commands have room where its own stands.
    command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), " " * _MOST_NAME]
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = ColdPopen(
        command, pass_fds=(theirs.fileno(),), cwd=folder, stdin=subprocess.DEVNULL, env={**os.environ, **_ONE_THREAD}
    )
    theirs.close()
    _servers[os.getpid()] = ours

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)


def stand_by() -> None:
    """Have a server for what this process starts, which has torch and no threads yet; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.fork():
        theirs.close()
        _servers[os.getpid()] = ours
        return
    try:
        ours.close()
        gc.freeze()
        signal.signal(signal.SIGINT, lambda number, frame: None)  # of a terminal, to all; its children have their own
        with contextlib.suppress(EOFError, OSError):
            _serve(theirs)
    finally:
        os._exit(0)


def _server() -> socket.socket | None:
    """Beside this process, if it has one."""
    if os.getpid() == _pid_of_pytest and not _servers:
        _start_server()
    return _servers.get(os.getpid())


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _from_server(request: Request, fds: dict[int, int]) -> int:
    link = _server()
    assert link is not None
    said = pickle.dumps((request, list(fds)))
    with _lock:
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(link, [struct.pack("!I", len(said))], list(fds.values()))
            link.sendall(said)
            (pid,) = struct.unpack("!I", _receive(link, 4))
        finally:
            _libc().prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return int(pid)


def _receive(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _serve(link: socket.socket) -> None:
    """Fork when asked to, until there is nobody any more who asks."""
    while True:
        head, ancillary, _, _ = link.recvmsg(4, socket.CMSG_SPACE(64 * 4))
        if not head:
            return
        received = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
        (size,) = struct.unpack("!I", head + _receive(link, 4 - len(head)))
        request, numbers = pickle.loads(_receive(link, size))
        tells, told = os.pipe()
        if not (between := os.fork()):
            between = os.getpid()
            if child := os.fork():
                os.write(told, struct.pack("!I", child))
                os._exit(0)
            while os.getppid() == between:  # until it is the child of who asked
                time.sleep(0.0005)
            _become(request, dict(zip(numbers, received, strict=True)))
        os.waitpid(between, 0)
        pid = os.read(tells, 4)
        for fd in (tells, told, *received):
            os.close(fd)
        link.sendall(pid)


# -- what the child does -----------------------------------------------------------------------------------------------


def _become(request: Request, fds: dict[int, int]) -> NoReturn:
    """Be what a new interpreter would be, to the end."""
    code = 70
    try:
        gc.freeze()  # what belongs to the process before is never collected: it would close numbers that are ours now
        atexit._clear()
        _servers.clear()
        _take_files(fds)
        _forget_signals()
        _forget_logging()
        if request.own_session:
            os.setsid()
        _take_name([sys.executable, *request.arguments])
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # Python's own does so itself
        everywhere()
        if "offbeat.cli.worker_main" in request.arguments:
            stand_by()  # it may start a server when it has threads
        code = _run(request.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_files(fds: dict[int, int]) -> None:
    kept = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for number, fd in fds.items()}
    for number, fd in kept.items():
        os.dup2(fd, number)
    first = 3
    for number in sorted({*fds, 1 << 16}):
        if number >= first:
            os.closerange(first, number)
            first = number + 1


def _take_name(command: list[str]) -> None:
    """Have /proc tell the command, as far as it fits where the one before stood; tests look for processes by it."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    ctypes.memmove(begin, "\0".join(command).encode()[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def _forget_signals() -> None:
    """What was handled is not; what was ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _forget_logging() -> None:
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _run(arguments: list[str]) -> int:
    """Run the command, as the interpreter does; its exit code."""
    options = [one for one in arguments if one in ("-u", "-P")]
    kind, what, *rest = arguments[len(options) :]
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, f"__{name}__")
        raw = open(number, "wb", 0, closefd=False)  # noqa: SIM115
        buffered = raw if "-u" in options else io.BufferedWriter(raw)
        text = io.TextIOWrapper(
            buffered,
            encoding="utf-8",
            errors=before.errors,
            line_buffering="-u" not in options and (name == "stderr" or os.isatty(number)),
            write_through="-u" in options,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, open(0, encoding="utf-8", closefd=False))  # noqa: SIM115
    own = types.ModuleType("__main__")
    own.__package__ = own.__spec__ = None
    sys.modules["__main__"] = own
    if "-P" not in options:
        sys.path.insert(0, "" if kind == "-c" else os.getcwd())
    try:
        if what == sentinel_client.PROGRAM:
            sys.argv = ["-c", *rest[1:]]
            runpy.run_module("offbeat.diagnosis", run_name="__main__")
        elif kind == "-c":
            sys.argv = ["-c", *rest]
            importlib.import_module("offbeat.cli").main()
        else:
            module = importlib.import_module(what)
            sys.argv = [str(module.__file__), *rest]
            module.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def main() -> None:
    """Load what offbeat's processes need, and fork."""
    link = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.pop(0)  # the folder of the tests: commands run elsewhere
    import torch  # noqa: F401

    for name in (
        "offbeat.run.run",
        "offbeat.cli.shard_main",
        "offbeat.cli.app",
        "offbeat.cli.worker_main",
        "offbeat.server",
    ):
        importlib.import_module(name)
    offbeat_serve = importlib.import_module("offbeat.cli.shard_main")
    offbeat_serve.prepare_process()
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(link)


if __name__ == "__main__":
    from tests import warm

    warm.main()  # not this module, which is named otherwise: what it forks imports that one
