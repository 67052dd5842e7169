"""offbeat trains PyTorch models data-parallel on clusters that are not perfect.

Names are loaded when they are first used, so that the parts that need no torch (the wire, the command line) start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.codec import Cast, Dense
    from offbeat.fabric import InMemory, ProcessGroup
    from offbeat.plan import Plan
    from offbeat.replica import Replica
    from offbeat.run import Run, init
    from offbeat.sync import BSP

__version__ = "0.1.0.dev0"

_HOMES = {
    "BSP": "offbeat.sync",
    "Cast": "offbeat.codec",
    "Dense": "offbeat.codec",
    "InMemory": "offbeat.fabric",
    "Plan": "offbeat.plan",
    "ProcessGroup": "offbeat.fabric",
    "Replica": "offbeat.replica",
    "Run": "offbeat.run",
    "init": "offbeat.run",
}

__all__ = ["BSP", "Cast", "Dense", "InMemory", "Plan", "ProcessGroup", "Replica", "Run", "init"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
