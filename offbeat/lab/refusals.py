"""What would the lab refuse to measure on this machine, what does measuring a scenario take, and what does it lack?

What is wrong with a scenario itself is told when it is read, and when its plans and scripts are looked at (`jobs`).
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, OffbeatError
from offbeat.lab.jobs import find
from offbeat.lab.lower_bounds import allreduce_s
from offbeat.lab.network import check_memory, check_topology, require_rights
from offbeat.scenario import TrainingScript

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    checks: list[Callable[[], object]] = [
        require_rights,
        lambda: check_topology(scenario.topology),
        lambda: check_memory(scenario.topology),
        lambda: _check_emulated(scenario),
        # Behind hours of measuring is too late to say that the limit cannot be computed.
        lambda: allreduce_s(scenario.workers, 1.0),
    ]
    for check in checks:
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
    judged = ", with a validator beside it where the plan has one" if any(job.validated for job in rows) else ""
    runs = scenario.run.repeats * len(rows)
    namespaces = len(scenario.topology.hosts) + len(scenario.topology.switches)
    takes = "no root" if scenario.loopback else f"root, pyroute2 and {namespaces} namespaces"
    if any(host.memory_mb is not None for host in scenario.topology.hosts):
        takes += ", and cgroups that limit memory"
    if scenario.emulated:
        takes += f", and {_TUN} for links that can become bad"
    return f"needs {takes}. It makes {runs} runs of {hosts} worker processes{server}{judged}."


def lacking_data(scenario: Scenario, folder: Path) -> str:
    """Say that the data are not there which a script is to read, and what it says of them; "" if nothing is lacking.

    Args:
        folder: where the scenario's file lies.
    """
    workload = scenario.workload
    if not isinstance(workload, TrainingScript) or workload.data is None or find(workload.data, folder) is not None:
        return ""
    target = "" if workload.target is None else f", nor is the time to {workload.metric} {workload.target:g}"
    about = _what_it_reads(find(workload.path, folder))
    said = f' {workload.path} says: "{about}"' if about else ""
    return (
        f"There is no {workload.data} (workload.data), so what is measured is not on the data of this scenario{target}."
        f"{said}"
    )


def _what_it_reads(script: Path | None) -> str:
    """The paragraph of a script's docstring that begins with "Reads", in a line; "" if there is none."""
    try:
        told = ast.get_docstring(ast.parse("" if script is None else script.read_text())) or ""
    except (OSError, ValueError, SyntaxError):
        return ""  # whoever runs it will see
    return next((" ".join(part.split()) for part in told.split("\n\n") if part.startswith("Reads ")), "")


def _check_emulated(scenario: Scenario) -> None:
    if scenario.emulated and not _TUN.exists():
        raise NetworkError(
            f"Cannot make the link of {scenario.emulated[0]} bad: there is no {_TUN}. Load the kernel's module tun, or "
            "leave out [impair] and faults of links."
        )
