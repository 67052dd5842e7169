"""Which batch is next?

* `manager` - the prepared loaders of a run, who gives out their data, and which batch is at hand
* `sharded_loader` - every worker has its share of each epoch; `epoch_size` - how many batches that is, and how large
* `endless_loader` - a validator goes round its own data
* `leased_loader` - batches are leased, so nobody owns a part of the data
* `batch_source` - where the batches of a leased loader come from: `server_source` - from the server's coordinator;
  `replicated_source` - worked out alike by all workers
* `position` - the place in leased data, and its translation from one source to the other
* `loader_check` - a loop over the loader that `prepare` was given, instead of the one that it returned
"""
