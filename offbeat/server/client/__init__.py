"""A worker's end of a parameter server.

* `client` - what the training thread asks of all shards; `receiver` - what is heard from one of them
* `model_exchanges` - opening models, contributions, and the parameters that come back; `model_state` - one model there
* `question_client` - what all workers are asked; `coordinator_requests` - the status, and swaps of the plan
* `requests` - what the training thread waits for, and what comes of it; `pulled_blocks` - a part of the parameters
* `loss_question` - what a validator waits for beside its parameters
* `lease_requests` - asks for leases of data; `lease_queue` - those that it has
* `plan_judge` - what it makes of another plan that is proposed
* `state_transfer` - what it fetches and puts for checkpoints, and what a validator fetches of others' contributions
* `connections` - its way to the shards, and back to them after they were lost
"""
