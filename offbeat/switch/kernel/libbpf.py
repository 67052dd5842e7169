"""Kernel programs and their maps, by libbpf: load, read, write, call, and attach to interfaces."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_LOCKED = 4  # BPF_F_LOCK: the whole value at once, under its spin lock
_INGRESS, _EGRESS, _BOTH_WAYS = 1, 2, 3
_REPLACE = 1
_XDP, _GENERIC = 37, 2  # BPF_XDP, XDP_FLAGS_SKB_MODE
_SIOCGIFMTU = 0x8921
_HANDLE, _PRIORITY = 1, 0x0FFB  # by which a filter of ours is known, and replaced
_BATCH_BYTES = 1 << 20  # of entries that are written at a time
_SAID = 1500  # characters of what the kernel says


class _TestRun(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t), ("data_in", ctypes.c_void_p), ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32), ("data_size_out", ctypes.c_uint32), ("ctx_in", ctypes.c_void_p),
        ("ctx_out", ctypes.c_void_p), ("ctx_size_in", ctypes.c_uint32), ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32), ("repeat", ctypes.c_int), ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32), ("cpu", ctypes.c_uint32), ("batch_size", ctypes.c_uint32),
    )  # fmt: skip


class _Hook(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t), ("ifindex", ctypes.c_int), ("attach_point", ctypes.c_uint32),
        ("parent", ctypes.c_uint32),
    )  # fmt: skip


class _Filter(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t), ("prog_fd", ctypes.c_int), ("flags", ctypes.c_uint32), ("prog_id", ctypes.c_uint32),
        ("handle", ctypes.c_uint32), ("priority", ctypes.c_uint32),
    )  # fmt: skip


class _BatchOptions(ctypes.Structure):
    _fields_ = (("sz", ctypes.c_size_t), ("elem_flags", ctypes.c_uint64), ("flags", ctypes.c_uint64))


class _LinkOptions(ctypes.Structure):
    _fields_ = (("sz", ctypes.c_size_t), ("flags", ctypes.c_uint32), ("unused", ctypes.c_uint32))


class KernelMap:
    """One map with keys 0, 1, ... or any number of 32 bits.

    Args:
        fd: of the map.
        value: of its entries, as they lie in memory.
        is_locked: whether entries begin with a spin lock, under which they are read and written.
    """

    def __init__(self, library: ctypes.CDLL, fd: int, value: np.dtype[Any], *, is_locked: bool) -> None:
        self._library, self._fd, self._value = library, fd, value
        self._flags = ctypes.c_uint64(_LOCKED if is_locked else 0)

    def __getitem__(self, key: int) -> Any:
        """The entry of a key.

        Raises:
            KeyError: if there is none.
        """
        entry = np.zeros(1, self._value)
        at = ctypes.c_uint32(key)
        if self._library.bpf_map_lookup_elem_flags(self._fd, ctypes.byref(at), _pointer(entry), self._flags):
            raise KeyError(key)
        return entry[0]

    def __setitem__(self, key: int, entry: NDArray[Any]) -> None:
        at, entry = ctypes.c_uint32(key), np.ascontiguousarray(entry, self._value)
        _check(self._library.bpf_map_update_elem(self._fd, ctypes.byref(at), _pointer(entry), self._flags), "write")

    def clear(self, first: int, count: int) -> None:
        """Make so many entries zero, from a key on."""
        most = max(1, _BATCH_BYTES // self._value.itemsize)
        empty = np.zeros(min(most, count), self._value)
        opts = _BatchOptions(sz=ctypes.sizeof(_BatchOptions), elem_flags=self._flags.value)
        for start in range(first, first + count, most):
            keys = np.arange(start, min(start + most, first + count), dtype=np.uint32)
            done = ctypes.c_uint32(len(keys))
            _check(
                self._library.bpf_map_update_batch(
                    self._fd, _pointer(keys), _pointer(empty), ctypes.byref(done), ctypes.byref(opts)
                ),
                "clear",
            )

    def __delitem__(self, key: int) -> None:
        self._library.bpf_map_delete_elem(self._fd, ctypes.byref(ctypes.c_uint32(key)))


class KernelObject:
    """An object file, loaded.

    Args:
        path: of the object file.

    Raises:
        NetworkError: if libbpf is missing, or the kernel does not take it; says why.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = library = ctypes.CDLL("libbpf.so.1", use_errno=True)
        except OSError as error:
            raise NetworkError(
                "Cannot sum in the kernel: libbpf is not installed. Install it (on Debian: apt install libbpf1), or "
                "use --target udp."
            ) from error
        for name in ("bpf_object__open_file", "bpf_object__find_map_by_name", "bpf_object__find_program_by_name"):
            getattr(library, name).restype = ctypes.c_void_p
        said = _Said(library)
        self._object = ctypes.c_void_p(library.bpf_object__open_file(str(path).encode(), None))
        if not self._object or (code := library.bpf_object__load(self._object)):
            code = -ctypes.get_errno() if not self._object else code
            if self._object:
                library.bpf_object__close(self._object)
            raise NetworkError(_not_loaded(-code, said.text))
        self._attached: list[tuple[_Hook, bool]] = []
        self._links: list[int] = []

    def map(self, name: str, value: np.dtype[Any], *, is_locked: bool = False) -> KernelMap:
        """A map of the program, whose entries have to be as large as `value`."""
        size = self._library.bpf_map__value_size(self._map(name))
        assert size == value.itemsize, f"entries of {name} have {size} bytes, not {value.itemsize}"
        return KernelMap(self._library, self._library.bpf_map__fd(self._map(name)), value, is_locked=is_locked)

    def counts(self, name: str, counters: int) -> list[int]:
        """The sums over all processors of a map's first counters."""
        each = np.dtype(("<u8", (self._library.libbpf_num_possible_cpus(),)))
        table = KernelMap(self._library, self._library.bpf_map__fd(self._map(name)), each, is_locked=False)
        return [int(np.sum(table[key])) for key in range(counters)]

    def call(self, program: str, data: bytes) -> bytes:
        """Run a program on a packet that nobody has sent; what it has made of it."""
        found = np.frombuffer(bytearray(data), np.uint8)
        run = _TestRun(
            sz=ctypes.sizeof(_TestRun), data_in=found.ctypes.data, data_size_in=len(found),
            data_out=found.ctypes.data, data_size_out=len(found), repeat=1,
        )  # fmt: skip
        _check(self._library.bpf_prog_test_run_opts(self._program(program), ctypes.byref(run)), "call")
        return found.tobytes()

    def attach(self, program: str, interfaces: Sequence[str], *, is_egress: bool = False) -> None:
        """Have a program see all that comes in at these interfaces, or all that goes out, until `close`.

        Raises:
            NetworkError: if there is no such interface, or it cannot be attached.
        """
        for name in interfaces:
            hook = _Hook(
                sz=ctypes.sizeof(_Hook), ifindex=_index_of(name), attach_point=_EGRESS if is_egress else _INGRESS
            )
            made = self._library.bpf_tc_hook_create(ctypes.byref(hook))
            if made and made != -errno.EEXIST:
                raise NetworkError(
                    f"Cannot sum what comes in at {name!r}: its clsact hook cannot be made ({os.strerror(-made)}). The "
                    "kernel needs CONFIG_NET_CLS_ACT and CONFIG_NET_CLS_BPF; or use --target udp."
                )
            opts = _Filter(
                sz=ctypes.sizeof(_Filter), prog_fd=self._program(program), flags=_REPLACE, handle=_HANDLE,
                priority=_PRIORITY,
            )  # fmt: skip
            code = self._library.bpf_tc_attach(ctypes.byref(hook), ctypes.byref(opts))
            if code:
                raise NetworkError(f"Cannot sum what comes in at {name!r}: {os.strerror(-code)}.")
            self._attached.append((hook, made == 0))

    def attach_at_xdp(self, program: str, interfaces: Sequence[str]) -> None:
        """Have a program see all that comes in at these interfaces as early as can be, until `close`.

        That is in the driver if it can; else (generic) before anything else looks at a packet, as on loopback.

        Raises:
            NetworkError: if there is no such interface, or it cannot be attached.
        """
        for name in interfaces:
            index = _index_of(name)
            for flags in (0, _GENERIC):
                opts = _LinkOptions(sz=ctypes.sizeof(_LinkOptions), flags=flags)
                link = self._library.bpf_link_create(self._program(program), index, _XDP, ctypes.byref(opts))
                if link >= 0:
                    self._links.append(link)
                    break
            else:
                raise NetworkError(
                    f"Cannot sum what comes in at {name!r} by XDP: {os.strerror(-link)}. If another program is there, "
                    f"which `ip link show {name}` tells, take it away; or use --target ebpf."
                )

    @staticmethod
    def frame_bytes(interfaces: Sequence[str]) -> int:
        """The most that a frame of each of these interfaces carries, in bytes (MTU).

        Raises:
            NetworkError: if there is no such interface.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                asked = [fcntl.ioctl(sock, _SIOCGIFMTU, struct.pack("16si12x", n.encode(), 0)) for n in interfaces]
            except OSError as error:
                raise NetworkError(_no_such(interfaces)) from error
        return min(int(struct.unpack("16si12x", one)[1]) for one in asked)

    def close(self) -> None:
        """Detach it everywhere, and forget it with its maps; again does nothing."""
        for hook, is_ours in self._attached:
            opts = _Filter(sz=ctypes.sizeof(_Filter), handle=_HANDLE, priority=_PRIORITY)
            self._library.bpf_tc_detach(ctypes.byref(hook), ctypes.byref(opts))
            if is_ours:
                hook.attach_point = _BOTH_WAYS  # which is the whole of it
                self._library.bpf_tc_hook_destroy(ctypes.byref(hook))
        for link in self._links:
            os.close(link)
        self._attached, self._links = [], []
        if self._object:
            self._library.bpf_object__close(self._object)
            self._object = ctypes.c_void_p()

    def _map(self, name: str) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._library.bpf_object__find_map_by_name(self._object, name.encode()))

    def _program(self, name: str) -> int:
        found = ctypes.c_void_p(self._library.bpf_object__find_program_by_name(self._object, name.encode()))
        return int(self._library.bpf_program__fd(found))


class _Said:
    """The complaints of libbpf while it loads, instead of writing them to stderr."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.text = ""
        libc = ctypes.CDLL(None)

        def note(level: int, form: bytes, arguments: int | None) -> int:
            line = ctypes.create_string_buffer(4096)
            libc.vsnprintf(line, len(line), form, ctypes.c_void_p(arguments))
            self.text += line.value.decode(errors="replace") if level <= 1 else ""
            return 0

        self._note = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(note)
        _kept.append(self._note)
        library.libbpf_set_print(self._note)


_kept: list[Any] = []  # functions that the library may call as long as this process lives


def _index_of(interface: str) -> int:
    try:
        return socket.if_nametoindex(interface)
    except OSError as error:
        raise NetworkError(_no_such([interface])) from error


def _no_such(names: Sequence[str]) -> str:
    there = [name for _, name in socket.if_nameindex()]
    lacking = ", ".join(repr(name) for name in names if name not in there)
    return f"Cannot sum what comes in at {lacking}: there is no such interface; there are {', '.join(there)}."


def _not_loaded(code: int, said: str) -> str:
    if code in (errno.EPERM, errno.EACCES) and os.geteuid() != 0:
        return (
            f"Cannot sum in the kernel as user {os.geteuid()}: loading its program needs root, or CAP_BPF and "
            "CAP_NET_ADMIN. Run it with sudo, or use --target udp."
        )
    if code == errno.ENOMEM:
        return "Cannot sum in the kernel: it has no memory for its tables. Start it with a smaller --table-mib."
    return (
        f"Cannot sum in the kernel: it does not take the program ({os.strerror(code)}). It needs Linux 5.17 or newer "
        f"with CONFIG_BPF_SYSCALL and CONFIG_DEBUG_INFO_BTF; or use --target udp. It said: {said[-_SAID:].strip()}"
    )


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _check(code: int, what: str) -> None:
    if code:
        raise NetworkError(f"Cannot {what} the kernel's switch: {os.strerror(-code)}.")
