"""`offbeat bench switch`: a tiny run of each target, and what it would see if something were wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from offbeat.cli.switch_benchmark import cells_of
from offbeat.errors import PlanError
from offbeat.history import HistoryEnded, HistoryHeader, StepGranted, write_log
from offbeat.history.records import FORMAT
from offbeat.lab.garbage import KINDS, Garbage, GarbageMaker
from offbeat.lab.random_swaps import SwapProof, WindowChange, prove
from offbeat.lab.switch_load import CHUNKS, KnownVectors
from offbeat.switch.packet import Packet, PacketKind, decode, encode
from offbeat.switch.packet_batch import PacketBatch
from tests.cli.commands import offbeat
from tests.switch.kernel_replay import why_not

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.lab
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@pytest.mark.parametrize(("target", "values"), [("udp", "64"), ("ebpf", "64,2048"), ("xdp", "64,2048")])
def test_a_tiny_run(target: str, values: str, tmp_path: Path) -> None:
    arguments: tuple[str, ...] = ("--target", target, "--workers", "2", "--values", values, "--loss", "0,5")
    arguments += ("--repeats", "1", "--what", "results,clocks,packets", "--seconds", "0.2")
    code, output = offbeat("bench", "switch", *arguments, "--json", "switch.json", folder=tmp_path)
    assert code == 0, output
    report = msgspec.json.decode((tmp_path / "switch.json").read_bytes())
    rows = report["rows"]
    sizes = [int(one) for one in values.split(",")]
    assert len(rows) == 3 * len(sizes) + 2 * 2, "packets and results with and without loss, clocks by two windows"
    for row in rows:
        assert row["per_second"][0] > 0, row
        assert (row["wrong"], row["errors"]) == (0, []), row
        if row["what"] == "results":
            assert row["checked"] >= 2 * CHUNKS
            assert row["gb_per_s"] == pytest.approx(row["median"] * row["values"] * 4 / 1e9)
        if row["loss_percent"] and row["what"] == "results":
            assert 0.02 < row["lost"] / row["passed"] < 0.10, row
            assert row["resent"] > 0
    assert {"python", "clang", "libbpf"} <= set(report["versions"])
    assert {"processor", "kernel"} <= set(report["hardware"])
    assert all(f"0 of {row['checked']:,}" in output for row in rows if row["checked"])


@pytest.mark.lab
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@pytest.mark.parametrize("target", ["udp", "ebpf"])
def test_swaps_and_garbage(target: str, tmp_path: Path) -> None:
    arguments: tuple[str, ...] = ("--target", target, "--workers", "2", "--values", "64", "--repeats", "1")
    arguments += ("--seconds", "0.5", "--what", "garbage,swaps", "--clocks", "400", "--history", "kept")
    code, output = offbeat("bench", "switch", *arguments, "--json", "switch.json", folder=tmp_path)
    assert code == 0, output
    garbage, *swaps = msgspec.json.decode((tmp_path / "switch.json").read_bytes())["rows"]
    assert (garbage["what"], garbage["wrong"], garbage["errors"]) == ("garbage", 0, [])
    assert garbage["checked"] >= 2 * CHUNKS
    assert garbage["per_second"][0] > 0
    assert set(garbage["garbage"]) == set(KINDS), "all of it was sent"
    assert {"foreign", "unknown job", "STALE_COOKIE", "WRONG_PORT", "MALFORMED"} <= set(garbage["refused"])
    assert [row["loss_percent"] for row in swaps] == [0, 1, 3]
    for row in swaps:
        proof = row["proof"]
        assert proof["swaps"] > 5, row
        assert proof["grants"] == 2 * 400
        assert proof["grants"] > proof["by_lead"]["0"], "some were ahead of the slowest"
        wrong = [proof[name] for name in ("mixed", "other_windows", "violations", "too_late")]
        assert (wrong, row["errors"]) == ([0, 0, 0, 0], []), row
        assert (row["lost"] > 0) == (row["loss_percent"] > 0)
    for folder in sorted((tmp_path / "kept").iterdir()):
        code, output = offbeat("verify-run", str(folder), folder=tmp_path)
        assert code == 0, output
        assert "law 3  nobody too far ahead     holds         800 releases" in output


def test_a_mixed_clock_and_a_late_change_would_be_counted(tmp_path: Path) -> None:
    changes = [WindowChange(1, 0, 4, 11, 1e-4), WindowChange(2, 4, 1, 17, 3e-4)]
    right = [
        [StepGranted(0, 10, 10, 0, 1), StepGranted(0, 12, 11, 4, 1), StepGranted(0, 18, 17, 1, 2)],
        [StepGranted(0, 12, 10, 4, 1), StepGranted(0, 17, 17, 1, 2)],
    ]

    def proof(granted: list[list[StepGranted]], changes: list[WindowChange] = changes) -> SwapProof:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for rank, own in enumerate(granted):
            header = HistoryHeader(FORMAT, "worker", "job", rank, 0.0, "1")
            write_log(folder / f"worker-{rank}.log", [header, *own, HistoryEnded()])
        return prove(folder, changes, window=0)

    found = proof(right)
    assert found.holds, found
    assert (found.grants, found.by_lead, found.us_per_swap) == (5, {0: 2, 1: 2, 2: 1}, 200)
    assert found.clocks_to_effect == 1
    mixed = proof([right[0], [StepGranted(0, 12, 10, 16, 1)]])
    assert (mixed.mixed, mixed.other_windows) == (1, 1)
    assert mixed.violations > 0
    assert proof([right[0], [StepGranted(0, 18, 10, 1, 2)]]).violations > 0, "8 ahead of 1 allowed"
    assert proof([right[0], [StepGranted(0, 12, 11, 4, 9)]]).other_windows == 1, "nobody set that"
    assert proof(right, [changes[0]._replace(effective=12), changes[1]]).too_late == 1


def test_garbage_is_what_it_is_called() -> None:
    honest = encode(Packet(PacketKind.DATA, 7, 1, cookie=9, chunk=3, slot=3, values=(5,) * 64))
    maker = GarbageMaker((8, 0, 77))
    maker.see(honest)
    by_kind: dict[str, list[Garbage]] = {}
    for _ in range(500 * len(KINDS)):
        by_kind.setdefault((one := maker.next()).kind, []).append(one)
    assert set(by_kind) == set(KINDS)
    for kind in ("foreign", "cut", "too long"):
        assert {one.is_from_victim for one in by_kind[kind]} == {True, False}
        for one in by_kind[kind]:
            batch = PacketBatch.of([one.datagram], 2048)
            assert not any(batch.are_ours(job, from_workers=True)[0] for job in (7, 8)), one
    for kind, name in (("other job", "job"), ("other worker", "worker"), ("other cookie", "cookie")):
        for one in by_kind[kind]:
            packet = decode(one.datagram)
            assert getattr(packet, name) != getattr(decode(honest), name)
            assert packet.values == (5,) * 64
    assert {one.datagram for kind in ("replayed", "other port") for one in by_kind[kind]} == {honest}
    assert all(
        one.is_from_victim == (kind == "replayed") for kind in ("replayed", "other port") for one in by_kind[kind]
    )
    own = [PacketBatch.of([one.datagram], 2048).header[0] for one in by_kind["own job"]]
    assert all((one["job"], one["cookie"]) == (8, 77) for one in own)
    assert len({int(one["kind"]) for one in own}) > 8
    assert PacketKind.LEAVE not in {int(one["kind"]) for one in own}


def test_a_wrong_sum_would_be_counted() -> None:
    all_of_them = [KnownVectors(rank, 3, 64) for rank in range(3)]
    total = np.sum([one.vector(7, is_last=rank == 1) for rank, one in enumerate(all_of_them)], axis=0)
    assert total[0] == 1, "one worker wants no further exchange"
    assert all_of_them[0].wrong_chunks(7, total, 0b111) == 0
    assert all_of_them[0].wrong_chunks(8, total, 0b111) == CHUNKS, "of another exchange"
    assert all_of_them[0].wrong_chunks(7, total, 0b101) == CHUNKS, "a worker is missing"
    total[[1, 63, 64 * 9]] += 1
    assert all_of_them[2].wrong_chunks(7, total, 0b111) == 2


def test_jumbo_frames_are_for_the_kernel_alone() -> None:
    cells = cells_of(["udp", "ebpf"], [2], [352, 2048], [0])
    assert {(one.target, one.mtu) for one in cells if one.values == 2048 and one.target} == {("ebpf", 9000)}
    assert len([one for one in cells if one.what == "clocks"]) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--values", "100"), "multiple of 16"),
        (("--loss", "99"), "--loss"),
        (("--workers", "x"), "2,4"),
        (("--what", "sums"), "results, clocks, packets, garbage, swaps"),
    ],
)
def test_what_cannot_be_is_said(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    code, output = offbeat("bench", "switch", *arguments, folder=tmp_path)
    assert code == 2, output
    assert says in output


def test_within_a_process_only_garbage_is_measured() -> None:
    cells = cells_of(["memory"], [2, 4], [64, 2048], [0, 5])
    assert [(one.what, one.workers, one.values) for one in cells if one.target] == [
        ("garbage", 2, 64),
        ("garbage", 4, 64),
    ]


def test_nothing_to_measure() -> None:
    with pytest.raises(PlanError, match="nothing"):
        cells_of([], [2], [64], [0])
