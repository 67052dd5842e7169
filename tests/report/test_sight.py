"""What a server says about its job is read as it was meant, or refused; and what follows from it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from offbeat.errors import PeerError
from offbeat.protocol import messages
from offbeat.protocol.worker_status import Happening, Status
from offbeat.report import job_status
from offbeat.report.job_status import look, pacemaker, sight_of
from tests.report.scenes import a_scene, seen


@pytest.mark.parametrize(("ours", "theirs"), [(job_status.Seen, messages.Seen), (job_status.Scene, messages.Scene)])
def test_nothing_that_the_server_says_is_passed_over(ours: Any, theirs: Any) -> None:
    assert set(theirs.__struct_fields__) <= set(ours.__struct_fields__)


def test_both_ends_understand_each_other() -> None:
    assert messages.from_guest(look(7)) == messages.Look(7)
    usual: dict[str, Any] = {name: 3 for name in messages.Seen.__struct_fields__ if name not in ("worker", "phase")}
    usual["status"] = Status(step=3, epochs=1.5, values={"loss": 0.5}, events=(Happening(1.0, "x"),))
    worker = messages.Seen(worker=1, phase="held", **usual)
    scene = messages.Scene(model=2, policy="BSP()", version=9, started=False, running_s=1.5, workers=(worker,))
    got = sight_of(messages.pack(messages.Sight(7)), messages.pack((scene,)))
    assert got.number == 7
    for field in messages.Scene.__struct_fields__:
        if field != "workers":
            assert getattr(got.scenes[0], field) == getattr(scene, field)
    for field in messages.Seen.__struct_fields__:
        assert getattr(got.scenes[0].workers[0], field) == getattr(worker, field)


def raw(**changes: Any) -> bytes:
    worker = {"worker": 0, "phase": "held", **changes.pop("seen", {})}
    scene = {"model": 0, "policy": "BSP()", "version": 0, "started": True, "running_s": 0.0, "workers": [worker]}
    return msgspec.msgpack.encode({"type": "Sight", "number": 1, "scenes": [{**scene, **changes}]})


def test_server_and_onlooker_need_not_be_of_one_version() -> None:
    got = sight_of(raw(colour="red", seen={"mood": 3}))
    assert got.scenes[0].workers[0] == job_status.Seen(worker=0, phase="held")


def test_many_scenes_come_as_a_body() -> None:
    scenes = (a_scene(),)
    metadata = msgspec.msgpack.encode({"type": "Sight", "number": 1})
    assert sight_of(metadata, memoryview(msgspec.msgpack.encode(scenes))).scenes == scenes


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Go", "number": 1}),
        raw(version=-1),
        raw(running_s=float("nan")),
        raw(policy="x" * 70_000),
        raw(workers=[{"worker": 0, "phase": "held"}] * 4097),
        raw(seen={"phase": "x" * 17}),
        raw(seen={"samples": float("inf")}),
        raw(seen={"applied": 1 << 50}),
        b"\x91" * 20_000,
    ],
    ids=range(11),
)
def test_nonsense_is_refused(metadata: bytes) -> None:
    with pytest.raises(PeerError, match="Cannot understand what this server sees"):
        sight_of(metadata)


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
