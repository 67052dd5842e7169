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


def test_who_says_less_adds_nothing_to_the_rest() -> None:
    questions = CollectiveQuestions()
    questions.ask(0, AskAllWorkers(0, "how many", numbers=(1.0, 2.0)))
    questions.ask(1, AskAllWorkers(0, "how many", numbers=(4.0,)))
    assert len(list(questions.settle({0, 1}))) == 1
    assert [answer.numbers for _, answer in questions.take_ready(lambda worker: True)] == [(5.0, 2.0)] * 2


def test_who_comes_late_hears_what_the_others_were_told() -> None:
    """And is not waited for, nor waits for them."""
    questions = CollectiveQuestions()
    questions.ask(0, AskAllWorkers(0, "how many", numbers=(1.0,)))
    assert len(list(questions.settle({0}))) == 1
    questions.ask(1, AskAllWorkers(0, "how many", numbers=(8.0,)))
    assert [set(asked) for asked in questions.settle({0, 1})] == [{1}]
    told = dict(questions.take_ready(lambda worker: True))
    assert told[0].numbers == told[1].numbers == (1.0,)
