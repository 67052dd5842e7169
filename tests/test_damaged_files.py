"""Whatever has become of a file that offbeat wrote: it is read, or passed over in a sentence, in bounded time."""

from __future__ import annotations

import io
import os
import time
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch import nn

import offbeat
from offbeat.batching import Leases
from offbeat.coordinator.coordinator import Coordinator
from offbeat.diagnosis.startup_barrier import look_at
from offbeat.errors import HistoryError, ModelError, PeerError
from offbeat.history import HistoryHeader, HistoryLog, LifeBegan, ParametersAfter
from offbeat.loading import position
from offbeat.safe_read import MOST_BYTES, UnreadableError, open_file, read_file
from offbeat.server.optimizers import check_hyper
from offbeat.server.shard.snapshot_store import SnapshotStore
from offbeat.server.snapshot import Snapshot, describe_tensor, read
from offbeat.wire.frame import head
from tests.history.test_log import chunk
from tests.server.test_snapshot import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SOON_S = 5.0


def flipped(whole: bytes, step: int = 1) -> Iterator[bytes]:
    """The same with one bit that is another: each of them, or every `step`-th."""
    for bit in range(0, 8 * len(whole), step):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        yield bytes(data)


class Job:
    """With checkpoints of steps 1 and 2."""

    def __init__(self, run: offbeat.Run, folder: Path) -> None:
        self.net = net = nn.Linear(3, 1)
        self.model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        self.checkpoints = offbeat.Checkpoints(run, folder, model=self.model, optimizer=optimizer)
        self.weights = []
        for _ in range(2):
            self.model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.checkpoints.save()
            self.weights.append(net.weight.tolist())
        self.checkpoints.wait()
        self.files = {path: path.read_bytes() for path in folder.iterdir()}
        self.newest = folder / "run-000002.pt"

    def loaded(self) -> int:
        """Of which step the checkpoint is that is gone on from; all files are as they were again."""
        began_s = time.monotonic()
        assert self.checkpoints.load()
        assert time.monotonic() - began_s < SOON_S
        for path, data in self.files.items():
            if path.is_fifo() or path.is_symlink() or path.is_dir():
                path.rmdir() if path.is_dir() else path.unlink()
            path.write_bytes(data)
        return 1 + self.weights.index(self.net.weight.tolist())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with offbeat.init() as run:
        yield Job(run, tmp_path)


def test_any_bit_of_the_seal_may_be_another(job: Job) -> None:
    seal = job.newest.with_suffix(".json")
    read_bits = []
    for bit, data in enumerate(flipped(job.files[seal])):
        seal.write_bytes(data)
        if not isinstance(job.checkpoints._read(job.newest), str):
            read_bits.append(bit)
    assert min(read_bits) > 8 * job.files[seal].index(b'"world"'), "all but the number of workers has to be right"
    steps = set()
    for data in flipped(job.files[seal], 29):
        seal.write_bytes(data)
        steps.add(job.loaded())
    assert 1 in steps


def test_any_bit_of_the_seal_of_the_random_numbers_may_be_another(job: Job) -> None:
    seal = job.newest.with_suffix(".rank0.json")
    for data in flipped(job.files[seal], 29):
        seal.write_bytes(data)
        assert job.loaded() == 2


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 36)


STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "itself": lambda path: path.symlink_to(path.name),
    "large": large,
    "not UTF-8": lambda path: path.write_bytes(b'{"size":1,"xxh3_128":"\xff\xfe","step":2}'),
    "long number": lambda path: path.write_bytes(b'{"size":' + b"7" * 5000 + b',"xxh3_128":"","step":2}'),
    "deep": lambda path: path.write_bytes(b'{"size":' + b"[" * 100_000),
}


@pytest.mark.parametrize("suffix", [".pt", ".json", ".rank0.rng", ".rank0.json"])
@pytest.mark.parametrize("what", STRANGE)
def test_a_checkpoint_may_be_anything(
    what: str, suffix: str, job: Job, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = job.newest.with_suffix(suffix)
    path.unlink()
    STRANGE[what](path)
    assert job.loaded() == (2 if "rank0" in suffix else 1)
    (said,) = [record.getMessage() for record in caplog.records if "Cannot" in record.getMessage()]
    assert said.startswith(("Cannot resume ", "Cannot restore "))
    assert len(said) < 500


# -- what is in a checkpoint whose seal is right -----------------------------------------------------------------------


def deep(levels: int) -> Any:
    inner: Any = 0
    for _ in range(levels):
        inner = [inner]
    return inner


def often(levels: int) -> Any:
    inner: Any = [0]
    for _ in range(levels):
        inner = [inner, inner]
    return inner


def round_() -> Any:
    inner: list[Any] = []
    inner.append(inner)
    return inner


INSIDE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "long number": lambda states: states | {"run": states["run"] | {"seed": 10**5000}},
    "deep": lambda states: states | {"run": states["run"] | {"plan": deep(400)}},
    "again and again": lambda states: states | {"run": states["run"] | {"loaders": often(60)}},
    "in itself": lambda states: states | {"run": states["run"] | {"models": round_()}},
    "a list": lambda states: [1, 2],
    "a tensor": lambda states: torch.zeros(3),
    "names of numbers": lambda states: {1: states, "run": 2},
}


@pytest.mark.parametrize("what", INSIDE)
def test_what_save_would_not_write_is_passed_over(
    what: str, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda states, file: real(INSIDE[what](states), file))
    job.checkpoints._write(job.newest, torch.load(job.newest, weights_only=True), 2, 1)
    assert job.loaded() == 1
    assert "Cannot resume from run-000002.pt, which holds no checkpoint" in caplog.text
    assert len(caplog.text) < 1000


@pytest.mark.parametrize("what", ["long number", "deep", "again and again", "in itself"])
def test_such_a_state_is_refused_in_a_sentence(what: str, job: Job) -> None:
    """By those who load it themselves."""
    states = INSIDE[what](torch.load(job.newest, weights_only=True))
    began_s = time.monotonic()
    with pytest.raises(ModelError, match=r"^Cannot load this state: ") as caught:
        job.checkpoints._run.load_state_dict(states["run"])
    assert time.monotonic() - began_s < SOON_S
    assert len(str(caught.value)) < 500


class Strange:
    """What torch does not load without being told to."""


def test_what_torch_has_to_be_told_of_first_is_not_passed_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda states, file: real(states | {"run": Strange()}, file))
    job.checkpoints._write(job.newest, torch.load(job.newest, weights_only=True), 2, 1)
    there = sorted(job.newest.parent.iterdir())
    with pytest.raises(
        ModelError, match=r"run-000002.pt: Unsupported global: .*Strange.* with torch.*add_safe_globals\.$"
    ):
        job.checkpoints.load()
    assert sorted(job.newest.parent.iterdir()) == there


class Greedy:
    """A part whose state nobody could load."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": deep(200)}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_what_would_be_passed_over_is_not_written(job: Job, tmp_path: Path) -> None:
    checkpoints = offbeat.Checkpoints(job.checkpoints._run, tmp_path / "greedy", part=Greedy())
    with pytest.raises(ModelError, match=r"checkpoint of part: it is nested more than 100 deep\. Save less"):
        checkpoints.save()


# -- the other files ---------------------------------------------------------------------------------------------------


def test_any_bit_of_who_has_gone_may_be_another(tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path, "j")
    snapshots.note_gone({1, 12})
    path = tmp_path / "gone.json"
    found = set()
    for data in flipped(path.read_bytes()):
        path.write_bytes(data)
        found.add(snapshots.gone)
    assert frozenset() in found


def test_any_bit_of_who_was_started_may_be_another(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    for data in flipped(b'{"0":123456,"1":123457}'):
        path.write_bytes(data)
        look_at(0, path)
    path.write_bytes(b"\xff")
    assert look_at(0, path) is None


def test_any_bit_of_a_place_in_the_data_may_be_another() -> None:
    leases = Leases(20, seed=3)
    plain = leases.to_plain(leases.join(leases.init(), 0))
    whole = msgspec.json.encode({"0": {"leases": plain}})
    refused = 0
    for data in flipped(whole):
        try:
            position.for_workers(data, 0, leases)
        except ModelError:
            refused += 1
    assert refused > len(whole)
    for books in (b'{"0":"\xff"}', b"[" * 100_000, b'{"0":' + b"7" * 5000 + b"}"):
        with pytest.raises(ModelError, match="the checkpoint is damaged"):
            position.for_workers(books, 0, leases)


@pytest.mark.parametrize("data", [b'{"0":"\xff"}', b"[" * 100_000, b'{"0":' + b"7" * 5000 + b"}"])
def test_a_coordinator_is_told_why_it_cannot_go_on_there(data: bytes) -> None:
    coordinator = Coordinator(lambda plan: pytest.fail(plan), check_hyper=check_hyper)
    assert coordinator._data.load(data)


def test_any_bit_of_a_history_may_be_another_behind_its_checksums(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    records = [
        HistoryHeader(1, "worker", "job", 0, 0.0, "now"),
        LifeBegan(0, 5, "plan"),
        ParametersAfter(0, 1, 0.5, 3, 1.0),
    ]
    read_back = 0
    for payload in flipped(msgspec.msgpack.encode(records)):
        path.write_bytes(b"offbeat history\n" + chunk(zlib.compress(payload, 0)))
        try:
            read_back += len(list(HistoryLog(path)))
        except HistoryError:
            continue
    assert read_back


def test_any_bit_of_a_snapshot_may_be_another_behind_its_checksums() -> None:
    whole = snapshot(1)
    header = msgspec.msgpack.encode(whole.header)
    what = msgspec.msgpack.encode(describe_tensor(0, 5, "w", "momentum", torch.zeros(3)))
    body = bytes(12)

    def refused(header: bytes, what: bytes) -> bool:
        file = io.BytesIO(head(b"", header) + header + head(what, body) + body + head(msgspec.msgpack.encode(1)))
        try:
            assert isinstance(read(file), Snapshot)
        except PeerError:
            return True
        return False

    assert {refused(data, what) for data in flipped(header)} == {True}, "the end is of no such class"
    assert {refused(header, data) for data in flipped(what)} == {True}


def test_a_snapshot_of_nothing_of_an_impossible_shape_is_refused() -> None:
    header = msgspec.msgpack.encode(snapshot(1).header)
    what = msgspec.msgpack.encode((0, 5, "w", "momentum", "float32", (0, 1 << 39, 1 << 39)))
    with pytest.raises(PeerError, match="an empty tensor says it is of shape"):
        read(io.BytesIO(head(b"", header, version=4) + header + head(what, version=4)))


@pytest.mark.parametrize("what", ["a pipe", "a device", "a folder", "nowhere", "itself"])
def test_what_is_no_file_is_not_read(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    STRANGE[what](tmp_path / "a.log")
    STRANGE[what](tmp_path / f"{1:012d}-{7:010x}.snapshot")
    STRANGE[what](tmp_path / "gone.json")
    with pytest.raises(HistoryError, match=r"^Cannot read .*a\.log: .*\.$"):
        HistoryLog(tmp_path / "a.log")
    snapshots = SnapshotStore(tmp_path, "j")
    assert not snapshots.held
    assert not snapshots.gone
    assert "Cannot use the snapshot" in caplog.text
    with pytest.raises(OSError):  # noqa: PT011
        open_file(tmp_path / "gone.json")


def test_a_small_file_is_small(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(UnreadableError, match="more than 1048576 bytes"):
        read_file(path, msgspec.json.decode)
