"""The history of a run: what happened, written down while it happens.

* `records` - what is written: events and decisions, updates that were made, parameters that a worker has
* `log` - a file of them

Who writes what: the coordinator each event that its policy is told and what that decides, each judgement of a robust
rule, each life of the server, and each plan; every shard each update it has made, and of which contributions; every
worker a digest of the parameters it has after each of its steps, or by what a switch let it go on. `offbeat.audit`
reads it.
"""

from offbeat.history.log import HistoryLog, HistoryWriter, write_log
from offbeat.history.records import (
    CheckpointLoaded,
    ContributionsWithdrawn,
    FabricMigrated,
    HistoryEnded,
    HistoryHeader,
    LifeBegan,
    ModelPrepared,
    NoticeGiven,
    ParametersAfter,
    ParametersReplaced,
    PlanAdopted,
    PolicyStep,
    Record,
    ShardServes,
    StepGranted,
    UpdateJudged,
    UpdateMade,
    UsedContribution,
    WorkerReturned,
    WorkersAdmitted,
    actions_of,
    event_of,
    policy_step,
)

__all__ = [
    "CheckpointLoaded",
    "ContributionsWithdrawn",
    "FabricMigrated",
    "HistoryEnded",
    "HistoryHeader",
    "HistoryLog",
    "HistoryWriter",
    "LifeBegan",
    "ModelPrepared",
    "NoticeGiven",
    "ParametersAfter",
    "ParametersReplaced",
    "PlanAdopted",
    "PolicyStep",
    "Record",
    "ShardServes",
    "StepGranted",
    "UpdateJudged",
    "UpdateMade",
    "UsedContribution",
    "WorkerReturned",
    "WorkersAdmitted",
    "actions_of",
    "event_of",
    "policy_step",
    "write_log",
]
