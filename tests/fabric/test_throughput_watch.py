"""When links are said to have changed: after several steps, by a fifth, and not again and again."""

from __future__ import annotations

from offbeat.fabric.throughput_watch import IN_A_ROW, LEARNT, ThroughputWatch

MB = 1 << 20


class Link:
    """Sends a megabyte a step, in so many seconds."""

    def __init__(self) -> None:
        self.watch, self.sent_bytes, self.busy_s, self.now_s = ThroughputWatch(), 0, 0.0, 0.0

    def steps(self, count: int, took_s: float, size: int = MB) -> int | None:
        """The step behind which it was alarming, from 1."""
        for step in range(1, count + 1):
            self.sent_bytes += size
            self.busy_s += took_s
            self.now_s += took_s
            self.watch.sample(self.sent_bytes, self.busy_s)
            if self.watch.is_alarming(self.now_s):
                return step
        return None


def test_a_link_that_becomes_slow_is_noticed_within_a_few_steps() -> None:
    link = Link()
    assert link.steps(50, 0.1) is None
    assert link.steps(50, 0.4) == IN_A_ROW


def test_a_link_that_becomes_fast_as_well() -> None:
    link = Link()
    link.steps(LEARNT, 0.4)
    assert link.steps(50, 0.1) == IN_A_ROW


def test_what_passes_is_not_said() -> None:
    link = Link()
    link.steps(LEARNT, 0.1)
    for _ in range(20):
        assert link.steps(IN_A_ROW - 1, 0.4) is None
        assert link.steps(1, 0.1) is None
    assert link.steps(50, 0.115) is None


def test_little_says_nothing() -> None:
    """Small sums are a matter of what a message costs."""
    link = Link()
    link.steps(LEARNT, 0.1)
    assert link.steps(100, 1.0, size=100) is None
    link = Link()
    link.steps(LEARNT, 0.005, size=MB // 8)
    assert link.steps(100, 0.05, size=MB // 8) is None, "nor do many steps together"


def test_behind_a_false_alarm_what_is_usual_is_learnt_anew_and_the_next_waits() -> None:
    link = Link()
    link.steps(LEARNT, 0.1)
    assert link.steps(50, 0.4) == IN_A_ROW
    link.watch.was_false(link.now_s)
    assert link.steps(60, 0.4) is None
    before_s = link.now_s
    link.watch.was_false(before_s)
    assert link.steps(LEARNT, 0.1) is None
    link.steps(1000, 0.4)
    assert link.now_s - before_s > 50, "twice as long as the first time"
