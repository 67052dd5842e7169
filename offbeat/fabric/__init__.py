"""Where is it summed?

* `fabric` - the nouns: `FabricSpec` describes and `Offers`, what `Binds` makes a `Fabric`, which has handles; one with
  a server is `Served`
* `process_group` - the collectives of a torch process group (Gloo, NCCL); `reduce_scatter` - sums there in two rounds;
  `spare_memory` - what exchanges work in; `gloo_listener` - Gloo's sockets hear no strangers
* `elastic` - all-reduce that goes on without the workers it loses; `retryable` - what it exchanges, again if need be;
  `elastic_group` - who is left, and how they find together; `generation` - what carries it among those
* `routed` - all-reduce along planned paths (`offbeat.collective`); `linked_group` - links, and paths over them;
  `path_collectives` - sums along these; `path_planner` - which paths for which size; `algorithm_runner` - what carries
  them out: `lane_exchange` over lanes, `grouped_rounds` by torch's group, on GPUs by NCCL;
  `lane_network` - the links between workers; `introduction` - where each listens; `discovery` - what the links carry;
  `throughput_watch` - whether that has changed
* `object_store` - all-reduce by stores of objects in the workers (`offbeat.objects`)
* `switch` - sums in the network, beside an elastic companion (`offbeat.switch`); `switch_table` - sums there that last;
  `staging` - the way of tensors on a GPU over such a fabric
  `switch_session` - a worker's place at a switch, also at one that was started again
* `parameter_server` - the description of a sharded server (`offbeat.server`)
* `in_memory` - workers as threads of one process, for tests, docs and a worker that is alone
"""

from offbeat.fabric.elastic import Elastic
from offbeat.fabric.elastic_group import ElasticGroup
from offbeat.fabric.fabric import (
    BindContext,
    Binds,
    Fabric,
    FabricSpec,
    HoldsTables,
    Offers,
    ReduceScatters,
    Reroutes,
    Scattered,
    Served,
    SumsSome,
    check_spec,
)
from offbeat.fabric.in_memory import InMemory, InMemoryGroup
from offbeat.fabric.object_store import ObjectStore
from offbeat.fabric.parameter_server import ParameterServer
from offbeat.fabric.process_group import ProcessGroup, never_destroy
from offbeat.fabric.routed import Routed
from offbeat.fabric.switch import BoundSwitch, Switch

__all__ = [
    "BindContext",
    "Binds",
    "BoundSwitch",
    "Elastic",
    "ElasticGroup",
    "Fabric",
    "FabricSpec",
    "HoldsTables",
    "InMemory",
    "InMemoryGroup",
    "ObjectStore",
    "Offers",
    "ParameterServer",
    "ProcessGroup",
    "ReduceScatters",
    "Reroutes",
    "Routed",
    "Scattered",
    "Served",
    "SumsSome",
    "Switch",
    "check_spec",
    "never_destroy",
]
