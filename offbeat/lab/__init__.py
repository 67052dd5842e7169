"""What do real links do to it? Hosts, links and measurements on one machine.

A scenario (a TOML file, `offbeat.scenario`) says which hosts hang on which links, which work they do, and which systems
are compared. The lab builds each host as a network namespace, joins them by veth pairs to a bridge that lives in a
namespace of its own, or to each other, shapes both directions of every link with a token bucket (tbf), starts one
worker per host inside, and measures. Nothing is built in the machine's own network, so two labs never meet and nothing
outside can notice.

The network:

* `network` - build and remove the network of one scenario: `bridged_links` - of hosts on one switch; `routed_links` -
  of any other, in which hosts and switches forward; `link_shaping` - one end of a link
* `namespace` - run a function inside a network namespace; `netns_exec` - run a program inside one, and end it with its
  parent (a program by itself)
* `memory_cgroup` - the memory that a host's processes may use
* `emulator` - a bad link, packet by packet: delay, loss, damage, one-way partitions (a program by itself);
  `emulated_link` - a link that can be made bad at any time
* `lab_registry` - who built what, so that `offbeat lab clean` removes what a dead lab left and nothing else; `reaper` -
  cleans up when the lab itself is killed (a program by itself)
* `goodput` - do the links carry what the scenario promises? `bandwidth_probe` - measures one (a program by itself)

A run:

* `runner` - run every row of a scenario, interleaved and repeated
* `refusals` - what this machine cannot measure, and what measuring takes
* `jobs` - what the programs of one row are told; `command_lines` - their commands and environment
* `launch` - one worker per host with the environment of torchrun; `validator_process` - what they are judged by;
  `worker_placement` - where a process runs
* `systems` - offbeat and the systems it is compared with, behind one function; `torchft_peer` - one of them
* `object_load` - a worker that hands tensors to others by stores of objects (a program by itself)
* `ray_cluster` - a Ray node on each host, for rows in which Ray does the work
* `replay` - the worker program that replays a profile; `peer_checkpoint` - from what a script under torchrun goes on
* `fault_injection` - the faults of a run
* `recorder` - what a worker measures, as JSON lines; `link_sampler` - how busy each link is;
  `arc_counters` - what each direction of each link has carried
* `hardware` - the machine it was measured on

Switches by themselves:

* `packet_loss` - datagrams that are lost at a host's interface, by a program in the kernel
* `switch_load` - one worker that sums as fast as it can (a program by itself); `load_workers` - one in each host
* `garbage` - packets that no honest worker sends, and somebody who sends them; `memory_load` - within one process
* `random_swaps` - another policy every few milliseconds, and what workers' histories say of it

What comes of it:

* `results` - the records of a result file; `run_result` - what one run of one row amounts to
* `gradient_check` - whether the system that was measured summed rightly
* `swap_cost`, `fault_cost` - what a plan swap or a fault cost
* `lower_bounds` - how fast a row could be at best, from its `demand`
* `predictions` - what the simulator says of a scenario
* `result_table` - a result file as a table; `plots` - as a picture; `timeline_plot` - over time, where something went
  wrong

This file imports nothing, so that the programs start at once.
"""
