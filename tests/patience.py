"""How long tests wait for what has to happen: longer on a machine whose processors are shared by many."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def stretched(seconds: float) -> float:
    """Stretch a limit by the runnable tasks per processor, as the load average of the last minute counts them."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def soon(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Wait until `condition` holds; whether it does within `within_s`, stretched."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > stretched(within_s):
            return False
        time.sleep(0.05)
    return True
