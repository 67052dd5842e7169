"""One shard of a parameter server.

* `shard` - at work, on one event loop; `guest` - who is connected to it; `comparison` - who may be
* `table` - one model's blocks; `store` - their parameters and the optimizer's state
* `ledger` - what has arrived, what waits for it, who waits for that; per block, without I/O
* `marks` - when snapshots are made; `keeping` - how; `archive` - where they are kept
"""
