"""All-reduce along paths of our own choice, over lanes between the workers; a process group beside it for the rest.

What is summed goes by an `Algorithm`, which says what is sent to whom; see `offbeat.collective`. All workers make the
same one of what they know of the network, and compare digests.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.collective import CollectiveMethod
from offbeat.collective.programs import broadcast
from offbeat.collective.rank_part import part_of
from offbeat.errors import DisagreementError, NetworkError, PlanError
from offbeat.fabric.discovery import known_network, measure_network
from offbeat.fabric.fabric import BindContext, Offers
from offbeat.fabric.in_memory import InMemory
from offbeat.fabric.lane_exchange import LaneExchange
from offbeat.fabric.lane_network import LaneNetwork, texts_of_all
from offbeat.fabric.path_planner import plan_paths, timed
from offbeat.fabric.process_group import ProcessGroup, joined
from offbeat.fabric.staging import CudaCopies, StagedFabric
from offbeat.payload import Sum, Total
from offbeat.tensors import dtype_name
from offbeat.topology_spec import NetworkFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.collective.algorithm import Algorithm
    from offbeat.collective.rank_part import RankPart
    from offbeat.fabric.discovery import MeasuredNetwork
    from offbeat.fabric.fabric import Fabric
    from offbeat.fabric.path_planner import PathPlan
    from offbeat.payload import Payload, Reply
    from offbeat.pending import Pending
    from offbeat.topology import Topology

_log = logging.getLogger("offbeat")

_OFFERS = Offers()
_TRIAL = timedelta(seconds=20)
_SMALL_BYTES, _PIECES = 1 << 20, 16  # of broadcasts


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
        network = None
        try:
            network = LaneNetwork(context.rank, context.world, "lanes", meet, context.settings, context.timeout)
            runner = AlgorithmRunner(network)
            if context.topology is None:
                measured = measure_network(network, meet)
            else:
                measured = known_network(network, _read(context.topology), meet)
            plan = plan_paths(measured, self.method, runner.measure, meet)
            _check_alike(plan, meet, context.rank)
            if context.rank == 0:
                _tell(plan, measured)
        except BaseException:
            if network is not None:
                network.abandon()
            companion.abandon()
            raise
        return BoundRouted(network, companion, plan)


def _read(path: Path) -> Topology:
    try:
        return NetworkFile.from_toml(path.read_text()).build()
    except OSError as error:
        raise PlanError(f"Cannot read the topology in {path}: {error.strerror} (OFFBEAT_TOPOLOGY).") from error


def _tell(plan: PathPlan, measured: MeasuredNetwork) -> None:
    """Log what was chosen, and what the network that was found does not explain."""
    for one in plan.chosen:
        took = "not tried" if one.measured_s is None else f"took {one.measured_s * 1e3:.3g} ms"
        _log.info(
            "Sums of about %d bytes go by %s: predicted %.3g ms, %s.",
            *(one.size_bytes, one.algorithm.name, one.predicted_s * 1e3, took),
        )
    for a, b in measured.unlike:
        _log.info(
            "From rank %d to rank %d comes much less than one switch would carry: say which links there are with "
            "OFFBEAT_TOPOLOGY.",
            *(a, b),
        )


def _check_alike(plan: PathPlan, meet: Callable[[str], list[str]], rank: int) -> None:
    """See that all go by the same paths.

    Raises:
        DisagreementError: if not.
    """
    mine = " ".join(one.algorithm.digest for one in plan.chosen)
    digests = meet(mine)
    if (wrong := next((other for other, one in enumerate(digests) if one != mine), None)) is not None:
        raise DisagreementError(
            f"Cannot sum along paths that differ: rank {wrong} goes by {digests[wrong]}, and rank {rank} by {mine} "
            f"({', '.join(one.algorithm.name for one in plan.chosen)}). Run the same offbeat and the same plan."
        )


class AlgorithmRunner:
    """A channel on which algorithms are carried out on vectors.

    Args:
        network: the links.
    """

    def __init__(self, network: LaneNetwork) -> None:
        self._network, self._channel = network, network.channel()
        self._issued, self._order = 0, threading.Lock()

    def start(self, algorithm: Algorithm, part: RankPart, whole: torch.Tensor) -> LaneExchange:
        """Begin to sum a vector [D], contiguous and on the CPU, which the sum is written to."""
        terms = f"a sum of {whole.numel()} {dtype_name(whole.dtype)} ({algorithm.digest[:8]})"
        bytes_of_all = memoryview(whole.detach().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        size = whole.element_size()
        places = [
            bytes_of_all[size * place.start : size * place.stop]
            for place in (chunk.place(whole.numel()) for chunk in algorithm.chunks)
        ]
        add, pool = functools.partial(_add, whole.dtype), self._network.pool
        with self._order:
            exchange = LaneExchange(self._channel, self._issued, part, terms, places, add, pool)
            self._issued += 1
            self._network.loop.call(exchange.begin)
        return exchange

    def measure(self, algorithm: Algorithm, size_bytes: int) -> float:
        """Try an algorithm on a vector of so many bytes; how long it took, in seconds."""
        part, whole = part_of(algorithm, self._network.rank), torch.zeros(size_bytes // 4)
        return timed(lambda: self._until_over(self.start(algorithm, part, whole)))

    def _until_over(self, exchange: LaneExchange) -> None:
        if not exchange.wait(_TRIAL):
            raise NetworkError(f"Cannot choose paths: a trial did not end within {_TRIAL.total_seconds():g} s.")


class BoundRouted:
    """One worker's end. A `Fabric`."""

    def __init__(self, network: LaneNetwork, companion: Fabric, plan: PathPlan) -> None:
        self._network, self._companion, self.plan = network, companion, plan
        self._runner = AlgorithmRunner(network)
        self._broadcasts: dict[tuple[int, int], tuple[Algorithm, RankPart]] = {}  # by source and pieces
        self._parts = [part_of(one.algorithm, network.rank) for one in plan.chosen]
        self.rank, self.world, self.offers = network.rank, network.world, _OFFERS

    def start(self, payload: Payload) -> Pending:
        if not isinstance(payload, Sum):
            return self._companion.start(payload)
        whole = joined(payload)
        place = self.plan.for_size(whole.numel() * whole.element_size())
        exchange = self._runner.start(self.plan.chosen[place].algorithm, self._parts[place], whole)
        return RoutedPending(exchange, payload, whole, self._network.silence_of)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        whole = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        key = source, _PIECES if whole.numel() > _SMALL_BYTES else 1
        if key not in self._broadcasts:
            algorithm = broadcast(self.plan.network, source, pieces=key[1])
            self._broadcasts[key] = algorithm, part_of(algorithm, self.rank)
        exchange = self._runner.start(*self._broadcasts[key], whole)
        return RoutedPending(exchange, Sum(tensor), tensor, self._network.silence_of)

    def close(self) -> None:
        self._network.close()
        self._companion.close()

    def abandon(self) -> None:
        self._network.abandon()
        self._companion.abandon()


class RoutedPending:
    """A sum under way. A `Pending`."""

    def __init__(
        self, exchange: LaneExchange, payload: Sum, whole: torch.Tensor, silence_of: Callable[[int], str]
    ) -> None:
        self._exchange, self._payload, self._whole, self._silence_of = exchange, payload, whole, silence_of
        self.sent_bytes = exchange.sent_bytes

    @property
    def owed(self) -> str:
        """The transfer that it waits for; see `TellsOwed`."""
        owed = self._exchange.owed()
        if not owed:
            return ""
        first = owed[0]
        return (
            f"chunk {first.chunk} from rank {first.rank}: {first.have_bytes} of {first.size_bytes} bytes are here, "
            f"the last {first.silent_s:.1f} s ago{self._silence_of(first.rank)}"
        )

    def wait(self, timeout: timedelta) -> bool:
        return self._exchange.wait(timeout)

    def done(self) -> bool:
        return self._exchange.done()

    def result(self) -> Reply:
        payload, whole = self._payload, self._whole
        if payload.tail is None or whole.data_ptr() == payload.tensor.data_ptr():
            return Total(payload.tensor, tail=payload.tail)
        return Total(whole[: payload.tensor.numel()], tail=whole[payload.tensor.numel() :])


def _add(dtype: torch.dtype, out: memoryview, own: memoryview, received: bytearray) -> None:
    """Add two parts of a vector."""
    mine, theirs = torch.frombuffer(own, dtype=dtype), torch.frombuffer(received, dtype=dtype)
    torch.add(mine, theirs, out=torch.frombuffer(out, dtype=dtype))
