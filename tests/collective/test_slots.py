"""Time slots: MultiTree keeps them on any network, others do not, and who does not is named."""

from __future__ import annotations

import pytest

from offbeat.collective import Algorithm, FlatTree, HalvingDoubling, MultiTree, Ring, check_slots, cost
from offbeat.errors import PlanError
from offbeat.topology import Topology
from tests.collective.networks import MB_S, drawn, star

NETWORKS = {
    "torus": Topology.torus(4, 4, rate_mbps=MB_S),
    "mesh": Topology.mesh(3, 5, rate_mbps=MB_S),
    "torus 3-D": Topology.torus(2, 3, 3, rate_mbps=MB_S),
    "star": star(*[MB_S] * 6),
    "fat tree": Topology.fat_tree(4, 2, rate_mbps=MB_S),
    "three levels": Topology.fat_tree(2, 3, rate_mbps=MB_S),
    "bigraph": Topology.bigraph(2, 8, rate_mbps=MB_S),
    **{f"drawn {seed}": drawn(seed) for seed in range(8)},
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", [MultiTree(), MultiTree(split=2), MultiTree(released=True)], ids=repr)
def test_multitree_never_uses_a_link_twice_in_a_step(name: str, method: MultiTree) -> None:
    network = NETWORKS[name]
    made = method.plan(network)
    assert made.uses_slots
    made.verify()
    check_slots(made, network)


@pytest.mark.parametrize("interfaces", [1, 2, 3])
def test_no_more_messages_than_interfaces(interfaces: int) -> None:
    network = NETWORKS["torus"]
    made = MultiTree(interfaces=interfaces).plan(network)
    check_slots(made, network, interfaces=interfaces)
    with pytest.raises(
        PlanError, match=r"in step \d+ rank \d+ is to (send|receive) \d messages, and it has \d interfaces"
    ):
        check_slots(MultiTree().plan(network), network, interfaces=interfaces)


@pytest.mark.parametrize("name", ["torus", "mesh", "star"])
def test_steps_take_as_long_as_one_chunk(name: str) -> None:
    made = MultiTree().plan(NETWORKS[name])
    assert cost(made, NETWORKS[name], 1e6, lock_step=True) == pytest.approx(made.steps / len(made.chunks))


def test_others_keep_them_where_they_fit() -> None:
    check_slots(Ring().plan(NETWORKS["star"]), NETWORKS["star"])
    check_slots(Ring(by_links=True).plan(NETWORKS["torus"]), NETWORKS["torus"])
    with pytest.raises(PlanError, match=r"Cannot use HalvingDoubling\(\) in time slots: in step \d+ the link from 'h"):
        check_slots(HalvingDoubling().plan(NETWORKS["mesh"]), NETWORKS["mesh"])


def test_two_to_one_share_its_link() -> None:
    says = (
        "Cannot use FlatTree() in time slots: in step 0 the link from 'switch' to 'h0' is to carry operations 0 and 1."
    )
    with pytest.raises(PlanError) as refused:
        check_slots(FlatTree().plan(star(1, 1, 1)), star(1, 1, 1))
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize("number", range(0, 200, 17))
def test_an_operation_in_another_step_is_found(number: int) -> None:
    """All links of a torus are busy in all but few steps: one earlier or later is one too many."""
    network = NETWORKS["torus"]
    made = MultiTree().plan(network)
    op = made.ops[number]
    moved = (*made.ops[:number], op._replace(step=op.step + 1), *made.ops[number + 1 :])
    with pytest.raises(PlanError, match=f"in step {op.step + 1} the link from 'h{op.source}' to 'h{op.destination}'"):
        check_slots(Algorithm("mine", 16, made.chunks, moved), network)
