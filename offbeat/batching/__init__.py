"""Which samples does each worker compute next, and how many?

* `leases` - every epoch is given out in leases, each sample exactly once whoever joins and leaves
* `lease_state` - the nouns: what a worker is told, and the state it is told from
* `permutation` - the order of an epoch, any part of which can be had by itself
* `equal_batches` - batches that are all alike, whoever joins and leaves
* `tuning` - batches as large as machines are fast, with the same sum
* `worker_speed` - the nouns: what is known of each worker
* `next_batches` - the batches of the next round
* `cost_model` - how long a worker takes for a batch, learnt from its steps
* `balance` - batches with which all take equally long
* `explain` - who paces the rounds, in a sentence
"""

from offbeat.batching.equal_batches import KEEPS, Keeps, even_batches, what_changes
from offbeat.batching.lease_state import EndOfEpoch, Lease, LeasePool, NoDataYet, PositionRange, SampleCounts
from offbeat.batching.leases import Leases
from offbeat.batching.tuning import BatchTuning
from offbeat.batching.worker_speed import TuningState, WorkerSpeed

__all__ = [
    "KEEPS",
    "BatchTuning",
    "EndOfEpoch",
    "Keeps",
    "Lease",
    "LeasePool",
    "Leases",
    "NoDataYet",
    "PositionRange",
    "SampleCounts",
    "TuningState",
    "WorkerSpeed",
    "even_batches",
    "what_changes",
]
