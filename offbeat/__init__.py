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

if TYPE_CHECKING:
    from offbeat.checkpoints import Checkpoints
    from offbeat.codec import Cast, Dense
    from offbeat.fabric import Elastic, InMemory, ParameterServer, ProcessGroup
    from offbeat.pacing import BatchTuning
    from offbeat.plan import Plan
    from offbeat.replica import Replica
    from offbeat.run import Run, init
    from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, OuterSGD, RoundRobin

__version__ = "0.1.0.dev0"

_HOMES = {
    "ASP": "offbeat.sync",
    "BSP": "offbeat.sync",
    "BatchTuning": "offbeat.pacing",
    "ByProgress": "offbeat.control",
    "Cast": "offbeat.codec",
    "Checkpoints": "offbeat.checkpoints",
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
    "Replica": "offbeat.replica",
    "RoundRobin": "offbeat.sync",
    "Run": "offbeat.run",
    "SSP": "offbeat.sync",
    "WaitThreshold": "offbeat.control",
    "init": "offbeat.run",
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
