"""The offloads of an interface: checksums, packets put together as they come in (GRO), XDP programs."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from dataclasses import dataclass

from offbeat.wire.interfaces import address_towards, interface_addresses

_SIOCETHTOOL = 0x8946
_GET_TX_CHECKSUM, _GET_RX_CHECKSUM, _GET_GRO = 0x16, 0x14, 0x2B  # ETHTOOL_GTXCSUM, ETHTOOL_GRXCSUM, ETHTOOL_GGRO


@dataclass(frozen=True)
class Offloads:
    """The offloads of an interface; None for what cannot be read.

    Args:
        interface: its name.
        sends_checksums: whether it computes the checksums of what is sent.
        checks_checksums: whether it checks those of what comes in.
        gro: whether packets that come in are put together.
        xdp: the way an XDP program is attached, such as "xdpgeneric"; "none" if there is none.
    """

    interface: str
    sends_checksums: bool | None
    checks_checksums: bool | None
    gro: bool | None
    xdp: str | None


def interface_towards(host: str) -> str:
    """The interface by which this machine reaches `host`; "" if it cannot be told."""
    addresses = interface_addresses()
    try:
        is_own = socket.gethostbyname(host) in addresses.values()
    except OSError:
        return ""
    address = address_towards(host)
    return "lo" if is_own else next((name for name, one in addresses.items() if one and one == address), "")


def offloads_of(interface: str) -> Offloads:
    """Read the offloads of an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        out, come_in, gro = (_ask(sock, interface, what) for what in (_GET_TX_CHECKSUM, _GET_RX_CHECKSUM, _GET_GRO))
    return Offloads(interface, out, come_in, gro, _xdp_of(interface))


def _ask(sock: socket.socket, interface: str, what: int) -> bool | None:
    value = array.array("I", [what, 0])  # struct ethtool_value
    at, _ = value.buffer_info()
    try:
        fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), at))
    except OSError:
        return None
    return bool(value[1])


def _xdp_of(interface: str) -> str | None:
    try:
        from pyroute2 import IPRoute
    except ImportError:
        return None
    try:
        with IPRoute() as kernel:
            found = kernel.get_links(socket.if_nametoindex(interface))[0].get_attr("IFLA_XDP")
    except OSError:
        return None
    return None if found is None else str(found.get_attr("IFLA_XDP_ATTACHED") or "none")
