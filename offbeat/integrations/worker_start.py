"""The beginning of a framework's worker: it says where it is, and refuses what the framework would undo."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import Version  # all frameworks bring it

from offbeat.errors import PlanError
from offbeat.run.run import init
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.plan import Plan
    from offbeat.run.run import Run

_log = logging.getLogger("offbeat")
_open: list[tuple[Run, Plan]] = []  # the run that an adapter has begun and nobody has closed, with its first plan


class Framework(NamedTuple):
    """A framework and its versions.

    Args:
        name: for people.
        package: by which it is installed.
        least: the oldest version that has what an adapter needs.
        tried: the newest with which it was tried.
    """

    name: str
    package: str
    least: str
    tried: str

    def check_version(self) -> None:
        """Refuse a version that is too old; say of one that is newer than those that were tried.

        Raises:
            PlanError: if it is too old.
        """
        found = Version(importlib.metadata.version(self.package))
        other = 'init_process_group("offbeat") works with any'
        if found < Version(self.least):
            raise PlanError(
                f"Cannot give {self.name} {found} a plan: that takes {self.least} or newer. Run pip install -U "
                f"{self.package}; {other}."
            )
        if found.release[:1] > Version(self.tried).release[:1]:
            _log.warning(
                "%s %s is newer than what this was tried with (%s). If something fails: %s.",
                *(self.name, found, self.tried, other),
            )


LIGHTNING = Framework("Lightning", "lightning", "2.5", "2.6.6")
ACCELERATE = Framework("Accelerate", "accelerate", "1.1", "1.15.0")
TRAINER = Framework("the Trainer", "transformers", "4.56", "5.24.0")


def begin(framework: Framework, plan: Plan | None, **options: Any) -> Run:
    """Begin the run, for a framework that deals out the data itself, or share the one that is open. Collective.

    Args:
        framework: it.
        plan, options: as of `offbeat.init`; a run that is open is shared where the plan is None, or that of the run.

    Raises:
        PlanError: if the framework is too old, the plan tunes batches, or this worker joins a job that trains already;
            and as `init`.
    """
    framework.check_version()
    for run, began_with in _open:
        if plan is None or plan == began_with:
            return run
    run = suited(framework, init(plan, **options))
    _open.append((run, run.plan))
    run._session.resources.callback(_open.clear)
    return run


def suited(framework: Framework, run: Run) -> Run:
    """Return a run, if it suits a framework that deals out the data itself; else close it.

    Raises:
        PlanError: if the plan tunes batches, or this worker joins a job that trains already.
    """
    if run.plan.tuning is None and not run.has_joined:
        return run
    what = "join a job" if run.has_joined else f"go by {short_name(run.plan.tuning)}"
    run.close()
    raise PlanError(
        f"Cannot {what} under {framework.name}, which deals out the data itself, to as many workers as it began with. "
        "Write the loop with offbeat.init() and run.prepare(model, optimizer, loader)."
    )


def say_where(rank: int, local_rank: int, world: int, local_world: int, address: str, port: int) -> None:
    """Say, in the variables that `init` reads, which worker this is; a launcher's address stands.

    Args:
        rank, local_rank: of this worker, among all and on its machine.
        world, local_world: how many workers there are, in all and on this machine.
        address, port: where they meet, unless a launcher has said so.

    Raises:
        PlanError: if a launcher has started another number of workers.
    """
    started = int(os.environ.get("WORLD_SIZE") or world)
    if "RANK" in os.environ and started != world:
        raise PlanError(
            f"Cannot train with {world} devices where {started} workers were started: have the Trainer's devices and "
            f"num_nodes make {started}."
        )
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    said = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local_world}
    os.environ.update({name: str(number) for name, number in said.items()})
