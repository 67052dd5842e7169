"""What does the user hold?

* `run` - `offbeat.init()` and `Run`
* `session` - the parts of a worker's run, opened in stages, and their end; `open_sessions` - those of this process
* `refusal_hook` - a refusal that all workers end with, said once
* `environment` - what the launcher and the user say in variables
* `rendezvous` - how the workers of a job find each other; `fabric_binding` - this worker's ends of the fabrics
* `step_hooks` - what happens around each step of the script's loop; `status` - how it goes, for `offbeat top`
* `run_state` - what a run saves in a checkpoint beside model and optimizer
* `replica` - the model that `run.prepare` returns
* `model_checks` - which models and optimizers can be prepared; `wrapper_check` - other wrappers around or inside one
* `step_check` - steps of optimizers that were never prepared; `replica_check` - states saved while replicas differ
* `plan_manager` - which plan holds, and how another one comes to hold while training
* `fabric_migration` - from all-reduce to a parameter server and back while training
* `elastic_join` - workers that join a job without a server while it trains
* `rerouting` - other paths while training, when links have changed
* `uneven_inputs` - `with model.join()`: inputs that end on one worker sooner than on others
* `checkpoints` - checkpoints of a job as files; `background_writer` - the thread that writes them
"""
