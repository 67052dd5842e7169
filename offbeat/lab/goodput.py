"""Do the links carry what the scenario promises? Measured before every scenario, all hosts sending at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, ScenarioError
from offbeat.lab import command_lines
from offbeat.lab.network import bucket_bytes
from offbeat.topology import queue_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.lab.network import Network

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
    """Goodput of each host's link in 10^6 bit/s: host i sends to host i+1, all at the same time.

    Streams settle first; then they are measured for `seconds`, or longer where the slowest link needs it.

    Raises:
        NetworkError: if a stream fails.
    """
    hosts = [host.name for host in network.topology.hosts]
    if len(hosts) < 2:
        return {}
    settle_s, seconds = _times(network, seconds)
    # Filled one by one, so that what has started is ended even if the next cannot start.
    receivers: list[subprocess.Popen[str]] = []
    senders: list[subprocess.Popen[str]] = []
    try:
        for host in hosts:
            receivers.append(_start(network, host, "receive", str(_PORT), str(settle_s), str(seconds)))  # noqa: PERF401
        for sender, receiver in zip(hosts, [*hosts[1:], hosts[0]], strict=True):
            senders.append(_start(network, sender, "send", network.address(receiver), str(_PORT)))
        texts = [process.communicate(timeout=settle_s + seconds + _GRACE_S)[0] for process in receivers]
        for process in senders:
            process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired as error:
        raise NetworkError(
            f"Cannot measure the links: a stream took more than {settle_s + seconds + _GRACE_S:g} s. "
            "Close other programs, or choose lower rates (hosts.rate_mbps)."
        ) from error
    finally:
        for process in [*receivers, *senders]:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if any(process.returncode for process in [*receivers, *senders]):
        raise NetworkError("Cannot measure the links: a stream broke. Run `offbeat doctor` to see what is missing.")
    # Host i's stream is the one that host i+1 received.
    streams = [float(text) for text in [*texts[1:], texts[0]]]
    return {host: round(stream, 3) for host, stream in zip(hosts, streams, strict=True)}


def check(goodput_mbps: Mapping[str, float], network: Network) -> None:
    """Refuse links that this machine cannot shape as promised.

    Raises:
        ScenarioError: naming the first host whose stream was too slow.
    """
    hosts = list(goodput_mbps)
    for index, (host, measured) in enumerate(goodput_mbps.items()):
        receiver = hosts[(index + 1) % len(hosts)]
        rates = [network.topology.uplink(end).rate_mbps for end in (host, receiver)]
        shaped = [rate for rate in rates if rate is not None]
        if shaped and measured < LEAST_SHARE * min(shaped):
            raise ScenarioError(
                f"Cannot shape the link of {host} to {min(shaped):g} Mbit/s on this machine: with all hosts sending, a "
                f"stream reached {measured:.4g}. Lower the rate or the number of hosts, or close other programs "
                "(hosts.rate_mbps)."
            )


def _times(network: Network, seconds: float) -> tuple[float, float]:
    """Seconds that streams settle, and seconds that they are measured."""
    rates = [network.topology.uplink(host.name).rate_mbps for host in network.topology.hosts]
    shaped = [rate for rate in rates if rate is not None]
    if not shaped:
        return _SETTLE_S, seconds
    slowest_mbps = min(shaped)
    queue_s, packet_s = (
        size_bytes * 8 / (slowest_mbps * 1e6)
        for size_bytes in (queue_bytes(slowest_mbps), bucket_bytes(slowest_mbps, network.mtu)[0])
    )
    return min(_SETTLE_S + _SETTLE_QUEUES * queue_s, _SETTLE_MAX_S), max(seconds, _LEAST_PACKETS * packet_s)


def _start(network: Network, host: str, *arguments: str) -> subprocess.Popen[str]:
    command = command_lines.entered(network.namespace(host), [sys.executable, "-S", "-I", _PROBE, *arguments])
    return subprocess.Popen(
        command, env=network.mark(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
