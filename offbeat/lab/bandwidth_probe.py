"""Measure what links really carry: one node's ends of TCP streams.

    bandwidth_probe.py SETTLE_S SECONDS [receive PORT]... [send ADDRESS PORT]...

It says "ready" when it can be reached, waits for a line, so that all nodes begin at once, and prints the goodput of
each stream that it receives in 10^6 bit/s, a line for each, in order; then it hangs up. Senders send until the other
end does. Started by its path with nothing but the standard library.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import suppress

CHUNK = 1 << 18
CONNECT_S = 10.0


def receive(listener: socket.socket, settle_s: float, seconds: float) -> float:
    """Accept one stream, let it settle, and return its goodput over `seconds`, in 10^6 bit/s."""
    buffer = bytearray(CHUNK)
    with listener:
        listener.settimeout(CONNECT_S)
        stream, _ = listener.accept()
    with stream:
        # What arrives before the clock starts does not count: TCP begins slowly, and queues fill.
        stream.recv_into(buffer)
        settled_s = time.perf_counter() + settle_s
        while time.perf_counter() < settled_s and stream.recv_into(buffer):
            pass
        start_s = last_s = time.perf_counter()
        total_bytes = 0
        while last_s < start_s + seconds and (received := stream.recv_into(buffer)):
            total_bytes += received
            last_s = time.perf_counter()
    return total_bytes * 8 / 1e6 / max(last_s - start_s, 1e-9)


def send(address: str, port: int) -> None:
    """Send as much as the link takes until the receiver hangs up."""
    stream = socket.create_connection((address, port), timeout=CONNECT_S)
    # On a slow link one chunk takes long; whoever started us ends us.
    stream.settimeout(None)
    payload = bytes(CHUNK)
    with stream, suppress(ConnectionError):
        while True:
            stream.sendall(payload)


class _Receiver(threading.Thread):
    def __init__(self, port: int, settle_s: float, seconds: float) -> None:
        super().__init__()
        self._listener = socket.create_server(("0.0.0.0", port))
        self._settle_s, self._seconds = settle_s, seconds
        self.goodput_mbps = -1.0

    def run(self) -> None:
        self.goodput_mbps = receive(self._listener, self._settle_s, self._seconds)


def main(arguments: list[str]) -> int:
    """Be one node's ends of all its streams; the exit code."""
    settle_s, seconds = map(float, arguments[:2])
    words = iter(arguments[2:])
    receivers: list[_Receiver] = []
    senders: list[threading.Thread] = []
    for word in words:
        if word == "receive":
            receivers.append(_Receiver(int(next(words)), settle_s, seconds))
        else:
            senders.append(threading.Thread(target=send, args=(next(words), int(next(words)))))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for thread in (*receivers, *senders):
        thread.start()
    for thread in (*receivers, *senders):
        thread.join()
    sys.stdout.writelines(f"{one.goodput_mbps}\n" for one in receivers)
    return int(any(one.goodput_mbps < 0 for one in receivers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
