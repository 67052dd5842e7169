"""What would the lab refuse to measure on this machine, and what does measuring a scenario take?

What is wrong with a scenario itself is told when it is read, and when its plans and scripts are looked at (`jobs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, OffbeatError
from offbeat.lab.network import check_topology, require_rights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.lab.jobs import RowJob
    from offbeat.scenario import Scenario

_TUN = Path("/dev/net/tun")


def refuse(scenario: Scenario) -> None:
    """Refuse to measure what cannot be measured here.

    Raises:
        OffbeatError: the first of `refusals`.
    """
    for error in refusals(scenario):
        raise error


def refusals(scenario: Scenario) -> list[OffbeatError]:
    """All reasons why this machine cannot measure a scenario, or this user; none for processes on loopback."""
    if scenario.loopback:
        return []
    found: list[OffbeatError] = []
    for check in (require_rights, lambda: check_topology(scenario.topology), lambda: _check_emulated(scenario)):
        try:
            check()
        except OffbeatError as error:
            found.append(error)
    return found


def needs(scenario: Scenario, rows: Sequence[RowJob]) -> str:
    """Say what measuring takes, in one sentence.

    Args:
        rows: of the scenario.
    """
    hosts, shards = len(scenario.workers.hosts), max(1, len(scenario.servers))
    server = f", and {shards} of a server where the plan has one" if any(job.served for job in rows) else ""
    runs = scenario.run.repeats * len(rows)
    takes = "no root" if scenario.loopback else f"root, pyroute2 and {len(scenario.topology.hosts) + 1} namespaces"
    if scenario.emulated:
        takes += f", and {_TUN} for links that can become bad"
    return f"needs {takes}. It makes {runs} runs of {hosts} worker processes{server}."


def _check_emulated(scenario: Scenario) -> None:
    if scenario.emulated and not _TUN.exists():
        raise NetworkError(
            f"Cannot make the link of {scenario.emulated[0]} bad: there is no {_TUN}. Load the kernel's module tun, or "
            "leave out [impair] and faults of links."
        )
