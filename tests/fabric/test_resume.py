"""Who may come back with what, and what is counted as lost."""

from __future__ import annotations

import pytest

from offbeat.fabric.server.lead.coordinator import Coordinator
from offbeat.fabric.server.lead.resume import Losses, Verdict, judge
from offbeat.fabric.server.messages import Back
from offbeat.sync import ASP, Apply, Ready


def back(**what: object) -> Back:
    return Back(**{"life": 1, "clock": 7, "version": 20, "holds": False, "waits": False, **what})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("life", "what", "decided", "expected"),
    [
        (1, {}, 7, Verdict.LATER),
        (1, {"holds": True, "waits": True}, 8, Verdict.JOIN),
        (1, {"waits": True}, 7, Verdict.JOIN),
        (2, {}, 5, Verdict.GO_ON),
        (2, {"holds": True, "waits": True}, 8, Verdict.JOIN),
        (2, {"holds": True, "waits": True}, 7, Verdict.AGAIN),
        (2, {"waits": True}, 5, Verdict.JOIN),
    ],
)
def test_the_table(life: int, what: dict[str, object], decided: int, expected: Verdict) -> None:
    assert judge(back(**what), life=life, decided=decided) is expected


def test_who_was_never_here_just_joins() -> None:
    assert judge(None, life=3, decided=0) is Verdict.JOIN


def test_what_is_lost_is_what_no_snapshot_has() -> None:
    losses = Losses(40)
    assert str(losses) == "nothing is lost"
    losses.book(0, back(version=57, done=((19, 64.0), (20, 64.0), (21, 32.0))), decided=20)
    losses.book(1, back(version=50, done=((18, 64.0),)), decided=19)
    assert str(losses) == "updates 41 to 57 are lost (2 contributions, 96 samples; rank 0: 2)"
    losses.add(1, [8.0])
    assert str(losses) == "updates 41 to 57 are lost (3 contributions, 104 samples; rank 0: 2, rank 1: 1)"


def test_a_round_keeps_its_size_when_a_worker_comes_back_only_to_wait() -> None:
    """Else the others' contributions would weigh more after a restart than before."""
    coordinator = Coordinator(ASP(), 2, lambda: 0.0)
    coordinator.join(0, least=14, weight=32.0)
    coordinator.join(1, least=40, weight=32.0)
    coordinator.start_if_all_are_here()
    coordinator.leave(1, returns=True)
    clock = coordinator.state.members[0].step
    actions = coordinator.tell(Ready(0, clock, 0.0, 32.0))
    assert [action.rate for action in actions if isinstance(action, Apply)] == [0.5]
