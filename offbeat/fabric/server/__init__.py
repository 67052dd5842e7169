"""A parameter server: the workers push contributions and pull parameters, so that any synchronization policy runs.

* `spec` - `ParameterServer`, the description in a plan
* `client` - a worker's end
* `shard` - one shard: what it holds, takes in and gives out, and the snapshots of that
* `lead` - what the first shard does beside: it decides, for all shards and workers
* `messages` - what workers and shards say; `deals` - what they say about data
* `blocks` - the parameters cut into blocks, and dealt out to shards
* `optimizers` - the user's optimizer as data
* `snapshot` - what is kept of a shard, as a file
* `checkpoint` - the optimizer's state, by parameter; `memory` - tensors as bytes
"""

from offbeat.fabric.server.blocks import cut, deal
from offbeat.fabric.server.client.client import Client
from offbeat.fabric.server.deals import Enrol
from offbeat.fabric.server.messages import DEALING, LEAVING, LOADING, About
from offbeat.fabric.server.optimizers import describe, hyper, outer_hyper
from offbeat.fabric.server.shard.shard import Shard
from offbeat.fabric.server.spec import ParameterServer

__all__ = [
    "DEALING",
    "LEAVING",
    "LOADING",
    "About",
    "Client",
    "Enrol",
    "ParameterServer",
    "Shard",
    "cut",
    "deal",
    "describe",
    "hyper",
    "outer_hyper",
]
