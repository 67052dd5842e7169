"""Snapshots as files: whole or not used, the last two kept, and no end of the job if there is no room."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.errors import NetworkError, PeerError
from offbeat.protocol.messages import from_peer, pack
from offbeat.protocol.shards import SnapshotSaved
from offbeat.server.shard.snapshot_builder import SnapshotBuilder, SnapshotSchedule
from offbeat.server.shard.snapshot_store import SnapshotStore
from offbeat.server.snapshot import FORMAT, Snapshot, SnapshotHeader, SnapshotId, describe_tensor, read, write

if TYPE_CHECKING:
    from pathlib import Path


def snapshot(number: int, life: int = 7, job: str = "j", format_: int = FORMAT) -> Snapshot:
    generator = torch.Generator().manual_seed(number)
    tensors = {
        ("", ""): torch.randn(1000, generator=generator),
        ("w", "momentum"): torch.randn(1000, generator=generator).to(torch.bfloat16),
        ("w", "step"): torch.tensor(3),
    }
    return Snapshot(
        SnapshotHeader(format_, job, SnapshotId(number, life), 1, ()),
        [(describe_tensor(0, 5, name, key, tensor), tensor) for (name, key), tensor in tensors.items()],
    )


def as_bytes(one: Snapshot) -> bytes:
    file = io.BytesIO()
    write(file, one)
    return file.getvalue()


def assert_same(one: Snapshot, other: Snapshot) -> None:
    assert one.header == other.header
    for (what, tensor), (other_what, other_tensor) in zip(one.tensors, other.tensors, strict=True):
        assert what == other_what
        assert torch.equal(tensor, other_tensor)


def test_what_is_read_is_what_was_written() -> None:
    one = snapshot(1)
    assert_same(read(io.BytesIO(as_bytes(one))), one)


def test_any_cut_and_any_damage_is_found() -> None:
    data = as_bytes(snapshot(1))
    for size in [*range(0, len(data), 97), len(data) - 1]:
        with pytest.raises(PeerError):
            read(io.BytesIO(data[:size]))
    for at in range(0, len(data), 53):
        damaged = bytearray(data)
        damaged[at] ^= 4
        with pytest.raises(PeerError):
            read(io.BytesIO(damaged))


def test_another_format_is_not_guessed_at() -> None:
    with pytest.raises(PeerError, match="it is of format 2, this is format 1"):
        read(io.BytesIO(as_bytes(snapshot(1, format_=FORMAT + 1))))


def test_the_one_that_all_have_and_the_newest_are_kept(tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path, "j")
    for number in (1, 2, 3):
        assert snapshots.write(snapshot(number), SnapshotId(number - 1, 7))
    assert list(snapshots.held) == [SnapshotId(3, 7), SnapshotId(2, 7)]
    assert snapshots.write(snapshot(4), SnapshotId(2, 7)), "another shard has not written number 3"
    snapshots.close()
    again = SnapshotStore(tmp_path, "j")
    assert list(again.held) == [SnapshotId(4, 7), SnapshotId(2, 7)]
    assert again.least == 4
    assert_same(again.read(SnapshotId(2, 7)), snapshot(2))
    again.clear()
    assert os.listdir(tmp_path) == ["lock"]


def test_the_history_that_leads_to_one_is_written_before(tmp_path: Path) -> None:
    """A server that is killed between the two would continue from updates that nobody has recorded."""
    snapshots, there = SnapshotStore(tmp_path, "j"), list[bool]()
    snapshots.before_write = lambda: there.append(any(tmp_path.glob("*.snapshot")))
    assert snapshots.write(snapshot(1), None)
    assert there == [False]
    assert any(tmp_path.glob("*.snapshot"))
    snapshots.close()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_one_is_said_and_the_one_before_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = SnapshotStore(tmp_path, "j")
    for number in (1, 2):
        snapshots.write(snapshot(number), SnapshotId(number - 1, 7))
    snapshots.close()
    newest = max(tmp_path.glob("*.snapshot"))
    data = bytearray(newest.read_bytes())
    data[3000] ^= 1
    newest.write_bytes(bytes({"cut": data[:-1], "flipped": data, "empty": bytearray()}[damage]))
    with caplog.at_level(logging.WARNING):
        again = SnapshotStore(tmp_path, "j")
    assert list(again.held) == [SnapshotId(1, 7)]
    assert f"Cannot use the snapshot {newest}" in caplog.text
    assert again.least == 2, "its number is not used again"


def test_one_that_is_damaged_while_its_shard_lives_is_found_before_another_life(tmp_path: Path) -> None:
    """Another shard may be lost, and then this one would never get past it."""
    snapshots = SnapshotStore(tmp_path, "j")
    for number in (1, 2):
        snapshots.write(snapshot(number), SnapshotId(number - 1, 7))
    os.truncate(max(tmp_path.glob("*.snapshot")), 1000)
    assert list(snapshots.held) == [SnapshotId(2, 7), SnapshotId(1, 7)]
    snapshots.look()
    assert list(snapshots.held) == [SnapshotId(1, 7)]
    assert snapshots.least == 2


def test_a_folder_in_the_place_of_one_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = SnapshotStore(tmp_path, "j")
    for number in (1, 2):
        snapshots.write(snapshot(number), SnapshotId(number - 1, 7))
    snapshots.close()
    newest = max(tmp_path.glob("*.snapshot"))
    newest.unlink()
    newest.mkdir()
    with caplog.at_level(logging.WARNING):
        again = SnapshotStore(tmp_path, "j")
        assert list(again.held) == [SnapshotId(1, 7)]
        for number in (3, 4):
            assert again.write(snapshot(number), SnapshotId(1, 7))
        again.clear()
    assert sorted(os.listdir(tmp_path)) == [newest.name, "lock"]
    assert caplog.text.count(f"Cannot remove {newest}: Is a directory.") == 1


def test_a_full_disk_is_said_once_and_what_was_there_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = SnapshotStore(tmp_path, "j")
    snapshots.write(snapshot(1), None)
    calls = []

    def full(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "fsync", full)
        assert not snapshots.write(snapshot(2), SnapshotId(1, 7))
        assert not snapshots.write(snapshot(3), SnapshotId(1, 7))
    assert len(calls) == 2, "the fault was injected"
    assert caplog.text.count("No space left on device. The job continues") == 1
    assert list(snapshots.held) == [SnapshotId(1, 7)]
    assert not list(tmp_path.glob("*.part"))
    with caplog.at_level(logging.WARNING):
        assert snapshots.write(snapshot(4), SnapshotId(1, 7))
        assert snapshots.write(snapshot(5), SnapshotId(4, 7))
    assert caplog.text.count(f"Snapshots are written to {tmp_path} again.") == 1


def test_a_folder_belongs_to_one_shard(tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path, "j")
    snapshots.write(snapshot(1), None)
    with pytest.raises(NetworkError, match=r"another shard does\. Give each shard a folder of its own"):
        SnapshotStore(tmp_path, "j")
    snapshots.close()
    fresh = SnapshotStore(tmp_path, "k", is_fresh=True)
    assert not fresh.held
    assert fresh.least == 1


def test_snapshots_of_another_job_are_passed_over_and_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = SnapshotStore(tmp_path, "j")
    theirs.write(snapshot(1), None)
    theirs.write(snapshot(2), SnapshotId(1, 7))
    theirs.note_gone({3})
    theirs.close()
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    assert len(before) == 3
    with caplog.at_level(logging.WARNING):
        ours = SnapshotStore(tmp_path, "k")
        assert not ours.held
        ours.look()
    first, second = sorted(path.name for path in tmp_path.glob("*.snapshot"))
    assert [record.getMessage() for record in caplog.records] == [
        f"Passed over in {tmp_path}, where it stays: {first}, {second} of job 'j'. This shard is of job 'k' and begins "
        "with no snapshot. Give each job a folder of its own."
    ]
    assert ours.least == 2, "the numbers are taken"
    ours.note_gone({1})
    for number in (3, 4, 5):
        assert ours.write(snapshot(number, job="k"), SnapshotId(number - 1, 7))
    assert len(list(tmp_path.glob("*.snapshot"))) == 4
    ours.close()
    caplog.clear()
    again = SnapshotStore(tmp_path, "k")
    assert list(again.held) == [SnapshotId(5, 7), SnapshotId(4, 7)]
    assert f"begins with its newest own one, {5:012d}-{7:010x}.snapshot." in caplog.text
    again.clear()
    again.close()
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == before
    assert list(SnapshotStore(tmp_path, "j").held) == [SnapshotId(2, 7), SnapshotId(1, 7)]


def test_who_has_gone_is_noted_for_this_job_alone(tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path, "j")
    assert snapshots.gone == set()
    snapshots.note_gone({2, 5})
    snapshots.close()
    again = SnapshotStore(tmp_path, "j")
    assert again.gone == {2, 5}
    again.close()
    other = SnapshotStore(tmp_path, "k")
    assert other.gone == set()
    other.close()
    (tmp_path / "gone.json").write_text("{")
    assert SnapshotStore(tmp_path, "j", is_fresh=True).gone == set()
    assert os.listdir(tmp_path) == ["lock"]


def test_snapshots_take_at_most_two_percent_of_the_time() -> None:
    rhythm = SnapshotSchedule(10, least=4, life=7)
    assert rhythm.is_due(0, 100.0), "of what the job begins with"
    assert rhythm.next(0, shards=2) == 5
    assert not rhythm.is_due(1000, 1000.0), "one is under way"
    assert not rhythm.saved(5, True, 0.5, 100.0)
    assert rhythm.saved(5, True, 1.0, 101.0), "the last shard"
    assert rhythm.last == SnapshotId(5, 7)
    assert not rhythm.is_due(0, 1000.0), "there is nothing new"
    assert not rhythm.is_due(9, 101.0 + 48.9)
    assert rhythm.is_due(9, 101.0 + 49.1), "after 10 s fewer updates will do"
    assert not rhythm.is_due(10, 101.0 + 48.9), "the slowest shard took 1 s"
    assert rhythm.is_due(10, 101.0 + 49.1)
    rhythm.next(10, shards=2)
    rhythm.saved(6, False, 0.1, 200.0)
    assert not rhythm.saved(6, True, 0.1, 200.0), "one shard does not have it"
    assert rhythm.last == SnapshotId(5, 7)


def test_slow_updates_are_kept_by_the_time_that_they_took() -> None:
    rhythm = SnapshotSchedule(100, least=0, life=7)
    rhythm.start_from(SnapshotId(3, 6), 40, 1000.0)
    assert not rhythm.is_due(40, 1060.0), "there is nothing new"
    assert not rhythm.is_due(45, 1009.9)
    assert rhythm.is_due(45, 1010.1)
    assert rhythm.is_due(140, 1001.0)


def test_one_that_is_given_up_is_not_written_and_the_next_one_is(tmp_path: Path) -> None:
    """A contribution that was to be in it is withdrawn, while some blocks are kept and others are not."""
    told: list[tuple[int, bool]] = []

    async def story() -> set[int]:
        snapshots = SnapshotStore(tmp_path, "j")
        builder = SnapshotBuilder(snapshots, "j", lambda number, well, cost_s: told.append((number, well)))
        for number in (1, 2):
            builder.begin(SnapshotId(number, 7), None, shards=1, models=[], blocks={0: (0, 1)})
            builder.take(0, 0, torch.zeros(2), [])
            if number == 1:
                builder.give_up()
            builder.take(0, 1, torch.zeros(2), [])
        assert builder.writing is not None
        await builder.writing
        return {identity.number for identity in snapshots.held}

    assert asyncio.run(story()) == {2}
    assert told == [(1, False), (2, True)]


def test_one_that_fails_for_another_reason_than_the_disk_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nobody would hear that there are no snapshots any more."""
    told: list[tuple[int, bool]] = []

    def fail(snapshot: Snapshot, keep: SnapshotId | None) -> bool:
        raise MemoryError("no room for a header")

    async def story() -> None:
        snapshots = SnapshotStore(tmp_path, "j")
        monkeypatch.setattr(snapshots, "write", fail)
        builder = SnapshotBuilder(snapshots, "j", lambda number, well, cost_s: told.append((number, well)))
        builder.begin(SnapshotId(1, 7), None, shards=1, models=[], blocks={0: (0,)})
        builder.take(0, 0, torch.zeros(2), [])
        while not told:
            await asyncio.sleep(0.01)

    asyncio.run(story())
    assert told == [(1, False)]
    assert "Cannot make snapshot 1: MemoryError('no room for a header')." in caplog.text


@pytest.mark.parametrize("cost_s", [float("nan"), float("inf"), -1.0])
def test_what_one_has_cost_is_a_time(cost_s: float) -> None:
    """The pause before the next one is worked out from it: after an infinite one there would be none any more."""
    with pytest.raises(PeerError, match=r"Expected `float` .* - at `\$\.cost_s`"):
        from_peer(pack(SnapshotSaved(1, True, cost_s)))
