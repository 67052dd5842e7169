"""A warm process is what a cold one is to whoever starts it, and to what runs in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm
from tests.cli.commands import COMMAND, clean_environment, script

if TYPE_CHECKING:
    from pathlib import Path

TELL = """
import json, logging, os, random, signal, stat, sys, threading
def is_socket(fd):  # a warm worker has one to what it starts processes with
    return stat.S_ISSOCK(os.fstat(fd).st_mode)
print(json.dumps({
    "arguments": sys.argv,
    "command": open("/proc/self/cmdline").read().split("\\0"),
    "environment": {name: value for name, value in os.environ.items()},
    "folder": os.getcwd(),
    "name": __name__,
    "path": sys.path,
    "files": [fd for fd in range(200) if os.path.exists(f"/proc/self/fd/{fd}") and not is_socket(fd)],
    "input": sys.stdin.read(),
    "handed": os.read(int(sys.argv[1]), 9).decode(),
    "parent": os.getppid(),
    "leads_session": os.getsid(0) == os.getpid(),
    "handlers": {number: str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGHUP)},
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "loggers": [repr(logging.getLogger(name)) + repr(logging.getLogger(name).handlers) for name in (None, "offbeat")],
    "streams": [(file.encoding, file.errors, file.line_buffering) for file in (sys.stdout, sys.stderr)],
    "main_thread": threading.current_thread() is threading.main_thread(),
}))
print("loaded" if "torch" in sys.modules else "new", random.random(), file=sys.stderr)
"""
POPENS = [pytest.param(warm.ColdPopen, id="cold"), pytest.param(warm.WarmPopen, id="warm")]


def start(popen: Any, path: Path, *arguments: str, **how: Any) -> subprocess.Popen[str]:
    """A worker's process that runs the script."""
    command = [sys.executable, "-u", "-m", "offbeat.cli.worker_main", str(path), *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process: subprocess.Popen[str] = popen(command, **pipes, text=True, **how)
    return process


def told(popen: Any, path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a process says of itself, and on its stderr."""
    ours, theirs = os.pipe()
    os.write(theirs, b"handed on")
    try:
        process = start(
            popen,
            path,
            str(ours),
            "an argument",
            cwd=path.parent,
            env=clean_environment() | {"A_VARIABLE": "its value"},
            pass_fds=(ours,),
            start_new_session=True,
        )
        out, errors = process.communicate("read", timeout=30)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0, errors
    return json.loads(out), errors.split()


@pytest.mark.slow
def test_it_has_what_a_new_interpreter_has(tmp_path: Path) -> None:
    path = script(tmp_path, TELL)
    cold, (is_new, _) = told(warm.ColdPopen, path)
    hot, (is_loaded, luck) = told(warm.WarmPopen, path)
    assert (is_new, is_loaded) == ("new", "loaded"), "the warm one would be no other"
    assert cold["arguments"][2:] == ["an argument"]
    assert (cold["input"], cold["handed"], cold["parent"]) == ("read", "handed on", os.getpid())
    assert cold["environment"]["A_VARIABLE"] == "its value"
    assert cold["leads_session"]
    shown = "\0".join(hot.pop("command")).rstrip("\0")  # what is left of the room for it is empty
    assert "offbeat.cli.worker_main" in shown
    assert "\0".join(cold.pop("command")).rstrip("\0") == shown
    assert hot == cold
    assert luck != told(warm.WarmPopen, path)[1][1], "each draws its own random numbers"


@pytest.mark.parametrize("popen", POPENS)
@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('a sentence')", 1, "a sentence"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
        ("import threading, time; threading.Timer(0.1, print, ('a thread',)).start()", 0, "a thread"),
    ],
)
def test_it_ends_as_a_new_interpreter_does(popen: Any, text: str, code: int, says: str, tmp_path: Path) -> None:
    process = start(popen, script(tmp_path, text), env=clean_environment())
    out, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert says in out + errors


@pytest.mark.parametrize("popen", POPENS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGUSR2])
def test_signals_reach_it(popen: Any, number: int, tmp_path: Path) -> None:
    sleeps = script(tmp_path, "import time; print('here'); time.sleep(30)")
    with start(popen, sleeps, env=clean_environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        assert process.wait(10) == (128 + number if number == signal.SIGINT else -number)  # see `worker_main`


@pytest.mark.parametrize("popen", POPENS)
def test_commands_run_in_it(popen: Any, tmp_path: Path) -> None:
    process = popen(
        [*COMMAND, "no-such-command"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, _ = process.communicate(timeout=30)
    assert (process.returncode, "No such command" in said) == (2, True), said


def test_any_other_command_is_a_new_interpreter() -> None:
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.Popen is warm.WarmPopen
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_path_of_its_own_makes_a_new_interpreter(tmp_path: Path) -> None:
    """Modules may come from there that were loaded from elsewhere."""
    environment = clean_environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = start(warm.WarmPopen, script(tmp_path, "import sys; print('torch' in sys.modules)"), env=environment)
    assert process.communicate(timeout=30)[0] == "False\n"
