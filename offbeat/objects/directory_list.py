"""The directories that a store names: all stores name the same ones, in the same order, or names lead to several."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.protocol.objects import StoreHello


def why_no_member(hello: StoreHello, other: StoreHello) -> str:
    """Return why a store cannot have the same directories as another one, as a sentence; "" if it may."""
    same_place = (hello.number, len(hello.directories)) == (other.number, len(other.directories))
    if same_place and all(_may_be_one(*pair) for pair in zip(hello.directories, other.directories, strict=True)):
        return ""
    return (
        f"The store at {hello.address} has this directory as number {hello.number + 1} of "
        f"{','.join(hello.directories)}, and the store at {other.address} as number {other.number + 1} of "
        f"{','.join(other.directories)}. Name the same directories in the same order for all stores "
        "(--directories, OFFBEAT_DIRECTORIES)."
    )


def _may_be_one(one: str, other: str) -> bool:
    """Whether two addresses may lead to one directory, which its own machine may call otherwise than others do."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    known = _numbers(host), _numbers(other_host)
    return port == other_port and (None in known or known[0] == known[1])


def _numbers(host: str) -> str | None:
    """The number of a host, if it is said and is the same on all machines."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    return None if address.is_loopback else str(address)
