"""Read what offbeat wrote into a file, whatever has become of it since.

A file may be damaged, cut off, another program's, or no file at all (a pipe, a device). Whatever it holds, reading it
takes bounded time and memory, and ends in a value of the declared type, an `OSError`, or an `UnreadableError`.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

_T = TypeVar("_T")
MOST_BYTES = 1 << 20  # of a file that is read at once
_MOST_TEXT = 200  # characters of why it cannot be read


class UnreadableError(ValueError):
    """The bytes are not what was written; the text says why."""


def decode(decoder: Callable[[Any], _T], data: bytes | bytearray | memoryview | str) -> _T:
    """The value in these bytes.

    Args:
        decoder: the `decode` of an encoding's `msgspec` decoder.

    Raises:
        UnreadableError: if they are damaged, nested too deeply, or hold something else.

    >>> decode(msgspec.json.Decoder(list[int]).decode, b"[1, 2]")
    [1, 2]
    >>> decode(msgspec.json.Decoder(list[str]).decode, b'["\\xff"]')
    Traceback (most recent call last):
    offbeat.safe_read.UnreadableError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte
    """
    try:
        return decoder(data)
    # A ValueError: text that is not UTF-8, or an integer of thousands of digits.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableError(str(error)[:_MOST_TEXT]) from error


def open_file(path: Path) -> BinaryIO:
    """A regular file, opened to be read; the size of anything else, and how long reading it takes, nobody knows.

    Raises:
        OSError: if there is none, or it is a folder, a pipe or a device.
    """
    # Without O_NONBLOCK opening a pipe waits until somebody writes into it.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(fd, "rb")


def read_file(path: Path, decoder: Callable[[Any], _T]) -> _T:
    """The value in a small file.

    Args:
        decoder: as `decode` takes it.

    Raises:
        OSError: if it cannot be read.
        UnreadableError: if it is larger than 1 MiB, damaged, or holds something else.
    """
    with open_file(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UnreadableError(f"it has more than {MOST_BYTES} bytes")
    return decode(decoder, data)
