"""How much does each worker take?

Which samples:

* `leases` - every epoch is dealt out in leases, each sample exactly once whoever comes and goes
* `pool` - the nouns: what a worker is told, and the state it is told from
* `permutation` - the order of an epoch, any part of which can be had by itself

How many of them:

* `even` - all alike, whoever comes and goes
* `tuning` - batches as large as machines are fast, with the same sum
* `machine` - the nouns: what is known of each worker
* `planning` - the batches of the next round
* `fit` - how long a worker takes for a batch, learnt from its steps
* `equalise` - batches with which all take equally long
* `explain` - who paces the rounds, in a sentence
"""

from offbeat.pacing.even import KEEPS, Keeps, even_batches, what_changes
from offbeat.pacing.leases import Leases
from offbeat.pacing.machine import Machine, Tuning
from offbeat.pacing.pool import Lease, Over, Piece, Pool, Tally, Wait
from offbeat.pacing.tuning import BatchTuning

__all__ = [
    "KEEPS",
    "BatchTuning",
    "Keeps",
    "Lease",
    "Leases",
    "Machine",
    "Over",
    "Piece",
    "Pool",
    "Tally",
    "Tuning",
    "Wait",
    "even_batches",
    "what_changes",
]
