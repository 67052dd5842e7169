"""What goes wrong, when, and the proof that it did? Faults at (worker, step), without a change to the training script.

    python -m offbeat.testing.run_with_faults train.py --its --own --options

runs a script that knows nothing of them, with those of the environment (`environment`): under `offbeat run`, torchrun,
the lab, or by hand. A test in whose process a worker runs calls `FaultInjector(faults, log, rank)` itself.

* `injector` - counts the steps, and has each fault strike at its own
* `processes` - faults of a process: killed, stopped, slow, without a disk; `process_faults_main` is the program that
  strikes
* `in_process` - faults in the script: exceptions, the GIL, the clock, gradients
* `links` - faults of its links, by the proxies of `offbeat.testing.chaos_proxy`
* `unauthorized_peers` - peers that dial the server and may not

Each is written to a log, and is on the disk, before it strikes; `assert_fired` fails if one did not. What a fault is
stands in `offbeat.fault_spec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.fault_spec import FAULTS, LOG, Fault, Fired, read_fired, unfired
from offbeat.testing.faults.injector import FaultInjector, from_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Fault", "FaultInjector", "Fired", "assert_fired", "environment", "from_environment", "read_fired"]


def environment(faults: Sequence[Fault], log: Path) -> dict[str, str]:
    """Variables for workers started as `offbeat.testing.run_with_faults`."""
    return {FAULTS: msgspec.json.encode(list(faults)).decode(), LOG: str(log)}


def assert_fired(faults: Sequence[Fault], log: Path) -> None:
    """Fail if one did not fire.

    Raises:
        AssertionError: that names those that did not.
    """
    missing = unfired(faults, log)
    assert not missing, f"never fired: {'; '.join(fault.words for fault in missing)}"
