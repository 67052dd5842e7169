"""When may a worker go on?

* `policy` - the noun: a rule over the state
* `state` - what every rule decides from, and how events and decisions change it
* `events`, `actions` - what happens to workers, and what is decided
* `bsp` - bulk synchronous: after every step all workers wait for all
* `asp` - asynchronous: nobody waits
* `ssp` - stale synchronous: nobody is more than so many steps ahead
* `dssp` - the same, the number chosen anew where it helps
* `ksync` - the first k make the update: backup workers
* `round_robin` - workers take turns on the link
* `local_sgd` - workers step by themselves, and average now and then; `outer_sgd` - how the average is applied
* `hybrid` - one policy within groups of workers, another between groups; `hybrid_group` - one of those
* `transition` - contributions that belong to no round any more after a swap
"""

from offbeat.sync.actions import Action, Apply, Drop, Evict, Grant, Push, Release, Remember, Wake
from offbeat.sync.asp import ASP
from offbeat.sync.bsp import BSP
from offbeat.sync.dssp import DSSP
from offbeat.sync.events import Adopted, Deadline, Event, Joined, Left, Pulled, Pushed, PushEnding, Ready, TakesEveryNth
from offbeat.sync.hybrid import Hybrid
from offbeat.sync.ksync import KSync
from offbeat.sync.local_sgd import LocalSGD
from offbeat.sync.outer_sgd import OuterSGD
from offbeat.sync.policy import (
    Contributes,
    CountsWorkers,
    Policy,
    StepsLocally,
    TakesTurns,
    adoption,
    check_workers,
    on,
    own_steps,
    settle,
)
from offbeat.sync.round_robin import RoundRobin
from offbeat.sync.ssp import SSP
from offbeat.sync.state import InvalidDecision, Member, State
from offbeat.sync.transition import DrainOldKind

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "SSP",
    "Action",
    "Adopted",
    "Apply",
    "Contributes",
    "CountsWorkers",
    "Deadline",
    "DrainOldKind",
    "Drop",
    "Event",
    "Evict",
    "Grant",
    "Hybrid",
    "InvalidDecision",
    "Joined",
    "KSync",
    "Left",
    "LocalSGD",
    "Member",
    "OuterSGD",
    "Policy",
    "Pulled",
    "Push",
    "PushEnding",
    "Pushed",
    "Ready",
    "Release",
    "Remember",
    "RoundRobin",
    "State",
    "StepsLocally",
    "TakesEveryNth",
    "TakesTurns",
    "Wake",
    "adoption",
    "check_workers",
    "on",
    "own_steps",
    "settle",
]
