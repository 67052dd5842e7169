"""What does the user hold?

* `run` - `offbeat.init()` and `Run`
* `rendezvous` - how the workers of a job find each other
* `replica` - the model that `run.prepare` returns
* `model_checks` - which models and optimizers can be prepared; `wrapper_check` - other wrappers around or inside one
* `step_check` - steps of a model that was never prepared
* `plan_manager` - which plan holds, and how another one comes to hold while training
* `fabric_migration` - from all-reduce to a parameter server and back while training
* `elastic_join` - workers that join a job without a server while it trains
* `uneven_inputs` - `with model.join()`: inputs that end on one worker sooner than on others
* `checkpoints` - checkpoints of a job as files
"""
