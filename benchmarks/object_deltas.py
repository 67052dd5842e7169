"""Deltas between versions of 100 MiB of bfloat16: bytes, seconds, a pause. `python -m benchmarks.object_deltas`

Two stores on this machine, as processes; a publisher at one, a reader at the other. In each version a random share of
the elements has other bits. The pause is the time in which the reader's tensor is written; beside it, by turns,
`index_copy_` writes the same decoded positions and values. Writes benchmarks/results/object_deltas.json.
"""

from __future__ import annotations

import os
import re
import secrets
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from offbeat.lab import hardware
from offbeat.objects import delta
from offbeat.objects.client import connect
from offbeat.objects.packed_tensors import TensorLayout
from offbeat.objects.tensor_writes import TensorWrites, words_of
from offbeat.protocol.objects import INLINE_BYTES
from offbeat.wire.credentials import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

RESULT = Path(__file__).parent / "results/object_deltas.json"
COMMAND = "python -m benchmarks.object_deltas"
SIZE_BYTES, SHARES, VERSIONS, REPEATS = 100 << 20, (0.02, 0.002), 8, 31


class DeltaTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of one share of changed elements; a list has one number per version or repeat.

    Args:
        changed: share of the elements.
        wire_bytes: that one store sent to the other for a version.
        encode_s, decode_s: of the delta alone.
        publish_s, update_s: of the calls.
        pause_s, index_copy_s: by turns.
    """

    changed: float
    whole_bytes: int
    wire_bytes: list[int]
    publish_s: list[float]
    update_s: list[float]
    encode_s: list[float]
    decode_s: list[float]
    pause_s: list[float]
    index_copy_s: list[float]


class DeltasMeasured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    size_bytes: int
    shares: list[DeltaTimes]


@contextmanager
def store(token: str, *arguments: str) -> Iterator[tuple[str, str]]:
    """A store as a process: its address for clients, and that of the directory."""
    command = [sys.executable, "-m", "offbeat", "objects", "serve", "--memory-mib", "2048", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OFFBEAT_TOKEN": token})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"OFFBEAT_OBJECTS=(\S+);.*--directories (\S+);", line)
        assert found is not None, line
        yield found[1], found[2]
    finally:
        process.terminate()
        process.communicate()


def change_(tensor: Tensor, share: float, generator: torch.Generator) -> None:
    """Give a random share of the elements other bits."""
    words = words_of(tensor)
    count = int(share * words.numel())
    at = torch.randperm(words.numel(), generator=generator)[:count]
    words[at] ^= torch.randint(1, 1 << 15, (count,), generator=generator, dtype=torch.int16)


def seconds(what: Callable[[], object]) -> float:
    """The time that a call takes."""
    began_s = time.perf_counter()
    what()
    return round(time.perf_counter() - began_s, 6)


def measure(share: float) -> DeltaTimes:
    """Publish and follow some versions; then the parts of it alone."""
    generator, token = torch.Generator().manual_seed(0), secrets.token_hex(32)
    mine = torch.randn(SIZE_BYTES // 2, generator=generator).bfloat16()
    theirs, before = torch.zeros_like(mine), mine.clone()
    wire, publish_s, update_s = [], [], []
    credentials = Token(token.encode())
    with (
        store(token, "--directory") as (one, directory),
        store(token, "--directories", directory) as (other, _),
        connect(one, credentials=credentials) as trainer,
        connect(other, credentials=credentials) as rollout,
    ):
        publisher, follower = trainer.publisher("policy"), rollout.follow("policy", {"w": theirs})
        for number in range(1 + VERSIONS):
            before.copy_(mine)
            if number:
                change_(mine, share, generator)
            publish_s.append(seconds(lambda: publisher.publish({"w": mine})))
            sent = trainer.status().sent_bytes
            update_s.append(seconds(lambda: follower.update(timeout=60)))
            if not torch.equal(words_of(mine), words_of(theirs)):
                sys.exit("The reader has other bits than the publisher.")
            wire.append(trainer.status().sent_bytes - sent)
    layout = TensorLayout.of({"w": mine})
    wholes = [memoryview(bytearray(b"".join(layout.parts({"w": one})))) for one in (before, mine)]
    encode_s = [seconds(lambda: delta.encode(layout, *wholes)) for _ in range(VERSIONS)]
    there_and_back = []
    for old, new in (wholes, wholes[::-1]):
        parts = delta.encode(layout, old, new)
        assert parts is not None
        there_and_back.append(memoryview(bytearray(b"".join(parts))))
    assert len(there_and_back[0]) > INLINE_BYTES, "else it travels in a message, and is not counted"
    decode_s = [seconds(lambda: delta.decode(layout, there_and_back[0])) for _ in range(VERSIONS)]
    pause_s, index_copy_s = pauses(layout, there_and_back, theirs)
    return DeltaTimes(
        changed=share,
        whole_bytes=wire[0],
        wire_bytes=wire[1:],
        publish_s=publish_s[1:],
        update_s=update_s[1:],
        encode_s=encode_s,
        decode_s=decode_s,
        pause_s=pause_s,
        index_copy_s=index_copy_s,
    )


def pauses(layout: TensorLayout, deltas: Sequence[memoryview], tensor: Tensor) -> tuple[list[float], list[float]]:
    """Write versions back and forth: as a reader does, and by `index_copy_`."""
    ours: list[float] = []
    plain: list[float] = []
    words = words_of(tensor)
    for number in range(2 * REPEATS):
        changes = delta.decode(layout, deltas[number // 2 % 2])
        writes = TensorWrites({"w": tensor})
        writes.change(changes)
        positions = torch.from_numpy(changes[0].positions)
        values = torch.from_numpy(changes[0].words)

        def copy(positions: Tensor = positions, values: Tensor = values) -> None:
            words.index_copy_(0, positions, values)

        turns: list[tuple[list[float], Callable[[], object]]] = [(ours, writes.write_), (plain, copy)]
        times, what = turns[number % 2]
        times.append(seconds(what))
    return ours[1:], plain[1:]


def read() -> DeltasMeasured:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=DeltasMeasured)


def section(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """The part of the page of results; nothing before it was measured.

    Args:
        lines: makes a table of headings and rows.
    """
    if not RESULT.exists():
        return ""
    found = read()
    rows = []
    for one in found.shares:
        wire = statistics.median(one.wire_bytes)
        times = [statistics.median(each) for each in (one.encode_s, one.decode_s, one.pause_s, one.index_copy_s)]
        calls = [statistics.median(each) for each in (one.publish_s, one.update_s)]
        rows.append(
            [
                f"{one.changed:.1%}",
                f"{wire:,.0f}",
                f"{one.whole_bytes / wire:.1f}",
                *(f"{1e3 * each:.1f}" for each in (*calls, *times)),
                f"{times[2] / times[3]:.2f}",
            ]
        )
    heads = ["changed", "bytes sent", "times fewer than whole", "publish, ms", "update, ms", "encode, ms", "decode, ms"]
    return (
        f"\n## object_deltas\n\n{found.size_bytes >> 20} MiB of bfloat16 in versions, of which each changes a random "
        "share of the elements; a publisher and a reader at two stores of one machine. Medians. The pause is the time "
        "in which the reader's tensor is written, beside `index_copy_` of the same positions and values.\n\n"
        f"{lines([*heads, 'pause, ms', 'index_copy_, ms', 'ratio'], rows)}\n`{found.command}`, {found.date}, "
        f"{found.hardware['processor']}, torch {found.versions['torch']}. [Raw records](object_deltas.json).\n"
    )


def main() -> None:
    torch.set_num_threads(1)
    measured = DeltasMeasured(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        size_bytes=SIZE_BYTES,
        shares=[measure(share) for share in SHARES],
    )
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


if __name__ == "__main__":
    main()
