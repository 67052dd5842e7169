"""The store that tasks of one machine share without being told where it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.errors import NetworkError
from offbeat.objects import local_store
from offbeat.objects.client import connect
from offbeat.wire.credentials import Token
from tests.cli.commands import offbeat

if TYPE_CHECKING:
    from pathlib import Path

READER = """
from offbeat.objects.client import connect
with connect() as client:
    print(int(client.get("w", timeout=60).sum()))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for runtime files; the store that is started in it is ended."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("OFFBEAT_OBJECTS", "OFFBEAT_TOKEN", local_store.DIRECTORIES_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def ended(process: int) -> None:
    until_s = time.monotonic() + 20
    while local_store._runs(process):
        assert time.monotonic() < until_s, "the store does not end"
        time.sleep(0.02)


@pytest.mark.timeout(180)
def test_the_first_task_starts_it_and_others_find_it(here: Path) -> None:
    readers = [
        subprocess.Popen([sys.executable, "-c", READER], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]  # at the same time
    with connect() as client:
        client.put("w", torch.ones(100_000), timeout=60)
        assert [reader.communicate(timeout=90)[0] for reader in readers] == ["100000\n"] * 2
    found = local_store.find("default")
    assert found is not None
    assert found.token, "other users of this machine are kept out"
    assert len(list(here.glob("*/*.json"))) == 1
    variables = {"XDG_RUNTIME_DIR": str(here)}
    code, output = offbeat("objects", "ls", folder=here, variables=variables)
    assert code == 0, output
    assert "float32[100000]" in output
    code, output = offbeat("objects", "stop", folder=here, variables=variables)
    assert code == 0, output
    assert f"(process {found.process})" in output
    ended(found.process)
    code, output = offbeat("objects", "stop", folder=here, variables=variables)
    assert code != 0
    assert "no task of this user has started one here that still runs" in output
    code, output = offbeat("objects", "ls", folder=here, variables=variables)
    assert "say its address, or set OFFBEAT_OBJECTS" in output


@pytest.mark.timeout(180)
def test_it_ends_when_nobody_uses_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_store, "UNUSED_S", 1.0)
    with connect() as client:
        found = local_store.find("default")
        assert found is not None
        time.sleep(2.0)
        client.put("w", torch.ones(3), timeout=20)
    ended(found.process)
    with connect() as client:  # and another one is started
        assert not client.status().objects
        again = local_store.find("default")
        assert again is not None
        os.kill(again.process, signal.SIGKILL)
    ended(again.process)


@pytest.mark.timeout(180)
def test_it_joins_the_directories_that_are_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_store, "UNUSED_S", 1.0)
    monkeypatch.setenv("OFFBEAT_TOKEN", "0123456789abcdef")
    with connect(job="first") as first:
        found = local_store.find("first")
        assert found is not None
        assert not found.token
        log = next(here.glob("*/*.log")).read_text()
        monkeypatch.setenv(local_store.DIRECTORIES_VARIABLE, log.partition("--directories ")[2].partition(";")[0])
        with connect(job="first") as second:
            first.put("w", torch.ones(100_000), timeout=20)
            assert second.status().address != first.status().address
            assert torch.equal(second.get("w", timeout=20), torch.ones(100_000))
            other = local_store.find("first")
            assert other is not None
    ended(found.process)
    ended(other.process)


def test_what_cannot_start_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NetworkError, match="Cannot start a store of objects with these credentials"):
        connect(credentials=Token(b"another token of mine"))
    monkeypatch.setenv(local_store.DIRECTORIES_VARIABLE, "no port")
    with pytest.raises(NetworkError, match="Cannot use 'no port' of OFFBEAT_DIRECTORIES: it is no host:port"):
        connect()
    monkeypatch.delenv(local_store.DIRECTORIES_VARIABLE)
    with pytest.raises(NetworkError, match=r"Cannot start a store of objects: .*memory-mib"):
        connect(memory_mib=0)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_RUNTIME_DIR", str(here / "is not there"))
        elsewhere.setattr("tempfile.gettempdir", lambda: str(here / "nor this"))
        with pytest.raises(NetworkError, match=r"Cannot look for a store of objects in .*nor this.*: No such file"):
            connect()
    (folder,) = here.glob("offbeat-objects-*")
    folder.chmod(0o755)
    with pytest.raises(NetworkError, match="the folder is open to other users"):
        connect()
