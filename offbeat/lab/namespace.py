"""Run a function inside a network namespace.

A namespace belongs to a thread, so each call enters it on a thread of its own and the caller never leaves home. What is
opened inside (sockets) stays inside for life.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

DIRECTORY = Path("/var/run/netns")
"""Where named namespaces are mounted: the folder of `ip netns`."""

_CLONE_NEWNET = 0x40000000


def inside(namespace: str, function: Callable[[], T]) -> T:
    """Return `function()` run inside the named network namespace.

    Raises:
        NetworkError: if there is no such namespace or this process may not enter it.
        Exception: whatever `function` raises.
    """
    visit = _Visit(namespace, function)
    thread = threading.Thread(target=visit.run, name=f"inside {namespace}")
    thread.start()
    thread.join()
    if visit.error is not None:
        raise visit.error
    return visit.results[0]


def enter(namespace: str) -> None:
    """Move the calling thread into the named network namespace, for good.

    Raises:
        NetworkError: if there is no such namespace or this process may not enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        handle = os.open(DIRECTORY / namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(handle, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(handle)
    except OSError as error:
        raise NetworkError(
            f"Cannot enter the network namespace {namespace!r}: {error.strerror}. "
            "Run as root, and build the lab again if it was removed."
        ) from error


class _Visit(Generic[T]):
    """One call of `inside`, and what came of it."""

    def __init__(self, namespace: str, function: Callable[[], T]) -> None:
        self.namespace = namespace
        self.function = function
        self.results: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            enter(self.namespace)
            self.results.append(self.function())
        except BaseException as error:
            self.error = error
