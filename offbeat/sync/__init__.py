"""When may a worker go on?

* `policy` - what a synchronization policy declares
* `bsp` - bulk synchronous: after every step all workers wait for all
"""

from offbeat.sync.bsp import BSP
from offbeat.sync.policy import Policy

__all__ = ["BSP", "Policy"]
