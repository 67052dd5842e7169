"""The introduction of workers who know each other already (by a process group, or a store): where each listens."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.errors import NetworkError
from offbeat.payload import Gather, Total
from offbeat.wire.credentials import Certificates, Token
from offbeat.wire.interfaces import address_for_peers, interface_of, nominal_mbps

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fabric.fabric import Fabric
    from offbeat.server.launch import ShardSettings
    from offbeat.wire.credentials import Credentials

_POLL = timedelta(milliseconds=20)


@dataclass(frozen=True)
class Introduction:
    """One worker's answer to where the others find it.

    Args:
        address: "host:port" at which it listens.
        interface: over which it has its links, for people.
    """

    address: str
    interface: str


def introduce(
    meet: Callable[[str], list[str]],
    settings: ShardSettings | None,
    listen: Callable[[str, Credentials], str],
) -> list[Introduction]:
    """Have each worker listen, and tell the others where. Collective; returns what all say, by place.

    Args:
        meet: tells the others what this worker has to say, and returns what all say, by place.
        settings: the credentials; None for a token that the first worker draws for all.
        listen: listens at this address, with these credentials; returns the "host:port" that the others are to dial.

    Raises:
        PeerError: if this worker's certificate is not good for its address.
    """
    said = [json.loads(text) for text in meet(json.dumps({"token": secrets.token_hex(32)}))]
    credentials = None if settings is None else settings.credentials()
    bind = address_for_peers(os.environ)
    if credentials is None:
        credentials = Token(str(said[0]["token"]).encode())
    elif isinstance(credentials, Certificates):
        credentials.check_serves(bind)
    mine = {"address": listen(bind, credentials), "interface": _interface(bind)}
    told = [json.loads(text) for text in meet(json.dumps(mine))]
    return [Introduction(str(one["address"]), str(one["interface"])) for one in told]


def _interface(address: str) -> str:
    """The interface with an address, and what it says it carries, for people."""
    name = interface_of(address)
    rate_mbps = nominal_mbps(name) if name else None
    return name + (f", which says it has {rate_mbps:,}" if rate_mbps else "")


def first_unlike(mine: str, meet: Callable[[str], list[str]]) -> tuple[int, str] | None:
    """Compare a text with the others'. Collective; returns the first place that says something else, and what."""
    return next(((place, text) for place, text in enumerate(meet(mine)) if text != mine), None)


def texts_of_all(companion: Fabric, text: str, patience: timedelta) -> list[str]:
    """Tell the others a text, and hear theirs, over a fabric that is there. Collective.

    Raises:
        NetworkError: if not all say theirs within `patience`.
    """
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    pending = companion.start(Gather((mine,)))
    deadline_s = time.monotonic() + patience.total_seconds()
    while not pending.wait(_POLL):
        if time.monotonic() > deadline_s:
            raise NetworkError(
                "Cannot open and measure the links between the workers: within "
                f"{patience.total_seconds():g} s not all of them have told each other what they found. A longer "
                "--timeout gives them longer."
            )
    reply = pending.result()
    assert not isinstance(reply, Total)
    return [bytes(part.tensors[0].tolist()).decode() for part in reply]
