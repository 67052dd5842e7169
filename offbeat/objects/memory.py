"""Memory of objects that several processes of a machine map: anonymous memory files.

A store makes one for each object, and other processes of the same user and PID namespace open its descriptor under
/proc. It has no name, so nothing is left when the last of them is gone, whoever was killed. Its size is sealed. While
its maker fills it, it may be mapped for writing; then that is sealed, too: the kernel refuses a shared writable map. A
reader maps it privately, so what it writes nobody else sees.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from offbeat.errors import ObjectError

_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which Python has no name for: this process goes on writing by its own map
_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Segment:
    """The memory of one object, in the process that made it.

    Args:
        size_bytes: of it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.descriptor = os.memfd_create("offbeat-object", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, max(1, size_bytes))
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SIZE)
            self._map = mmap.mmap(self.descriptor, max(1, size_bytes))
        except OSError:
            os.close(self.descriptor)
            raise
        self.memory = memoryview(self._map)[:size_bytes]

    def seal(self) -> None:
        """Have nobody else map it for writing any more."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _FUTURE_WRITE)

    def close(self) -> None:
        """Let go of it; whoever has mapped it keeps it. Lanes that still send from it keep this process's map."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def map_segment(process: int, descriptor: int, size_bytes: int, *, to_fill: bool = False) -> mmap.mmap:
    """Map an object that another process of this machine has.

    Args:
        process, descriptor: whose, and which of its.
        to_fill: whether for its maker, who writes what all will read; else for a reader.

    Raises:
        ObjectError: if that process cannot be looked into: it is gone, another user's, or of another PID namespace.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR if to_fill else os.O_RDONLY)
    except OSError as error:
        raise ObjectError(
            f"Cannot open the memory of the store with process id {process} ({error.strerror}). A client has to run on "
            "its store's machine, as the same user and in the same PID namespace (container)."
        ) from error
    try:
        if to_fill:
            return mmap.mmap(opened, max(1, size_bytes))
        return mmap.mmap(opened, max(1, size_bytes), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(opened)
