"""How do tasks hand tensors to each other, and have them summed on the way?

* `client` - what a task does; `object_future` - a call that may be waited for
* `progress` - how far an object is, for those who wait for it
* `store_access` - a task's way to a store: `remote_store` - to that of its machine, which `local_store` finds or
  starts; `embedded_store` - to one in its own process
* `publishing` - a trainer publishes a model, readers follow it; `versions` - how versions are put and loaded
* `packed_tensors` - several tensors in one object; `delta` - what changed since the version before; `version_path` -
  what a reader gets; `tensor_writes` - how it loads that, all at once
* `node_store` - the objects of one machine; `stored_object` - one of them; `memory` - that clients map; `room` -
  what is dropped for others
* `client_link` - a client; `data_links` - other stores that read here, or feed this one; `directory_link` - the
  way to a directory; `deletions` - that it has not answered
* `stage_runner` - what a store adds for reduces; `stage` - one position of one; `adding` - by torch;
  `edge_dtypes` - the dtypes of what travels between stages; `rounded_part` - a source that is sent in another one
* `serve` - a store as a process; `store_doctor` - whether it works; `directory_server` - a directory over links;
  `directory_list` - the directories that a store names
* `directory` - who has what, who reads from whom, and which reduces are under way; `directory_entry` - one object
* `version_index` - which versions there are, and who waits for a newer one
* `chains` - who feeds whom while many read one object; `goodput` - which stores are slow
* `reduction` - which sources are in a sum, and who takes whose place; `stripe_sum` - the stages that add one stripe of
  it; `sum_parts` - which sources are in which part of that; `small_reduction` - a sum of objects that travel in
  messages; `running_stages` - what a new directory hears of stages
* `reduce_plan` - the tree along which the sources of a reduce are summed; `reduce_checks` - why one is refused
* `stripes` - how an object is cut into ranges that each have a way of their own

The directory and what it consists of are without I/O. After Hoplite (Zhuang et al., "Hoplite: Efficient and
Fault-Tolerant Collective Communication for Task-Based Distributed Systems", SIGCOMM 2021).
"""
