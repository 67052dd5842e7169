"""What do processes say to each other?

* `messages` - the conversation between workers and shards as a whole: how messages are packed, and who may say which
* `training` - from opening a model to the parameters that come back
* `shards` - between the shards and their coordinator
* `loss_scores` - losses on trusted samples, which a validator finds out
* `data_leases` - who computes which samples next
* `plan_swap` - how another plan comes to hold
* `rank_reservation` - which ranks newcomers get
* `checkpoints` - the optimizer's state, out of the server and back into it
* `status` - what can be seen of a job; `worker_status` - what a worker tells of its training
* `switch_control` - what workers and operators say to a switch, beside the packets
* `objects` - between stores of objects and their directory; `object_lanes` - between stores; `object_calls` - between a
  store and a client on its machine; `object_versions` - what the objects of a version begin with
* `group_progress` - how far a worker is in exchanges, told behind a loss
* `optimizer_spec` - an optimizer as data
* `bounds` - types of fields with their bounds; `decoding` - a message is read, or refused

Everything is a declared structure with a bound on every field, and is checked when it is decoded.
"""
