"""Recorders: warm-up and evaluations count for nothing, bytes are those that left, outside of the lab all is quiet."""

from __future__ import annotations

import itertools
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from offbeat.errors import PlanError
from offbeat.lab import command_lines, recorder
from offbeat.lab.recorder import MeasuredStep, Metric, Note, Recorder, RunTotals, Work, sent_bytes
from offbeat.scenario import RowSwap

if TYPE_CHECKING:
    from pathlib import Path

WORK = Work(steps=3, warmup_steps=2)


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "result.jsonl"
    monkeypatch.setenv(recorder.RESULT, str(path))
    return path


def test_only_measured_steps_count(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count(1000, 100)
    monkeypatch.setattr(recorder, "sent_bytes", lambda: next(counter))
    own = Recorder(compute_s=0.004, gradient_bytes=12, work=WORK)
    for _ in range(WORK.warmup_steps + WORK.steps + 2):
        time.sleep(0.01)
        own.step(samples=8)
    own.finish(digest="d", gradient_error=0.5)
    begun, *steps, end = recorder.read(result)
    assert isinstance(begun, recorder.Begun)
    assert [step.step for step in steps if isinstance(step, MeasuredStep)] == [0, 1, 2]
    for step in steps:
        assert isinstance(step, MeasuredStep)
        assert step.step_s >= 0.01
        assert step.wait_s == pytest.approx(step.step_s - 0.004, abs=2e-6)
    # Counted once before the first measured step and once after the last.
    assert isinstance(end, RunTotals)
    begin_s, end_s = end.span_s
    assert 0.03 <= end_s - begin_s < 1.0
    assert msgspec.structs.replace(end, span_s=(0.0, 0.0)) == RunTotals(100, 3 * 8, 12, 0.004, "d", 0.5)


def test_evaluations_cost_no_step_and_no_training_time(result: Path) -> None:
    own = Recorder(compute_s=1.0, gradient_bytes=0, work=WORK)
    for _ in range(5):
        own.step(1)
        time.sleep(0.2)  # the evaluation
        own.metric(0.9)
    own.note("other data")
    own.finish(digest="")
    lines = recorder.read(result)
    steps = [line for line in lines if isinstance(line, MeasuredStep)]
    assert len(steps) == 3
    assert all(step.step_s < 0.1 and step.wait_s == 0 for step in steps)
    metrics = [line for line in lines if isinstance(line, Metric)]
    assert [metric.step for metric in metrics] == [1, 2, 3, 4, 5]
    assert metrics[-1].time_s < 0.2, "five evaluations of 0.2 s are not training"
    assert [line for line in lines if isinstance(line, Note)] == [Note("other data")]


def test_outside_of_the_lab_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(recorder.RESULT, raising=False)
    monkeypatch.delenv(recorder.WORK, raising=False)
    monkeypatch.chdir(tmp_path)
    own = Recorder(compute_s=0.0, gradient_bytes=0)
    own.step(1)
    own.metric(1.0)
    own.finish(digest="")
    assert own.work == Work()
    assert list(tmp_path.iterdir()) == []


def test_the_work_comes_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recorder.WORK, '{"system": "ddp", "steps": 7, "replay": {"kind": "replay", "profile": "vgg16"}}')
    work = Work.from_environment()
    assert (work.system, work.steps, work.warmup_steps) == ("ddp", 7, 5)
    assert work.replay is not None
    assert work.replay.profile == "vgg16"


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert recorder.read(tmp_path / "nothing") == []


def sent_again_bytes(connection: socket.socket) -> int:
    """What the kernel sent once more, as it does where a busy machine acknowledges late: `tcpi_bytes_retrans`."""
    return int.from_bytes(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[208:216], "little")


def test_on_loopback_bytes_are_those_of_our_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        before = sent_bytes()
        for size in (100_000, 23_456):
            ours.sendall(bytes(size))
            left = size
            while left:
                left -= len(theirs.recv(left))
        assert sent_bytes() - before == 123_456 + sent_again_bytes(ours)


def test_elsewhere_they_are_those_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such")
    assert sent_bytes() == 0


@pytest.mark.slow
def test_a_row_whose_policy_is_refused_is_not_measured(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_RUN_DIR", str(tmp_path))  # where nothing trains
    own = Recorder(compute_s=0.0, gradient_bytes=0, work=Work(steps=3, swaps=(RowSwap(step=1, policy="ASP"),)))
    own.step(1)
    with pytest.raises(PlanError, match="was not swapped"):
        own.finish(digest="")


def test_a_swap_for_which_no_time_is_left_is_said(result: Path) -> None:
    own = Recorder(compute_s=0.0, gradient_bytes=0, work=Work(steps=3, swaps=(RowSwap(step=5, policy="ASP"),)))
    own.step(1)
    with pytest.raises(PlanError, match=r"no time left to swap to ASP.*row\.swap\.step"):
        own.finish(digest="")


def test_swaps_are_made_one_after_the_other(result: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = tmp_path / "said"
    program = f"import sys, time; time.sleep(0.3); print(*sys.argv[1:], file=open({str(said)!r}, 'a'))"
    monkeypatch.setattr(command_lines, "module", lambda *told: [sys.executable, "-c", program, *told])
    monkeypatch.setenv("OFFBEAT_RUN_DIR", "here")
    swaps = (RowSwap(step=2, policy="SSP(8)"), RowSwap(step=3, policy="ASP"))
    own = Recorder(compute_s=0.0, gradient_bytes=0, work=Work(steps=3, swaps=swaps))
    end_s = time.monotonic() + 30
    while not (said.exists() and len(said.read_text().splitlines()) == 2) and time.monotonic() < end_s:
        own.step(1)
        time.sleep(0.01)
    own.finish(digest="")
    assert said.read_text().splitlines() == [f"offbeat swap {policy} --job here" for policy in ("SSP(8)", "ASP")]
