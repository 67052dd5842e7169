"""Controllers: the parts of a plan that have another policy decide while training.

A person swaps the policy with `run.swap` or `offbeat swap`; a controller does it by what it is told of the job.

* `controller` - the nouns: what a controller is told, and what it answers
* `event_metrics` - what it is told with a server, kept from what happens to workers and what is decided about them
* `round_metrics` - what it is told without one, kept from how long each worker computed between two exchanges
* `round_controller` - asks the controller where there is no server, as `offbeat.coordinator` does with one
* `metrics_history` - what both keep: readings, swaps, and the pace under each policy
* `swap_sentence` - what people are told of a swap
* `threshold` - looser while workers wait for each other, tighter again when they would not
* `adapt_quorum` - how many contributions make an update: `KSync`
* `by_progress` - one policy after the other as training goes on: Sync-Switch

Nothing here does I/O or reads a clock: the same objects run at the coordinator, in workers that have none, and in the
simulator.
"""

from offbeat.control.adapt_quorum import AdaptQuorum
from offbeat.control.by_progress import ByProgress
from offbeat.control.controller import Controller, Decision, Keep, Metrics, Pace, Reading, Swap
from offbeat.control.event_metrics import EventMetrics
from offbeat.control.round_controller import RoundController
from offbeat.control.round_metrics import RoundMetrics
from offbeat.control.swap_sentence import swap_sentence
from offbeat.control.threshold import WaitThreshold

__all__ = [
    "AdaptQuorum",
    "ByProgress",
    "Controller",
    "Decision",
    "EventMetrics",
    "Keep",
    "Metrics",
    "Pace",
    "Reading",
    "RoundController",
    "RoundMetrics",
    "Swap",
    "WaitThreshold",
    "swap_sentence",
]
