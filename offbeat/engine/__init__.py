"""Runs a plan for real: gradients out of autograd, through codec and fabric, back into `.grad`.

* `exchanger` - what the front end needs of one model's exchange, whichever of the next three it is; `either` - stands
  before it, so that it may be exchanged
* `reducer` - hooks on the parameters, buckets issued in order during backward, the fence at its end
* `local` - workers that step by themselves, and average now and then
* `served` - the same where a server holds the parameters: gradients out, parameters in, at `optimizer.step()`
* `swappable` - goes over from gradients in every step to `local` and back: `swaps_together` without a server,
  `swaps_alone` with one; `gathered` - what the optimizers have gathered meanwhile, made the same; `take_over` - an
  optimizer goes on from another's
* `confer` - how workers without a server come to another plan
* `controlling` - asks the plan's controller there; `times` - how long each computes, told in the tails of exchanges
* `admission` - how workers come to a job without a server; `handover` - what they are handed
* `all_reduced`, `at_server` - how they average, without a server and with one
* `anchor` - one bucket's parameters after the last average, and how far they have come since
* `server` - how a worker reaches its server, and its questions to all through it; `beside` - one beside the workers;
  `border` - where they leave it again
* `arrivals` - the order in which gradients arrive, learnt in the first backward
* `saved` - what a checkpoint holds, read with care
* `share` - this worker's part in the next exchange: its batches, its weight
* `flat` - one bucket's memory: the gradients are views into it
* `flight` - one bucket's exchange under way
* `channel` - one model's way to the other workers, counted and waited for
* `inquiry` - who is at another batch, whose gradient is NaN
* `sparse` - gradients that are no dense tensors
* `buffers` - BatchNorm statistics and other buffers, kept equal
* `ignored` - what the user asked to leave alone
* `waiting` - the one primitive for every blocking wait, and the report when it takes too long
* `witness` - ties the waiting primitive to the sentinel beside each worker
* `roll` - who is there before there are sentinels, and whether who is not still starts
* `control` - collective questions beside the data's path: are we the same, who has data
* `source` - where a leased loader's batches come from; `dealt` - from the server; `agreed` - worked out alike by all;
  `place` - the place in the data, from one to the other
* `meter` - one record per step, written by a background thread
* `resources` - what this process uses of its machine
* `status` - how the training goes, said about once a second for whoever looks
* `diary` - digests of the parameters, for the history of a run
"""

from offbeat.engine import place, saved
from offbeat.engine.admission import Claim, Job, Newcomer, Parting, Reception
from offbeat.engine.agreed import AgreedSource, Timing
from offbeat.engine.all_reduced import AllReduced
from offbeat.engine.beside import addresses_of, start_beside
from offbeat.engine.buffers import Buffers, distinct
from offbeat.engine.confer import Conference
from offbeat.engine.control import Control
from offbeat.engine.controlling import Controlling
from offbeat.engine.dealt import DealtSource
from offbeat.engine.diary import Diary
from offbeat.engine.either import Either
from offbeat.engine.exchanger import Exchanger
from offbeat.engine.handover import hand_over
from offbeat.engine.ignored import ignored_names
from offbeat.engine.local import Local
from offbeat.engine.meter import Meter, MetricsFile, samples_in
from offbeat.engine.reducer import Reducer
from offbeat.engine.roll import Roll
from offbeat.engine.served import Served
from offbeat.engine.server import connect, leave_file
from offbeat.engine.share import Draw, Drawn
from offbeat.engine.source import Batch, Source
from offbeat.engine.status import StatusReporter, happenings, named_values, shortened
from offbeat.engine.swaps_alone import SwapsAlone
from offbeat.engine.swaps_together import SwapsTogether
from offbeat.engine.waiting import Awaited, Nobody, Waiter
from offbeat.engine.witness import Watched, join_watch, start_watch

__all__ = [
    "AgreedSource",
    "AllReduced",
    "Awaited",
    "Batch",
    "Buffers",
    "Claim",
    "Conference",
    "Control",
    "Controlling",
    "DealtSource",
    "Diary",
    "Draw",
    "Drawn",
    "Either",
    "Exchanger",
    "Job",
    "Local",
    "Meter",
    "MetricsFile",
    "Newcomer",
    "Nobody",
    "Parting",
    "Reception",
    "Reducer",
    "Roll",
    "Served",
    "Source",
    "StatusReporter",
    "SwapsAlone",
    "SwapsTogether",
    "Timing",
    "Waiter",
    "Watched",
    "addresses_of",
    "connect",
    "distinct",
    "hand_over",
    "happenings",
    "ignored_names",
    "join_watch",
    "leave_file",
    "named_values",
    "place",
    "samples_in",
    "saved",
    "shortened",
    "start_beside",
    "start_watch",
]
