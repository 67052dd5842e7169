"""Write files that are there whole or not at all, whoever looks, and whenever this process is killed."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO


def write_whole(
    path: Path, data: bytes | Callable[[BinaryIO], object], *, mode: int = 0o666, sync: bool = False
) -> None:
    """Write a file under another name beside its place, then move it there; what is there before is replaced.

    Args:
        data: its content, or what writes that.
        mode: permission bits, of which the process's umask takes away.
        sync: whether content and name survive when the machine fails, too.

    Raises:
        OSError: if it cannot be written; what was there before is.

    >>> import tempfile; from pathlib import Path
    >>> path = Path(tempfile.mkdtemp()) / "answer.json"
    >>> write_whole(path, b"42"); path.read_bytes(), [one.name for one in path.parent.iterdir()]
    (b'42', ['answer.json'])
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # it may have other permissions
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
        if sync:
            sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Have the names of a folder's files survive when the machine fails, too."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
