"""In what order, and in what portions, are gradients sent? Pure: from one profile all workers make the same schedule.

* `profile` - what a scheduler knows: when each gradient is complete, when the next forward pass needs it, the link
* `schedule` - what it decides: blocks of gradients in the order in which they are sent, and how many are under way
* `timeline` - what comes of a schedule: when blocks are done, what the forward pass waits for; and the lower bound
* `scheduler` - the Protocol of one
* `slices` - gradients cut into slices; `urgency_queue` - the order in which a queue by urgency would send slices
* `fifo`, `priority`, `credit`, `merged_gradient`, `prophet` - one scheduler each
* `reduce_scatter_gather` - one whose blocks are reduced in backward, and gathered in the next forward pass
* `credit_tuner` - the search for the two numbers of `Credit`
"""

from offbeat.scheduling.credit import Credit
from offbeat.scheduling.fifo import FIFO
from offbeat.scheduling.merged_gradient import MergedGradient
from offbeat.scheduling.priority import Priority
from offbeat.scheduling.profile import BackwardProfile, GradientTimes
from offbeat.scheduling.prophet import Prophet
from offbeat.scheduling.reduce_scatter_gather import ReduceScatterGather
from offbeat.scheduling.schedule import GradientSlice, Schedule, ScheduledBlock
from offbeat.scheduling.scheduler import Scheduler
from offbeat.scheduling.timeline import StepTimeline, lower_bound_s, play

__all__ = [
    "FIFO",
    "BackwardProfile",
    "Credit",
    "GradientSlice",
    "GradientTimes",
    "MergedGradient",
    "Priority",
    "Prophet",
    "ReduceScatterGather",
    "Schedule",
    "ScheduledBlock",
    "Scheduler",
    "StepTimeline",
    "lower_bound_s",
    "play",
]
