"""MultiTree's evaluation in our model: what others' simulators have found, and what the variants cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from offbeat.collective import BidirectionalRing, FlatTree, MultiTree, Ring, cost
from offbeat.sim import interconnect
from offbeat.sim.interconnect import FLIT_BYTES, SIZES, STRONG_BYTES, VARIANTS, cycles, network_of
from offbeat.topology import Topology
from tests.cli.commands import offbeat

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.collective import CollectiveMethod


@pytest.mark.parametrize(
    ("side", "method", "published"),
    [
        # Speed-up over a ring of 64 Mi parameters on meshes, in the result files of TTO (HPCA 2024).
        (4, MultiTree(released=True), 1.50),
        (5, MultiTree(released=True), 1.77),
        (8, MultiTree(released=True), 1.80),
        (4, BidirectionalRing(by_links=True), 2.00),
        (8, BidirectionalRing(by_links=True), 2.00),
    ],
)
def test_speed_ups_on_meshes_are_those_that_others_published(
    side: int, method: CollectiveMethod, published: float
) -> None:
    network = Topology.mesh(side, side, rate_mbps=128)
    size_bytes = 4 << 26

    def took_s(one: CollectiveMethod) -> float:
        algorithm = one.plan(network)
        return cost(algorithm, network, size_bytes, block_bytes=math.inf, lock_step=algorithm.uses_slots)

    # A ring needs a way through all hosts and back, which a mesh of 5 x 5 does not have: there one hop is long.
    assert took_s(Ring(by_links=True)) / took_s(method) == pytest.approx(published, rel=0.1)


def test_with_messages_the_heads_of_packets_are_saved() -> None:
    network = network_of("torus 4x4")
    algorithm = MultiTree(interfaces=4).plan(network)
    packets, messages = (cycles(algorithm, network, STRONG_BYTES, VARIANTS[name]) for name in ("beta", "delta"))
    assert packets / messages == pytest.approx(17 / 16, rel=1e-3)


def test_one_interface_makes_a_torus_a_ring() -> None:
    """What is 1 of the spec's pitfalls: with one interface MultiTree sends no more at a time than a ring does."""
    network = network_of("torus 4x4")
    ring = cycles(Ring(by_links=True).plan(network), network, STRONG_BYTES, VARIANTS["alpha"])
    one = cycles(MultiTree(split=1, interfaces=1).plan(network), network, STRONG_BYTES, VARIANTS["alpha"])
    four = cycles(MultiTree(split=1, interfaces=4).plan(network), network, STRONG_BYTES, VARIANTS["beta"])
    assert ring / one == pytest.approx(1.0, rel=0.15)
    assert ring / four == pytest.approx(3.0, rel=0.05)


def test_interfaces_limit_what_a_host_sends_at_a_time() -> None:
    """A flat tree's root receives from all others: with one interface one after the other."""
    network = Topology.from_table([("h0", f"h{i}", 8.0, None, 0.0) for i in range(1, 5)])
    algorithm = FlatTree().plan(network)
    wide, narrow = (cost(algorithm, network, 1e6, interfaces=count) for count in (4, 1))
    assert narrow > 2 * wide, "the sums come one after the other; the results do, too, in blocks"


def test_small_vectors_are_a_matter_of_links_latency() -> None:
    network = network_of("mesh 4x4")
    algorithm = Ring(by_links=True).plan(network)
    took = cycles(algorithm, network, 16 * FLIT_BYTES, VARIANTS["delta"])
    assert took == pytest.approx(30 * (interconnect.LINK_CYCLES + 1 + 1), rel=0.05)


@pytest.mark.slow
def test_the_command_writes_all_figures(tmp_path: Path) -> None:
    arguments = ("collective", "evaluate", "--network", "torus 4x4", "--json", "all.json", "--png", "all.png")
    code, output = offbeat(*arguments, folder=tmp_path)
    assert code == 0, output
    assert "torus 4x4, delta: times as fast as the ring, at 32 KB, 1 MB, 64 MB" in output
    assert "torus 4x4, strong scaling" in output
    assert (tmp_path / "all.json").stat().st_size > 1000
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"
    code, output = offbeat("collective", "evaluate", "--network", "torus 9x9", folder=tmp_path)
    assert code == 2
    assert "Unknown network 'torus 9x9'" in output


def test_sizes_are_those_of_the_paper() -> None:
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (32 << 10, 64 << 20, 12)
