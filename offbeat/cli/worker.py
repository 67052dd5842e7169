"""What `offbeat run` starts on each worker: the user's script, unchanged, with errors that end in one sentence.

    python -m offbeat.cli.worker script.py its arguments

Exit codes: 2 if offbeat refused something, `VICTIM` if this worker only stopped because another was lost, else the
script's own.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import traceback

from offbeat.errors import NetworkError, OffbeatError, WorkerLostError

VICTIM = 76
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the script named on the command line as ``__main__``."""
    _die_with_launcher()
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except OffbeatError as error:
        if os.environ.get("OFFBEAT_DEBUG"):
            traceback.print_exc()
        else:
            sys.stderr.write(f"offbeat: {error}\n")
        _leave(VICTIM if isinstance(error, (WorkerLostError, NetworkError)) else 2, error)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        if stop.code not in (None, 0):
            _leave(stop.code if isinstance(stop.code, int) else 1, stop)
    except Exception as error:  # what the interpreter would print, without the frames of this file and of runpy
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != os.path.abspath(script):
            if frames.tb_frame.f_code.co_filename == script:
                break
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames or error.__traceback__)
        _leave(1, error)


def _leave(code: int, error: BaseException) -> None:
    """End now: closing in order would wait for workers that will never come."""
    if "offbeat.run" in sys.modules:
        sys.modules["offbeat.run"].say_last_words(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
