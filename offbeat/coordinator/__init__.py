"""Who decides for a whole job? The coordinator, on the first shard of its server.

* `coordinator` - takes in what workers and shards say, and tells them what was decided
* `policy_runner` - asks the synchronization policy, and keeps count of what it promised; `model_record` - what else is
  known of one model
* `data_leases` - who computes which samples next, and how many
* `reconnect` - who may come back, and with what
* `plan_swap` - which plan holds, and how another one comes to; `plan_proposal` - who has agreed to it
* `questions` - what all workers are asked beside the data
* `replacements` - parameters that the first worker brings in place of what the server has
* `hyperparameters` - whether workers bring the same hyper-parameters
* `progress` - how far workers are, as a snapshot keeps it; `loss` - a contribution that is lost with its worker
* `controller_driver` - asks the plan's controller
"""
