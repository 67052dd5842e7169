"""Gloo's listening sockets, which hear nobody once the workers of a group are connected.

Each group of Gloo's has a listening socket that it needs until its workers are connected, and keeps until it ends. Gloo
asks nobody who connects there for a token, and keeps a descriptor of each connection for ever (torch 2.13). Strangers
could use up all descriptors, which ends the process. So offbeat attaches a filter to the socket that drops every
packet. The connections between the workers have sockets of their own, and Gloo's own bookkeeping remains untouched.

offbeat finds the socket of a group by the address that Gloo published in the group's store. The socket remains as it is
where that fails, or where fewer workers are connected than the group has, as with `TORCH_GLOO_LAZY_INIT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

_log = logging.getLogger("offbeat")
_DESCRIPTORS, _ABOUT_THEM = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes
_WATCHED = re.compile(r"^tfd:\s+(\d+)", re.MULTILINE)  # the descriptors that an epoll watches, see proc(5)


def stop_listening(group: dist.ProcessGroup) -> bool:
    """Drop all packets for the listening sockets of a group that torch has registered; see `stop_listening_at`."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return stop_listening_at(PrefixStore("cpu/", store), group.rank(), group.size())


def stop_listening_at(store: Store, rank: int, size: int) -> bool:
    """Drop all packets for the listening sockets of a group of Gloo's, if its workers are connected.

    Args:
        store: with which the group was made.
        rank: of this worker in the group.
        size: of the group.

    Returns:
        Whether the group had such sockets, and none of them hears anybody now.
    """
    try:
        published = b"".join(_published(store, rank))
        are_deaf = [others >= size - 1 and drop_all(one) for one, others in _listeners(published)]
    except (OSError, RuntimeError) as error:  # not Linux, a kernel without filters, a store that is gone
        _log.debug("Gloo's sockets of rank %d remain open to strangers: %s", rank, error)
        return False
    if are_deaf and all(are_deaf):
        return True
    _log.debug("Gloo's sockets of rank %d remain open to strangers: offbeat found %s", rank, are_deaf)
    return False


def drop_all(listener: socket.socket) -> bool:
    """Have the kernel drop all packets to a listening socket; accepted connections live on.

    Raises:
        OSError: if the kernel has no such filters.
    """
    instructions = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("@HP", 1, ctypes.addressof(instructions))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    return True


def _published(store: Store, rank: int) -> Iterator[bytes]:
    """The bytes by which Gloo tells the others where this worker listens, once per interface."""
    interface = 0
    while store.check([key := f"{interface}/{rank}"]):
        yield store.get(key)
        interface += 1


def _listeners(published: bytes) -> Iterator[tuple[socket.socket, int]]:
    """The listening sockets with a published address, each with how many connections lie beside it."""
    with contextlib.ExitStack() as opened:
        sockets = {fd: opened.enter_context(one) for fd, one in _sockets()}
        for fd, one in sockets.items():
            if _is_listening(one) and _address(one) in published:
                yield one, sum(_is_connected(sockets[other]) for other in _watched_beside(fd) if other in sockets)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # another thread closed it, or Python does not know its kind
            if os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                yield int(name), socket.socket(fileno=os.dup(int(name)))


def _watched_beside(fd: int) -> set[int]:
    """The descriptors that the thread of Gloo's watches which watches `fd`."""
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):
            if os.readlink(_DESCRIPTORS / name) == "anon_inode:[eventpoll]":
                watched = {int(other) for other in _WATCHED.findall((_ABOUT_THEM / name).read_text())}
                if fd in watched:
                    return watched
    return set()


def _is_listening(one: socket.socket) -> bool:
    is_internet = one.family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_connected(one: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return bool(one.getpeername())
    return False


def _address(one: socket.socket) -> bytes:
    """The address as the kernel writes it, without an IPv6 scope."""
    host, port = one.getsockname()[:2]
    flow = bytes(4) if one.family == socket.AF_INET6 else b""
    place = struct.pack("!H", port) + flow + socket.inet_pton(one.family, host.partition("%")[0])
    return struct.pack("=H", one.family) + place
