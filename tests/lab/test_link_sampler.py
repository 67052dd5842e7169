"""How a link was used: bytes per interval, from readings that come when they can."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from offbeat.lab import command_lines
from offbeat.lab.link_sampler import Sampler, Traffic, figures, idle_share, traffic, variation, whole_time
from offbeat.lab.network import Network
from offbeat.topology import Topology
from tests.lab.permissions import needs_root
from tests.patience import soon

SEND = "import socket, sys; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(bytes(1000), (sys.argv[1], 9))"


def test_late_readings_do_not_shift_bytes() -> None:
    # 1000 bytes per second in, 100 out; the readings are anything but regular.
    times_s = [0.0, 0.07, 0.1, 0.31, 0.33, 0.6, 1.2]
    readings = [(10 + time_s, round(1000 * time_s), round(100 * time_s)) for time_s in times_s]
    seen = traffic("s0", readings, begin_s=10.1, end_s=10.74, interval_s=0.1)
    assert seen.received_bytes == pytest.approx([100] * 6, abs=1)
    assert seen.sent_bytes == pytest.approx([10] * 6, abs=1)


def test_too_short_to_see_anything() -> None:
    assert traffic("s0", [(0.0, 0, 0), (9.0, 9, 9)], begin_s=1.0, end_s=1.01, interval_s=0.05).received_bytes == []
    assert traffic("s0", [], begin_s=1.0, end_s=2.0, interval_s=0.05).sent_bytes == []


def test_links_are_watched_while_anybody_is_measured() -> None:
    """One machine of three is half as fast: its first measured step begins when the others are nearly done."""
    begin_s, end_s = whole_time([(34.0, 69.0), (64.0, 128.0), (35.0, 68.0)])
    assert (begin_s, end_s) == (34.0, 128.0)
    readings = [(float(second), 1000 * second, 0) for second in range(140)]
    assert len(traffic("s0", readings, begin_s=begin_s, end_s=end_s, interval_s=1.0).received_bytes) == 94


@pytest.mark.parametrize(
    ("series", "uneven", "idle"),
    [
        ([50] * 40, 0.0, 0.0),
        ([100] * 5 + [0] * 5 + [100] * 5 + [0] * 5, 1.0, 0.5),
        # What is uneven from round to round, not within one, is not counted.
        ([100] * 10 + [50] * 10, 0.0, 0.0),
        ([0] * 20, 0.0, 1.0),
        ([], 0.0, 0.0),
    ],
)
def test_flat_and_in_bursts(series: list[int], uneven: float, idle: float) -> None:
    assert variation(series, window=10) == pytest.approx(uneven)
    assert idle_share(series, capacity_bytes=100) == idle


def test_figures_of_both_directions() -> None:
    # 8 kbit/s are 100 bytes in 0.1 s.
    link = Traffic("s0", 0.1, [100] * 10, [100, 0] * 5)
    share, uneven, idle = figures(link, rate_mbps=0.008, round_s=1.0)
    assert (share, uneven, idle) == (1.0, 0.5, 0.25)


class TestLinks:
    pytestmark = needs_root

    @pytest.mark.timeout(60)
    def test_the_switch_sees_what_a_host_sends_and_receives(self) -> None:
        with Network(Topology.star(["h0", "s0"], rate_mbps=100)) as network:
            begin_s = time.perf_counter()
            with Sampler("s0", *network.port("s0"), interval_s=0.01) as sampler:
                send = [sys.executable, "-S", "-c", SEND, network.address("h0")]
                subprocess.run(command_lines.entered(network.namespace("s0"), send), check=True, timeout=20)
                # What is between two samples is shared out, so that a part of it may be still to come.
                assert soon(lambda: sum(sampler.between(begin_s, time.perf_counter()).received_bytes) >= 576)
                assert soon(lambda: sum(sampler.between(begin_s, time.perf_counter()).sent_bytes) >= 1042)
            seen = sampler.between(begin_s, time.perf_counter())
            # The datagram and its headers, and ARP; back comes that nobody listens there, in 576 bytes.
            assert 1042 <= sum(seen.sent_bytes) < 1400
            assert 576 <= sum(seen.received_bytes) < 900
            assert len(seen.sent_bytes) == len(seen.received_bytes)
