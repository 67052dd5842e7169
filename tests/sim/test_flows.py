"""Flows share links max-min fair, and nothing of them is lost."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.sim.flows import Flows
from offbeat.sim.max_min_fair import FlowPath, shares
from offbeat.timeline import Timeline

LINKS = ("a", "b", "c")
ways = st.builds(
    FlowPath,
    st.lists(st.sampled_from(LINKS), unique=True).map(lambda names: tuple(sorted(names))),
    st.floats(0.5, 50),
    st.sampled_from([0.5, 1.0, 2.0]),
)


@given(
    st.dictionaries(ways, st.integers(1, 20), min_size=1, max_size=8),
    st.fixed_dictionaries({link: st.floats(1, 100) for link in LINKS}),
)
def test_shares_are_max_min_fair(counts: dict[FlowPath, int], rates: dict[str, float]) -> None:
    found = shares(counts, rates)
    load = {link: sum(n * found[way] for way, n in counts.items() if link in way.links) for link in LINKS}
    assert all(load[link] <= rates[link] * (1 + 1e-9) for link in LINKS)
    for way, speed in found.items():
        # Who has less than its bound is on a full link on which nobody has more, by weight.
        if speed < way.most * (1 - 1e-9):
            full = [link for link in way.links if load[link] >= rates[link] * (1 - 1e-9)]
            assert any(
                speed / way.weight >= other_speed / other.weight - 1e-9
                for link in full
                for other, other_speed in [max(((w, s) for w, s in found.items() if link in w.links), key=_level)]
            ), f"{way} could have more than {speed}: {found}"


def _level(item: tuple[FlowPath, float]) -> float:
    return item[1] / item[0].weight


class Sent:
    """A link of 100 bytes per second, and when flows on it were done."""

    def __init__(self, **rates: float) -> None:
        self.timeline = Timeline()
        self.flows = Flows(self.timeline, rates or {"link": 100.0})
        self.done_s: dict[str, float] = {}

    def start(self, name: str, size_bytes: float, way: FlowPath = FlowPath(("link",)), at_s: float = 0.0) -> None:  # noqa: B008
        self.timeline.at(at_s, lambda: self._start(name, size_bytes, way))

    def _start(self, name: str, size_bytes: float, way: FlowPath) -> None:
        self.flows.start(way, size_bytes, lambda: self.done_s.update({name: self.timeline.now_s}))


def test_two_flows_share_and_the_one_that_stays_has_all() -> None:
    sent = Sent()
    sent.start("short", 100)
    sent.start("long", 300)
    sent.timeline.run()
    assert sent.done_s == pytest.approx({"short": 2.0, "long": 4.0})


def test_a_flow_that_comes_later_slows_the_first() -> None:
    sent = Sent()
    sent.start("first", 200)
    sent.start("second", 100, at_s=1.0)
    sent.timeline.run()
    assert sent.done_s == pytest.approx({"first": 3.0, "second": 3.0})


def test_a_flow_with_more_weight_has_more() -> None:
    sent = Sent()
    sent.start("heavy", 200, FlowPath(("link",), weight=2.0))
    sent.start("light", 100, FlowPath(("link",), weight=1.0))
    sent.timeline.run()
    assert sent.done_s == pytest.approx({"heavy": 3.0, "light": 3.0})


def test_a_flow_is_bounded_by_its_own_link() -> None:
    sent = Sent()
    sent.start("slow", 20, FlowPath(("link",), most=10.0))
    sent.start("fast", 180)
    sent.timeline.run()
    assert sent.done_s == pytest.approx({"slow": 2.0, "fast": 2.0})


def test_the_last_bytes_of_a_fast_link_come_although_the_clock_cannot_tell_so_little_time() -> None:
    timeline, ended = Timeline(), list[float]()
    flows = Flows(timeline, {"a": 1.25e8})

    def send() -> None:
        flows.start(FlowPath(("a",), 1.25e8), 64, lambda: ended.append(timeline.now_s))

    for start_s in (1000.1 + n / 7 for n in range(50)):
        for late_s in (0.0, 1e-7):
            timeline.at(start_s + late_s, send)
    turns = 0
    while timeline._due and turns < 10_000:
        timeline.now_s, _, happen = heapq.heappop(timeline._due)
        happen()
        turns += 1
    assert len(ended) == 100, f"{len(ended)} of 100 after {turns} turns"


def test_who_stops_leaves_the_link_to_the_others() -> None:
    sent = Sent()
    stopped = sent.flows.start(FlowPath(("link",)), 1000, lambda: sent.done_s.update(stopped=math.nan))
    sent.start("other", 150)
    sent.timeline.at(1.0, lambda: sent.flows.stop(stopped))
    sent.timeline.at(1.5, lambda: sent.flows.stop(stopped))  # again: nothing happens
    sent.timeline.run()
    assert sent.done_s == pytest.approx({"other": 2.0})
    assert sent.flows.on("link") == 0


@given(
    st.lists(st.tuples(st.floats(1, 500), st.floats(0, 5), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=40)
)
def test_a_link_is_never_faster_than_it_is_nor_idle_while_there_is_work(
    flows: list[tuple[float, float, float]],
) -> None:
    sent = Sent()
    for index, (size_bytes, at_s, weight) in enumerate(flows):
        sent.start(str(index), size_bytes, FlowPath(("link",), weight=weight), at_s)
    sent.timeline.run()
    assert len(sent.done_s) == len(flows)
    # A link that serves whoever is there ends as one that serves them in turn.
    free_s = 0.0
    for size_bytes, at_s, _ in sorted(flows, key=lambda flow: flow[1]):
        free_s = max(free_s, at_s) + size_bytes / 100
    assert max(sent.done_s.values()) == pytest.approx(free_s, rel=1e-6)
