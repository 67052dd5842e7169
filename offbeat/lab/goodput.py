"""Do the links carry what the scenario promises? Measured before every scenario, all of them busy at once.

Where hosts hang on one switch, each sends to the next one. In any other network there is a stream over each link in
each direction; behind that one stream by itself goes over as many links as any way has. Streams are named by the host
that sends, or by both ends, as "h0>h1".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offbeat.errors import NetworkError, ScenarioError
from offbeat.lab import command_lines
from offbeat.lab.link_shaping import bucket_bytes
from offbeat.topology import queue_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.lab.network import Network
    from offbeat.topology import Topology

LEAST_SHARE = 0.85
"""Below this share of its rate a link is not what the scenario says. Headers alone take 4 %."""
ATTEMPTS = 3
"""A machine that was busy for a second is no reason to refuse a scenario of half an hour."""
_PORT = 29_400
_PROBE = str(Path(__file__).resolve().with_name("bandwidth_probe.py"))
_GRACE_S = 20.0
_SETTLE_S = 0.3
_SETTLE_MAX_S = 6.0
_SETTLE_QUEUES = 6
"""A stream from nothing needs about so many times what the fullest queue on its way holds."""
_LEAST_PACKETS = 40
"""Fewer, and one that is on its way when the clock stops would count too much."""


class ProbeStream(NamedTuple):
    """A stream of bytes from one node to another.

    Args:
        rate_mbps: of the slowest link on its way; None if none is shaped.
    """

    name: str
    sender: str
    receiver: str
    rate_mbps: float | None


def ensure(network: Network) -> dict[str, float]:
    """Measure, again if a link fell short, up to `ATTEMPTS` times; what `measure` returns.

    Raises:
        NetworkError: if a stream fails.
        ScenarioError: if a link falls short each time.
    """
    attempts = 1
    while True:
        measured = measure(network)
        try:
            check(measured, network)
        except ScenarioError:
            attempts += 1
            if attempts > ATTEMPTS:
                raise
        else:
            return measured


def measure(network: Network, *, seconds: float = 0.7) -> dict[str, float]:
    """Goodput of each stream, in 10^6 bit/s.

    Streams settle first; then they are measured for `seconds`, or longer where the slowest link needs it.

    Raises:
        NetworkError: if a stream fails.
    """
    measured: dict[str, float] = {}
    for streams in streams_of(network.topology):
        measured |= _measure(network, streams, seconds)
    return measured


def check(goodput_mbps: Mapping[str, float], network: Network) -> None:
    """Refuse links that this machine cannot shape as promised.

    Raises:
        ScenarioError: naming the first stream that was too slow.
    """
    for stream in (stream for streams in streams_of(network.topology) for stream in streams):
        measured = goodput_mbps[stream.name]
        if stream.rate_mbps is not None and measured < LEAST_SHARE * stream.rate_mbps:
            where = f"of {stream.name}" if network.topology.is_star else f"from {stream.sender} to {stream.receiver}"
            raise ScenarioError(
                f"Cannot shape the link {where} to {stream.rate_mbps:g} Mbit/s on this machine: with all links busy, a "
                f"stream reached {measured:.4g}. Lower the rate or the number of hosts, or close other programs "
                "(hosts.rate_mbps, topology.rate_mbps)."
            )


def streams_of(topology: Topology) -> list[list[ProbeStream]]:
    """The streams to measure: those of a list all at once, one list after the other."""
    hosts = [host.name for host in topology.hosts]
    if len(hosts) < 2:
        return []
    if topology.is_star:
        ring = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
        return [[_stream(topology, a, b, name=a) for a, b in ring]]
    arcs = [ProbeStream(f"{arc.source}>{arc.target}", arc.source, arc.target, arc.rate_mbps) for arc in topology.arcs]
    farthest = max(hosts[1:], key=lambda host: len(topology.route(hosts[0], host)))
    far = _stream(topology, hosts[0], farthest, name=f"{hosts[0]}>{farthest}")
    return [arcs] if far.name in {arc.name for arc in arcs} else [arcs, [far]]


def _stream(topology: Topology, sender: str, receiver: str, *, name: str) -> ProbeStream:
    rates_mbps = [arc.rate_mbps for arc in topology.route(sender, receiver) if arc.rate_mbps is not None]
    return ProbeStream(name, sender, receiver, min(rates_mbps, default=None))


def _measure(network: Network, streams: Sequence[ProbeStream], seconds: float) -> dict[str, float]:
    """Measure streams that run at the same time."""
    settle_s, seconds = _times(network, seconds)
    limit_s = settle_s + seconds + _GRACE_S
    arguments: dict[str, list[str]] = {}
    for index, stream in enumerate(streams):
        port = str(_PORT + index)
        arguments.setdefault(stream.receiver, []).extend(["receive", port])
        arguments.setdefault(stream.sender, []).extend(["send", network.address(stream.receiver), port])
    probes: dict[str, subprocess.Popen[str]] = {}
    try:
        for node, words in arguments.items():
            probes[node] = _start(network, node, str(settle_s), str(seconds), *words)
        for probe in probes.values():
            assert probe.stdout is not None
            probe.stdout.readline()  # "ready", or nothing: then it has ended, and its exit code says so
        texts = {}
        for probe in probes.values():
            assert probe.stdin is not None
            probe.stdin.write("go\n")
            probe.stdin.flush()
        for node, probe in probes.items():
            texts[node] = probe.communicate(timeout=limit_s)[0].split()
    except subprocess.TimeoutExpired as error:
        raise NetworkError(
            f"Cannot measure the links: a stream took more than {limit_s:g} s. Close other programs, or choose lower "
            "rates (hosts.rate_mbps, topology.rate_mbps)."
        ) from error
    except BrokenPipeError:
        pass  # what ended has an exit code
    finally:
        for probe in probes.values():
            probe.kill()
            probe.wait()
            for pipe in (probe.stdin, probe.stdout):
                if pipe is not None:
                    pipe.close()
    if any(probe.returncode for probe in probes.values()):
        raise NetworkError("Cannot measure the links: a stream broke. Run `offbeat doctor` to see what is missing.")
    received = {node: iter(text) for node, text in texts.items()}
    return {stream.name: round(float(next(received[stream.receiver])), 3) for stream in streams}


def _times(network: Network, seconds: float) -> tuple[float, float]:
    """Seconds that streams settle, and seconds that they are measured."""
    shaped = [arc.rate_mbps for arc in network.topology.arcs if arc.rate_mbps is not None]
    if not shaped:
        return _SETTLE_S, seconds
    slowest_mbps = min(shaped)
    queue_s, packet_s = (
        size_bytes * 8 / (slowest_mbps * 1e6)
        for size_bytes in (queue_bytes(slowest_mbps), bucket_bytes(slowest_mbps, network.mtu)[0])
    )
    return min(_SETTLE_S + _SETTLE_QUEUES * queue_s, _SETTLE_MAX_S), max(seconds, _LEAST_PACKETS * packet_s)


def _start(network: Network, node: str, *arguments: str) -> subprocess.Popen[str]:
    command = command_lines.entered(network.namespace(node), [sys.executable, "-S", "-I", _PROBE, *arguments])
    return subprocess.Popen(
        command,
        env=network.mark(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
