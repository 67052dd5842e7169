"""What do real links do to it? Hosts, links and measurements on one machine.

A scenario (a TOML file, `offbeat.scenario`) says which hosts hang on which links, which work they do, and which systems
are compared. The lab builds each host as a network namespace, joins them by veth pairs to a bridge that lives in a
namespace of its own, shapes both directions of every link with a token bucket (tbf), starts one worker per host inside,
and measures. Nothing is built in the machine's own network, so two labs never meet and nothing outside can notice.

=================  ==================================================================================================
`namespace.py`     run a function inside a network namespace
`enter.py`         run a program inside a network namespace, and end it with its parent (a program by itself)
`network.py`       build and remove the network of one scenario
`emulator.py`      a bad link, packet by packet: delay, loss, damage, one-way partitions (a program by itself)
`emulated.py`      a link that can be made bad at any time
`state.py`         who built what, so that `offbeat lab clean` removes what a dead lab left and nothing else
`reaper.py`        the watcher that cleans up when the lab itself is killed (a program by itself)
`probe.py`         what the links really carry (a program by itself)
`refusals.py`      what this machine cannot measure, and what measuring takes
`launch.py`        one worker per host with the environment of torchrun
`peers.py`         offbeat and the systems it is compared with, behind one function
`replay.py`        the worker program that replays a profile
`recorder.py`      what a worker measures, as JSON lines
`results.py`       the records of a result file
`predicted.py`     what the simulator says of a scenario
`rounds.py`        run every row of a scenario, interleaved and repeated
`plots.py`         the picture of a result file
=================  ==================================================================================================

This file imports nothing, so that the programs start at once.
"""
