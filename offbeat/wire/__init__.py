"""The transport of everything that is not a collective of torch's.

* `frame` - bytes to frames and back, bodies in place, without I/O
* `messages` - what is said, as declared structs
* `handshake`, `credentials` - what proves who may speak: token, certificates

Links, which carry a parameter server's blocks:

* `session` - exactly once and in order, whatever breaks; without I/O
* `stream` - a socket that never blocks, plain or with TLS
* `link` - a session on real connections, one after the other
* `tcp` - `listen` and `connect`, with an example; `door` and `dial` behind them, `greeting` between them
* `interfaces` - the addresses of this machine, and which of them leads to a peer
* `ask` - questions and answers over a link
* `loop` - an event loop on a thread, for a training process; `eager` - one that looks again before it sleeps

The control connection:

* `page` - shared memory with a worker's last words, and its `status`: how its training goes, for people
* `process` - what the kernel knows about a process
* `talk`, `hub`, `uplink` - messages over TCP: between a sentinel and rank 0's
* `sentinel` - the process beside each worker
* `watch` - a worker's handle on it
* `culprit` - who has not arrived, and why

`wish` - what somebody wants of a job that has no server, left in its folder; `refusals` - who was refused, in the log

Nothing here loads torch, and nothing from the network is decoded into anything but declared structs.
"""

from offbeat.wire.culprit import Culprit, Diagnosis, explain
from offbeat.wire.watch import Watch

__all__ = ["Culprit", "Diagnosis", "Watch", "explain"]
