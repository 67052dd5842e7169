"""Where is it summed?

* `fabric` - the nouns: `FabricSpec` describes, what `Binds` makes a `Fabric`, which has handles, and `Pending` is an
  exchange under way
* `process_group` - the collectives of a torch process group (Gloo, NCCL)
* `elastic` - all-reduce that goes on without the workers it loses; `tries` - what it exchanges, again if need be;
  `circle` - who is left, and how they find together
* `server` - parameters and optimizer at a sharded server
* `in_memory` - workers as threads of one process, for tests, docs and a worker that is alone
"""

from offbeat.fabric.circle import Circle
from offbeat.fabric.elastic import Elastic
from offbeat.fabric.fabric import Binds, Fabric, FabricSpec, Offers, Pending
from offbeat.fabric.in_memory import InMemory, Meeting
from offbeat.fabric.process_group import ProcessGroup, never_destroy
from offbeat.fabric.server import ParameterServer

__all__ = [
    "Binds",
    "Circle",
    "Elastic",
    "Fabric",
    "FabricSpec",
    "InMemory",
    "Meeting",
    "Offers",
    "ParameterServer",
    "Pending",
    "ProcessGroup",
    "never_destroy",
]
