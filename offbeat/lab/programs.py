"""Command lines and environment of the lab's own programs, so that they start from any folder and from any checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGE = Path(__file__).resolve().parent.parent
_ENTER = Path(__file__).resolve().with_name("enter.py")


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package in this interpreter."""
    return [sys.executable, "-m", name, *arguments]


def script(path: Path, *arguments: str) -> list[str]:
    """The command that runs a script in this interpreter."""
    return [sys.executable, str(path), *arguments]


def entered(namespace: str | None, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in a network namespace (None: here), ended by the kernel when we end."""
    # -S -I: nothing but the standard library is needed to enter, and start-up is what a row of runs waits for.
    return [sys.executable, "-S", "-I", str(_ENTER), str(os.getpid()), namespace or "-", *command]


def environment() -> dict[str, str]:
    """Our environment, with this very package first where Python looks for modules."""
    paths = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
