"""The measurements of `offbeat bench objects`: what stores of objects take beside the tensor alone on one link.

One worker with a store of its own stands for each host: processes of this machine, or, where a rate is given, network
namespaces with links of that rate.
"""

from __future__ import annotations

import json
import secrets
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import ScenarioError
from offbeat.lab import command_lines, goodput, launch
from offbeat.lab.network import Network
from offbeat.lab.object_load import OPS, STRIPED
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WARM_UP, _TIMEOUT_S = 1, 500.0
_SYSTEMS = {"offbeat": "", STRIPED: "allreduce"}
"""Systems, and the one operation of each that is measured; all if ""."""


@dataclass
class ObjectFigure:
    """The measurement of one operation on one size.

    Args:
        op: of `OPS`.
        is_striped: whether each store makes a stripe of the sum.
        bound_s: that the tensor alone takes on one link; None where no link is shaped.
        values: seconds of the slowest host, one per repeat.
    """

    op: str
    is_striped: bool
    size_bytes: int
    bound_s: float | None
    values: list[float]

    @property
    def median(self) -> float:
        """The median of all repeats."""
        return statistics.median(self.values)


def measure_objects(
    sizes: Sequence[int], *, hosts: int, rate_mbps: float | None, repeats: int, tell: Callable[[str], None]
) -> list[ObjectFigure]:
    """Measure all operations.

    Args:
        sizes: of the tensors, in bytes.
        hosts: how many there are.
        rate_mbps: of each host's link, each way; None for processes of this machine on loopback.
        tell: what is measured now.

    Raises:
        NetworkError: if namespaces cannot be built.
        ScenarioError: if this machine cannot shape the links as asked, or the sums of hosts differ.
        WorkerLostError: if a worker fails.
    """
    names = [f"h{number}" for number in range(hosts)]
    with ExitStack() as around:
        if rate_mbps is None:
            places, lab = launch.loopback_places(names), None
        else:
            network = around.enter_context(Network(Topology.star(names, rate_mbps=rate_mbps)))
            tell("links")
            goodput.ensure(network)
            places, lab = launch.places(network), network.lab
        figures = []
        for system, only in _SYSTEMS.items():
            tell(system)
            folder = Path(around.enter_context(tempfile.TemporaryDirectory()))
            arguments = [system, str(_WARM_UP), str(repeats), ",".join(map(str, sizes)), only or ";".join(OPS)]
            with launch.Workers(
                command_lines.module("offbeat.lab.object_load", *arguments),
                places=places,
                folder=folder,
                environment={"OFFBEAT_TOKEN": secrets.token_hex(32)},
                each=[{"GLOO_ADDRESS": place.address} for place in places],
                lab=lab,
            ) as workers:
                workers.wait(_TIMEOUT_S)
                logs = [workers.log(rank).read_text(errors="replace") for rank in range(hosts)]
            figures += _figures(logs, rate_mbps, is_striped=system == STRIPED)
    return figures


def _figures(logs: Sequence[str], rate_mbps: float | None, *, is_striped: bool) -> list[ObjectFigure]:
    """Put together what the workers have said."""
    took: dict[tuple[int, str], dict[int, float]] = {}
    digests: dict[tuple[int, str], str] = {}
    for line in (json.loads(text) for log in logs for text in log.splitlines() if text.startswith('{"size')):
        if "took_s" not in line:
            continue
        cell = line["size"], line["op"]
        if digests.setdefault(cell, line["digest"]) != line["digest"]:
            raise ScenarioError(f"Hosts have other bytes after {cell[1]} of {cell[0]} bytes: this is a bug of offbeat.")
        repeats = took.setdefault(cell, {})
        repeats[line["repeat"]] = max(repeats.get(line["repeat"], 0.0), line["took_s"])
    return [
        ObjectFigure(op, is_striped, size, rate_mbps and size * 8 / (rate_mbps * 1e6), list(repeats.values()))
        for (size, op), repeats in took.items()
    ]
