"""A history as a file: what comes back from it, and what of it may be damaged."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import struct
import subprocess
import zlib
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.audit import verify
from offbeat.errors import HistoryError
from offbeat.history import (
    HistoryEnded,
    HistoryHeader,
    HistoryLog,
    HistoryWriter,
    LifeBegan,
    ParametersAfter,
    PlanAdopted,
    PolicyStep,
    Record,
    actions_of,
    event_of,
    log,
    policy_step,
)
from offbeat.history.log import write_log
from offbeat.sync import Apply, Drop, Evict, Grant, Joined, Ready, Release, Remember, TakesEveryNth, Wake
from tests.workers import listen

if TYPE_CHECKING:
    from pathlib import Path

HEADER = HistoryHeader(1, "worker", "job", 3, 0.0, "now")


def has(step: int) -> ParametersAfter:
    return ParametersAfter(0, step, step / 3, (step * 0x9E3779B97F4A7C15) % 2**64, 32.0, 7, (step,), (step,))


def written(path: Path, count: int = 1000) -> list[Record]:
    records: list[Record] = [HEADER, *map(has, range(count)), HistoryEnded()]
    write_log(path, records)
    return records


def test_what_is_recorded_comes_back(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "new", "worker-3", kind="worker", job="job", rank=3)
    actions = (Grant(1), Apply(((1, 7), (0, 9)), 0.5, False), Drop(((2, 1),)), Release(1), Evict(2), Wake(8.25))
    recorded: list[Record] = [
        LifeBegan(0, 5, "plan", 3, 2, {1: 4}),
        policy_step(0, Ready(1, 7, 1.25, 32.0), (*actions, Remember("anything")), asked=True),
        policy_step(0, Joined(2, 1.5), (), asked=False),
        policy_step(1, TakesEveryNth(2, 3, 1.75), (), asked=True),
        *map(has, range(1000)),
    ]
    for record in recorded:
        writer.append(record)
    writer.close("it was enough")
    writer.close()
    back = HistoryLog(writer.path)
    assert (back.header.kind, back.header.job, back.header.rank) == ("worker", "job", 3)
    assert list(back)[1:] == [*recorded, HistoryEnded("it was enough")]
    assert not back.is_torn
    assert isinstance(recorded[1], PolicyStep)
    assert event_of(recorded[1]) == Ready(1, 7, 1.25, 32.0)
    assert actions_of(recorded[1]) == actions


def test_a_process_that_is_started_again_writes_another_file(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        writer = HistoryWriter(tmp_path, "shard", kind="shard", job="job")
        names.append(writer.path.name)
        writer.close()
    assert names == ["shard.log", "shard.2.log", "shard.3.log"]


def test_a_process_that_is_killed_leaves_what_it_has_recorded(tmp_path: Path) -> None:
    path = tmp_path / "worker-3.log"
    records = written(path)
    whole = path.read_bytes()
    found = set()
    for size in range(16, len(whole), 101):
        path.write_bytes(whole[:size])
        try:
            torn = HistoryLog(path)
        except HistoryError as error:
            assert "cut off at its beginning" in str(error)  # noqa: PT017
            continue
        there = list(torn)
        assert there == records[: len(there)]
        assert torn.is_torn or len(there) in {257, 513, 769, 256, 512, 768}
        found.add(len(there))
    assert len(found) > 2


def test_what_is_flushed_can_be_read_at_once(tmp_path: Path) -> None:
    """Also while the writer's own thread is at it: no record is missing, and none is there twice."""
    writer = HistoryWriter(tmp_path, "x", kind="worker", job="j")
    for step in range(500):
        writer.append(has(step))
        if step % 50 == 49:
            writer.flush()
            assert list(HistoryLog(writer.path))[1:] == [has(earlier) for earlier in range(step + 1)]
    writer.close()


def test_a_bit_that_is_flipped_is_found(tmp_path: Path) -> None:
    path = tmp_path / "worker-3.log"
    records = written(path)
    whole = path.read_bytes()
    for at in range(16, len(whole), 53):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(HistoryError, match=r"damaged after it was written|cut off"):
            assert list(HistoryLog(path)) != records


def test_a_chunk_that_is_missing_is_found(tmp_path: Path) -> None:
    path = tmp_path / "worker-3.log"
    written(path)
    data = path.read_bytes()
    _, size, _ = struct.unpack_from("!QII", data, 16)
    second = 16 + 20 + size
    _, size, _ = struct.unpack_from("!QII", data, second)
    path.write_bytes(data[:second] + data[second + 20 + size :])
    with pytest.raises(HistoryError, match="from record 256 on: the next one there is number 512"):
        list(HistoryLog(path))


def chunk(payload: bytes, number: int = 0, size: int | None = None) -> bytes:
    """As a writer makes them, with whatever in it, and its checksums right."""
    head = struct.pack("!QII", number, len(payload) if size is None else size, zlib.crc32(payload))
    return head + struct.pack("!I", zlib.crc32(head)) + payload


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (chunk(zlib.compress(b"\x91" + bytes(3 << 20))), "no whole chunk of at most"),
        (chunk(zlib.compress(b"\xdd\xff\xff\xff\xff")), "truncated"),
        (chunk(zlib.compress(b"\x91" * 100_000, 0)), "recursion|Expected"),
        (chunk(b"nothing deflated"), "incorrect header check"),
        (chunk(zlib.compress(msgspec.msgpack.encode([[99, 1, 2]]))), "Invalid value 99"),
        (chunk(b"", size=1 << 31), "and 1048576 is the most"),
        (chunk(b"", size=0), "0 bytes belong together"),
    ],
    ids=["bomb", "long-array", "deep", "plain", "unknown", "large", "empty"],
)
def test_nothing_is_allocated_for_what_a_file_claims(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "worker-3.log"
    path.write_bytes(b"offbeat history\n" + data)
    with pytest.raises(HistoryError, match=says):
        HistoryLog(path)


@settings(max_examples=100)
@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_whatever_a_file_holds_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, is_chunk: bool, is_deflated: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.log"
    data = zlib.compress(data) if is_deflated else data
    path.write_bytes(b"offbeat history\n" + (chunk(data) if is_chunk else data))
    with pytest.raises(HistoryError):
        verify(path)


_numbers = st.integers(0, 3)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 9), st.lists(_numbers, min_size=1, max_size=4)), max_size=12), st.data())
def test_whatever_is_recorded_is_judged(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """Well-formed records of anything: a verdict, never another exception."""
    path = tmp_path_factory.getbasetemp() / "nonsense.log"
    records: list[object] = [msgspec.msgpack.decode(msgspec.msgpack.encode(LifeBegan(0, 1, PLAN)))]
    for number, values in events:
        worker, clock, *_ = [*values, 0, 0]
        event = {
            1: [1, worker, clock, 1.0, 1.0],
            2: [2, worker, clock, 1.0],
            3: [3, worker, clock, 1.0],
            4: [4, worker, 1.0],
            5: [5, worker, 1.0],
            6: [6, worker, 1.0, False],
            7: [7, worker, clock, 1.0],
            8: [8, 1.0],
            9: [9, 1.0, False],
        }[number]
        actions = data.draw(
            st.lists(
                st.one_of(
                    st.tuples(st.sampled_from([1, 4, 5]), _numbers).map(list),
                    st.lists(st.tuples(_numbers, _numbers), max_size=2).map(lambda pushes: [2, pushes, 1.0, True]),
                    st.lists(st.tuples(_numbers, _numbers), max_size=2).map(lambda pushes: [3, pushes]),
                ),
                max_size=2,
            )
        )
        records.append([3, 0, event, actions, data.draw(st.booleans())])
    header = [0, 1, "coordinator", "job", 0, 0.0, "now"]
    path.write_bytes(b"offbeat history\n" + chunk(zlib.compress(msgspec.msgpack.encode([header, *records]), 0)))
    verdict = verify(path)
    assert verdict.events <= len(events)


PLAN = '[sync]\nkind = "SSP"\nbound = 1\n[fabric]\nkind = "ParameterServer"\n'


@pytest.mark.parametrize("ends", ["with room", "full", "with too much"])
def test_a_full_disk_ends_nothing_but_the_recording_if_it_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    said, write = listen(), os.write
    monkeypatch.setattr(log, "_FLUSH_S", 600)  # it is this thread that writes
    writer = HistoryWriter(tmp_path, "worker-3", kind="worker", job="job", rank=3)
    full = False

    def write_or_not(fd: int, data: bytes) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return write(fd, data[: max(1, len(data) // 2)])  # what a disk may do before it is full

    monkeypatch.setattr(os, "write", write_or_not)
    for step in range(1000):
        writer.append(has(step))
    writer._flush()
    full = True
    for step in range(1000, 2000):
        writer.append(has(step))
    writer._flush()
    if ends == "with too much":
        monkeypatch.setattr(log, "_MOST_QUEUED", 500)
        for step in range(2000, 2600):
            writer.append(has(step))
    full = ends != "with room"
    writer.close()
    assert said[0] == (
        f"Cannot write the history {writer.path} at present: No space left on device. Up to 262144 records are kept in "
        "memory until there is room."
    )
    assert said[1:] == [
        f"The history {writer.path} is written again; nothing is missing in it."
        if ends == "with room"
        else f"Cannot write the history {writer.path} any further: No space left on device. Training continues without "
        "it."
    ]
    found = list(HistoryLog(writer.path))
    assert (len(found) == 2002) == (ends == "with room")
    assert found[-1] == (
        HistoryEnded() if ends == "with room" else HistoryEnded("No space left on device", gave_up=True)
    )
    assert len(found) >= 1001
    assert not verify(tmp_path).violations


class Limit:
    """Files of this process may not be longer than this: what a full disk does to the one that is written."""

    def __init__(self, folder: Path) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, path: Path, room: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, self._before[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


class Small:
    """A file system of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("mounting needs root")

    def fill(self, path: Path, room: int) -> None:
        with (self._folder / "filler").open("wb", 0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass

    def free(self) -> None:
        subprocess.run(["umount", self._folder], check=True)


@pytest.mark.parametrize(("disk", "room"), [(Small, 0), *((Limit, room) for room in (0, 1, 10, 40, 200))])
@pytest.mark.parametrize("before", [3, 700])
def test_what_is_left_on_a_full_disk_says_so_itself(
    disk: type[Limit | Small], room: int, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_FLUSH_S", 600)  # it is this thread that writes
    there = disk(tmp_path)
    try:
        writer = HistoryWriter(tmp_path, "worker-3", kind="worker", job="job", rank=3)
        for step in range(before):  # in chunks of one record, which are the smallest
            writer.append(has(step))
            if step > before - 4:
                writer._flush()
        writer._flush()
        monkeypatch.setattr(log, "_MOST_QUEUED", 500)
        there.fill(writer.path, room)
        for step in range(before, before + 600):
            writer.append(has(step))
            if step == before + 400:
                writer._flush()
        writer.close()
        found = list(HistoryLog(writer.path))
        told = verify(tmp_path)
    finally:
        there.free()
    assert isinstance(found[-1], HistoryEnded)
    assert found[-1].gave_up
    assert found[1:-1] == [has(step) for step in range(len(found) - 2)]
    assert len(found) >= before - 4
    (note,) = [one for one in told.notes if "worker-3" in one]
    assert re.fullmatch(
        r"worker-3.log ends before its process did, which could write no more of it: "
        r"(No space left on device|File too large)\.",
        note,
    )


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    for name, text, says in (
        ("a.log", b"a b c", "it is no history of offbeat's"),
        ("b.log", b"", "it says nothing of who wrote it"),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(HistoryError, match=says):
            verify(tmp_path / name)
    with pytest.raises(HistoryError, match="there is no such file or folder"):
        verify(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HistoryError, match="Record one with `offbeat run --history`"):
        verify(tmp_path / "empty")
    write_log(tmp_path / "later.log", [HistoryHeader(3, "worker", "job", 0, 0.0, "9.9")])
    with pytest.raises(HistoryError, match=r"its format is 3, this version of offbeat reads 1 and 2\."):
        verify(tmp_path / "later.log")


class Overflowing(deque[Record]):
    """Between looking how much there is and taking it, somebody else finds that it is too much."""

    def __init__(self, writer: HistoryWriter) -> None:
        super().__init__(writer._queue)
        self._writer = writer

    def popleft(self) -> Record:
        self._writer._give_up("the disk is too slow")
        return super().popleft()


def test_who_writes_outlives_that_somebody_else_gives_up(tmp_path: Path) -> None:
    """Which records something on another thread, and finds the queue full while the first is about to take from it."""
    said = listen()
    writer = HistoryWriter(tmp_path, "worker-0", kind="worker", job="job")
    writer._stop.set()
    writer._thread.join()
    writer.append(has(0))
    writer._queue = Overflowing(writer)
    writer._flush()
    assert any("the disk is too slow" in text for text in said)
    assert not writer._queue, "nothing is kept for a file that nobody writes"
    os.close(writer._fd)


def test_nothing_is_kept_of_what_comes_after_the_end(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, "worker-0", kind="worker", job="job")
    writer.close()
    writer.append(has(0))
    assert not writer._queue


def test_histories_of_the_format_before_are_read(tmp_path: Path) -> None:
    """Their swaps do not say who wanted them."""
    path = tmp_path / "coordinator.log"
    before = msgspec.msgpack.encode([[0, 1, "coordinator", "job", 0, 0.0, "0.1"], [4, "plan"], [10, ""]])
    path.write_bytes(b"offbeat history\n" + chunk(zlib.compress(before)))
    assert list(HistoryLog(path)) == [
        HistoryHeader(1, "coordinator", "job", 0, 0.0, "0.1"),
        PlanAdopted("plan", ""),
        HistoryEnded(),
    ]
