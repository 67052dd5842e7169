"""The links of a scenario, seen from above the transport."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.topology import queue_bytes

if TYPE_CHECKING:
    from offbeat.scenario import Scenario

GOODPUT = 0.95
"""Part of a rate that is left behind headers (52 of 1,500 bytes, and 14 of the frame); what the lab's streams reach."""
LATENCY_S = 0.0005
"""From one process to another, on links that are idle: queues, wake-ups, Python."""
_LOOPBACK = 2.5e9


@dataclass(frozen=True)
class Links:
    """Bytes per second in each direction.

    Args:
        worker: of each worker's link, by rank.
        servers: of all servers' links together; parameters are spread over them evenly.
        shards: how many servers.
        queue_s: how long a message waits where a server's link is busy: it is behind half a queue on average.
        to_server_s: of a message between a worker and a server, beyond that.
        to_worker_s: between two workers.
    """

    worker: tuple[float, ...]
    servers: float
    shards: int
    queue_s: float
    to_server_s: float = LATENCY_S
    to_worker_s: float = LATENCY_S

    @classmethod
    def of(cls, scenario: Scenario) -> Links:
        """The links of a scenario; its servers' may be those beside rank 0 if it has none of its own.

        Where hosts do not hang on one switch, a worker's is the slowest of those that it has.
        """
        topology = scenario.topology
        if not topology.is_star:
            workers = [host.name for host in scenario.workers.hosts]
            slowest = {
                name: min(_bytes_per_s(arc.rate_mbps) for arc in topology.arcs if arc.source == name)
                for name in workers
            }
            return cls(tuple(slowest.values()), math.inf, 1, 0.0)
        rates = {host.name: _bytes_per_s(topology.uplink(host.name).rate_mbps) for host in topology.hosts}
        servers = [rates[name] for name in scenario.servers]
        # Each holds an equal part, so the slowest of them decides.
        together = len(servers) * min(servers, default=math.inf) if servers else _LOOPBACK
        return cls(
            worker=tuple(rates[host.name] for host in scenario.workers.hosts),
            servers=together,
            shards=max(1, len(servers)),
            queue_s=_queue_s(scenario),
            to_server_s=LATENCY_S + _delay_s(scenario),
            # On its way it passes two links, each of which may be bad.
            to_worker_s=LATENCY_S + min(2, len(scenario.impaired)) * _delay_s(scenario),
        )

    @property
    def meeting_at_switch(self) -> Links:
        """The same with a server where the workers' links meet, without a link of its own."""
        return dataclasses.replace(self, servers=math.inf, shards=1, queue_s=0.0)

    @property
    def slowest(self) -> float:
        """The rate of the slowest worker's link."""
        return min(self.worker)


def _queue_s(scenario: Scenario) -> float:
    rates_mbps = [scenario.topology.uplink(name).rate_mbps for name in scenario.servers]
    shaped_mbps = [rate_mbps for rate_mbps in rates_mbps if rate_mbps is not None]
    return max((queue_bytes(rate) * 8 / (rate * 1e6) / 2 for rate in shaped_mbps), default=0.0)


def _delay_s(scenario: Scenario) -> float:
    """The delay that a bad link adds; losses are not modelled."""
    impair = scenario.impair
    return 0.0 if impair is None else (impair.delay_ms + impair.jitter_ms / 2) / 1e3


def _bytes_per_s(rate_mbps: float | None) -> float:
    return _LOOPBACK if rate_mbps is None else GOODPUT * rate_mbps * 1e6 / 8
