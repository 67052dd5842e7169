"""Programs: each collective is what it says, with any root, and as fast as links allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from offbeat.collective import Algorithm, cost, programs
from offbeat.errors import PlanError
from offbeat.topology import Topology
from tests.collective.networks import MB_S, drawn, star, with_slow_host

if TYPE_CHECKING:
    from collections.abc import Callable

NETWORKS = {
    **{f"star {hosts}": star(*[MB_S] * hosts) for hosts in (1, 2, 3, 6)},
    "slow host": with_slow_host(star(*[MB_S] * 5), "h1"),
    "mesh": Topology.mesh(3, 3, rate_mbps=MB_S),
    "not shaped": Topology.torus(3, 3),
    "fat tree": Topology.fat_tree(2, 3, rate_mbps=MB_S),
    **{f"drawn {seed}": drawn(seed) for seed in range(4)},
}
ROOTED: dict[str, Callable[[Topology, int], Algorithm]] = {
    "broadcast": programs.broadcast,
    "reduce": programs.reduce,
    "gather": programs.gather,
    "scatter": programs.scatter,
}
OF_ALL: dict[str, Callable[[Topology], Algorithm]] = {
    "all-gather": programs.all_gather,
    "reduce-scatter": programs.reduce_scatter,
    "all-to-all": programs.all_to_all,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("what", ROOTED)
def test_any_root(what: str, name: str) -> None:
    network = NETWORKS[name]
    for root in {0, len(network.hosts) // 2, len(network.hosts) - 1}:
        made = ROOTED[what](network, root)
        made.verify()
        assert made.to_bytes() == ROOTED[what](network, root).to_bytes()
        chunks = {(chunk.source, chunk.target) for chunk in made.chunks}
        ranks = range(len(network.hosts))
        assert (
            chunks
            == {
                "broadcast": {(root, None)},
                "reduce": {(None, root)},
                "gather": {(rank, root) for rank in ranks},
                "scatter": {(root, rank) for rank in ranks},
            }[what]
        )
        assert len(ranks) < 3 or made.collective == what


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("what", OF_ALL)
def test_no_root(what: str, name: str) -> None:
    network = NETWORKS[name]
    made = OF_ALL[what](network)
    made.verify()
    assert made.to_bytes() == OF_ALL[what](network).to_bytes()
    nodes = len(network.hosts)
    assert nodes < 3 or made.collective == what
    if what != "all-to-all":
        for rank in range(nodes):
            mine = [one for one in made.chunks if rank in (one.source, one.target)]
            assert mine[0].begin * nodes == rank
            assert mine[-1].end * nodes == rank + 1


@pytest.mark.parametrize("what", ROOTED)
@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_is_a_rank(what: str, root: int) -> None:
    with pytest.raises(PlanError, match=f"Cannot take rank {root} as the root: there are ranks 0 to 2"):
        ROOTED[what](star(1, 1, 1), root)


@pytest.mark.parametrize(
    ("what", "name", "seconds"),
    [
        ("broadcast", "star 6", 1.1),
        ("reduce", "star 6", 1.1),
        ("all-gather", "star 6", 5 / 6),
        ("reduce-scatter", "star 6", 5 / 6),
        ("gather", "star 6", 5 / 6),
        ("scatter", "star 6", 5 / 6),
        ("all-to-all", "star 6", 5 / 36),
        ("broadcast", "mesh", 0.62),
        ("all-gather", "mesh", 4 / 9),
        ("reduce-scatter", "mesh", 4 / 9),
    ],
)
def test_time(what: str, name: str, seconds: float) -> None:
    """1 MB over links of 1 MB/s: a broadcast over all links of its root, not over one of them."""
    make = ROOTED.get(what)
    made = make(NETWORKS[name], 0) if make else OF_ALL[what](NETWORKS[name])
    assert cost(made, NETWORKS[name], 1e6, block_bytes=1e6 / 256) <= seconds * 1.001


def test_a_small_broadcast_is_one_tree() -> None:
    made = programs.broadcast(star(*[MB_S] * 8), pieces=1)
    assert len(made.chunks) == 1
    assert cost(made, star(*[MB_S] * 8), 1e6, block_bytes=1e6) == pytest.approx(3.0)
