"""A worker's end of a parameter server.

* `client` - its links to all shards, and what is said over them; `receiver` - what it hears from one shard
* `model_state` - one model there; `requests` - what the training thread waits for, and what comes of it
* `lease_queue` - its leases of data; `plan_judge` - what it makes of another plan that is proposed
* `state_transfer` - what it fetches and puts for checkpoints
* `connections` - its way to the shards, and back to them after they were lost
"""
