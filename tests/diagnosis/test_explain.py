"""Who is late, and why: the function alone, case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offbeat.diagnosis.explain import END_OF_RUN, Diagnosis, explain, gone
from offbeat.wire.messages import ClusterReport, WorkerReport

HERE = {"phase": "exchanging", "operation": "all-reduce", "step": 7}


def look(*others: dict[str, Any], waited_s: float = 4.5, hub_lost_s: float | None = None, me: Any = HERE) -> Diagnosis:
    """Rank 0 waits in an exchange; the others are as given."""
    words = [WorkerReport(rank=0, host="a", **me)]
    words += [WorkerReport(rank=rank, host=f"host{rank}", **other) for rank, other in enumerate(others, 1)]
    return explain(
        ClusterReport(1, tuple(words), hub_lost_s),
        rank=0,
        step=me["step"],
        phase=me["phase"],
        operation=me["operation"],
        place="all-reduce of bucket 2/3 (fc.bias … conv.weight)",
        waited_s=waited_s,
    )


CASES: dict[str, tuple[dict[str, Any], str, bool, str]] = {
    "computing": ({"phase": "computing", "step": 7, "since_s": 6.0, "busy": 0.9}, "computing", False, "6.0 s (90% of"),
    "sleeping": ({"phase": "computing", "step": 7, "since_s": 6.0, "busy": 0.0}, "sleeping", False, "no processor"),
    "gil": ({"phase": "computing", "step": 7, "heartbeat_age_s": 4.0}, "gil", False, "held the GIL for 4.0 s"),
    "paused": ({"phase": "computing", "step": 7, "process": "paused", "state_since_s": 3.0}, "paused", False, "3.0 s"),
    "paused while it waits here": ({**HERE, "process": "paused"}, "paused", False, "SIGSTOP"),
    "dead": ({"phase": "computing", "step": 7, "process": "dead"}, "dead", True, "without a word"),
    "raised": ({"phase": "raised", "step": 7, "traceback": "ValueError: x"}, "raised", True, "| ValueError: x"),
    "raised and dead": ({"phase": "raised", "process": "dead", "traceback": "E: y"}, "raised", True, "| E: y"),
    "another model": (
        {**HERE, "model": 1, "since_s": 4.0},
        "elsewhere",
        True,
        "waiting in all-reduce of model 2 at step 7",
    ),
    "left": ({"phase": "finished", "step": 7, "process": "dead"}, "done", True, "done after 7 steps"),
    "at the end": ({"phase": "finished", "step": 7}, "done", True, "is done after 7 steps"),
    "unreachable": ({"phase": "computing", "process": "unreachable", "age_s": 9.0}, "unreachable", False, "9.0 s"),
    "starting": ({"phase": "starting"}, "starting", False, "still starting"),
    "starting a server": (
        {"phase": "starting", "operation": "starting it", "since_s": 3.0},
        "starting",
        False,
        "been starting it for 3.0 s",
    ),
    "busy": (
        {"phase": "busy", "operation": "starting it", "since_s": 3.0},
        "busy",
        False,
        "been starting it for 3.0 s",
    ),
    "elsewhere": (
        {"phase": "waiting", "operation": "a mean", "step": 7, "since_s": 4.0},
        "elsewhere",
        True,
        "waits elsewhere",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_one_that_is_late(name: str) -> None:
    words, reason, fatal, says = CASES[name]
    found = look(HERE, words, HERE)
    assert [(c.rank, c.host, c.reason) for c in found.culprits] == [(2, "host2", reason)]
    assert found.fatal == fatal
    assert found.is_on_its_way == (reason == "starting")
    assert found.arrived == (0, 1, 3)
    assert says in found.text
    assert "step 7: rank 0 has waited 4.5 s in all-reduce of bucket 2/3 (fc.bias … conv.weight)" in found.text
    assert "arrived: 0 1 3" in found.text
    assert json.loads(json.dumps(found.to_json()))["culprits"][0]["rank"] == 2


@pytest.mark.parametrize(
    ("phase", "step", "place", "says"),
    [
        ("waiting", -1, "all workers to call run.settle()", "has waited 4.5 s for all workers to call run.settle()."),
        ("waiting", -1, "the mean over all workers", "has waited 4.5 s for the mean over all workers."),
        (
            "exchanging",
            7,
            "the exchange with the server (ASP())",
            "waited 4.5 s in the exchange with the server (ASP()).",
        ),
    ],
)
@pytest.mark.parametrize("hub_lost_s", [None, 3.0])
def test_one_waits_in_an_exchange_and_for_anything_else(
    phase: str, step: int, place: str, says: str, hub_lost_s: float | None
) -> None:
    words = WorkerReport(rank=1, host="b", phase=phase, operation=place, step=step)
    cluster = ClusterReport(1, (words,), hub_lost_s)
    found = explain(cluster, rank=0, step=step, phase=phase, operation=place, place=place, waited_s=4.5)
    assert says in found.text


def test_what_all_take_part_in_is_no_transfer_that_was_lost() -> None:
    """Links are measured, or a model is given to all: nothing says that the network is at fault."""
    place = "the links with the others to be measured"
    cluster = ClusterReport(1, (WorkerReport(rank=1, host="b", phase="waiting", operation=place, step=0),))
    found = explain(cluster, rank=0, step=0, phase="waiting", operation=place, place=place, waited_s=4.5)
    assert found.text.endswith("All workers wait for it.")


AHEAD: dict[str, dict[str, Any]] = {
    "computing the next step": {"phase": "computing", "step": 8},
    "holding the GIL in the next step": {"phase": "computing", "step": 8, "heartbeat_age_s": 5.0},
    "in the next exchange": {**HERE, "step": 8},
    "another model's": {**HERE, "step": 8, "model": 1},
    "gone": {"phase": "finished", "step": 8},
}


@pytest.mark.parametrize("name", AHEAD)
def test_who_is_ahead_owes_nothing(name: str) -> None:
    found = look(HERE, AHEAD[name])
    assert found.culprits == ()
    assert not found.fatal
    assert found.arrived == (0, 1)
    assert "the transfer itself" in found.text


def test_a_slow_transfer_is_no_disagreement() -> None:
    """One rank has this exchange behind it, another still waits for data of the one before."""
    found = look({**HERE, "step": 6}, {**HERE, "step": 8})
    assert found.culprits == ()
    assert not found.fatal


def test_another_bucket_of_the_same_exchange_is_here() -> None:
    found = look({**HERE, "bucket": 0, "operation": "broadcast of the buffers"})
    assert found.arrived == (0, 1)


def test_a_disagreement_has_to_settle() -> None:
    words = {"phase": "waiting", "operation": "a mean", "step": 7, "since_s": 4.0}
    assert look(words, waited_s=0.5).fatal is False
    assert look(words, waited_s=4.5).fatal is True


def test_a_stack_shows_what_the_worker_does_and_not_what_started_it() -> None:
    frames = ['File "train.py", line 12 in <module>', 'File "<frozen runpy>", line 88 in _run_code']
    frames += ['File "/x/offbeat/cli/worker_main.py", line 36 in main']
    stack = "Stack (most recent call first):\n" + "\n".join(frames)
    (culprit,) = look({"phase": "computing", "step": 7, "stack": stack}).culprits
    assert culprit.detail.splitlines() == ["Stack (most recent call first):", frames[0]]


def test_who_left_before_another_died_has_nothing_to_do_with_it() -> None:
    found = look({"phase": "finished", "step": 7}, {"process": "dead", "step": 7})
    assert [c.rank for c in found.culprits] == [2]


def test_at_the_end_who_is_done_has_arrived() -> None:
    here = {"phase": "waiting", "operation": END_OF_RUN, "step": 7}
    found = look({"phase": "finished", "step": 7}, {"phase": "computing", "step": 7, "busy": 1.0}, me=here)
    assert found.arrived == (0, 1)
    assert [(c.rank, c.reason) for c in found.culprits] == [(2, "computing")]


def test_who_died_of_another_is_no_culprit() -> None:
    found = look({"phase": "lost", "process": "dead", "traceback": "WorkerLostError"}, {"process": "dead"})
    assert [c.rank for c in found.culprits] == [2]
    only = look({"phase": "lost", "process": "dead", "traceback": "WorkerLostError"}, HERE)
    assert [c.rank for c in only.culprits] == [1]


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ({"phase": "waiting", "operation": "a mean", "step": 7, "since_s": 4.0}, "elsewhere"),
        ({"phase": "computing", "step": 7, "busy": 1.0}, "computing"),
    ],
)
def test_who_gave_up_first_does_not_hide_the_one_it_gave_up_on(late: dict[str, Any], reason: str) -> None:
    found = look(late, {"phase": "lost", "step": 7, "traceback": "WorkerLostError"}, waited_s=1.6)
    assert [(c.rank, c.reason) for c in found.culprits] == [(1, reason), (2, "raised")]
    assert found.fatal
    assert ("disagree" in found.text) == (reason == "elsewhere")


def test_who_moves_on_elsewhere_is_not_apart() -> None:
    mean, evaluation = ({"phase": "waiting", "operation": what, "step": 7} for what in ("a mean", "another mean"))
    moving = look({**evaluation, "since_s": 0.2}, {**evaluation, "since_s": 4.0}, mean, me=mean)
    assert not moving.fatal
    assert "may still be on its way" in moving.text
    assert look({**evaluation, "since_s": 4.2}, {**evaluation, "since_s": 4.0}, mean, me=mean).fatal


def test_a_first_broadcast_comes_to_the_last_long_after_it_came_to_the_first() -> None:
    broadcast = {"phase": "waiting", "operation": "the first broadcast of a", "step": 0, "since_s": 20.0}
    later = {"phase": "waiting", "operation": "the comparison of the optimizer", "step": 0, "since_s": 20.0}
    for mine, theirs in ((broadcast, later), (later, broadcast)):
        found = look(theirs, mine, waited_s=20.0, me=mine)
        assert not found.culprits
        assert not found.fatal


def test_why_another_is_gone_is_said_in_its_exceptions_own_line() -> None:
    told = (
        "WorkerLostError: step 7: rank 1 has waited 4.5 s in all-reduce.\n  arrived: 0 1\n  All have arrived: slow.\n"
    )
    frames = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n    ^^^^^^\n'
    chained = f"{frames}KeyError: 3\n\nDuring handling of the above exception, another exception occurred:\n\n{frames}"
    raised = f"{chained}ValueError: no batch.\nNone at all.\n  Not one.\n"
    words = (
        WorkerReport(rank=1, phase="lost", step=7, traceback=told),
        WorkerReport(rank=2, phase="raised", step=7, traceback=raised),
        WorkerReport(rank=3, phase="raised", step=7),
    )
    assert gone(ClusterReport(1, words), patience_s=5.0) == {
        1: "raised an exception after 7 steps: WorkerLostError: step 7: rank 1 has waited 4.5 s in all-reduce.",
        2: "raised an exception after 7 steps: ValueError: no batch.",
        3: "raised an exception after 7 steps:",
    }


def test_the_certain_come_before_the_slow() -> None:
    found = look({"phase": "computing", "busy": 1.0}, {"process": "dead"})
    assert [(c.rank, c.reason) for c in found.culprits] == [(2, "dead")]


def test_several_are_late() -> None:
    found = look({"phase": "computing", "busy": 1.0}, {"process": "paused"})
    assert [(c.rank, c.reason) for c in found.culprits] == [(1, "computing"), (2, "paused")]
    assert not found.fatal


def test_the_hub_is_out_of_reach() -> None:
    found = look(hub_lost_s=4.0, me={**HERE})
    assert found.culprits == ()
    lost = explain(
        ClusterReport(1, (WorkerReport(rank=1),), 4.0),
        rank=1,
        step=7,
        phase="exchanging",
        operation="all-reduce",
        place="x",
        waited_s=5.0,
    )
    assert [(c.rank, c.reason) for c in lost.culprits] == [(0, "unreachable")]


def test_a_server_in_trouble_is_why_all_wait() -> None:
    found = look(HERE, HERE).with_server("The parameter server at a:1 has been silent for 3.0 s.")
    assert found.text.splitlines()[1:] == [
        "  arrived: 0 1 2",
        "  The parameter server at a:1 has been silent for 3.0 s.",
    ]
    assert found.to_json()["server"] == "The parameter server at a:1 has been silent for 3.0 s."


def test_who_waits_elsewhere_may_wait_for_the_same_server() -> None:
    elsewhere = {"phase": "waiting", "operation": "a mean", "step": 7, "since_s": 4.0}
    found = look(elsewhere).with_server("It is silent.")
    assert [c.reason for c in found.culprits] == ["elsewhere"]
    assert not found.fatal
    assert "disagree" not in found.text
    assert look({"phase": "raised", "traceback": "ValueError: x"}).with_server("It is silent.").fatal


def test_nothing_is_transferred_where_all_wait_for_something_else() -> None:
    place = {"phase": "waiting", "operation": "the connection to the switch", "step": 0}
    assert look(place, place, me=place).note == "All workers wait for it."
    assert look(HERE, HERE).note.startswith("All have arrived: the transfer itself")
