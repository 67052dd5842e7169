"""MultiTree's evaluation again: all-reduce over direct links of 16 bytes a cycle, by the network interfaces' variants.

Huang et al., "Communication algorithm-architecture co-design for distributed deep learning", ISCA 2021. The machine is
theirs: flits of 16 bytes, one a cycle and link; 150 cycles on each link; a head flit for each packet of 256 bytes, or,
with messages, for each message. The variants are

    alpha   one interface at a host, packets        gamma   one interface, messages
    beta    four interfaces, packets                delta   four interfaces, messages

MultiTree goes in lock-step; the others go as soon as what they send is there. Whole chunks are sent on, as the paper's
interfaces do. What their simulator has beyond that (virtual channels, buffers, arbitration) is not here, nor is the
systolic array's schedule: a host of the model makes 1,024 multiply-adds a cycle, without a pause.

A cycle is a microsecond inside, so that rates are those that a `Topology` may have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from offbeat.collective import HDRM, BidirectionalRing, DoubleBinaryTree, MultiTree, Ring, Ring2D, cost
from offbeat.errors import PlanError
from offbeat.model_profiles import profile
from offbeat.short_name import short_name
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.collective import Algorithm, CollectiveMethod

FLIT_BYTES, PACKET_BYTES, LINK_CYCLES = 16, 256, 150
_PER_CYCLE = 1024  # multiply-adds of an array of 32 x 32
_BATCH = 256  # samples of all hosts together
_TRAINING = 3  # a backward pass takes twice as many as a forward pass
SIZES = tuple(1 << bits for bits in range(15, 27))
"""32 KB to 64 MB."""
STRONG_BYTES = 32 << 20
WEAK_BYTES = 2 << 20
"""Of each host, where the vector is as large as there are hosts."""
MODELS_ON = "torus 8x8"
MODELS = ("resnet50", "vgg16", "transformer-small")


@dataclass(frozen=True)
class Variant:
    """A kind of network interface.

    Args:
        interfaces: messages that a host can send at a time, and receive.
        packets: whether a head goes with each packet, or with each message.
    """

    name: str
    interfaces: int
    packets: bool


VARIANTS = {
    one.name: one
    for one in (
        Variant("alpha", 1, packets=True),
        Variant("beta", 4, packets=True),
        Variant("gamma", 1, packets=False),
        Variant("delta", 4, packets=False),
    )
}


class InterconnectRow(NamedTuple):
    """A figure of the study.

    Args:
        study: "sizes", "strong", "weak", or the name of a model.
        network, hosts: where.
        variant: of the interfaces.
        method: that makes the sums.
        size_bytes: of the vector.
        cycles: of the all-reduce; of a model those of a step, with the all-reduce behind backward.
        layerwise_cycles: of a model, where each layer's gradient goes as soon as it is there.
    """

    study: str
    network: str
    hosts: int
    variant: str
    method: str
    size_bytes: int
    cycles: float
    layerwise_cycles: float | None = None


def network_of(name: str) -> Topology:
    """A network of the study, such as "torus 4x4" or "bigraph 4x8": hosts at each switch, and switches.

    >>> len(network_of("fat-tree 8x2").hosts)
    64
    """
    kind, _, sizes = name.partition(" ")
    dims = [int(size) for size in sizes.split("x")]
    rate_mbps, latency_ms = FLIT_BYTES * 8.0, LINK_CYCLES / 1e3
    match kind:
        case "torus":
            return Topology.torus(*dims, rate_mbps=rate_mbps, latency_ms=latency_ms)
        case "mesh":
            return Topology.mesh(*dims, rate_mbps=rate_mbps, latency_ms=latency_ms)
        case "bigraph":
            return Topology.bigraph(dims[0], dims[1], rate_mbps=rate_mbps, latency_ms=latency_ms)
    return Topology.fat_tree(dims[0], dims[1], rate_mbps=rate_mbps, latency_ms=latency_ms)


NETWORKS = ("torus 4x4", "torus 8x8", "mesh 4x4", "mesh 8x8", "bigraph 4x8", "bigraph 4x16", "fat-tree 8x2")
SCALING = ("torus 4x4", "torus 6x6", "torus 8x8", "torus 10x10", "torus 12x12", "torus 14x14", "torus 16x16")


def variants_for(network: Topology) -> list[Variant]:
    """The variants that make a difference: where hosts have one link, more interfaces are of no use."""
    names = ("alpha", "gamma") if network.switches else ("alpha", "beta", "gamma", "delta")
    return [VARIANTS[name] for name in names]


def methods_for_study(network: Topology, variant: Variant) -> list[CollectiveMethod]:
    """The methods that are compared on a network: a ring along its links first."""
    multitree = [MultiTree(split=1, interfaces=variant.interfaces), MultiTree(interfaces=variant.interfaces)]
    if not network.switches:
        return [Ring(by_links=True), BidirectionalRing(by_links=True), DoubleBinaryTree(), Ring2D(), *multitree]
    return [Ring(), DoubleBinaryTree(), HDRM(), *multitree[:1]]


def cycles(algorithm: Algorithm, network: Topology, size_bytes: float, variant: Variant) -> float:
    """The time of an all-reduce, in cycles.

    Raises:
        PlanError: as `cost`.
    """
    heads = 1 + FLIT_BYTES / PACKET_BYTES if variant.packets else 1.0
    took_s = cost(
        algorithm,
        network,
        size_bytes * heads,
        block_bytes=math.inf,
        overhead_s=0.0 if variant.packets else 1e-6,  # a head flit
        lock_step=algorithm.uses_slots,
        interfaces=variant.interfaces,
    )
    return took_s * 1e6


def study(networks: Sequence[str] = NETWORKS, scaling: Sequence[str] = SCALING) -> Iterator[InterconnectRow]:
    """All figures: networks by size of the vector; tori of 16 to 256 hosts, with a vector of one size and with one that
    grows with them; and steps of models.
    """
    for name in networks:
        yield from _rows("sizes", name, SIZES)
    for name in scaling:
        yield from _rows("strong", name, (STRONG_BYTES,), ("beta", "delta"))
        hosts = len(network_of(name).hosts)
        yield from _rows("weak", name, (WEAK_BYTES * hosts,), ("beta", "delta"))
    for model in MODELS if MODELS_ON in networks else ():
        yield from _steps_of(model, MODELS_ON)


def _rows(
    kind: str, name: str, sizes: Sequence[int], variants: Sequence[str] = tuple(VARIANTS)
) -> Iterator[InterconnectRow]:
    network = network_of(name)
    for variant, label, algorithm in _algorithms(network, variants):
        for size_bytes in sizes:
            took = cycles(algorithm, network, size_bytes, variant)
            yield InterconnectRow(kind, name, len(network.hosts), variant.name, label, size_bytes, took)


def _algorithms(network: Topology, variants: Sequence[str]) -> Iterator[tuple[Variant, str, Algorithm]]:
    for variant in variants_for(network):
        if variant.name not in variants:
            continue
        for method in methods_for_study(network, variant):
            try:
                yield variant, _label(method), method.plan(network)
            except PlanError:  # it is for networks of another shape
                continue


def _label(method: CollectiveMethod) -> str:
    """The name of a method, whatever the variant."""
    return short_name(replace(method, interfaces=None) if isinstance(method, MultiTree) else method)


def _steps_of(model: str, name: str) -> Iterator[InterconnectRow]:
    """A step of a model: the last layer's gradient is there first."""
    network, layers = network_of(name), profile(model)
    hosts = len(network.hosts)
    computed = [_TRAINING * layer.work * _BATCH / hosts / _PER_CYCLE for layer in layers]
    size_bytes = sum(4 * layer.numel for layer in layers)
    for variant, label, algorithm in _algorithms(network, ("alpha", "delta")):
        took = {size: cycles(algorithm, network, size, variant) for size in {4 * layer.numel for layer in layers}}
        ready, free = sum(computed) / _TRAINING, 0.0  # behind the forward pass
        for layer, compute in zip(reversed(layers), reversed(computed), strict=True):
            ready += compute * (_TRAINING - 1) / _TRAINING
            free = max(free, ready) + took[4 * layer.numel]
        whole = sum(computed) + cycles(algorithm, network, size_bytes, variant)
        yield InterconnectRow(model, name, hosts, variant.name, label, size_bytes, whole, free)
