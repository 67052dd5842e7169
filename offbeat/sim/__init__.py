"""How long would it take? The same policies and the same tuning of batches, on the same scenarios, in virtual time.

Nothing here does any I/O or reads a clock: an event happens, the next one is jumped to. A row of a scenario is played
from what the scenario says (links, computation, bad luck, with the lab's own seeds) and from what its plan decides: the
objects that decide are those of the parameter server and of the workers, not copies.

* `max_min_fair` - how links are shared, with weights; `flows` - what is on its way over them
* `links` - what the links carry, seen from above the transport
* `compute_time` - how long each step of each worker computes
* `message_sizes` - what a step sends, in which buckets, and when they are ready
* `disturbances` - what goes wrong for a while: stopped processes, links that are cut or slow
* `faults` - a scenario's faults as disturbances; `fault_cost` - what each cost
* `detection_times` - when a worker is missed, and when it is back
* `parameter_server` - workers and a parameter server; `worker` is one of them, `transfers` what is on its way,
  `leased_data` what they compute, `sim_plan` what the coordinator is told of the plan; `early_push` - the same where
  gradients are pushed while backward computes
* `allreduce` - workers that all hold the parameters; `routed_sums` - how long sums take along planned paths;
  `controller_driver` - which policy decides there;
  `cross_iteration` - the same where gradients travel behind the next forward pass, too
* `interconnect` - MultiTree's evaluation: all-reduce in cycles, by the variants of network interfaces
* `result` - what became of a row
* `predict` - a row's prediction, as it stands beside the measurement

What is not modelled: the cores that the lab's processes share, and TCP beyond how it shares a link. Where steps take
milliseconds, on many workers of one machine, it is these that decide.
"""

from offbeat.sim.predict import Known, Prediction, fits_network, is_modelled, predict

__all__ = ["Known", "Prediction", "fits_network", "is_modelled", "predict"]
