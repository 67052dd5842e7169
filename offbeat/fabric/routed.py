"""All-reduce along paths of our own choice, over lanes between the workers; a process group beside it for the rest.

What is summed goes by an `Algorithm`, which says what is sent to whom; see `offbeat.collective`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from offbeat.collective import CollectiveMethod
from offbeat.diagnosis.startup_barrier import startup_limit
from offbeat.errors import PlanError
from offbeat.fabric.algorithm_runner import LaneRunner
from offbeat.fabric.fabric import BindContext, Offers
from offbeat.fabric.grouped_rounds import GroupedRunner
from offbeat.fabric.in_memory import InMemory
from offbeat.fabric.introduction import texts_of_all
from offbeat.fabric.linked_group import LinkedGroup
from offbeat.fabric.path_collectives import PathCollectives
from offbeat.fabric.process_group import GlooCollectives, ProcessGroup, joined, new_group, total_of
from offbeat.fabric.staging import CudaCopies, StagedFabric
from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fabric.algorithm_runner import AlgorithmRunner
    from offbeat.fabric.fabric import Fabric
    from offbeat.fabric.generation import Generation, GroupCollectives
    from offbeat.fabric.lane_network import LaneNetwork
    from offbeat.fabric.path_planner import PathPlan
    from offbeat.payload import Payload
    from offbeat.pending import Pending

_OFFERS = Offers()


@dataclass(frozen=True)
class Routed:
    """All-reduce along paths that are planned for the network.

    Args:
        method: how the paths are found; None for what suits the network best.
        grouped: whether they are carried out by torch's group (NCCL, where the tensors are on GPUs), each round of an
            algorithm as one grouped batch of sends and receives; else over lanes, through the memory of the host.

    Raises:
        PlanError: if it is no method.

    >>> from offbeat.collective import WaterFilling
    >>> Routed(WaterFilling())
    Routed(method=WaterFilling(pieces=32), grouped=False)
    """

    method: CollectiveMethod | None = None
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.method is not None and (isinstance(self.method, type) or not isinstance(self.method, CollectiveMethod)):
            raise PlanError(
                f"Cannot find paths by {self.method!r}: use a method of offbeat.collective, made with (...), such as "
                "Ring(), or None - at `plan.fabric.method`."
            )
        if not isinstance(self.grouped, bool):
            raise PlanError(f"Cannot use grouped={self.grouped!r}: it is True or False - at `plan.fabric.grouped`.")

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
        if context.backend != "gloo" and not self.grouped:
            return StagedFabric(self.bind(replace(context, backend="gloo")), CudaCopies())
        companion = self.companion.bind(context)
        # What the others say is text, in the memory of the host.
        told = companion if context.backend == "gloo" else self.companion.bind(replace(context, backend="gloo"))
        context = replace(context, timeout=startup_limit(context.timeout))
        meet = functools.partial(texts_of_all, told, patience=context.timeout)
        try:
            linked = LinkedGroup(
                self.method, context, range(context.world), "lanes", meet, lambda tensor: companion.start(Sum(tensor)),
                make_runner=_grouped_runner(context.backend) if self.grouped else LaneRunner,
            )  # fmt: skip
            collectives = linked.plan(meet)
        except BaseException:
            companion.abandon()
            if told is not companion:
                told.abandon()
            raise
        if told is not companion:
            told.close()
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
        return self._collectives.all_reduce(whole, functools.partial(total_of, payload, whole))

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
        linked = LinkedGroup(
            self._method, self._context, generation.members, f"lanes/{generation.name}", generation.meet,
            GlooCollectives(generation.group).all_reduce, generation.group,
        )  # fmt: skip
        return linked.plan(generation.meet, known, is_first=not generation.number)


def _grouped_runner(backend: str) -> Callable[[LaneNetwork], AlgorithmRunner]:
    """Make a group of torch's, and what makes a runner that uses it. Collective."""
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
    group = new_group(backend)
    # All have to take part in the first operation of a group of NCCL's; in a round of sends some may not.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return functools.partial(GroupedRunner, group=group, device=device)
