"""What the first shard does beside: it decides for all shards and workers.

* `lead` - tells them what was decided; `model` - what it knows about one model
* `coordinator` - asks the policy, and keeps count
* `dealer` - who computes which samples next, and how many
* `resume` - who may come back, and with what
* `swaps` - which plan holds, and how another one comes to; `proposal` - who has agreed to it
* `questions` - what all workers are asked beside the data
* `replacements` - what the first worker brings in place of what the server has, when all others wait for it
* `schedules` - whether workers bring the same hyper-parameters
* `controlling` - asks the plan's controller
"""
