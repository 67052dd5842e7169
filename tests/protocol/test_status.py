"""What a server says about its job is read as it was meant, or refused; and what follows from it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from offbeat.errors import PeerError
from offbeat.protocol import messages
from offbeat.protocol.status import GetStatus, ModelStatus, StatusReply, WorkerStatus
from offbeat.protocol.worker_status import StatusEvent, TableClock, TrainingStatus
from offbeat.report.job_status import pacemaker
from tests.report.fake_status import a_scene, seen


def test_both_ends_understand_each_other() -> None:
    assert messages.from_peer(messages.pack(GetStatus(7))) == GetStatus(7)
    usual: dict[str, Any] = {name: 3 for name in WorkerStatus.__struct_fields__ if name not in ("worker", "phase")}
    usual["status"] = TrainingStatus(step=3, epochs=1.5, values={"loss": 0.5}, events=(StatusEvent(1.0, "x"),))
    usual["validates"] = True
    usual["table"] = TableClock(worker=1, lag=3, waited_s=1.5, silent_s=None)
    worker = WorkerStatus(worker=1, phase="held", **usual)
    model = ModelStatus(model=2, policy="BSP()", version=9, started=False, running_s=1.5, workers=(worker,))
    assert messages.status_reply_of(messages.pack(StatusReply(7)), messages.pack((model,))) == (7, (model,))


def raw(**changes: Any) -> bytes:
    worker = {"worker": 0, "phase": "held", **changes.pop("seen", {})}
    model = {"model": 0, "policy": "BSP()", "version": 0, "started": True, "running_s": 0.0, "workers": [worker]}
    return msgspec.msgpack.encode([{**model, **changes}])


REPLY = messages.pack(StatusReply(1))


def test_server_and_onlooker_need_not_be_of_one_version() -> None:
    _, (model,) = messages.status_reply_of(REPLY, raw(colour="red", seen={"mood": 3}))
    assert model.workers[0] == WorkerStatus(worker=0, phase="held")


@pytest.mark.parametrize("metadata", [b"", b"\xc1", messages.pack(GetStatus(1)), b"\x91" * 20_000], ids=range(4))
def test_another_answer_is_refused(metadata: bytes) -> None:
    with pytest.raises(PeerError, match="Cannot understand what this server sees"):
        messages.status_reply_of(metadata, raw())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        raw(version=-1),
        raw(running_s=float("nan")),
        raw(policy="x" * 70_000),
        raw(workers=[{"worker": 0, "phase": "held"}] * 4097),
        raw(seen={"phase": "x" * 17}),
        raw(seen={"samples": float("inf")}),
        raw(seen={"applied": 1 << 50}),
        b"\x91" * 20_000,
    ],
    ids=range(10),
)
def test_nonsense_is_refused(body: bytes) -> None:
    with pytest.raises(PeerError, match="Cannot understand what this server sees"):
        messages.status_reply_of(REPLY, body)


def test_figures_of_a_worker() -> None:
    scene = a_scene()
    zero, one, two, gone = scene.workers
    assert [scene.ahead(worker) for worker in (zero, one, two)] == [2, 3, 0], "of those that are there"
    assert scene.waiting_share(zero) == 0.25
    assert scene.waiting_share(one) == pytest.approx(17 / 20), "with the present wait"
    assert scene.waiting_share(two) == 0
    assert scene.waiting_share(seen(0, here_s=10.0)) == 0.5, "of the time since it came"
    assert a_scene(running_s=0.0).waiting_share(zero) == 0
    assert gone.gone
    assert gone.step_s == 0


def test_a_worker_that_has_brought_its_contribution_is_not_ahead_of_itself() -> None:
    alone = seen(0, phase="pushed", step=5, clock=6)
    assert a_scene(alone).ahead(alone) == 0


def test_updates_per_second() -> None:
    scene = a_scene()
    assert scene.updates_per_s() == pytest.approx(61.7)
    assert scene.updates_per_s(a_scene(version=1134, running_s=15.0)) == pytest.approx(20.0)
    assert scene.updates_per_s(a_scene(running_s=99.0)) == 0, "of another server"
    assert a_scene(running_s=0.0).updates_per_s() == 0


def test_who_sets_the_pace() -> None:
    assert pacemaker(a_scene()) == (
        "Rank 2 sets the pace: a step takes it 120.0 ms (100.0 ms of it computing), 100% longer than the others' "
        "median of 60.0 ms."
    )
    assert pacemaker(a_scene(seen(0), seen(1, computing_s=0.055))) == (
        "No worker stands out: a step takes the slowest, rank 1, 65.0 ms, and the others 60.0 ms (median)."
    )
    assert pacemaker(a_scene(seen(0), seen(1, computing_s=0.0))) == "", "of one nothing is known"
    assert pacemaker(a_scene(seen(0))) == ""
