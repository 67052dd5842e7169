"""The file in which the workers of `Elastic()` meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch._C._distributed_c10d import FileStore

from offbeat.cli.run import STORE_BYTES, _store
from offbeat.errors import PlanError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_disk_that_fills_up_has_room_for_it(tmp_path: Path) -> None:
    """A worker that is lost then is missed by writing there; an entry cut in half would hold up all for ever."""
    path = _store(tmp_path)
    assert path.stat().st_size == 0, "to who reads it, it is empty"
    assert path.stat().st_blocks * 512 >= STORE_BYTES
    FileStore(str(path)).set("here-0", "a")
    assert path.stat().st_blocks * 512 >= STORE_BYTES, "what is written takes of that room"


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Cannot write to .*: No such file or directory\. Choose another folder"):
        _store(tmp_path / "missing")
