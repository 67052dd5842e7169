"""How do bytes arrive exactly once?

* `frame` - bytes to frames and back, bodies in place, without I/O
* `messages` - what is said to open a link, and on the control connection, as declared structs
* `handshake`, `credentials` - what proves who may speak: token, certificates; `handshake_io` - over a stream
* `session` - exactly once and in order, whatever breaks; without I/O
* `stream` - a socket that never blocks, plain or with TLS
* `link` - a session on real connections, one after the other; `keepalive` - whether a silent peer's machine answers
* `tcp` - `listen` and `connect`, with an example; `listener` and `connector` behind them
* `mesh` - a link with each of the others; `lane` - memory that grows at one end of a link and then at the other;
  `lane_inbox` - which lane takes in the block that comes
* `interfaces` - the addresses of this machine, and which of them leads to a peer
* `loop_thread` - an event loop on a thread, for a training process; `busy_poll` - one that looks again before it sleeps
* `message_stream` - messages over an asyncio stream
* `rate_limited_log` - who was refused, in the log
* `swap_request` - a request for another plan, left in the folder of a job that has no server to be asked

Nothing here loads torch, and nothing from the network is decoded into anything but declared structs.
"""
