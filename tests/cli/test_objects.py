"""`offbeat objects`: stores as processes, and clients of their machines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.errors import DisagreementError, ObjectError, ObjectTimeoutError, PeerError
from offbeat.objects.client import ObjectClient, connect, embedded
from offbeat.protocol.object_calls import CreateCall
from offbeat.protocol.objects import ObjectMeta, ObjectName
from offbeat.wire.credentials import Token
from tests.cli.commands import offbeat, start

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "a token of more than sixteen bytes"
LARGE = 2_000_003


class Served:
    """A store as a process."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        self.process = process
        found = re.fullmatch(
            r"keeping objects at (127\.0\.0\.1:\d+): OFFBEAT_OBJECTS=(127\.0\.0\.1:\d+); on other machines: "
            r"offbeat objects serve --directories ([\d.:,]+); it ends with Ctrl-C\n",
            line,
        )
        assert found is not None, line
        self.address, self.client_address, self.directories = found[1], found[2], found[3]
        self.was_killed = False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.was_killed = True

    def client(self) -> ObjectClient:
        return connect(self.client_address, credentials=Token(TOKEN.encode()))


@contextlib.contextmanager
def served(folder: Path, *arguments: object) -> Iterator[Served]:
    (folder / "token").write_text(TOKEN)
    with start("objects", "serve", "--token-file", "token", *arguments, folder=folder) as process:
        try:
            assert process.stdout is not None
            made = Served(process, process.stdout.readline())
            yield made
            if not made.was_killed:
                process.send_signal(signal.SIGTERM)
                assert process.wait(10) == 0
        finally:
            process.kill()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    with served(tmp_path, "--directory") as first, served(tmp_path, "--directories", first.directories) as second:
        yield first, second


@pytest.mark.timeout(120)
def test_tensors_go_from_task_to_task(two: tuple[Served, Served], tmp_path: Path) -> None:
    first, second = two
    wanted = torch.randn(LARGE)
    with first.client() as here, second.client() as there:
        here.put("w", wanted)
        got = there.get("w", timeout=20)
        assert torch.equal(got, wanted)
        got.zero_()
        assert torch.equal(there.get("w", timeout=20), wanted), "what a reader writes nobody else sees"
        assert torch.equal(here.get("w", timeout=20), wanted)

        there.put("v", wanted * 2)
        here.reduce("sum", ["w", "v"])
        assert torch.equal(there.get("sum", timeout=20), wanted + wanted * 2)
        with pytest.raises(ObjectError, match="get it first"):
            here.reduced_set("sum")
        here.get("sum", timeout=20)
        assert sorted(here.reduced_set("sum")) == ["v", "w"]
        mean = here.allreduce("mean", ["w", "v"], op="mean", timeout=20)
        torch.testing.assert_close(mean, wanted * 1.5)
        assert torch.equal(there.allreduce("mean", ["w", "v"], op="mean", timeout=20), mean)

        code, output = offbeat("objects", "ls", first.address, "--token-file", "token", folder=tmp_path)
        assert code == 0, output
        assert re.search(r"w +0 +float32\[2000003\] +7\.63 +100% +yes\b", output), output

        there.delete("w")
        time.sleep(0.3)
        with pytest.raises(ObjectTimeoutError, match=r"Cannot get 'w' within 1 s: nobody has put it\."):
            here.get("w", timeout=1)


@pytest.mark.timeout(120)
def test_the_doctor(two: tuple[Served, Served], tmp_path: Path) -> None:
    first, second = two
    code, output = offbeat("objects", "doctor", second.client_address, "--token-file", "token", folder=tmp_path)
    assert code == 0, output
    assert [line.split(":")[0].split()[1] for line in output.splitlines()] == [
        "store", "memory", "directory", "objects", "sums",
    ]  # fmt: skip
    with second.client() as client:
        until_s = time.monotonic() + 10
        while client.status().objects:
            assert time.monotonic() < until_s, "it leaves nothing"
            time.sleep(0.05)
    code, output = offbeat("objects", "doctor", "127.0.0.1:1", "--token-file", "token", folder=tmp_path)
    assert code == 1
    assert "bad   store: cannot be reached" in output
    first.kill()
    code, output = offbeat("objects", "doctor", second.client_address, "--token-file", "token", folder=tmp_path)
    assert code == 1
    assert "cannot be put or got" in output


@pytest.mark.timeout(120)
def test_a_store_may_have_as_many_descriptors_as_the_machine_lets_it(two: tuple[Served, Served]) -> None:
    line = re.search(r"Max open files\s+(\d+)\s+(\d+)", Path(f"/proc/{two[0].process.pid}/limits").read_text())
    assert line is not None
    assert line[1] == line[2]


def test_small_ones_and_what_is_refused(two: tuple[Served, Served]) -> None:
    first, second = two
    with first.client() as here, second.client() as there:
        here.put("a", torch.tensor([1.0, 5.0]))
        there.put("b", torch.tensor([4.0, 2.0]))
        here.reduce("max", ["a", "b"], op="max")
        assert here.get("max", timeout=10).tolist() == [4.0, 5.0]
        with pytest.raises(DisagreementError, match="Cannot put 'a' again: its bytes differ"):
            there.put("a", torch.tensor([1.0, 6.0]))
        here.put("a", torch.tensor([1.0, 5.0]))  # as a task that is tried again does
        for other in ([1.0, 6.0], [1.0, 5.0, 0.0]):
            with pytest.raises(DisagreementError, match="Cannot put 'a': this store has other bytes under that name"):
                here.put("a", torch.tensor(other))
        here.put("twice", torch.ones(LARGE))
        here.put("twice", torch.ones(LARGE))
        with pytest.raises(DisagreementError, match="Cannot put 'twice': this store has other bytes under that name"):
            here.put("twice", torch.zeros(LARGE))
        here.put("n", torch.tensor([1, 2]))
        here.reduce("mean of integers", ["n"], op="mean")
        with pytest.raises(DisagreementError, match=r"Cannot take the mean of 'n': it is int64\[2\]"):
            here.get("mean of integers", timeout=10)
        for size in (2, LARGE):
            here.put(f"complex {size}", torch.ones(size, dtype=torch.complex64))
            here.reduce(f"least {size}", [f"complex {size}"], op="min")
            with pytest.raises(DisagreementError, match=r"Cannot take the min of 'complex \d+': it is complex64"):
                here.get(f"least {size}", timeout=10)
        here.reduce("a", ["b"])
        with pytest.raises(ObjectError, match=r"Cannot reduce into 'a': it is there already"):
            here.get("a", timeout=10)
        assert there.get("a", timeout=10).tolist() == [1.0, 5.0], "who has not asked for that sum gets what there is"
        with pytest.raises(ObjectError, match="num_objects=3 and min_objects=3 have to be 1 to 2"):
            here.reduce("x", ["a", "b"], num_objects=3)
        with pytest.raises(ObjectError, match="say deadline="):
            here.reduce("x", ["a", "b"], min_objects=1)
        for name, version in (("", 0), ("x" * 257, 0), (3, 0), ("\ud800", 0), ("a", -1), ("a", 1.5)):
            with pytest.raises(ObjectError, match="an object's name is a string of 1 to 256 characters"):
                here.put(name, torch.ones(2), version=version)  # type: ignore[arg-type]
            with pytest.raises(ObjectError, match="an object's name is a string of 1 to 256 characters"):
                here.get(name, version=version)  # type: ignore[arg-type]
            with pytest.raises(ObjectError, match="an object's name is a string of 1 to 256 characters"):
                here.delete(name, version=version)  # type: ignore[arg-type]
        here.put("x" * 256, torch.ones(2))
        here.delete("x" * 256)
        with pytest.raises(ObjectError, match=r"Cannot put 'x': it is no tensor or dict of tensors by name \(list\)"):
            here.put("x", [1.0])  # type: ignore[arg-type]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"op": "avg"}, "is one of sum, mean, min, max, prod"),
            ({"deadline": 1.0}, "say min_objects="),
        ]
        for wrong, why in refused:
            with pytest.raises(ObjectError, match=why):
                here.reduce("x", ["a", "b"], **wrong)
        no_sources: tuple[Any, ...] = ("ab", [])
        for sources in no_sources:
            with pytest.raises(ObjectError, match="its sources are a list of names"):
                here.reduce("x", sources)
        with pytest.raises(ObjectError, match="Cannot reduce into 'x': "):
            here.reduce("x", ["a", "b"], min_objects=1, deadline=-1.0)
        here.reduce("late", ["a", "never"], min_objects=1, deadline=0.2)
        assert here.get("late", timeout=10).tolist() == [1.0, 5.0]
        assert here.reduced_set("late") == ["a"]
        with pytest.raises(ObjectError, match=r"Cannot keep 'large' of 8,000,000,000 bytes: .*--memory-mib"):
            here.put("large", torch.empty(1, dtype=torch.int8).expand(8_000_000_000))


@pytest.mark.timeout(120)
def test_a_store_keeps_what_is_mapped_and_no_longer(tmp_path: Path) -> None:
    with (
        served(tmp_path, "--directory", "--memory-mib", 20) as first,
        served(tmp_path, "--directories", first.directories) as second,
        first.client() as here,
        second.client() as there,
    ):
        there.put("a", torch.ones(LARGE))
        there.put("b", torch.ones(LARGE) * 2)
        there.put("c", torch.ones(LARGE) * 3)
        held = here.get("a", timeout=20)
        also = here.get("b", timeout=20)
        with pytest.raises(ObjectError, match="Cannot keep 'c'"):
            here.get("c", timeout=20)
        del also
        with contextlib.suppress(ObjectError):  # "b" may go now, which takes a moment
            here.get("c", timeout=20)
        time.sleep(0.3)
        assert torch.equal(here.get("c", timeout=20), torch.ones(LARGE) * 3)
        assert torch.equal(held, torch.ones(LARGE))


@pytest.mark.timeout(120)
def test_a_store_that_is_killed_leaves_what_is_mapped(two: tuple[Served, Served]) -> None:
    first, second = two
    wanted = torch.randn(LARGE)
    with first.client() as here, second.client() as there:
        there.put("w", wanted)
        got = here.get("w", timeout=20)
        mine = there.get("w", timeout=20)
        second.kill()
        assert torch.equal(mine, wanted)
        assert torch.equal(got, wanted)
        with pytest.raises(ObjectError, match="is lost"):
            there.get("w", timeout=20)
        assert torch.equal(here.get("w", timeout=20), wanted), "the other store has it"


@pytest.mark.timeout(120)
def test_a_client_that_asks_for_memory_for_a_small_one(tmp_path: Path) -> None:
    with served(tmp_path, "--directory") as first, first.client() as good:
        with first.client() as bad:
            meta = ObjectMeta("float32", (3,), 12)
            asked = bad._access._ask("put", lambda call: CreateCall(call=call, name=ObjectName("w"), meta=meta))  # type: ignore[attr-defined]
            assert asked.wait(timedelta(seconds=10))
            assert "Cannot make 'w'" in str(asked.error)
        good.put("w", torch.ones(3))
        assert torch.equal(good.get("w", timeout=10), torch.ones(3))


CRASH = """
import datetime, os, sys
from offbeat.objects.client import connect
from offbeat.protocol.objects import ObjectMeta, ObjectName
access = connect(sys.argv[1])._access
meta = ObjectMeta("float32", (1000000,), 4000000)
made = access.create(ObjectName("w"), meta)
made.wait(datetime.timedelta(seconds=10))
os.kill(os.getpid(), 9)
"""


@pytest.mark.timeout(120)
def test_a_directory_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """The objects of its own store are lost; those of others are not, and a task that waits for one gets it."""
    with (
        served(tmp_path, "--directory") as first,
        served(tmp_path, "--directories", first.directories) as second,
        served(tmp_path, "--directories", first.directories) as third,
        second.client() as there,
        third.client() as here,
    ):
        with first.client() as lost:
            lost.put("lost", torch.ones(LARGE))
        there.put("w", torch.full((LARGE,), 3.0))
        first.kill()
        with pytest.raises(ObjectTimeoutError, match=r"within 4 s: its directory has been lost for \d s"):
            here.get("w", timeout=4)
        getting = here.start_get("w")
        port = first.directories.rpartition(":")[2]
        with served(tmp_path, "--directory", "--directory-port", port):
            assert getting.wait(timedelta(seconds=20))
            assert torch.equal(getting.outcome(), torch.full((LARGE,), 3.0))
            with pytest.raises(ObjectTimeoutError, match="nobody has put it"):
                here.get("lost", timeout=1)
            here.put("lost", torch.zeros(LARGE))
            assert torch.equal(there.get("lost", timeout=10), torch.zeros(LARGE))


@pytest.mark.timeout(120)
def test_a_client_that_is_killed_while_it_puts(two: tuple[Served, Served]) -> None:
    first, second = two
    with second.client() as there:
        waiting = there.start_get("w")
        command = [sys.executable, "-c", CRASH, first.client_address]
        assert subprocess.run(command, env=os.environ | {"OFFBEAT_TOKEN": TOKEN}, check=False).returncode == -9
        with pytest.raises(ObjectError, match=r"'w' (is lost|was deleted)"):
            waiting.get(20)
        with first.client() as here:
            here.put("w", torch.ones(100_000))
            assert torch.equal(there.get("w", timeout=20), torch.ones(100_000))


def test_a_store_in_this_process(tmp_path: Path) -> None:
    with served(tmp_path, "--directory") as first:
        directories = first.directories.split(",")
        with embedded(directories, credentials=Token(TOKEN.encode())) as here, first.client() as there:
            here.put("w", torch.ones(LARGE))
            assert torch.equal(there.get("w", timeout=20), torch.ones(LARGE))
            there.put("v", torch.ones(3))
            assert here.get("v", timeout=20).tolist() == [1, 1, 1]


def test_what_a_reader_in_the_store_s_process_writes_nobody_else_sees(tmp_path: Path) -> None:
    with served(tmp_path, "--directory") as first:
        directories = first.directories.split(",")
        with embedded(directories, credentials=Token(TOKEN.encode())) as here, first.client() as there:
            for name, wanted in (("w", torch.ones(LARGE)), ("v", torch.ones(3))):
                here.put(name, wanted)
                here.get(name, timeout=20).zero_()
                assert torch.equal(here.get(name, timeout=20), wanted)
                assert torch.equal(there.get(name, timeout=20), wanted)


HOLDS = """
import ctypes, sys, torch
from offbeat.objects.client import connect
client = connect(sys.argv[1])
client.put("before", torch.ones(3))
ctypes.PyDLL(None).sleep(3)  # with the GIL
client.put("after", torch.ones(3))
print(client.get("before").tolist(), client.get("after").tolist())
"""


@pytest.mark.timeout(120)
def test_a_client_may_hold_the_gil_for_longer_than_a_store_may_be_silent(tmp_path: Path) -> None:
    with served(tmp_path, "--directory") as first:
        command = [sys.executable, "-c", HOLDS, first.client_address]
        done = subprocess.run(
            command, env=os.environ | {"OFFBEAT_TOKEN": TOKEN}, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "[1.0, 1.0, 1.0] [1.0, 1.0, 1.0]\n"


class TestNotThere:
    def test_with_another_token(self, tmp_path: Path) -> None:
        with served(tmp_path, "--directory") as first, pytest.raises(PeerError):
            connect(first.client_address, credentials=Token(b"another token of its own"))

    def test_without_a_directory(self, tmp_path: Path) -> None:
        code, output = offbeat("objects", "serve", folder=tmp_path)
        assert code != 0
        assert "Cannot serve objects without a directory: say --directory on one machine" in " ".join(output.split())
