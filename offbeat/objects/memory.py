"""Memory of objects that several processes of a machine map: anonymous memory files.

A store makes one for each object, and other processes of the same user and PID namespace open its descriptor under
/proc. It has no name, so nothing is left when the last of them is gone, whoever was killed. Its size is sealed. While
its maker fills it, it may be mapped for writing; then that is sealed, too: the kernel refuses a shared writable map. A
reader maps it privately, so what it writes nobody else sees.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import time
from typing import Any

from offbeat.errors import ObjectError

_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which Python has no name for: this process goes on writing by its own map
_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAP_FIXED = 0x10
_FREED_ASIDE_BYTES = 1 << 20
_MOST_TRIES, _RETRY_S = 100, 0.01


class ObjectMap(mmap.mmap):
    """A map of an object's memory that a thread of its own unmaps.

    Where nobody else has it mapped the kernel frees each page then, which takes some 0.2 s for 100 MiB. Whoever drops
    the last reference, or the garbage collector on its behalf, would stand still that long: an event loop, or training.
    """

    def __del__(self) -> None:
        if not self.closed and len(self) >= _FREED_ASIDE_BYTES and not sys.is_finalizing():
            # threading.Thread takes a lock that whoever runs the garbage collector here may hold.
            with contextlib.suppress(RuntimeError):  # without another thread it is unmapped here
                _thread.start_new_thread(_unmap, (self,))


def _unmap(memory: ObjectMap) -> None:
    """Unmap an object's memory; what the garbage collector drops together with it may still look into it."""
    for _ in range(_MOST_TRIES):
        try:
            return memory.close()
        except BufferError:
            time.sleep(_RETRY_S)


class Segment:
    """The memory of one object, in the process that made it.

    Args:
        size_bytes: of it.

    Raises:
        ObjectError: if this process may have no more memory, or descriptors.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes, self.descriptor = size_bytes, -1
        try:
            self.descriptor = os.memfd_create("offbeat-object", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, max(1, size_bytes))
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SIZE)
            self._map = ObjectMap(self.descriptor, max(1, size_bytes))
        except OSError as error:
            self.close()
            raise _at_limit(error) from error
        self.memory = memoryview(self._map)[:size_bytes]

    def seal(self) -> None:
        """Have nobody else map it for writing any more."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _FUTURE_WRITE)

    def close(self) -> None:
        """Let go of it; whoever has mapped it keeps it. Lanes that still send from it keep this process's map."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class MakerMap:
    """The shared map of an object that its maker fills, in the maker's process.

    Args:
        process, descriptor, size_bytes: as of `map_segment`.

    Raises:
        ObjectError: as `map_segment`.
    """

    def __init__(self, process: int, descriptor: int, size_bytes: int) -> None:
        self._size = max(1, size_bytes)
        self._descriptor = _opened(process, descriptor, os.O_RDWR)
        try:
            self._map: ObjectMap | None = _mapped(self._descriptor, self._size, mmap.MAP_SHARED)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, at: int, data: memoryview) -> None:
        """Fill a part: through the file, which takes half as long as through a map whose pages are all new.

        Raises:
            ObjectError: if the kernel refuses.
        """
        while data:
            try:
                written = os.pwrite(self._descriptor, data, at)
            except OSError as error:
                raise ObjectError(
                    f"Cannot fill an object of {self._size:,} bytes: {error.strerror}. See what `ulimit -a` says of "
                    "this process."
                ) from error
            at, data = at + written, data[written:]

    def take(self) -> ObjectMap:
        """Return the memory; from now on its user alone keeps it."""
        memory, self._map = self._map, None
        assert memory is not None
        return memory

    def make_private(self) -> None:
        """Have nobody else see what is written into the memory from now on; it must still be mapped.

        Raises:
            ObjectError: if the kernel refuses.
        """
        access = mmap.PROT_READ | mmap.PROT_WRITE
        made = _libc().mmap(self.address, self._size, access, mmap.MAP_PRIVATE | _MAP_FIXED, self._descriptor, 0)
        if made != self.address:
            raise ObjectError(
                f"Cannot finish an object: its memory cannot be mapped ({os.strerror(ctypes.get_errno())})."
            )
        self.close()

    def close(self) -> None:
        """Keep the memory as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return libc


def map_segment(process: int, descriptor: int, size_bytes: int) -> ObjectMap:
    """Map an object that another process of this machine has, for a reader: what is written nobody else sees.

    Args:
        process, descriptor: whose, and which of its.

    Raises:
        ObjectError: if that process cannot be looked into: it is gone, another user's, or of another PID namespace; or
            if this one may map no more.
    """
    opened = _opened(process, descriptor, os.O_RDONLY)
    try:
        return _mapped(opened, max(1, size_bytes), mmap.MAP_PRIVATE)
    finally:
        os.close(opened)


def _mapped(descriptor: int, size_bytes: int, flags: int) -> ObjectMap:
    try:
        return ObjectMap(descriptor, size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise _at_limit(error) from error


def _at_limit(error: OSError) -> ObjectError:
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
        return ObjectError(f"Cannot have memory of another object here: {error.strerror}.")
    return ObjectError(
        f"Cannot have memory of another object here: {error.strerror}. Each takes a file descriptor: let go of some, "
        "or raise the limits of this process (`ulimit -n`, `ulimit -v`)."
    )


def _opened(process: int, descriptor: int, flags: int) -> int:
    try:
        return os.open(f"/proc/{process}/fd/{descriptor}", flags)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise _at_limit(error) from error
        raise ObjectError(
            f"Cannot open the memory of the store with process id {process} ({error.strerror}). A client has to run on "
            "its store's machine, as the same user and in the same PID namespace (container)."
        ) from error
