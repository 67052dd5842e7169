"""The transport of everything that is not a collective of torch's: here, the control connection.

* `frame` - bytes to frames and back, without I/O
* `messages` - what is said, as declared structs; the proof of the token
* `page` - shared memory with a worker's last words
* `process` - what the kernel knows about a process
* `talk`, `hub`, `uplink` - messages over TCP: between a sentinel and rank 0's
* `sentinel` - the process beside each worker
* `watch` - a worker's handle on it
* `culprit` - who has not arrived, and why

Nothing here loads torch, and nothing from the network is decoded into anything but declared structs.
"""

from offbeat.wire.culprit import Culprit, Diagnosis, explain
from offbeat.wire.watch import Watch

__all__ = ["Culprit", "Diagnosis", "Watch", "explain"]
