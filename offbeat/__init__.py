"""offbeat trains PyTorch models data-parallel on clusters that are not perfect.

A run goes by its `plan`, made of parts: when workers may go on (`sync`), what is sent (`codec`), where it is summed
(`fabric`), along which paths (`collective`), in what order (`scheduling`), how batches are dealt (`batching`), who
swaps the policy (`control`). Whom to believe is a matter of `robust`, how little can be learnt about a worker one of
`privacy`.

* what a user holds: `run` - a worker; `cli`, `__main__` - the commands; `testing` - conformance checks and faults;
  `c10d` - a backend of torch.distributed; `integrations` - Lightning, Accelerate, the Hugging Face Trainer, trackers
* training: `loading` - batches; `engine` - gradients; `server` - the parameter server; `coordinator` - its decisions;
  `switch` - sums in the network; `objects` - tensors that tasks hand to each other; `groups` - a model for each group
  of a table
* processes: `wire` - bytes between them; `protocol` - what they say; `diagnosis` - who has not arrived
* behind and before a run: `history`, `audit`, `report`; `sim` - in virtual time; `lab` - on real links

Beside them stand the nouns that rooms share:

* a model: `layout` - parameters in flat buckets; `tensors` - as bytes, and dtypes by name; `payload` - what is
  exchanged; `pending` - an exchange under way; `rng` - random generators; `model_profiles` - sizes of well-known
  networks
* a cluster: `topology` - hosts and links; `routing` - ways over them; `topology_drawing`; `topology_spec` - as text;
  `scenario` - and their work; `straggler_model` - slow steps; `fault_spec` - faults; `attack_spec` - lies;
  `contribution_hooks` - for its tests
* a process: `clock`; `timeline` - appointments in virtual time; `backoff` - pauses between tries; `exit_codes`;
  `errors`; `version`
* text and files: `toml_reader`, `safe_read` - what may be damaged; `safe_write` - whole or not at all; `short_name` -
  of a part; `number_range` - what a part's numbers may be; `float_sum` - exact sums

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
    from offbeat.codec import (
        GRBS,
        QSGD,
        Carry,
        Cast,
        Dense,
        ErrorFeedback,
        ErrorReset,
        FixedPoint,
        LookAhead,
        PowerSGD,
        RandomK,
        Sign,
        TopK,
    )
    from offbeat.control import AdaptQuorum, ByProgress, WaitThreshold
    from offbeat.fabric import Elastic, InMemory, ObjectStore, ParameterServer, ProcessGroup, Routed, Switch
    from offbeat.plan import Plan
    from offbeat.privacy import GaussianMechanism
    from offbeat.run.checkpoints import Checkpoints
    from offbeat.run.replica import Replica
    from offbeat.run.run import Run, init
    from offbeat.scheduling import FIFO, Credit, MergedGradient, Priority, Prophet, ReduceScatterGather
    from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, OuterSGD, RoundRobin

_HOMES = {
    "ASP": "offbeat.sync",
    "AdaptQuorum": "offbeat.control",
    "BSP": "offbeat.sync",
    "BatchTuning": "offbeat.batching",
    "ByProgress": "offbeat.control",
    "Carry": "offbeat.codec",
    "Cast": "offbeat.codec",
    "Checkpoints": "offbeat.run.checkpoints",
    "Credit": "offbeat.scheduling",
    "DSSP": "offbeat.sync",
    "Dense": "offbeat.codec",
    "Elastic": "offbeat.fabric",
    "ErrorFeedback": "offbeat.codec",
    "ErrorReset": "offbeat.codec",
    "FIFO": "offbeat.scheduling",
    "FixedPoint": "offbeat.codec",
    "GRBS": "offbeat.codec",
    "GaussianMechanism": "offbeat.privacy",
    "Hybrid": "offbeat.sync",
    "InMemory": "offbeat.fabric",
    "KSync": "offbeat.sync",
    "LocalSGD": "offbeat.sync",
    "LookAhead": "offbeat.codec",
    "MergedGradient": "offbeat.scheduling",
    "ObjectStore": "offbeat.fabric",
    "OuterSGD": "offbeat.sync",
    "ParameterServer": "offbeat.fabric",
    "Plan": "offbeat.plan",
    "PowerSGD": "offbeat.codec",
    "Priority": "offbeat.scheduling",
    "ProcessGroup": "offbeat.fabric",
    "Prophet": "offbeat.scheduling",
    "QSGD": "offbeat.codec",
    "RandomK": "offbeat.codec",
    "ReduceScatterGather": "offbeat.scheduling",
    "Replica": "offbeat.run.replica",
    "RoundRobin": "offbeat.sync",
    "Routed": "offbeat.fabric",
    "Run": "offbeat.run.run",
    "SSP": "offbeat.sync",
    "Sign": "offbeat.codec",
    "Switch": "offbeat.fabric",
    "TopK": "offbeat.codec",
    "WaitThreshold": "offbeat.control",
    "init": "offbeat.run.run",
}

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "FIFO",
    "GRBS",
    "QSGD",
    "SSP",
    "AdaptQuorum",
    "BatchTuning",
    "ByProgress",
    "Carry",
    "Cast",
    "Checkpoints",
    "Credit",
    "Dense",
    "Elastic",
    "ErrorFeedback",
    "ErrorReset",
    "FixedPoint",
    "GaussianMechanism",
    "Hybrid",
    "InMemory",
    "KSync",
    "LocalSGD",
    "LookAhead",
    "MergedGradient",
    "ObjectStore",
    "OuterSGD",
    "ParameterServer",
    "Plan",
    "PowerSGD",
    "Priority",
    "ProcessGroup",
    "Prophet",
    "RandomK",
    "ReduceScatterGather",
    "Replica",
    "RoundRobin",
    "Routed",
    "Run",
    "Sign",
    "Switch",
    "TopK",
    "WaitThreshold",
    "init",
]


if not TYPE_CHECKING:  # for a type checker, a name that is not above is a mistake

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
