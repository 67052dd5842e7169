"""Claims: an owner is known by more than its number, and a record that no lab wrote is not obeyed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from offbeat.errors import NetworkError
from offbeat.lab import lab_registry

if TYPE_CHECKING:
    from pathlib import Path


def test_a_claim_comes_back(tmp_path: Path) -> None:
    claim = lab_registry.LabRecord.mine("0123abcd", ["offbeat-0123abcd-h0"])
    path = lab_registry.write(claim, tmp_path / "new")
    assert path == lab_registry.path_of("0123abcd", tmp_path / "new")
    assert lab_registry.read(path) == claim
    assert lab_registry.leftovers(tmp_path / "new") == [claim]
    assert claim.owner_lives


def test_a_number_used_again_is_not_the_owner() -> None:
    mine = lab_registry.LabRecord.mine("0123abcd", [])
    assert mine.owner_pid == os.getpid()
    assert not msgspec.structs.replace(mine, owner_started_ticks=mine.owner_started_ticks - 1).owner_lives


def test_an_owner_that_ended_but_was_not_buried_does_not_live() -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, msgspec.json.encode(lab_registry.LabRecord.mine("0123abcd", [])))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as written:
        claim = msgspec.json.decode(written.read(), type=lab_registry.LabRecord)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert claim.owner_pid == child
    assert not claim.owner_lives
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"namespaces": ["../../etc/passwd"]},
        {"namespaces": ["offbeat-0123abcd-../../../etc/passwd"]},
        {"namespaces": ["production"]},
        {"namespaces": ["offbeat-99999999-h0"]},
        {"lab": "99999999"},
        {"lab": "../0123abcd"},
    ],
)
def test_a_forged_record_is_not_obeyed(tmp_path: Path, change: dict[str, object]) -> None:
    claim = msgspec.structs.replace(lab_registry.LabRecord.mine("0123abcd", ["offbeat-0123abcd-h0"]), **change)
    path = lab_registry.path_of("0123abcd", tmp_path)
    path.write_bytes(msgspec.json.encode(claim))
    with pytest.raises(NetworkError, match="Cannot trust the record"):
        lab_registry.clean(force=True, directory=tmp_path)
    assert path.exists()


def test_half_a_record_is_named(tmp_path: Path) -> None:
    path = lab_registry.path_of("0123abcd", tmp_path)
    path.write_text('{"lab": "0123abcd", ')
    with pytest.raises(NetworkError, match=f"Cannot read the record {path} of a lab: .* Remove the file by hand"):
        lab_registry.leftovers(tmp_path)


def test_a_record_that_goes_away_while_we_look_is_none(tmp_path: Path) -> None:
    assert lab_registry.read(lab_registry.path_of("0123abcd", tmp_path)) is None
    assert lab_registry.leftovers(tmp_path / "nowhere") == []
