"""A worker's end of a parameter server.

* `client` - its links to all shards, and what is said over them; `side` - what it hears from one
* `place` - one model there; `exchange` - what the training thread waits for
* `hands` - its leases of data
* `transfers` - what it fetches and puts for checkpoints
* `route` - its way to the shards, and back to them
"""
