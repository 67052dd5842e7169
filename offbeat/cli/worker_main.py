"""The program that `offbeat run` starts as each worker: the user's script, unchanged, with errors that end in one
sentence.

    python -m offbeat.cli.worker_main script.py its arguments

Exit codes: `REFUSED` if offbeat refused something, `VICTIM` if this worker only stopped because another was lost,
`LEFT` (of `offbeat.exit_codes`) if it was sent SIGTERM and left the others in order, `UNPREPARED` if the script came to
its end, but had trained without `run.prepare` beside other workers; else the script's own. However it ends, short of
SIGKILL, its last records are written.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.diagnosis.explain import QUOTED
from offbeat.errors import NetworkError, OffbeatError, WorkerLostError
from offbeat.exit_codes import LEFT, UNPREPARED

if TYPE_CHECKING:
    from types import FrameType

REFUSED, VICTIM = 2, 76
_PR_SET_PDEATHSIG = 1
_DRAIN_S = 1.0  # from SIGTERM to the end of the step at hand; `offbeat run` waits a little longer
_drains = False


def main() -> None:
    """Run the script named on the command line as ``__main__``."""
    _die_with_launcher()
    signal.signal(signal.SIGTERM, _on_sigterm)
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except OffbeatError as error:
        _trim(error, script)
        is_victim = isinstance(error, (WorkerLostError, NetworkError))
        if os.environ.get("OFFBEAT_DEBUG"):
            traceback.print_exc()
        elif is_victim or not _hand_over(str(error)):
            sys.stderr.write(f"offbeat: {_brief(str(error))}\n")
        _leave(VICTIM if is_victim else REFUSED, error)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        if stop.code not in (None, 0):
            _leave(stop.code if isinstance(stop.code, int) else 1, stop)
    except Exception as error:  # what the interpreter would print, without the frames of this file and of runpy
        _trim(error, script)
        _leave(1, error, prints=True)
    except KeyboardInterrupt as stop:
        _trim(stop, script)
        traceback.print_exception(stop)
        _leave(128 + signal.SIGINT, stop)
    if getattr(sys.modules.get("offbeat.run.open_sessions"), "trained_unprepared", bool)():
        sys.exit(UNPREPARED)  # in order: the others are waited for


def _hand_over(refusal: str) -> bool:
    """Leave what offbeat refused to the launcher, which says it once for all workers; whether it can."""
    folder = os.environ.get("OFFBEAT_REFUSALS")
    if folder is None:
        return False
    try:
        Path(folder, os.environ["RANK"]).write_text(_brief(refusal), "utf-8", "backslashreplace")
    except OSError:
        return False
    return True


def _trim(error: BaseException, script: str) -> None:
    """Leave the frames of this file and of runpy out of the traceback: it begins in the user's script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename not in (script, os.path.abspath(script)):
        frames = frames.tb_next
    if frames is not None:
        error.__traceback__ = frames


def _brief(text: str) -> str:
    """Cut another worker's traceback down to its last line: the launcher prints it once, in full."""
    lines = text.splitlines()
    following = [*lines[1:], ""]
    kept = [
        line
        for line, after in zip(lines, following, strict=True)
        if not (line.startswith(QUOTED) and after.startswith(QUOTED))
    ]
    return "\n".join(kept)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Leave in order, if the others go on then and the step at hand is soon over; else end now."""
    global _drains
    run = sys.modules.get("offbeat.run.open_sessions")
    drain, has_left = getattr(run, "drain", None), getattr(run, "has_left", None)
    if _drains and has_left is not None and has_left():
        os._exit(LEFT)
    if not _drains and drain is not None and drain():
        _drains = True
        timer = threading.Timer(_DRAIN_S, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
        return
    _say_last_words(KeyboardInterrupt("SIGTERM"))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _leave(code: int, error: BaseException, *, prints: bool = False) -> None:
    """End now: closing in order would wait for workers that will never come."""
    _say_last_words(error)  # which may add a note to it
    if prints:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_last_words(error: BaseException) -> None:
    say = getattr(sys.modules.get("offbeat.run.open_sessions"), "say_last_words", None)  # it may just be being imported
    if say is not None:
        say(error)


def _die_with_launcher() -> None:
    """Ask the kernel to end this process when the launcher is gone, however it went."""
    launcher = os.environ.get("OFFBEAT_LAUNCHER_PID")
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        os._exit(1)


if __name__ == "__main__":
    main()
