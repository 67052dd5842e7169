"""A sharded parameter server: the workers push contributions to it and pull parameters from it.

The idea is Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014). Here the server
holds the user's optimizer as well, moves each block of the parameters as soon as that block of a contribution has
arrived, and sends it back while later blocks are still coming.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from offbeat.errors import PlanError
from offbeat.fabric.fabric import Offers
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.payload import Sum

_PORT = re.compile("[0-9]{1,5}")


@dataclass(frozen=True)
class ParameterServer:
    """A parameter server, where parameters and optimizer live; with it every synchronization policy runs.

    Args:
        addresses: "host:port" of each shard, started with `offbeat serve` or `offbeat run --servers`; empty for those
            in the environment variable OFFBEAT_SERVERS, or, if there are none, one shard beside rank 0.
        block_bytes: the parameters travel in blocks of at most this size.
        patience_s: for how long a worker dials a server that is gone, or that went on without it; 0 gives up at once.
        collocated: start a shard beside every worker, that of rank 0 coordinates; with N workers each link carries
            about 2(N-1)/N copies of the parameters per round, in each direction, instead of one link N.

    Raises:
        PlanError: if a value cannot be.

    >>> ParameterServer()
    ParameterServer(addresses=(), block_bytes=1048576, patience_s=60.0, collocated=False)
    """

    addresses: tuple[str, ...] = ()
    block_bytes: int = 1 << 20
    patience_s: float = 60.0
    collocated: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.addresses, tuple):
            raise PlanError(
                f"Cannot reach shards at {self.addresses!r}: write a tuple of addresses, such as ('10.0.0.7:7070',) "
                "- at `plan.fabric.addresses`."
            )
        for address in self.addresses:
            host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
            if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
                raise PlanError(f"Cannot reach {address!r}: write host:port - at `plan.fabric.addresses`.")
        if len(set(self.addresses)) < len(self.addresses):
            raise PlanError("Cannot use one shard twice: give each address once - at `plan.fabric.addresses`.")
        if self.block_bytes not in WholeNumbers(4096, 16 << 20):
            raise PlanError(
                f"Cannot cut parameters into blocks of {self.block_bytes!r} bytes: choose a whole number from 4096 to "
                "16777216 (16 MiB) - at `plan.fabric.block_bytes`."
            )
        if self.patience_s not in RealNumbers(0, below=1e9):
            raise PlanError(
                f"Cannot wait {self.patience_s!r} s for a server that is gone: choose a number of seconds from 0 "
                "- at `plan.fabric.patience_s`."
            )
        if type(self.collocated) is not bool:
            raise PlanError(
                f"Cannot start shards beside the workers with collocated={self.collocated!r}: choose True or False "
                "- at `plan.fabric.collocated`."
            )
        if self.collocated and self.addresses:
            raise PlanError(
                f"Cannot start shards beside the workers and use those at {', '.join(self.addresses)}: it is one or "
                "the other. Leave out addresses, or collocated - at `plan.fabric.collocated`."
            )

    @property
    def offers(self) -> Offers:
        return Offers(carries=frozenset({Sum}), ordered=False, holds="server", partial=True, elastic=True)
