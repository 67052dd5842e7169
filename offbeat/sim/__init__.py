"""How long would it take? The same policies and the same tuning of batches, on the same scenarios, in virtual time.

Nothing here does any I/O or reads a clock: an event happens, the next one is jumped to. A row of a scenario is played
from what the scenario says (links, computation, bad luck, with the lab's own seeds) and from what its plan decides: the
objects that decide are those of the parameter server and of the workers, not copies.

* `timeline` - what happens next
* `fair` - how links are shared: max-min fair, with weights
* `flows` - what is on its way over them
* `course` - how long each step of each worker computes
* `links` - what the links carry, seen from above the transport
* `troubles` - what goes wrong for a while: stopped processes, links that are cut or slow
* `faults` - a scenario's faults, as what goes wrong
* `notice` - when somebody is missed, and is back
* `sizes` - what a step sends, in which buckets, and when they are ready
* `served` - workers and a parameter server; `contributor` is one of them, `transfers` what is on its way, `data` what
  they are dealt
* `replicated` - workers that all hold the parameters; `steered` - which policy decides there
* `played` - what became of a row
* `cost` - what each fault cost
* `predict` - a row's prediction, as it stands beside the measurement

What is not modelled: the cores that the lab's processes share, and TCP beyond how it shares a link (`served`). Where
steps take milliseconds, on many workers of one machine, it is these that decide.
"""

from offbeat.sim.predict import Known, Prediction, is_modelled, predict

__all__ = ["Known", "Prediction", "is_modelled", "predict"]
