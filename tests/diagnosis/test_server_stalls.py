"""A worker that waits for a parameter server in trouble is told so, with its address; within the timeout."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.errors import OffbeatError
from offbeat.report.outcome import read_stalls
from offbeat.server import launch
from offbeat.sync import ASP
from tests.cli.test_serve import free_port
from tests.diagnosis.test_stall_reports import Reports
from tests.training.server_jobs import TIMEOUT_S, TOKEN, Counter, join, serve
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

FAULTY_STEP = 3
FAULT_S = 2 * TIMEOUT_S  # so that they have let go of it by then


def train(folder: Path, number: signal.Signals) -> dict[str, Any]:
    """Rank 0 sends a signal to the server between two steps; what this rank was told, and after how long."""
    rank, fault, ready = int(os.environ["RANK"]), folder / "fault", folder / "ready"
    pids = serve(folder)
    told = Reports()
    logging.getLogger("offbeat").addHandler(told)
    stall = folder / f"stall-rank{rank}.json"
    with join(ASP(), folder) as run:
        counter, error = Counter(run), ""
        for _ in range(FAULTY_STEP):
            counter.step()
        run.mean(1.0)
        if rank == 1:
            ready.touch()
        if pids:
            while not ready.exists():
                time.sleep(0.01)
            os.kill(pids[0], number)
            fault.touch()
        while not fault.exists():
            time.sleep(0.01)
        if number == signal.SIGSTOP and pids:
            wake(pids[0])
        began_s = time.monotonic()
        try:
            counter.step()
        except OffbeatError as lost:
            error = str(lost)
        return {
            "error": error,
            "told": [(at_s - began_s, text) for at_s, text in told.texts if at_s >= began_s],
            "stall": json.loads(stall.read_text()),
            "address": os.environ["OFFBEAT_SERVERS"],
        }


def starts_slowly(folder: Path) -> list[str]:
    """Rank 0 takes its time to start the server beside it; what this rank was told."""
    told = Reports()
    logging.getLogger("offbeat").addHandler(told)
    if os.environ["RANK"] == "0":
        begun = launch.start_shard

        def start(settings: launch.ShardSettings) -> Any:
            time.sleep(5 * TIMEOUT_S)
            return begun(settings)

        launch.start_shard = start  # type: ignore[assignment]
    with join(ASP(), folder) as run:
        Counter(run).step()
    return [text for _, text in told.texts]


@pytest.mark.slow
def test_who_takes_long_to_start_the_server_says_so(tmp_path: Path) -> None:
    first, second = run_workers(2, starts_slowly, tmp_path)
    assert any(text.startswith("starting the parameter server has taken ") for text in first)
    (stalled, *_) = [text for text in second if "has waited" in text]
    assert 3 * TIMEOUT_S <= float(stalled.split("has waited ")[1].split()[0]) <= 5 * TIMEOUT_S, "no false alarm before"
    assert "rank 0 on " in stalled
    assert "has been starting the parameter server for " in stalled


def dials_early(folder: Path) -> list[str]:
    """All dial a server that is not there yet; what this rank was told."""
    told, where = Reports(), folder / "port"
    logging.getLogger("offbeat").addHandler(told)
    if os.environ["RANK"] == "0":
        port = free_port()
        where.with_suffix(".new").write_text(str(port))
        where.with_suffix(".new").rename(where)
        settings = launch.ShardSettings(job="j", token=TOKEN, timeout_s=TIMEOUT_S, port=port)
        threading.Timer(FAULT_S, launch.start_shard, (settings,)).start()
    while not where.exists():
        time.sleep(0.01)
    address = f"127.0.0.1:{where.read_text()}"
    os.environ.update(OFFBEAT_SERVERS=address, OFFBEAT_JOB="j", OFFBEAT_TOKEN=TOKEN)
    with join(ASP(), folder) as run:
        Counter(run).step()
    return [text.replace(address, "ADDRESS") for _, text in told.texts]


@pytest.mark.slow
def test_who_dials_the_server_says_so(tmp_path: Path) -> None:
    for told in run_workers(2, dials_early, tmp_path):
        assert any(text.startswith("dialling the parameter server at ADDRESS has taken 1.") for text in told), told


def wake(pid: int) -> None:
    """Have somebody wake it again, when its workers have given it up for now."""
    if os.fork() == 0:
        time.sleep(FAULT_S)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda n: n.name)
def test_a_server_that_says_nothing_is_named(tmp_path: Path, number: signal.Signals) -> None:
    results = run_workers(2, train, tmp_path, number)
    for result in results:
        after_s, text = next((at_s, text) for at_s, text in result["told"] if "has waited" in text)
        assert after_s <= TIMEOUT_S
        assert "The parameter server " in text
        assert result["address"] in text
        assert "silent for " in text
        assert "is being dialled again" in text
        assert "All have arrived" not in text
        assert "disagree" not in text
        assert result["stall"]["server"].startswith("The parameter server ")
        assert not result["stall"]["fatal"]
    if number == signal.SIGSTOP:
        assert [result["error"] for result in results] == ["", ""], "it went on, and so did they"
    else:
        assert all("Cannot reconnect to the job" in result["error"] for result in results)
    (stall, _) = read_stalls(tmp_path, 0.0)
    assert stall.server
