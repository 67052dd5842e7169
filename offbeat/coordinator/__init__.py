"""Who decides for a whole job? The coordinator, without I/O: on the first shard of its server, and in the simulator.

* `coordinator` - hears events and returns instructions; `events` and `instructions` are those; `job_record` - what its
  parts share
* `members` - workers come, come back and go
* `contributions` - from a worker that has computed one until it has the next parameters; `arrivals` - which are whole
  at all shards, and what of them goes with a worker; `decisions` - what the policy decides, as messages
* `judgements` - what a rule that compares whole contributions makes of them
* `short_updates` - which are of fewer contributions than the rule needs, and why
* `reference_limit` - how many contributions of a worker are compared with one reference
* `loss_questions` - which validator finds out the losses that a rule goes by
* `policy_runner` - asks the synchronization policy, and keeps count of what it promised; `model_record` - what else is
  known of one model
* `data_leases` - who computes which samples next, and how many; `data_requests` - what workers say about that
* `reconnect` - who may come back, and with what
* `plan_swap` - which plan holds, and how another one comes to; `plan_proposal` - who has agreed to it
* `questions` - what all workers are asked beside the data; `question_rounds` - who takes no part while it asks
* `replacements` - parameters that the first worker brings in place of what the server has
* `hyperparameters` - whether workers bring the same hyper-parameters
* `progress` - how far workers are, as a snapshot keeps it
* `controller_driver` - asks the plan's controller
"""
