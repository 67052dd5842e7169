"""Which paths are tried, and which are taken for which size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from offbeat.collective import Ring
from offbeat.fabric.discovery import MeasuredNetwork
from offbeat.fabric.path_planner import SIZES, plan_paths, predict_paths, replan_paths
from offbeat.topology import Host, Link, Topology

if TYPE_CHECKING:
    from offbeat.fabric.path_planner import PricedPaths


def measured(*rates_mbps: float) -> MeasuredNetwork:
    hosts = tuple(Host(f"h{i}") for i in range(len(rates_mbps)))
    links = tuple(Link(host.name, "switch", rate) for host, rate in zip(hosts, rates_mbps, strict=True))
    return MeasuredNetwork(Topology(hosts, links), 200e-6, 32 << 10)


class Trials:
    """Trials in which whatever is named takes less than all others."""

    def __init__(self, fastest: str = "") -> None:
        self.fastest, self.sizes = fastest, list[int]()

    def measure(self, paths: PricedPaths) -> float:
        self.sizes.append(paths.size_bytes)
        return 0.1 if paths.name == self.fastest else 1.0

    def meet(self, text: str) -> list[str]:
        took, error = json.loads(text)
        return [text, json.dumps([[2 * one for one in took], error])]


def test_the_fastest_of_those_that_come_close_is_taken() -> None:
    network, first = measured(200, 200, 200, 50), predict_paths(measured(200, 200, 200, 50), None).chosen[-1]
    for fastest in ("DoubleBinaryTree()", "FlatTree()", "torch's group"):
        trials = Trials(fastest)
        plan = plan_paths(network, None, trials.measure, trials.meet)
        chosen = plan.chosen[-1]
        assert chosen.name in (fastest, first.name)
        assert chosen.measured_s == (0.2 if chosen.name == fastest else 2.0)
        assert set(trials.sizes) == set(SIZES)
        assert len(plan.group_ratios) == len(SIZES)


def test_when_links_change_the_group_is_taken_where_it_was_better_than_predicted() -> None:
    before, trials = measured(200, 200, 200), Trials()
    plan = plan_paths(before, None, trials.measure, trials.meet)
    assert [one.name for one in plan.chosen[:-1]] == ["torch's group"] * 2
    assert set(trials.sizes) == {SIZES[-1]}, "with equal links small sums are not tried"
    known = replace(before, group_ratios=(0.1, 0.1, 10.0))
    small, middling, large = replan_paths(known, None).chosen
    assert small.name == middling.name == "torch's group"
    assert large.name != "torch's group"


def test_on_very_slow_links_nothing_large_is_tried() -> None:
    trials = Trials()
    plan = plan_paths(measured(1, 1, 1, 0.5), None, trials.measure, trials.meet)
    assert SIZES[-1] not in trials.sizes
    assert plan.chosen[-1].measured_s is None
    assert plan.chosen[-1].predicted_s > 60


def test_one_method_is_not_tried() -> None:
    trials = Trials()
    plan = plan_paths(measured(100, 100), Ring(), trials.measure, trials.meet)
    assert not trials.sizes
    assert [one.algorithm.name for one in plan.chosen] == ["Ring()"]


@pytest.mark.parametrize(("size_bytes", "place"), [(0, 0), (60 << 10, 0), (70 << 10, 1), (1 << 20, 2), (1 << 30, 2)])
def test_a_size_belongs_to_the_class_nearest_by_ratio(size_bytes: int, place: int) -> None:
    assert predict_paths(measured(100, 100, 100), None).for_size(size_bytes) == place
