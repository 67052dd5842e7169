"""A file is there whole or not at all, with the permissions that were asked for."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, BinaryIO

import pytest

from offbeat.safe_write import write_whole

if TYPE_CHECKING:
    from pathlib import Path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_whole(path, b"first")
    write_whole(path, lambda file: [file.write(word) for word in (b"sec", b"ond")])
    assert path.read_bytes() == b"second"
    assert names(tmp_path) == ["status.json"]


def test_of_one_that_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_whole(path, b"first")

    def fill(file: BinaryIO) -> None:
        file.write(b"sec")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, fill)
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["status.json"]


def test_nobody_else_may_read_what_only_the_user_may(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    for left in (path, tmp_path / "server.json.part"):  # as a process that was killed may have left it
        left.write_bytes(b"")
        left.chmod(0o666)
    write_whole(path, b"secret", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"secret"


def test_others_have_the_permissions_of_the_process(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "answer.json", b"42")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "answer.json").stat().st_mode) == 0o640


@pytest.mark.parametrize("sync", [False, True])
def test_content_and_name_are_synced_if_that_is_wanted(
    tmp_path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[bool]()  # whether each was a folder
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)))
    write_whole(tmp_path / "snapshot", b"state", sync=sync)
    assert synced == ([False, True] if sync else [])
