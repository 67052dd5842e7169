"""Links between the workers of a group, and the paths that are planned over them; of one generation.

Who uses it tells when: a fabric plans as soon as the links are there, torch's process group when something large is to
be summed up.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from offbeat.errors import DisagreementError, PlanError
from offbeat.fabric.algorithm_runner import LaneRunner
from offbeat.fabric.discovery import known_among, known_network, measure_network
from offbeat.fabric.introduction import first_unlike
from offbeat.fabric.lane_network import LaneNetwork
from offbeat.fabric.path_collectives import PathCollectives, PathTrials, check_alike, log_paths
from offbeat.fabric.path_planner import plan_paths, replan_paths, suited
from offbeat.topology_spec import NetworkFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from pathlib import Path

    import torch.distributed as dist

    from offbeat.collective import CollectiveMethod
    from offbeat.fabric.algorithm_runner import AlgorithmRunner
    from offbeat.fabric.discovery import MeasuredNetwork
    from offbeat.fabric.fabric import BindContext
    from offbeat.fabric.path_collectives import GroupSum
    from offbeat.fabric.path_planner import PathPlan
    from offbeat.topology import Topology


class LinkedGroup:
    """The links of one worker with the others. Call order: `plan`, once, if sums are to go along paths.

    Args:
        method: how paths are found; None for what suits the network best.
        context: of this worker.
        members: ranks that take part, each at its place.
        name: of the group's generation, which no other has.
        meet: tells the others a text, and returns what all say, by place.
        group_sum: sums up by torch's group.
        group: that, if exchanges of other kinds are asked of what `plan` returns.
        make_runner: what carries out algorithms among members who have these links.

    Raises:
        NetworkError, PeerError: if there is no link with one of the others.
        PlanError: if the topology that is named has another number of hosts than the job has workers.
    """

    def __init__(
        self,
        method: CollectiveMethod | None,
        context: BindContext,
        members: Sequence[int],
        name: str,
        meet: Callable[[str], list[str]],
        group_sum: GroupSum,
        group: dist.ProcessGroup | None = None,
        make_runner: Callable[[LaneNetwork], AlgorithmRunner] = LaneRunner,
    ) -> None:
        self._method, self._group_sum, self._group, self._make_runner = method, group_sum, group, make_runner
        self._given = None if context.topology is None else _read(context.topology, context.world)
        self._network = LaneNetwork(context.rank, members, name, meet, context.settings, context.timeout)

    @property
    def lost(self) -> dict[int, str]:
        """The reasons why those are lost that are, by rank; who has left in order is not."""
        return self._network.lost

    @property
    def stalled(self) -> dict[int, float]:
        """The ranks that stand still, and for how many seconds; see `PeerMesh.stalled`."""
        return self._network.stalled

    def plan(
        self,
        meet: Callable[[str], list[str]],
        known: MeasuredNetwork | None = None,
        *,
        is_first: bool = True,
        patience: timedelta | None = None,
    ) -> PathCollectives:
        """Measure what is not known, and plan paths. Collective; if it fails the links are let go.

        Args:
            meet: as that of the group; another one may wait for longer.
            known: of the network in the generation before; None if this worker was not in it.
            is_first: whether this is the first generation.
            patience: for how long a measurement may take; None for what follows from the context's timeout.

        Raises:
            NetworkError, PeerError: if a link is lost meanwhile.
            DisagreementError: if others were told of other links, or have other paths.
            PlanError: if the method does not suit the network that the job begins with.
        """
        runner = self._make_runner(self._network)
        self._network.patience = patience or self._network.patience
        try:
            measured, plan = self._planned(runner, meet, known, is_first=is_first)
            check_alike(plan, meet, self._network)
        except BaseException:
            runner.abandon()
            self._network.abandon()
            raise
        log_paths(plan, measured, self._network)
        return PathCollectives(runner, measured, plan, self._method, self._group_sum, self._group)

    def close(self) -> None:
        """Say good-bye, once all that was sent has arrived."""
        self._network.close()

    def abandon(self) -> None:
        """Let go at once."""
        self._network.abandon()

    def _planned(
        self,
        runner: AlgorithmRunner,
        meet: Callable[[str], list[str]],
        known: MeasuredNetwork | None,
        *,
        is_first: bool,
    ) -> tuple[MeasuredNetwork, PathPlan]:
        network, given, method = self._network, self._given, self._method
        if is_first:
            self._check_topologies(meet)
        elif (among := known_among(network, known, given, meet)) is not None:
            return among, replan_paths(among, suited(method, among.network))
        if given is None or max(network.members) >= len(given.hosts):
            measured = measure_network(network, meet)
        else:
            names = [given.hosts[rank].name for rank in network.members]
            measured = known_network(network, given.among(names), meet)
        method = method if is_first else suited(method, measured.network)
        trials = PathTrials(runner, self._group_sum)
        return measured, plan_paths(measured, method, trials.measure, meet, rounds=runner.in_rounds)

    def _check_topologies(self, meet: Callable[[str], list[str]]) -> None:
        """See that all were told the same of the links, before they measure what they were not told."""
        mine = "" if self._given is None else hashlib.blake2b(repr(self._given).encode(), digest_size=8).hexdigest()
        if (found := first_unlike(mine, meet)) is not None:
            place, theirs = found
            raise DisagreementError(
                f"Cannot plan paths: rank {self._network.members[place]} was told of "
                f"{'other links' if theirs else 'none'}, and rank {self._network.rank} of "
                f"{'some' if mine else 'none'}. Give all workers the same file with OFFBEAT_TOPOLOGY, or none."
            )


def _read(path: Path, world: int) -> Topology:
    topology = NetworkFile.read(path, " (OFFBEAT_TOPOLOGY)").build()
    if len(topology.hosts) != world:
        raise PlanError(
            f"Cannot plan paths: the topology has {len(topology.hosts)} hosts, and there are {world} workers. Name the "
            "file that describes this network with OFFBEAT_TOPOLOGY, or none."
        )
    return topology
