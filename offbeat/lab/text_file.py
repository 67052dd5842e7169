"""Read a file that somebody named, whatever it is: what is no regular file, or too large, is refused at once."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from offbeat.errors import ScenarioError

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 256 * 1024
"""Of a scenario or a plan; those that are kept here have a hundredth of it."""


def read_text(path: Path, what: str, way_out: str) -> str:
    """The text of a file.

    Args:
        what: that it should be, such as "scenario".
        way_out: what to do where it is none, as a sentence.

    Raises:
        ScenarioError: as `read_bytes` does, or if it is no text.
    """
    found = read_bytes(path, what, way_out, most=MOST_BYTES)
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise ScenarioError(
            f"Cannot read the {what} {_brief(path)}: it is not UTF-8 (byte {error.start} is "
            f"{found[error.start]:#04x}). {way_out}"
        ) from None


def read_bytes(path: Path, what: str, way_out: str, *, most: int) -> bytes:
    """What a file holds.

    Args:
        what, way_out: as above.
        most: bytes that it may have.

    Raises:
        ScenarioError: if there is no such file, it cannot be read, is a pipe, a device or a folder, or is too large.
    """
    try:
        # A pipe that nobody writes to would be waited for as soon as it is opened.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ScenarioError(f"Cannot read the {what} {_brief(path)}: it is no regular file. {way_out}")
            found = file.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ScenarioError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ScenarioError(f"Cannot read the {what} {_brief(path)}: {reason}. {way_out}") from None
    if len(found) > most:
        raise ScenarioError(
            f"Cannot read the {what} {_brief(path)}: it has more than {most // 1024:,} KiB, which is the most. "
            f"{way_out}"
        )
    return found


def _brief(path: Path) -> str:
    """A path, or its end."""
    text = str(path)
    return text if len(text) <= 200 else f"...{text[-200:]}"
