"""A parameter server: the workers push contributions and pull parameters, so that any synchronization policy runs.

* `spec` - `ParameterServer`, the description in a plan
* `blocks` - the parameters cut into blocks, and dealt out to shards
* `optimizers` - the user's optimizer as data
* `messages` - what workers and shards say
* `deals` - what they say about data
* `hands` - a worker's leases of it
* `dealer` - who computes which samples next, and how many
* `ledger` - what has arrived, what waits for it, who waits for that; per block, without I/O
* `store` - parameters and optimizer state of a shard
* `table` - one model's blocks at one shard
* `coordinator` - asks the policy, and keeps count
* `lead` - what the first shard does beside: it tells all shards and workers what was decided
* `model` - what the lead knows about one model; `questions` - what all workers are asked beside the data
* `shard` - one shard at work; `guest` - who is connected to it
* `client` - a worker's end; `place` - one model there; `exchange` - what the training thread waits for
* `snapshot`, `archive`, `keeping` - what is kept of a shard, where, and when; `resume` - how a job goes on from it
* `checkpoint`, `transfers` - what it fetches and puts for checkpoints
* `route` - its way to the shards, and back to them
* `memory` - tensors as bytes
"""

from offbeat.fabric.server.blocks import cut, deal
from offbeat.fabric.server.client import Client
from offbeat.fabric.server.deals import Enrol
from offbeat.fabric.server.messages import About
from offbeat.fabric.server.optimizers import describe, hyper, outer_hyper
from offbeat.fabric.server.shard import Shard
from offbeat.fabric.server.spec import ParameterServer

__all__ = [
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
