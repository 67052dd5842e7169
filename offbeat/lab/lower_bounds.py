"""How fast could a row be at best? C is computation, B a link's rate, N the workers, S the bytes of a gradient.

* all-reduce over one switch: each host has to send S, and all together 2 (N-1) S, at best while they compute:
  max(C, S/min B, 2 (N-1) S/sum B), see `Topology.allreduce_bound_s`. S is what a step sends on average: half of it in
  16 bits, an eighth where workers exchange after every eighth step. How little PowerSGD sends is not counted: C.
* all-reduce over any other network: no cut carries more than the links across it, whatever method: see
  `offbeat.collective.bounds`.
* switch: each host sends S, and receives it, at best while it computes: max(C, S/min B).
* server, one update of all workers' contributions: nothing leaves before the optimizer steps, so what all workers are
  given back passes the server's link after the computation; at best while contributions still arrive: C + N d, where
  d = S/B is one copy of the model on that link. (A server that does not pipeline the two takes C + 2 N d.) Parameters
  come back whole, however narrow contributions are; where they come back after every eighth step only, so does d.
* server, contributions applied one by one: while one worker has the link the others compute: max(C + d, N d). (Without
  pipelining max(C + 2 d, N d).) N d holds as long as all train.
* server, with a scheduler: contributions leave while backward computes, parameters come back while the next forward
  pass does: max(C, N d), whatever the policy.

C is that of the slowest worker where all wait for all; the mean where each goes at its own pace; and the harmonic mean
where batches follow the machines: then all take equally long for a round of the same number of samples.

Where a controller may swap policies, the least that any of them demands. Where a fault may take a worker away for so
long that others go on without it, what those demand.

With several shards each link carries an equal part of d. Where a fault gives links another rate, the mean over the
measured steps of what holds in each.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING

import msgspec

from offbeat.collective.bounds import bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.lab.jobs import RowJob
    from offbeat.lab.results import RawRun, ResultFile
    from offbeat.scenario import Scenario
    from offbeat.topology import Topology

ALLREDUCE = "max(C, S/min B, 2 (N-1) S/sum B)"
CUTS = "max(C, all-reduce over the narrowest cuts)"
IN_NETWORK = "max(C, S/min B)"
TOGETHER = "C + N d"
ONE_BY_ONE = "max(C + d, N d)"
OVERLAPPED = "max(C, N d)"


def limit(job: RowJob, raw: Sequence[RawRun]) -> tuple[float, str]:
    """Least seconds per step of a row, and the formula.

    Args:
        raw: what all rows measured: the work costs the same in each.
    """
    steps = job.scenario.measured_steps
    changes = {fault.step + 1 for fault in job.faults if fault.stays}
    begins = sorted({steps.start, *(step for step in changes if step in steps)})
    found = [_limit(job, job.scenario.at(begin), raw) for begin in begins]
    counts = [end - begin for begin, end in itertools.pairwise([*begins, steps.stop])]
    mean_s = sum(count * bound_s for count, (bound_s, _) in zip(counts, found, strict=True)) / len(steps)
    return (found[0][0] if len(found) == 1 else mean_s), found[0][1]


def _limit(job: RowJob, scenario: Scenario, raw: Sequence[RawRun]) -> tuple[float, str]:
    demand = job.demand
    hosts = scenario.workers.hosts
    seen = sorted({one.rank for one in raw if one.rank < len(hosts)})
    staying = [rank for rank in seen if rank not in job.may_lose] or seen[:1]
    computing_s = [statistics.median(one.compute_s for one in raw if one.rank == rank) for rank in staying]
    compute_s = computation_s(computing_s, together=demand.together, tuned=demand.tuned)
    size_bytes = demand.part * max(one.gradient_bytes for one in raw)
    if job.served and scenario.servers:
        return served(
            scenario,
            compute_s=compute_s,
            size_bytes=size_bytes,
            workers=len(staying),
            together=demand.together,
            overlaps=demand.overlaps,
        )
    staying_names = {hosts[rank].name for rank in staying}
    workers = scenario.workers.among([host.name for host in scenario.workers.hosts if host.name in staying_names])
    if job.switched:
        return max(compute_s, workers.switch_bound_s(size_bytes)), IN_NETWORK
    return allreduce(workers, compute_s=compute_s, size_bytes=size_bytes)


def again(report: ResultFile, rows: Sequence[RowJob]) -> ResultFile:
    """A result with the limits that follow from its raw records.

    Args:
        rows: of its scenario, in order.
    """
    found = [limit(job, report.raw) for job in rows]
    return msgspec.structs.replace(
        report,
        bounds={job.row.name: words for job, (_, words) in zip(rows, found, strict=True)},
        rows=[
            msgspec.structs.replace(row, bound_s=bound_s, percent_of_bound=100 * bound_s / row.seconds_per_step.median)
            for row, (bound_s, _) in zip(report.rows, found, strict=True)
        ],
    )


def computation_s(computing_s: Sequence[float], *, together: bool, tuned: bool) -> float:
    """C.

    Args:
        computing_s: of each worker, for an equal batch.
        together: whether one update takes the contributions of all workers.
        tuned: whether batches follow the machines.

    >>> [computation_s([0.2, 0.4], together=t, tuned=u) for t, u in ((True, False), (False, False), (True, True))]
    [0.4, 0.30000000000000004, 0.26666666666666666]
    """
    if tuned:
        return statistics.harmonic_mean(computing_s)
    return max(computing_s) if together else statistics.fmean(computing_s)


def allreduce(workers: Topology, *, compute_s: float, size_bytes: float) -> tuple[float, str]:
    """Least seconds per step of a row without a server, and the formula.

    Args:
        compute_s: C.
        size_bytes: S.
    """
    return max(compute_s, allreduce_s(workers, size_bytes)), ALLREDUCE if workers.is_star else CUTS


def allreduce_s(workers: Topology, size_bytes: float) -> float:
    """Least seconds in which `size_bytes` of each host can be summed by whatever method, and all be given the sum.

    Raises:
        PlanError: if hosts do not hang on one switch, and scipy is not installed.
    """
    if workers.is_star:
        return workers.allreduce_bound_s(size_bytes)
    return bound(workers, size_bytes).any_method_s


def served(
    scenario: Scenario,
    *,
    compute_s: float,
    size_bytes: float,
    workers: int,
    together: bool,
    overlaps: bool = False,
) -> tuple[float, str]:
    """The same for a row with a server.

    Args:
        workers: N.
        together: whether one update takes the contributions of all workers.
        overlaps: whether all that passes the link can do so while workers compute.
    """
    all_s = _server_s(scenario, size_bytes, workers)
    if overlaps:
        return max(compute_s, all_s), OVERLAPPED
    if together:
        return compute_s + all_s, TOGETHER
    return max(compute_s + all_s / workers, all_s), ONE_BY_ONE


def _server_s(scenario: Scenario, size_bytes: float, workers: int) -> float:
    """Least seconds in which workers can push `size_bytes` each to the servers, and pull as much."""
    topology = scenario.topology
    if topology.is_star:
        return topology.server_bound_s(size_bytes, scenario.servers, workers)
    # Whatever the ways to them, it passes the servers' own links.
    together = [
        sum(arc.rate_mbps or math.inf for arc in topology.arcs if getattr(arc, end) == name)
        for name in scenario.servers
        for end in ("source", "target")
    ]
    return workers * size_bytes * 8e-6 / (len(scenario.servers) * min(together))
