"""All-reduce along paths of our own choice, over lanes between the workers; a process group beside it for the rest.

What is summed goes by an `Algorithm`, which says what is sent to whom; see `offbeat.collective`.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offbeat.collective import CollectiveMethod
from offbeat.errors import DisagreementError, PlanError
from offbeat.fabric.discovery import known_among, known_network, measure_network
from offbeat.fabric.fabric import BindContext, Offers
from offbeat.fabric.in_memory import InMemory
from offbeat.fabric.lane_network import LaneNetwork, texts_of_all
from offbeat.fabric.path_collectives import AlgorithmRunner, PathCollectives, PathTrials, check_alike, log_paths
from offbeat.fabric.path_planner import plan_paths, replan_paths, suited
from offbeat.fabric.process_group import GlooCollectives, ProcessGroup, joined
from offbeat.fabric.staging import CudaCopies, StagedFabric
from offbeat.payload import Sum, Total
from offbeat.topology_spec import NetworkFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from offbeat.fabric.discovery import MeasuredNetwork
    from offbeat.fabric.fabric import Fabric
    from offbeat.fabric.generation import Generation, GroupCollectives
    from offbeat.fabric.path_collectives import GroupSum
    from offbeat.fabric.path_planner import PathPlan
    from offbeat.payload import Payload
    from offbeat.pending import Pending
    from offbeat.topology import Topology

_OFFERS = Offers()


@dataclass(frozen=True)
class Routed:
    """All-reduce along paths that are planned for the network.

    Args:
        method: how the paths are found; None for what suits the network best.

    Raises:
        PlanError: if it is no method.

    >>> Routed(WaterFilling())
    Routed(method=WaterFilling(pieces=32))
    """

    method: CollectiveMethod | None = None

    def __post_init__(self) -> None:
        if self.method is not None and (isinstance(self.method, type) or not isinstance(self.method, CollectiveMethod)):
            raise PlanError(
                f"Cannot find paths by {self.method!r}: use a method of offbeat.collective, made with (...), such as "
                "Ring(), or None - at `plan.fabric.method`."
            )

    @property
    def offers(self) -> Offers:
        return _OFFERS

    @property
    def connecting(self) -> str:
        """The purpose of the wait while a worker is bound, which takes some seconds on slow links."""
        return "the links with the others to be measured"

    @property
    def companion(self) -> ProcessGroup:
        """The fabric of what is no sum, and of questions to the others."""
        return ProcessGroup()

    def bind(self, context: BindContext) -> Fabric:
        """Make one worker's end. Collective: every rank calls it.

        Raises:
            NetworkError, PeerError: if there is no link with one of the others.
            DisagreementError: if others have other paths.
        """
        if context.world == 1:
            return InMemory().bind(context)
        if context.backend != "gloo":
            return StagedFabric(self.bind(replace(context, backend="gloo")), CudaCopies())
        companion = self.companion.bind(context)
        meet = functools.partial(texts_of_all, companion, patience=context.timeout)
        try:
            group_sum = lambda tensor: companion.start(Sum(tensor))  # noqa: E731
            collectives = _connect(self.method, context, range(context.world), "lanes", meet, group_sum)
        except BaseException:
            companion.abandon()
            raise
        return BoundRouted(context.rank, context.world, companion, collectives)

    def reconnector(self, context: BindContext) -> PathReconnector:
        """Make what connects this worker in each generation of an elastic group."""
        return PathReconnector(self.method, context)


class BoundRouted:
    """One worker's end. A `Fabric`."""

    def __init__(self, rank: int, world: int, companion: Fabric, collectives: PathCollectives) -> None:
        self._companion, self._collectives = companion, collectives
        self.rank, self.world, self.offers = rank, world, _OFFERS

    @property
    def plan(self) -> PathPlan:
        """The paths."""
        return self._collectives.plan

    def start(self, payload: Payload) -> Pending:
        if not isinstance(payload, Sum):
            return self._companion.start(payload)
        whole = joined(payload)
        return self._collectives.all_reduce(whole, functools.partial(_total, payload, whole))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        return self._collectives.broadcast(flat, source, lambda: Total(tensor))

    def wants_reroute(self) -> bool:
        return self._collectives.wants_reroute()

    def reroute(self, meet: Callable[[str], list[str]]) -> str:
        return self._collectives.reroute(meet)

    def close(self) -> None:
        self._collectives.close()
        self._companion.close()

    def abandon(self) -> None:
        self._collectives.abandon()
        self._companion.abandon()


class PathReconnector:
    """Opens links in each generation, and plans paths among those that take part. A `Reconnector`.

    Args:
        method: how the paths are found; None for what suits the network best.
        context: of this worker.
    """

    def __init__(self, method: CollectiveMethod | None, context: BindContext) -> None:
        self._method, self._context = method, context

    def connect(self, generation: Generation, before: GroupCollectives | None) -> GroupCollectives:
        if len(generation.members) == 1:
            return GlooCollectives(generation.group)
        known = before.measured if isinstance(before, PathCollectives) else None
        return _connect(
            self._method, self._context, generation.members, f"lanes/{generation.name}", generation.meet,
            GlooCollectives(generation.group).all_reduce, known, generation.group, is_first=not generation.number,
        )  # fmt: skip


def _total(payload: Sum, whole: torch.Tensor) -> Total:
    """The reply to a sum that was made in a vector."""
    if payload.tail is None or whole.data_ptr() == payload.tensor.data_ptr():
        return Total(payload.tensor, tail=payload.tail)
    return Total(whole[: payload.tensor.numel()], tail=whole[payload.tensor.numel() :])


def _connect(
    method: CollectiveMethod | None,
    context: BindContext,
    members: Sequence[int],
    name: str,
    meet: Callable[[str], list[str]],
    group_sum: GroupSum,
    known: MeasuredNetwork | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    is_first: bool = True,
) -> PathCollectives:
    """Open links between workers, and plan paths. Collective among them.

    Args:
        group_sum: sums up by torch's group.
        known: of the network in the generation before; None if this worker was not in it.
        is_first: whether this is the first generation.

    Raises:
        NetworkError, PeerError: if there is no link with one of the others.
        DisagreementError: if others have other paths.
        PlanError: if the topology that is named does not fit, or the method does not suit the network.
    """
    given = None if context.topology is None else _read(context.topology, context.world)
    network = LaneNetwork(context.rank, members, name, meet, context.settings, context.timeout)
    try:
        return _planned(method, context, network, given, meet, group_sum, known, group, is_first=is_first)
    except BaseException:
        network.abandon()
        raise


def _planned(
    method: CollectiveMethod | None,
    context: BindContext,
    network: LaneNetwork,
    given: Topology | None,
    meet: Callable[[str], list[str]],
    group_sum: GroupSum,
    known: MeasuredNetwork | None,
    group: dist.ProcessGroup | None,
    *,
    is_first: bool,
) -> PathCollectives:
    """Plan paths over links that are there; see `_connect`."""
    measured = None
    if is_first:
        _check_topologies(network, given, meet)
    else:
        measured = known_among(network, known, given, meet)
    if measured is not None:
        plan = replan_paths(measured, suited(method, measured.network))
    else:
        if given is None or max(network.members) >= context.world:
            measured = measure_network(network, meet)
        else:
            among = given.among([given.hosts[rank].name for rank in network.members])
            measured = known_network(network, among, meet)
        named = method if is_first else suited(method, measured.network)
        plan = plan_paths(measured, named, PathTrials(AlgorithmRunner(network), group_sum).measure, meet)
    check_alike(plan, meet, network)
    log_paths(plan, measured, network)
    return PathCollectives(network, measured, plan, method, group_sum, group)


def _check_topologies(network: LaneNetwork, given: Topology | None, meet: Callable[[str], list[str]]) -> None:
    """See that all were told the same of the links, before they measure what they were not told.

    Raises:
        DisagreementError: if not.
    """
    mine = "" if given is None else hashlib.blake2b(repr(given).encode(), digest_size=8).hexdigest()
    told = meet(mine)
    if (wrong := next((place for place, one in enumerate(told) if one != mine), None)) is not None:
        raise DisagreementError(
            f"Cannot plan paths: rank {network.members[wrong]} was told of {'other links' if told[wrong] else 'none'}, "
            f"and rank {network.rank} of {'some' if mine else 'none'}. Give all workers the same file with "
            "OFFBEAT_TOPOLOGY, or none."
        )


class LinkedGroup:
    """Links between workers whose paths are planned when they are first asked for.

    Args:
        spec: how paths are found.
        context: of this worker.
        members: ranks that take part, each at its place.
        name: of the group, which no other has.
        meet: tells the others a text while links are opened, and returns what all say, by place.
        meet_later: the same while paths are planned.
        group_sum: sums up by torch's group.

    Raises:
        NetworkError, PeerError: if there is no link with one of the others.
    """

    def __init__(
        self,
        spec: Routed,
        context: BindContext,
        members: Sequence[int],
        name: str,
        meet: Callable[[str], list[str]],
        meet_later: Callable[[str], list[str]],
        group_sum: GroupSum,
    ) -> None:
        self._spec, self._context, self._meet, self._group_sum = spec, context, meet_later, group_sum
        self._given = None if context.topology is None else _read(context.topology, context.world)
        self._network = LaneNetwork(context.rank, members, name, meet, context.settings, context.timeout)
        self._collectives: PathCollectives | None = None

    @property
    def lost(self) -> dict[int, str]:
        """The reasons why those are lost that are, by rank; who has left in order is not."""
        mesh = self._network.mesh
        return {rank: str(error) for rank, error in list(mesh.lost.items()) if rank not in mesh.left}

    def collectives(self) -> PathCollectives:
        """Plan paths, the first time. Collective then; raises as `Routed.bind`."""
        if self._collectives is None:
            self._meet("")  # some may come much later than others
            self._collectives = _planned(
                self._spec.method, self._context, self._network, self._given, self._meet, self._group_sum, None, None,
                is_first=True,
            )  # fmt: skip
        return self._collectives

    def close(self) -> None:
        """Say good-bye, once all that was sent has arrived."""
        self._network.close()

    def abandon(self) -> None:
        """Let go at once."""
        self._network.abandon()


def _read(path: Path, world: int) -> Topology:
    topology = NetworkFile.read(path, " (OFFBEAT_TOPOLOGY)").build()
    if len(topology.hosts) != world:
        raise PlanError(
            f"Cannot plan paths: the topology has {len(topology.hosts)} hosts, and there are {world} workers. Name the "
            "file that describes this network with OFFBEAT_TOPOLOGY, or none."
        )
    return topology
