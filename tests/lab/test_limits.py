"""The least time per step, by hand."""

from __future__ import annotations

import pytest

from offbeat.lab import limits
from offbeat.scenario import Scenario

TEXT = """
[scenario]
name = "limits"
[hosts]
count = 8
servers = {servers}
rate_mbps = 200
[workload]
kind = "replay"
profile = "resnet50"
[[row]]
name = "ddp"
system = "ddp"
"""
D_S = 0.05  # 1.25 MB at 200 Mbit/s


@pytest.mark.parametrize(
    ("servers", "compute_s", "together", "wanted_s"),
    [
        (1, 0.4, True, 0.4 + 8 * D_S),
        (1, 0.4, False, 0.4 + D_S),
        (1, 0.1, False, 8 * D_S),
        (2, 0.4, True, 0.4 + 4 * D_S),
        (2, 0.1, False, 4 * D_S),
    ],
)
def test_a_server(servers: int, compute_s: float, together: bool, wanted_s: float) -> None:
    scenario = Scenario.from_toml(TEXT.format(servers=servers))
    limit_s, words = limits.served(scenario, compute_s=compute_s, size_bytes=1.25e6, together=together)
    assert limit_s == pytest.approx(wanted_s)
    assert words == (limits.TOGETHER if together else limits.ONE_BY_ONE)


@pytest.mark.parametrize(("compute_s", "wanted_s"), [(0.4, 0.4), (0.01, 2 * 7 / 8 * D_S)])
def test_a_ring(compute_s: float, wanted_s: float) -> None:
    scenario = Scenario.from_toml(TEXT.format(servers=1))
    assert limits.allreduce(scenario, compute_s=compute_s, size_bytes=1.25e6)[0] == pytest.approx(wanted_s)
