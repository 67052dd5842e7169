"""Tests of the memory that several processes map."""

import gc
import os
import threading
import time

import pytest

from offbeat.objects.memory import MakerMap, ObjectMap, Segment, map_segment

SIZE = 8 << 20


def test_memory_is_freed_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
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
    until = time.monotonic() + 5
    while (len(threads) < 3 or "offbeat-object" in _maps()) and time.monotonic() < until:
        time.sleep(0.001)
    assert len(threads) == 3
    assert threading.get_ident() not in threads
    assert "offbeat-object" not in _maps()


def test_memory_that_the_garbage_collector_frees() -> None:
    segment = Segment(SIZE)
    segment.close()
    ring: list[object] = [segment]
    ring.append(ring)
    del segment, ring
    gc.collect()
    until = time.monotonic() + 5
    while "offbeat-object" in _maps() and time.monotonic() < until:
        time.sleep(0.001)
    assert "offbeat-object" not in _maps()


def _maps() -> str:
    with open("/proc/self/maps") as maps:
        return maps.read()
