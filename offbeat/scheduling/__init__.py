"""In what order, and in what portions, are gradients sent? Pure: from one profile all workers make the same schedule.

* `profile` - what a scheduler knows: when each gradient is complete, when the next forward pass needs it, the link
* `schedule` - what it decides: blocks of gradients in the order in which they are sent, and how many are under way
* `timeline` - what comes of a schedule: when blocks are done, what the forward pass waits for; and the lower bound
* `scheduler` - the Protocol of one
* `slices` - gradients cut into slices; `urgency_queue` - the order in which a queue by urgency would send slices
* `link_monitor` - what the link carries, followed while a job trains; `replanning` - when a schedule is made anew
* `schedule_file` - a schedule, and the profile that it was made from, as bytes
* `fifo`, `priority`, `credit`, `merged_gradient`, `prophet` - one scheduler each
* `reduce_scatter_gather` - one whose blocks are reduced in backward, and gathered in the next forward pass
* `credit_tuner` - the search for the two numbers of `Credit`
"""

from offbeat.scheduling.credit import Credit
from offbeat.scheduling.fifo import FIFO
from offbeat.scheduling.link_monitor import LinkMonitor
from offbeat.scheduling.merged_gradient import MergedGradient
from offbeat.scheduling.priority import Priority
from offbeat.scheduling.profile import BackwardProfile, GradientTimes, slowest
from offbeat.scheduling.prophet import Prophet, bursts_of
from offbeat.scheduling.reduce_scatter_gather import ReduceScatterGather
from offbeat.scheduling.replanning import BANDWIDTH_MOVED, BLOCKS_LATE, ReplanTrigger, can_be_worth_it, is_worth_it
from offbeat.scheduling.schedule import GradientSlice, Schedule, ScheduledBlock
from offbeat.scheduling.schedule_file import MadeSchedule
from offbeat.scheduling.scheduler import Scheduler
from offbeat.scheduling.timeline import StepTimeline, lower_bound_s, play

__all__ = [
    "BANDWIDTH_MOVED",
    "BLOCKS_LATE",
    "FIFO",
    "BackwardProfile",
    "Credit",
    "GradientSlice",
    "GradientTimes",
    "LinkMonitor",
    "MadeSchedule",
    "MergedGradient",
    "Priority",
    "Prophet",
    "ReduceScatterGather",
    "ReplanTrigger",
    "Schedule",
    "ScheduledBlock",
    "Scheduler",
    "StepTimeline",
    "bursts_of",
    "can_be_worth_it",
    "is_worth_it",
    "lower_bound_s",
    "play",
    "slowest",
]
