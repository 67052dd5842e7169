"""Where do parameters live? At a sharded server: workers push contributions, and pull parameters.

* `launch` - how a shard is started as a process of its own, and what it is told
* `client` - a worker's end
* `shard` - one shard: what it holds, takes in and gives out, and the snapshots of that
* `blocks` - the parameters cut into blocks, and dealt out to shards
* `pushed_block` - one block of a contribution, of one of several kinds; `aggregator` - what is made of all of them;
  `robust_aggregator` - the same by a rule, where some of them lie; `judge` - what the rule says of each;
  `encoded_block` - a block that a codec has encoded
* `optimizers` - the user's optimizer as data
* `snapshot` - what is kept of a shard, as a file
* `optimizer_checkpoint` - the optimizer's state as part of a checkpoint, by parameter
"""
