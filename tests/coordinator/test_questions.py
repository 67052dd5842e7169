"""Questions that all workers are asked: what stays of those that nobody answers."""

from __future__ import annotations

from offbeat.coordinator.questions import CollectiveQuestions
from offbeat.protocol.training import AskAllWorkers


def test_nothing_stays_of_what_only_a_lost_worker_has_asked() -> None:
    """Else a job of days would keep one for every worker that is lost while it asks."""
    questions = CollectiveQuestions()
    for number in range(10):
        questions.ask(1, AskAllWorkers(number, "how many"))
        questions.leave(1)
    assert not questions._asked
    assert questions.next_number == 0


def test_who_is_left_is_answered_without_the_lost_one() -> None:
    questions = CollectiveQuestions()
    questions.ask(1, AskAllWorkers(0, "how many", numbers=(1.0,)))
    questions.ask(0, AskAllWorkers(0, "how many", numbers=(1.0,)))
    questions.leave(1)
    (asked,) = questions.settle({0})
    assert set(asked) == {0}
    ((worker, answer),) = questions.take_ready(lambda worker: True)
    assert (worker, answer.numbers, answer.workers) == (0, (1.0,), 1)
    assert questions.next_number == 1
