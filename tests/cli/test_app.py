"""Every command ends with a sentence at an error that is not its own, and at Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import offbeat

if TYPE_CHECKING:
    from pathlib import Path

LONG = "a" * 5000
# Ctrl-C comes when the module is looked for that the first argument names.
INTERRUPTED = """
import os, signal, sys
name = sys.argv.pop(1)
class Finder:
    def find_spec(self, wanted, *_):
        if wanted == name:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from offbeat.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [("report", LONG), ("verify-run", LONG), ("track", LONG), ("run", LONG), ("run", "--join", LONG, __file__)],
    ids=lambda arguments: arguments[0] + str(len(arguments)),
)
def test_a_path_that_is_too_long_is_refused_in_a_sentence(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, output = offbeat(*arguments, folder=tmp_path)
    assert code == 2
    assert "Traceback" not in output
    assert "File name too long" in output
    assert len(output) < 1000, "the path is cut"


@pytest.mark.parametrize("command", [("serve",), ("top", "127.0.0.1:9")], ids=lambda command: command[0])
def test_a_token_file_without_end_is_refused(tmp_path: Path, command: tuple[str, ...]) -> None:
    code, output = offbeat(*command, "--token-file", "/dev/zero", folder=tmp_path)
    assert code == 2
    assert "Cannot use the token in /dev/zero: the file has more than 4096 bytes." in " ".join(output.split())


@pytest.mark.parametrize("module", ["offbeat.cli.app", "typer", "rich.console", "offbeat.cli.lab", "offbeat.plan"])
def test_ctrl_c_while_modules_are_imported_shows_no_traceback(tmp_path: Path, module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module, "run", __file__]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (-signal.SIGINT, 1, 130)
    assert "Traceback" not in done.stderr
