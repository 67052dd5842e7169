"""Network interfaces of this machine: their addresses, the one Gloo takes, and the one by which a host is reached.

Gloo listens at the address to which the hostname resolves, unless GLOO_SOCKET_IFNAME names an interface. Many Linux
distributions resolve a machine's own name to 127.0.1.1, at which no other machine reaches it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIOCGIFADDR = 0x8915


def interface_addresses() -> dict[str, str]:
    """IPv4 address of each interface; "" for one without."""
    return {name: interface_address(name) for _, name in socket.if_nameindex()}


def interface_address(interface: str) -> str:
    """The IPv4 address of an interface; "" if it has none, or there is no such interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(packed[20:24])


def nominal_mbps(interface: str, root: Path = Path("/sys/class/net")) -> int | None:
    """The rate that an interface says it has, in 10^6 bit/s; None if it says none, as loopback does."""
    try:
        rate_mbps = int((root / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return rate_mbps if rate_mbps > 0 else None


def interface_of(address: str) -> str:
    """The interface that has an IPv4 address; "" if none has."""
    return next((name for name, other in interface_addresses().items() if other == address), "")


def resolve_hostname() -> str:
    """The address Gloo takes for this machine's name: the first, IPv4 or IPv6, that can be bound; "" if none can."""
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, 0, socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in entries:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return str(address[0])
    return ""


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches `address`, as IPv4 or IPv6."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def shown_address(name: tuple[object, ...]) -> str:
    """The address of one end of a connection, as `socket.getsockname` returns it, as "host:port".

    >>> shown_address(("10.0.0.1", 7070)), shown_address(("::1", 7070, 0, 0))
    ('10.0.0.1:7070', '[::1]:7070')
    """
    host, port = str(name[0]), name[1]
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host.partition("%")[0]).version == 6:
            return f"[{host}]:{port}"
    return f"{host}:{port}"


def address_for_peers(environ: Mapping[str, str]) -> str:
    """The address at which the other workers reach this machine, on the network that Gloo uses.

    Args:
        environ: with GLOO_SOCKET_IFNAME, MASTER_ADDR, or neither.

    Raises:
        NetworkError: if there is none.
    """
    interface, first = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], environ.get("MASTER_ADDR", "")
    address = interface_address(interface) if interface else address_towards(first or socket.gethostname())
    if not address:
        raise NetworkError(
            f"Cannot tell at which address the other machines reach this one, {socket.gethostname()}: "
            f"GLOO_SOCKET_IFNAME is {interface!r} and MASTER_ADDR {first!r}. Set GLOO_SOCKET_IFNAME to the interface "
            "by which they do; `offbeat doctor` lists them."
        )
    return address


def address_towards(host: str) -> str:
    """The IPv4 address by which this machine reaches `host`, also if that is this machine; "" if it does not.

    Connecting a datagram socket sends nothing; it only chooses the address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
