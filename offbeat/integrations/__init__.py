"""How do those train with offbeat who do not write the loop themselves? One file for each framework.

* `lightning` - a strategy for Lightning's Trainer
* `accelerate` - an Accelerator; `transformers` - the Hugging Face Trainer on it
* `trackers` - TensorBoard, Weights & Biases and MLflow, told how the workers train; `figures` - what they are told
* `worker_start` - where a worker is, and what its framework would undo; `step_meetings` - who meets the others in every
  step, where a plan lets workers go on by themselves
* `state_files` - the state of a run beside a framework's own checkpoints
* `ray_objects` - stores of objects on the nodes of a Ray cluster; `ray_transport` - Ray's own references to tensors, on
  them; `ray_collective` - `ray.util.collective`, on them; `ray_groups` - models of a table's groups, fitted by actors

Nothing of offbeat imports these, and each imports its own framework alone. (Under Ray Train a loop calls
`offbeat.init()` as anywhere else.)
"""
