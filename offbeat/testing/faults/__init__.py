"""What goes wrong, when, and the proof that it did? Faults at (worker, step), without a change to the training script.

    python -m offbeat.testing.faulty train.py --its --own --options

runs a script that knows nothing of them, with those of the environment (`environment`): under `offbeat run`, torchrun,
the lab, or by hand. A test in whose process a worker runs calls `Script(faults, log, rank)` itself.

    script.py       counts the steps, and has each fault strike at its own
    processes.py    to a process: killed, stopped, slow, without a disk; `outside.py` is the program that does it
    within.py       in the script: exceptions, the GIL, the clock, gradients
    links.py        to its links, by the proxies of `offbeat.testing.proxy`
    strangers.py    somebody dials the server who may not

Each is written to a log, and is on the disk, before it strikes; `assert_fired` fails if one did not. What a fault is
stands in `offbeat.fault`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.fault import FAULTS, LOG, Fault, Fired, read_fired, unfired
from offbeat.testing.faults.script import Script, from_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Fault", "Fired", "Script", "assert_fired", "environment", "from_environment", "read_fired"]


def environment(faults: Sequence[Fault], log: Path) -> dict[str, str]:
    """Variables for workers started as `offbeat.testing.faulty`."""
    return {FAULTS: msgspec.json.encode(list(faults)).decode(), LOG: str(log)}


def assert_fired(faults: Sequence[Fault], log: Path) -> None:
    """Fail if one did not fire.

    Raises:
        AssertionError: that names those that did not.
    """
    missing = unfired(faults, log)
    assert not missing, f"never fired: {'; '.join(fault.words for fault in missing)}"
