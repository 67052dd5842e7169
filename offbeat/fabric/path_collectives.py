"""Sums and broadcasts along planned paths, over one mesh of links.

All workers make the same paths of what they know of the network, and compare digests before the first sum.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from offbeat.collective.programs import broadcast
from offbeat.collective.rounds import in_rounds
from offbeat.errors import DisagreementError, NetworkError
from offbeat.fabric.discovery import can_measure_again, measure_again
from offbeat.fabric.introduction import first_unlike
from offbeat.fabric.path_planner import plan_paths, suited, timed
from offbeat.fabric.process_group import never_destroy
from offbeat.fabric.throughput_watch import ThroughputWatch
from offbeat.payload import Total
from offbeat.topology import MAX_RATE_MBPS
from offbeat.wire.lane import BusyTime

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    import torch.distributed as dist

    from offbeat.collective import CollectiveMethod
    from offbeat.fabric.algorithm_runner import AlgorithmRunner, Exchange
    from offbeat.fabric.discovery import MeasuredNetwork
    from offbeat.fabric.lane_network import LaneNetwork
    from offbeat.fabric.path_planner import PathPlan, PricedPaths
    from offbeat.payload import Reply
    from offbeat.pending import Pending
    from offbeat.topology import Link, Topology

_log = logging.getLogger("offbeat")

GroupSum: TypeAlias = "Callable[[torch.Tensor], Pending]"
"""Begins to sum a tensor [D] in place by torch's group."""

_SMALL_BYTES, _PIECES = 1 << 20, 16  # of broadcasts


class PathTrials:
    """Trials of paths.

    Args:
        runner: carries them out.
        group: sums up by torch's group.
    """

    def __init__(self, runner: AlgorithmRunner, group: GroupSum) -> None:
        self._runner, self._group = runner, group

    def measure(self, paths: PricedPaths) -> float:
        """Sum up a vector; how long it took, in seconds.

        Raises:
            NetworkError: if it does not come to an end.
        """
        whole = torch.zeros(paths.size_bytes // 4, device=self._runner.device)
        begin = self._group if paths.by_group else self._runner.prepared(paths.algorithm)
        return timed(lambda: self._until_over(begin(whole)))

    def _until_over(self, exchange: Exchange | Pending) -> None:
        patience = self._runner.network.patience
        if not exchange.wait(patience):
            raise NetworkError(f"Cannot choose paths: a trial did not end within {patience.total_seconds():g} s.")
        if self._runner.device.type == "cuda":  # NCCL's collectives hold up the stream alone
            torch.cuda.synchronize(self._runner.device)


class PathCollectives:
    """Sums and broadcasts by a plan, begun in the same order on all. A `GroupCollectives`.

    Args:
        runner: carries them out.
        measured: what the plan was made of.
        plan: the paths.
        method: how they were found; None for any.
        group_sum: sums up by torch's group.
        group: that, for exchanges of other kinds; None if nobody asks for it.
    """

    def __init__(
        self,
        runner: AlgorithmRunner,
        measured: MeasuredNetwork,
        plan: PathPlan,
        method: CollectiveMethod | None,
        group_sum: GroupSum,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._runner, self._network, self._method = runner, runner.network, method
        self._group_sum, self._group = group_sum, group
        self._watch, self._group_busy = ThroughputWatch(), BusyTime()
        self._go_by(measured, plan)

    def _go_by(self, measured: MeasuredNetwork, plan: PathPlan) -> None:
        self.measured, self.plan = replace(measured, group_ratios=plan.group_ratios), plan
        self._broadcasts: dict[tuple[int, int], Callable[[torch.Tensor], Exchange]] = {}  # by place and pieces
        self._sums = [self._runner.prepared(one.algorithm) for one in plan.chosen]

    @property
    def group(self) -> dist.ProcessGroup:
        assert self._group is not None, "made for a generation"
        return self._group

    @property
    def is_suspicious(self) -> bool:
        return self._network.is_broken

    def goes_by_group(self, size_bytes: int) -> bool:
        """Whether torch's group makes sums of so many bytes."""
        return self.plan.chosen[self.plan.for_size(size_bytes)].by_group

    def sum_along_paths(self, tensor: torch.Tensor, reply: Callable[[], Reply] | None = None) -> PathPending:
        """Begin to sum a tensor [D] in place, though not by torch's group."""
        exchange = self._sums[self.plan.for_size(tensor.numel() * tensor.element_size())](tensor)
        return PathPending(exchange, reply or (lambda: Total(tensor)), self._network.silence_of)

    def all_reduce(self, tensor: torch.Tensor, reply: Callable[[], Reply] | None = None) -> Pending:
        if self.goes_by_group(tensor.numel() * tensor.element_size()):
            return GroupPending(self._group_sum(tensor), reply or (lambda: Total(tensor)), self._group_busy)
        return self.sum_along_paths(tensor, reply)

    def broadcast(self, tensor: torch.Tensor, place: int, reply: Callable[[], Reply] | None = None) -> PathPending:
        data = tensor.view(torch.uint8)
        key = place, _PIECES if data.numel() > _SMALL_BYTES else 1
        if key not in self._broadcasts:
            algorithm = broadcast(self.plan.network, place, pieces=key[1])
            self._broadcasts[key] = self._runner.prepared(in_rounds(algorithm) if self._runner.in_rounds else algorithm)
        return PathPending(self._broadcasts[key](data), reply or (lambda: Total(tensor)), self._network.silence_of)

    def wants_reroute(self) -> bool:
        """See `Reroutes`: what the links carry has changed, as far as this worker can tell."""
        now_s, busy, group = time.monotonic(), self._runner.busy, self._group_busy
        self._watch.sample(busy.sent_bytes + group.sent_bytes, busy.busy_s(now_s) + group.busy_s(now_s))
        return self._watch.is_alarming(now_s) and can_measure_again(self.measured.network)

    def reroute(self, meet: Callable[[str], list[str]]) -> str:
        """See `Reroutes`; raises NetworkError if a trial did not end: nobody knows then who has begun what."""
        names = meet(self._network.name)
        if set(names) != {self._network.name} or len(names) != self._network.world:
            return ""  # others are in another generation, or will be
        try:
            measured = measure_again(self._network, self.measured, meet)
        except NetworkError as error:  # on all: whoever is lost is found out by the next exchange
            _log.debug("Paths stay as they are: %s", error)
            measured = None
        if measured is None:
            self._watch.was_false(time.monotonic())
            return ""
        trials, method = PathTrials(self._runner, self._group_sum), suited(self._method, measured.network)
        plan = plan_paths(measured, method, trials.measure, meet, rounds=self._runner.in_rounds)
        check_alike(plan, meet, self._network)
        before, self._watch = self.measured, ThroughputWatch()
        self._go_by(measured, plan)
        large = plan.chosen[-1]
        return (
            f"Paths are planned anew, since {_changes(before.network, measured.network)}: large sums go by "
            f"{large.name}."
        )

    def close(self) -> None:
        self._runner.close()
        self._network.close()

    def abandon(self) -> None:
        self._runner.abandon()
        self._network.abandon()
        if self._group is not None:
            never_destroy(self._group)


class GroupPending:
    """A sum that torch's group makes. A `Pending`.

    Args:
        pending: it.
        reply: makes the reply, once it is over.
        busy: notes what it sent, and how long it was waited for.
    """

    def __init__(self, pending: Pending, reply: Callable[[], Reply], busy: BusyTime) -> None:
        self._pending, self._reply, self._busy = pending, reply, busy
        self.sent_bytes, self._is_over = pending.sent_bytes, False
        busy.began(time.monotonic())

    def wait(self, timeout: timedelta) -> bool:
        if self._pending.wait(timeout) and not self._is_over:
            self._is_over = True
            self._busy.sent_bytes += self.sent_bytes
            self._busy.ended(time.monotonic())
        return self._is_over

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> Reply:
        return self._reply()


class PathPending:
    """An exchange along paths that is under way. A `Pending`; once its links are gone nothing writes to its memory.

    Args:
        exchange: it.
        reply: makes the reply, once it is over.
        silence_of: says of a rank that it is silent.
    """

    def __init__(self, exchange: Exchange, reply: Callable[[], Reply], silence_of: Callable[[int], str]) -> None:
        self._exchange, self._reply, self._silence_of = exchange, reply, silence_of
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

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """See `Exchange.add_done_callback`."""
        self._exchange.add_done_callback(callback)

    def result(self) -> Reply:
        return self._reply()


def _changes(before: Topology, after: Topology) -> str:
    """Say which link has changed most."""
    found = [
        (max(was, now) / min(was, now), one.a, one.b, was, now)
        for one, other in zip(before.links, after.links, strict=True)
        for was, now in zip(_numbers(one), _numbers(other), strict=True)
    ]
    _, a, b, was, now = max(found)
    return f"the link between {a} and {b} carries {now:.3g} Mbit/s instead of {was:.3g}"


def _numbers(link: Link) -> tuple[float, float]:
    there, back = link.rates_mbps
    return there or MAX_RATE_MBPS, back or MAX_RATE_MBPS


def check_alike(plan: PathPlan, meet: Callable[[str], list[str]], network: LaneNetwork) -> None:
    """See that all go by the same paths.

    Raises:
        DisagreementError: if not.
    """
    mine = " ".join(one.digest for one in plan.chosen)
    if (found := first_unlike(mine, meet)) is not None:
        place, theirs = found
        raise DisagreementError(
            f"Cannot sum along paths that differ: rank {network.members[place]} goes by {theirs}, and rank "
            f"{network.rank} by {mine} ({', '.join(one.name for one in plan.chosen)}). Run the same offbeat "
            "and the same plan."
        )


def log_paths(plan: PathPlan, measured: MeasuredNetwork, network: LaneNetwork) -> None:
    """Log what was chosen, and what the network that was found does not explain; on the first of the workers."""
    if network.place:
        return
    links = measured.network.links
    if [link.a for link in links] == [host.name for host in measured.network.hosts]:
        for rank, interface, link in zip(network.members, network.interfaces, links, strict=True):
            _log.info("Rank %d sends %.3g and receives %.3g Mbit/s over %s.", rank, *_numbers(link), interface)
    for one in plan.chosen:
        took = "not tried" if one.measured_s is None else f"took {one.measured_s * 1e3:.3g} ms"
        _log.info(
            "Sums of about %d bytes go by %s: predicted %.3g ms, %s.",
            *(one.size_bytes, one.name, one.predicted_s * 1e3, took),
        )
    for a, b in measured.unlike:
        _log.info(
            "From rank %d to rank %d comes much less than one switch would carry: say which links there are with "
            "OFFBEAT_TOPOLOGY.",
            *(network.members[a], network.members[b]),
        )
