"""How fast could turns at a server be at all, on the machines and links of `ps_uniform`?

    python -m benchmarks.turns_bound

One worker at a time pushes its contribution, which takes d; it has its parameters back a block later, and computes for
C, which varies from step to step as in the scenario. Nothing else costs anything: no message has to travel between two
turns, nobody looks at a clock. What is printed is the mean length of a round, in fixed order, and where whoever is
ready first has the next turn, which no order can beat by much.
"""

from __future__ import annotations

import heapq
import statistics
import sys
from pathlib import Path

from offbeat.model_profiles import size_bytes
from offbeat.scenario import Replay, Scenario
from offbeat.straggler_model import jitter

_GOODPUT = 0.955  # of a link's rate, as the lab measures it
_ROUNDS, _WARMUP = 400, 20
_SCENARIO = Path(__file__).with_name("scenarios") / "ps_uniform.toml"


def round_s(workers: int, compute_s: float, push_s: float, block_s: float, sigma: float, *, in_order: bool) -> float:
    """Mean seconds of a round.

    Args:
        compute_s, push_s, block_s: C, d, and how much later than its last byte a worker has its parameters.
        sigma: of the jitter of C.
        in_order: whether turns follow each other by rank.
    """
    steps = [0] * workers
    ready = [(compute_s * (rank + 1) / workers, rank) for rank in range(workers)]
    free_s, begun_s = 0.0, []
    for turn in range(workers * _ROUNDS):
        if in_order:
            ready_s, rank = next(one for one in ready if one[1] == turn % workers)
            ready.remove((ready_s, rank))
        else:
            ready_s, rank = heapq.heappop(ready)
        begin_s = max(ready_s, free_s)
        free_s = begin_s + push_s
        begun_s.append(begin_s)
        steps[rank] += 1
        again_s = free_s + block_s + compute_s * jitter(sigma, rank, steps[rank])
        heapq.heappush(ready, (again_s, rank))
    measured = begun_s[workers * _WARMUP :]
    return (measured[-1] - measured[0]) / (len(measured) - 1) * workers


def main() -> None:
    """Print both."""
    scenario = Scenario.from_toml(_SCENARIO.read_text())
    workload, rate_mbps = scenario.workload, scenario.topology.links[0].rate_mbps
    assert isinstance(workload, Replay)
    assert rate_mbps is not None
    bytes_per_s = _GOODPUT * rate_mbps * 1e6 / 8
    layers = workload.layers()
    compute_s = statistics.fmean([sum(layer.forward_s + layer.backward_s for layer in layers)])
    for sigma in (0.0, workload.jitter):
        for in_order in (True, False):
            took_s = round_s(
                len(scenario.workers.hosts), compute_s, size_bytes(layers) / bytes_per_s, 131072 / bytes_per_s, sigma,
                in_order=in_order,
            )  # fmt: skip
            how = "in fixed order" if in_order else "whoever is ready first"
            sys.stdout.write(f"jitter {sigma:.0%}, {how}: {1000 * took_s:.0f} ms a round\n")


if __name__ == "__main__":
    main()
