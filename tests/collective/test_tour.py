"""Tours: exact for few ranks, neighbours only in a grid, round slow links."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from offbeat.collective import BidirectionalRing, Ring, cost
from offbeat.collective import tour as tours
from offbeat.collective.paths import Paths
from offbeat.collective.tour import shortest_tour
from offbeat.topology import Topology
from tests.collective.networks import MB_S, star, with_rates, with_slow_link


def tour_of(network: Topology) -> tuple[int, ...]:
    return shortest_tour(network, Paths(network))


def hops(network: Topology) -> list[int]:
    """Links that each hop of the shortest tour passes."""
    tour, paths = tour_of(network), Paths(network)
    assert sorted(tour) == list(range(paths.ranks))
    assert tour[0] == 0
    return [len(paths.between(a, b)) for a, b in zip(tour, (*tour[1:], 0), strict=True)]


def shuffled_star_of_stars(seed: int, hosts: int) -> Topology:
    """Racks of four hosts, whose numbers are shuffled, behind links of a tenth."""
    numbers = np.random.default_rng(seed).permutation(hosts)
    rows = [(f"h{number}", f"r{place // 4}", MB_S, None, 0.0) for place, number in enumerate(numbers)]
    rows += [(f"r{rack}", "core", MB_S / 10, None, 0.0) for rack in range(-(-hosts // 4))]
    switches = ["core", *(f"r{rack}" for rack in range(-(-hosts // 4)))]
    return Topology.from_table(sorted(rows, key=lambda row: (len(row[0]), row[0])), switches)


@pytest.mark.parametrize("seed", range(20))
def test_few_ranks_are_solved_exactly(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    ranks = int(numbers.integers(4, 8))
    hop_NN = numbers.integers(1, 20, (ranks, ranks)).astype(float)
    np.fill_diagonal(hop_NN, 0)
    best = min(tours._length(hop_NN, (0, *rest)) for rest in itertools.permutations(range(1, ranks)))
    assert tours._length(hop_NN, tours.best_tour(hop_NN)) == best


@pytest.mark.parametrize("seed", range(10))
def test_moves_come_close_to_what_is_exact(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    places = numbers.random((11, 2))
    hop_NN = np.linalg.norm(places[:, None] - places[None, :], axis=2)
    slowest, _ = tours._length(hop_NN, tours.best_tour(hop_NN))
    found = tours._search(hop_NN, [range(11)])
    assert tours._length(hop_NN, found)[0] <= 1.35 * slowest


@pytest.mark.parametrize("dims", [(4, 4), (3, 4), (2, 3), (8, 8), (2, 2, 2), (4, 4, 4), (6, 5)])
def test_all_hops_are_to_neighbours(dims: tuple[int, ...]) -> None:
    assert set(hops(Topology.mesh(*dims, rate_mbps=MB_S))) == {1}
    assert set(hops(Topology.mesh(*dims))) == {1}


def test_a_mesh_of_an_odd_number_needs_one_longer_hop() -> None:
    assert sorted(hops(Topology.mesh(3, 3, rate_mbps=MB_S))) == [1] * 8 + [2]


@pytest.mark.parametrize("number", range(0, 32, 5))
def test_a_slow_link_is_gone_round(number: int) -> None:
    network = with_slow_link(Topology.torus(4, 4, rate_mbps=MB_S), number)
    took = cost(Ring(by_links=True).plan(network), network, 1e6)
    assert took == pytest.approx(2 * 15 / 16, rel=1e-3)
    assert cost(BidirectionalRing(by_links=True).plan(network), network, 1e6) == pytest.approx(15 / 16, rel=1e-3)


@pytest.mark.parametrize("hosts", [8, 20])
def test_racks_are_entered_once(hosts: int) -> None:
    network = shuffled_star_of_stars(1, hosts)
    assert sum(length > 2 for length in hops(network)) == hosts // 4
    by_links, by_rank = (cost(Ring(by_links=one).plan(network), network, 1e6) for one in (True, False))
    assert by_links < 0.6 * by_rank


def test_the_faster_direction_is_taken() -> None:
    network = with_rates(Topology.ring(5), [(MB_S, MB_S / 2)] * 5)
    assert tour_of(network) == (0, 1, 2, 3, 4)
    network = with_rates(Topology.ring(5), [(MB_S / 2, MB_S)] * 5)
    assert tour_of(network) == (0, 4, 3, 2, 1)


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_the_smallest(hosts: int) -> None:
    assert tour_of(star(*[MB_S] * hosts)) == tuple(range(hosts))
