"""Do the links carry what the scenario promises? Measured before every scenario, all hosts sending at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, ScenarioError
from offbeat.lab import programs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.lab.network import Network

LEAST_SHARE = 0.85
"""Below this share of its rate a link is not what the scenario says. Headers alone take 4 %."""
_PORT = 29_400
_PROBE = str(Path(__file__).resolve().with_name("probe.py"))
_GRACE_S = 20.0


def measure(network: Network, *, seconds: float = 0.7) -> dict[str, float]:
    """Goodput of each host's link in 10^6 bit/s: host i sends to host i+1, all at the same time.

    Raises:
        NetworkError: if a stream fails.
    """
    hosts = [host.name for host in network.topology.hosts]
    if len(hosts) < 2:
        return {}
    # Filled one by one, so that what has started is ended even if the next cannot start.
    receivers: list[subprocess.Popen[str]] = []
    senders: list[subprocess.Popen[str]] = []
    try:
        for host in hosts:
            receivers.append(_start(network, host, "receive", str(_PORT), str(seconds)))  # noqa: PERF401
        for sender, receiver in zip(hosts, [*hosts[1:], hosts[0]], strict=True):
            senders.append(_start(network, sender, "send", network.address(receiver), str(_PORT)))
        texts = [process.communicate(timeout=seconds + _GRACE_S)[0] for process in receivers]
        for process in senders:
            process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired as error:
        raise NetworkError(
            f"Cannot measure the links: a stream took more than {seconds + _GRACE_S:g} s. "
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
    return {host: round(stream, 1) for host, stream in zip(hosts, streams, strict=True)}


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
                f"stream reached {measured:g}. Lower the rate or the number of hosts, or close other programs "
                "(hosts.rate_mbps)."
            )


def _start(network: Network, host: str, *arguments: str) -> subprocess.Popen[str]:
    command = programs.entered(network.namespace(host), [sys.executable, "-S", "-I", _PROBE, *arguments])
    return subprocess.Popen(
        command, env=network.mark(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
