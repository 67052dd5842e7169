"""MultiTree: as many steps as the published code takes, or as few as there can be."""

from __future__ import annotations

import pytest

from offbeat.collective import MultiTree
from offbeat.errors import PlanError
from offbeat.topology import Topology

DIRECT = {
    "torus 4x4": Topology.torus(4, 4),
    "torus 6x6": Topology.torus(6, 6),
    "torus 8x8": Topology.torus(8, 8),
    "mesh 4x4": Topology.mesh(4, 4),
    "mesh 6x6": Topology.mesh(6, 6),
    "mesh 8x8": Topology.mesh(8, 8),
}


def steps(method: MultiTree, network: Topology) -> int:
    """Steps of the all-gather alone."""
    return max(tree.steps for tree in method.trees(network))


@pytest.mark.parametrize(
    ("name", "released", "fixed", "two", "four"),
    [
        ("torus 4x4", 5, 5, 8, 15),
        ("torus 6x6", 10, 10, 18, 35),
        ("torus 8x8", 17, 17, 32, 63),
        ("mesh 4x4", 10, 8, 15, 30),
        ("mesh 6x6", 19, 18, 35, 70),
        ("mesh 8x8", 33, 32, 63, 126),
    ],
)
def test_steps_on_direct_networks(name: str, released: int, fixed: int, two: int, four: int) -> None:
    """The numbers of the published code, of the same without its fault, and with two and four trees per root."""
    network = DIRECT[name]
    assert steps(MultiTree(released=True), network) == released
    assert [steps(MultiTree(split=split), network) for split in (1, 2, 4)] == [fixed, two, four]


def test_one_interface_per_host() -> None:
    network = DIRECT["mesh 4x4"]
    assert steps(MultiTree(released=True, interfaces=1), network) == 22
    assert 15 <= steps(MultiTree(split=1, interfaces=1), network) <= 21


@pytest.mark.parametrize(
    "network",
    [Topology.star("abcdefgh"), Topology.fat_tree(4, 2), Topology.fat_tree(8, 2)],
    ids=["star", "fat tree 16", "fat tree 64"],
)
def test_hosts_with_one_link_hear_one_other_in_each_step(network: Topology) -> None:
    assert steps(MultiTree(), network) == len(network.hosts) - 1


@pytest.mark.parametrize("kwargs", [{"split": 0}, {"interfaces": 0}, {"split": 2, "released": True}])
def test_what_cannot_be(kwargs: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="Cannot plan MultiTree"):
        MultiTree(**kwargs)  # type: ignore[arg-type]
