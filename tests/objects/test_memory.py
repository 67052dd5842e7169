"""Tests of the memory that several processes map."""

import _thread
import gc
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from offbeat.errors import ObjectError
from offbeat.objects.memory import MakerMap, ObjectMap, Segment, map_segment
from tests.patience import stretched

SIZE = 8 << 20


def test_memory_is_freed_in_another_thread(monkeypatch: pytest.MonkeyPatch, before: set[str]) -> None:
    threads: list[int] = []

    def close(self: ObjectMap) -> None:
        super(ObjectMap, self).close()
        threads.append(threading.get_ident())

    monkeypatch.setattr(ObjectMap, "close", close)
    segment = Segment(SIZE)
    maker = MakerMap(os.getpid(), segment.descriptor, SIZE)
    maker.write(0, memoryview(bytes(range(256)) * (SIZE >> 8)))
    maker.close()
    reader = map_segment(os.getpid(), segment.descriptor, SIZE)
    part = segment.memory[:256]
    segment.close()
    del segment, maker
    assert bytes(part) == bytes(reader[:256]) == bytes(range(256)), "who has mapped it keeps it"
    del part, reader
    until = time.monotonic() + stretched(10)
    while (len(threads) < 3 or _maps() - before) and time.monotonic() < until:
        time.sleep(0.001)
    assert len(threads) >= 3, "and perhaps some that the tests before have left"
    assert threading.get_ident() not in threads
    assert not _maps() - before


def test_memory_that_the_garbage_collector_frees(before: set[str]) -> None:
    segment = Segment(SIZE)
    segment.close()
    ring: list[object] = [segment]
    ring.append(ring)
    del segment, ring
    gc.collect()
    until = time.monotonic() + stretched(10)
    while _maps() - before and time.monotonic() < until:
        time.sleep(0.001)
    assert not _maps() - before


def test_memory_is_freed_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, before: set[str]) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    segment = Segment(SIZE)
    segment.close()
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    del segment
    assert not _maps() - before


def test_the_limits_of_a_process_are_said() -> None:
    segment = Segment(SIZE)
    maker = MakerMap(os.getpid(), segment.descriptor, SIZE)
    free = os.dup(0)
    os.close(free)
    for more in (0, 1):  # for the descriptor, and for the one that the map has
        with limited(resource.RLIMIT_NOFILE, free + more):
            with pytest.raises(ObjectError, match="Too many open files"):
                map_segment(os.getpid(), segment.descriptor, SIZE)
            with pytest.raises(ObjectError, match="Too many open files"):
                MakerMap(os.getpid(), segment.descriptor, SIZE)
            with pytest.raises(ObjectError, match="Too many open files"):
                Segment(SIZE)
    with limited(resource.RLIMIT_FSIZE, SIZE // 2), pytest.raises(ObjectError, match="File too large"):
        maker.write(0, memoryview(bytes(SIZE)))
    maker.close()
    segment.close()


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def _maps() -> set[str]:
    """Where the maps of objects begin in this process."""
    with open("/proc/self/maps") as maps:
        return {line.split("-", 1)[0] for line in maps if "offbeat-object" in line}


@pytest.fixture
def before() -> set[str]:
    """The maps that other tests have left."""
    gc.collect()
    return _maps()
