"""Shape one end of a cable, in the network namespace in which it lies. Rules, each measured with plain TCP at 20, 200
and 1000 Mbit/s (goodput 92 to 96 % of the rate, headers included):

* A token bucket passes a packet only if it fits in the bucket, and splits larger GSO packets in software, which costs
  four times the CPU. So packets are limited (`gso_max_size`) to 0.6 ms of the link, or a frame if that is more, and the
  bucket holds two of them.
* The queue before the bucket holds 25 ms, as a switch with shallow buffers, and at least 128 KiB for slow links.
* A rate can change while the link is in use (`tc qdisc change`): what waits in the queue stays there. The bucket does
  not shrink with it: a packet that was made for a larger one would never pass.
* A link is cut by a queue in which no frame has room: what comes is dropped, what waited still leaves.
* All hosts run TCP Reno: the only algorithm that every kernel lets a namespace choose. Without competing traffic it
  fills these links as CUBIC does, while BBR's probing makes step times of the same work differ.
* IPv6 is off: its neighbour and multicast chatter would be in every byte count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offbeat.topology import queue_bytes

CONGESTION_CONTROL = "reno"
_ETHERNET_BYTES = 14
_NO_ROOM_BYTES = 1


def bucket_bytes(rate_mbps: float, mtu: int = 1500) -> tuple[int, int]:
    """Largest packet and size of the token bucket, in bytes, with which a link of `rate_mbps` is shaped."""
    packet = int(min(max(rate_mbps * 1e6 / 8 * 0.0006, 4096, mtu + _ETHERNET_BYTES), 65536))
    return packet, 2 * packet


def shape(kernel: Any, interface: int, rate_mbps: float | None, mtu: int) -> None:
    """Give an interface of this namespace a rate, for the first time; None is not shaped.

    Args:
        kernel: an `IPRoute` of this namespace.
        interface: its index.
        mtu: bytes that a frame carries.
    """
    if rate_mbps is not None:
        _set_rate(kernel, "add", interface, rate_mbps, mtu, bucket_bytes(rate_mbps, mtu)[1])


def reshape(name: str, rate_mbps: float, most_mbps: float, mtu: int, *, is_cut: bool = False) -> None:
    """Give an interface of this namespace another rate.

    Args:
        most_mbps: the highest that it has had.
        is_cut: nothing passes any more, until it is shaped again.
    """
    from pyroute2 import IPRoute

    with IPRoute() as kernel:
        interface = kernel.link_lookup(ifname=name)[0]
        _set_rate(kernel, "change", interface, rate_mbps, mtu, bucket_bytes(most_mbps, mtu)[1], is_cut=is_cut)


def configure_stack(*, forwards: bool = False) -> None:
    """Have this namespace talk IPv4 as all hosts of a lab do.

    Args:
        forwards: it passes on what is meant for others.
    """
    write_sysctl("ipv6/conf/all/disable_ipv6", "1")
    write_sysctl("ipv6/conf/default/disable_ipv6", "1")
    write_sysctl("ipv4/tcp_congestion_control", CONGESTION_CONTROL)
    # As on machines that are set up for training (`offbeat doctor` asks for it): links rest between two steps.
    write_sysctl("ipv4/tcp_slow_start_after_idle", "0")
    if forwards:
        write_sysctl("ipv4/ip_forward", "1")
        for scope in ("all", "default"):  # the way back may be another one, and nobody is to be told of a shorter one
            write_sysctl(f"ipv4/conf/{scope}/rp_filter", "0")
            write_sysctl(f"ipv4/conf/{scope}/send_redirects", "0")


def write_sysctl(name: str, value: str) -> None:
    """Set a variable of this namespace."""
    path = Path("/proc/sys/net") / name
    # A kernel built without IPv6 has nothing to switch off.
    if path.exists() or not name.startswith("ipv6/"):
        path.write_text(value)


def _set_rate(
    kernel: Any, command: str, interface: int, rate_mbps: float, mtu: int, burst_bytes: int, *, is_cut: bool = False
) -> None:
    packet_bytes, _ = bucket_bytes(rate_mbps, mtu)
    rate_bytes_per_s = rate_mbps * 1e6 / 8
    limit_bytes = _NO_ROOM_BYTES if is_cut else burst_bytes + queue_bytes(rate_mbps)
    kernel.link("set", index=interface, gso_max_size=packet_bytes, gro_max_size=packet_bytes)
    kernel.tc(command, "tbf", interface, rate=int(rate_bytes_per_s), burst=burst_bytes, limit=limit_bytes)
