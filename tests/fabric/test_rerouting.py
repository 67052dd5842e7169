"""Links that change while training: all go by other paths at the same place, and nothing is lost."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.collective import WaterFilling
from offbeat.fabric import path_collectives
from offbeat.fabric.discovery import MeasuredNetwork
from offbeat.fabric.path_collectives import PathCollectives
from offbeat.topology import Topology
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fabric.lane_network import LaneNetwork

STEPS, AT = 12, 5


def measured(rate_mbps: float) -> MeasuredNetwork:
    """Three hosts, the last of which has another rate."""
    network = Topology.star(["h0", "h1", "h2"], rate_mbps=200)
    links = (*network.links[:2], replace(network.links[2], rate_mbps=rate_mbps))
    return MeasuredNetwork(replace(network, links=links), 100e-6, 32 << 10)


def train(fabric: offbeat.Routed | offbeat.Elastic, changes: bool) -> tuple[dict[str, torch.Tensor], list[str], str]:
    """One worker finds its links to be changed; what they are now is not measured but given."""
    said, rank = listen(), int(os.environ["RANK"])
    asked = 0

    def wants(self: PathCollectives) -> bool:
        nonlocal asked
        asked += 1
        return rank == 1 and AT <= asked <= AT + 2  # behind two steps, and where all have come together

    def again(network: LaneNetwork, known: MeasuredNetwork, meet: Callable[[str], list[str]]) -> MeasuredNetwork | None:
        assert meet(str(network.place)) == ["0", "1", "2"]
        return measured(20) if changes else None

    patched: Any = PathCollectives
    patched.wants_reroute = wants
    path_collectives.measure_again = again  # type: ignore[attr-defined]
    torch.manual_seed(1)
    model = nn.Linear(30, 3000)
    generator = torch.Generator().manual_seed(100 + rank)
    with offbeat.init(offbeat.Plan(fabric=fabric), timeout=10.0) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in range(STEPS):
            replica(torch.randn(4, 30, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        bound: Any = run._session.models.prepared[0].fabric
        plan = bound._collectives.plan
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state, said, str(plan.network.links[2].rate_mbps)


@pytest.mark.parametrize("fabric", [offbeat.Routed(WaterFilling(2)), offbeat.Elastic(over=offbeat.Routed())], ids=repr)
def test_one_finds_its_links_changed_and_all_go_by_other_paths(fabric: offbeat.Routed | offbeat.Elastic) -> None:
    results = run_workers(3, train, fabric, True)
    first, said, _ = results[0]
    for state, _, rate in results:
        assert rate == "20"
        for name in first:
            torch.testing.assert_close(state[name], first[name], rtol=0, atol=0)
    expected = run_workers(3, train, fabric, False)[0][0]
    for name in first:
        torch.testing.assert_close(first[name], expected[name], rtol=1e-5, atol=1e-6)
    told = [text for text in said if "Paths are planned anew" in text]
    assert len(told) == 1
    assert "the link between h2 and switch carries 20 Mbit/s" in told[0]


def test_a_false_alarm_changes_nothing() -> None:
    for _, said, rate in run_workers(3, train, offbeat.Routed(WaterFilling(2)), False):
        assert rate != "20"
        assert not [text for text in said if "Paths are planned anew" in text]
