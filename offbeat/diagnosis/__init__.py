"""Who has not arrived, and why?

* `wait` - the one primitive for every blocking wait, and the report when it takes too long
* `stall_witness` - ties that primitive to the sentinel beside each worker
* `startup_barrier` - who is there before there are sentinels, and whether a missing worker still starts
* `sentinel` - the process beside each worker, started by `__main__`; `sentinel_client` - the worker's handle on it
* `status_page` - shared memory with a worker's last words
* `process_state` - what the kernel knows about a process
* `hub` - where the last words of all workers come together, in rank 0's sentinel; `hub_client` - the others' way to it
* `explain` - from the last words of all workers to a verdict
* `finding` - what `offbeat doctor` finds where it looks

A sentinel starts in a few milliseconds beside every worker: nothing that it imports may load torch.
"""
