"""offbeat trains PyTorch models data-parallel on clusters that are not perfect.

Names are loaded when they are first used, so that the parts that need no torch (the wire, the command line) start fast.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"Cannot use offbeat on {sys.platform}: it watches its processes by Linux's own means. Use a Linux "
        "machine, a Linux container, or WSL 2."
    )

from offbeat.version import __version__ as __version__

if TYPE_CHECKING:
    from offbeat.batching import BatchTuning
    from offbeat.codec import Cast, Dense
    from offbeat.fabric import Elastic, InMemory, ParameterServer, ProcessGroup
    from offbeat.plan import Plan
    from offbeat.run.checkpoints import Checkpoints
    from offbeat.run.replica import Replica
    from offbeat.run.run import Run, init
    from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, OuterSGD, RoundRobin

_HOMES = {
    "ASP": "offbeat.sync",
    "BSP": "offbeat.sync",
    "BatchTuning": "offbeat.batching",
    "ByProgress": "offbeat.control",
    "Cast": "offbeat.codec",
    "Checkpoints": "offbeat.run.checkpoints",
    "DSSP": "offbeat.sync",
    "Dense": "offbeat.codec",
    "Elastic": "offbeat.fabric",
    "Hybrid": "offbeat.sync",
    "InMemory": "offbeat.fabric",
    "KSync": "offbeat.sync",
    "LocalSGD": "offbeat.sync",
    "OuterSGD": "offbeat.sync",
    "ParameterServer": "offbeat.fabric",
    "Plan": "offbeat.plan",
    "ProcessGroup": "offbeat.fabric",
    "Replica": "offbeat.run.replica",
    "RoundRobin": "offbeat.sync",
    "Run": "offbeat.run.run",
    "SSP": "offbeat.sync",
    "WaitThreshold": "offbeat.control",
    "init": "offbeat.run.run",
}

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "SSP",
    "BatchTuning",
    "ByProgress",
    "Cast",
    "Checkpoints",
    "Dense",
    "Elastic",
    "Hybrid",
    "InMemory",
    "KSync",
    "LocalSGD",
    "OuterSGD",
    "ParameterServer",
    "Plan",
    "ProcessGroup",
    "Replica",
    "RoundRobin",
    "Run",
    "WaitThreshold",
    "init",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
