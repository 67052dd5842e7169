"""How fast could a row be at best? C is computation, S the bytes of a gradient, B a link's rate, N the workers.

* all-reduce: each host has to send 2 (N-1)/N S, at best while it computes: max(C, 2 (N-1)/N S/B).
* server, one update of all workers' contributions: nothing leaves before the optimizer steps, so all contributions pass
  the server's link after the computation; at best the update travels back while they still arrive: C + N d, where
  d = S/B is one copy of the model on that link. (A server that does not pipeline the two takes C + 2 N d.)
* server, contributions applied one by one: while one worker has the link the others compute: max(C + d, N d). (Without
  pipelining max(C + 2 d, N d).)

C is that of the slowest worker where all wait for all; the mean where each goes at its own pace; and the harmonic mean
where batches follow the machines: then all take equally long for a round of the same number of samples.

With several shards each link carries an equal part of d.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.scenario import Scenario

ALLREDUCE = "max(C, 2 (N-1)/N S/B)"
TOGETHER = "C + N d"
ONE_BY_ONE = "max(C + d, N d)"


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


def allreduce(scenario: Scenario, *, compute_s: float, size_bytes: float) -> tuple[float, str]:
    """Least seconds per step of a row without a server, and the formula.

    Args:
        compute_s: C.
        size_bytes: S.
    """
    return max(compute_s, scenario.workers.allreduce_bound_s(size_bytes)), ALLREDUCE


def served(scenario: Scenario, *, compute_s: float, size_bytes: float, together: bool) -> tuple[float, str]:
    """The same for a row with a server.

    Args:
        together: whether one update takes the contributions of all workers.
    """
    workers = len(scenario.workers.hosts)
    all_s = scenario.topology.server_bound_s(size_bytes, scenario.servers, workers)
    if together:
        return compute_s + all_s, TOGETHER
    return max(compute_s + all_s / workers, all_s), ONE_BY_ONE
