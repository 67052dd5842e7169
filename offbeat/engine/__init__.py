"""How does one model stay together? Gradients out of autograd, through codec and fabric, back into `.grad`.

* `worker_context` - what is one per worker, for all its parts; `run_log` - what people should know of a run;
  `model_registry` - the models that were prepared
* `prepared_model` - one model that was prepared
* `factory` - makes what keeps one prepared model together, on whichever fabric the plan names
* `synchronizer` - what the front end needs of that; `switchable_sync` - what it holds, where the plan decides what is
  at work; `exchange_result` - what an exchange has found out beside the mean
* `reducer` - hooks on the parameters, buckets issued in order during backward, the fence at its end
* `cross_iteration` - the same hidden behind the next forward pass, too, in the order of a `Scheduler`:
  `communication_thread` - carries blocks of gradients; `schedule_learner`, `forward_watch`, `pass_clock` - what the
  schedule is made from; `schedule_monitor` - whether it still holds; `schedule_state` - a schedule in a checkpoint;
  `pending_gradient` - a gradient that whoever uses it waits for; `pending_parameter` - the same of a parameter;
  `partial_optimizer` - the user's optimizer, stepping some of its parameters; `freshness_mode` - a mode that finds who
  uses a parameter's memory before its step is in it; `module_hook` - a hook that a copy of a module does not have
* `server_sync` - the same where a server holds the parameters: gradients out, parameters in, at `optimizer.step()`;
  `early_push` - gradients that leave while backward computes, in the order of a `Scheduler`; `parameter_return` -
  parameters that come back while the next forward pass computes; `push_encoder` - what is pushed, as the codec encodes
  it, and what is left of it
* `loss_scorer` - what a validator finds out about the contributions of others; `trusted_loss` - by the script's loss
* `local_sgd` - workers that step by themselves, and average now and then: `local_sgd_allreduce` without a server,
  `local_sgd_server` with one, `local_sgd_switch` at each worker's own pace; `anchor` - one bucket's parameters after
  the last average
* `averaged_replicas` - what all replicas have in common, shown for a while
* `state_average` - makes what optimizers have gathered in local steps the same; `optimizer_state` - an optimizer goes
  on from another one's state; `codec_state` - what the codec keeps of a model on this worker;
  `private_contributions` - clips and noises what it contributes
* `bucket_buffer` - one bucket's memory: the gradients are views into it; `bucket_exchange` - its exchange under way;
  `issue_queue` - in which order buckets are issued
* `communicator` - one model's way to the other workers, counted and waited for
* `gradient_order` - the order in which gradients arrive, learnt in the first backward
* `batch_accounting` - this worker's part in the next exchange: its batches, its weight
* `sparse` - gradients that are no dense tensors
* `buffers` - BatchNorm statistics and other buffers, kept equal; `ignored_parameters` - what the user asked to leave
  alone
* `nonfinite` - NaN and Inf where other workers go on without them; `worker_questions` - who is at another batch, whose
  gradient is NaN
* `control_group` - collective questions beside the data's path: are we the same, who has data; `rank_bits` - who, as
  numbers that can be added up
* `plan_vote` - how workers without a server come to another plan; `step_times` - how long each worker computes, told in
  the trailers of exchanges
* `join` - how workers come to a job without a server; `state_transfer` - what they are handed
* `server_session` - how a worker reaches its server, and its questions to all through it; `server_launch` - a server
  beside the workers; `sync_point` - the place of the script where all leave it again
* `sentinels` - the sentinels of all workers, started and connected
* `state_checks` - what a checkpoint holds, read with care
* `step_metrics` - one record per step, written by a background thread; `resource_usage` - what this process uses of
  its machine; `status_reporter` - how the training goes, said about once a second for whoever looks
* `history_recorder` - digests of the parameters, for the history of a run
"""

from offbeat.engine.batch_accounting import BatchCounts, DrawnBatch
from offbeat.engine.buffers import Buffers
from offbeat.engine.control_group import ControlGroup
from offbeat.engine.freshness_mode import FreshnessMode
from offbeat.engine.history_recorder import HistoryRecorder
from offbeat.engine.ignored_parameters import ignored_names
from offbeat.engine.join import JobInfo, JoinCheck, JoinClient, JoinServer, LeaveBarrier
from offbeat.engine.plan_vote import PlanVote
from offbeat.engine.prepared_model import check_sums_some
from offbeat.engine.server_launch import addresses_of, start_beside
from offbeat.engine.server_session import connect, leave_file
from offbeat.engine.state_transfer import hand_over
from offbeat.engine.status_reporter import StatusReporter, happenings, named_values, shortened
from offbeat.engine.step_metrics import MetricsFile, StepMetrics, samples_in
from offbeat.engine.switchable_sync import SwitchableSync
from offbeat.engine.synchronizer import Synchronizer

__all__ = [
    "BatchCounts",
    "Buffers",
    "ControlGroup",
    "DrawnBatch",
    "FreshnessMode",
    "HistoryRecorder",
    "JobInfo",
    "JoinCheck",
    "JoinClient",
    "JoinServer",
    "LeaveBarrier",
    "MetricsFile",
    "PlanVote",
    "StatusReporter",
    "StepMetrics",
    "SwitchableSync",
    "Synchronizer",
    "addresses_of",
    "check_sums_some",
    "connect",
    "hand_over",
    "happenings",
    "ignored_names",
    "leave_file",
    "named_values",
    "samples_in",
    "shortened",
    "start_beside",
]
