"""What the hub says of a job without a server, as what is to be seen of it."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.protocol.worker_status import TableClock, TrainingStatus
from offbeat.report.hub_status import model_status_of
from offbeat.report.job_status import pacemaker
from offbeat.wire.messages import Overview, WorkerReport

KNOWN = TrainingStatus(
    step=40, exchanges=50, policy="BSP()", fabric="Elastic()", computing_s=0.1, waited_s=5.0, here_s=20.0
)


def overview(*words: dict[str, Any], statuses: dict[int, TrainingStatus] | None = None, world: int = 0) -> Overview:
    said = tuple(WorkerReport(rank=rank, **{"host": "a", **one}) for rank, one in enumerate(words))
    return Overview(1, said, statuses or {}, world or max(1, len(words)), 30.0)


@pytest.mark.parametrize(
    ("words", "status", "phase", "since_s"),
    [
        ({"phase": "computing", "since_s": 1.0, "age_s": 0.5}, KNOWN, "computing", 1.5),
        ({"phase": "exchanging", "since_s": 1.0}, None, "exchanging", 1.0),
        ({"phase": "waiting", "since_s": 1.0}, None, "waiting", 1.0),
        ({"phase": "computing", "process": "paused", "state_since_s": 3.0, "age_s": 0.5}, KNOWN, "paused", 3.5),
        ({"phase": "computing", "process": "unreachable", "state_since_s": 4.0, "age_s": 4.0}, KNOWN, "unreachable", 4),
        ({"phase": "starting", "process": "unreachable", "host": ""}, None, "starting", 0.0),
        ({"phase": "computing", "process": "dead", "state_since_s": 2.0}, KNOWN, "gone", 2.0),
        ({"phase": "raised", "process": "dead"}, KNOWN, "failed", 0.0),
        ({"phase": "lost"}, KNOWN, "failed", 0.0),
        ({"phase": "finished", "process": "dead"}, KNOWN, "done", 0.0),
        ({"phase": "finished"}, TrainingStatus(left=True), "left", 0.0),
    ],
)
def test_what_a_worker_does(words: dict[str, Any], status: TrainingStatus | None, phase: str, since_s: float) -> None:
    (seen,) = model_status_of(overview(words, statuses={} if status is None else {0: status})).workers
    assert (seen.phase, seen.since_s) == (phase, since_s)
    assert seen.gone == (phase in ("gone", "failed", "done", "left"))


def test_the_clocks_on_a_table_are_those_that_somebody_there_says() -> None:
    at = {lag: tuple(TableClock(worker, lag, 1.0, 0.1) for worker in range(3)) for lag in (1, 2)}
    words = ({"process": "dead"}, {"phase": "computing"}, {"phase": "exchanging"})
    statuses = {0: TrainingStatus(clocks=at[1]), 2: TrainingStatus(clocks=at[2])}
    workers = model_status_of(overview(*words, statuses=statuses)).workers
    assert [seen.table.lag for seen in workers if seen.table is not None] == [2, 2, 2]


def test_its_step_is_that_of_its_script_now() -> None:
    """Also where that began with a checkpoint, or has several models, of which all exchanges are counted."""
    (seen,) = model_status_of(overview({"phase": "computing", "step": 53}, statuses={0: KNOWN})).workers
    assert seen.made == 43, "the words are newer"
    twice = TrainingStatus(step=40, exchanges=80, models=2)
    (seen,) = model_status_of(overview({"phase": "computing", "step": 85}, statuses={0: twice})).workers
    assert seen.made == 42
    (seen,) = model_status_of(overview({"phase": "starting", "step": -1})).workers
    assert seen.made == 0


def test_the_whole() -> None:
    slow = TrainingStatus(step=40, exchanges=50, computing_s=0.2, here_s=20.0, policy="BSP()", fabric="Elastic()")
    scene = model_status_of(
        overview({"phase": "exchanging", "step": 50}, {"phase": "computing", "step": 50}, statuses={0: KNOWN, 1: slow})
    )
    assert (scene.policy, scene.fabric, scene.version, scene.started) == ("BSP()", "Elastic()", 40, True)
    assert scene.waiting_share(scene.workers[0]) == 0.25
    assert pacemaker(scene) == (
        "Rank 1 sets the pace: it computes 200.0 ms per step, 100% longer than the others' median of 100.0 ms."
    )
    starting = model_status_of(overview({"phase": "computing"}, {"process": "unreachable", "host": ""}))
    assert not starting.started
