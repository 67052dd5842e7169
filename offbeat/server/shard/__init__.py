"""One shard of a parameter server.

* `shard` - at work, on one event loop; `peer` - one connection to it; `admission_check` - whether a worker trains the
  same model as the others; `coordinator_host` - the coordinator on the first shard
* `model_shard` - one model's blocks; `parameter_store` - their parameters and the optimizer's state
* `shard_parts` - what shards carry out of a plan
* `update_scheduler` - what has arrived, what waits for it, who waits for that; per block, without I/O
* `job_clock` - the time of a job, which stands still while its server is away
* `push_watch` - contributions that were announced and do not come
* `undo_log` - undoes and redoes updates that hold contributions which may still be withdrawn
* `update_measurement` - what is said of an update that a robust rule is to judge
* `update_recorder` - updates in the making, for the history
* `live_image` - what a shard that was not killed still holds of a life that has ended, from which the next continues
* `snapshot_barrier` - when all shards make a snapshot of one version; `snapshot_builder` - how one is made;
  `snapshot_store` - the folder that keeps them
"""
