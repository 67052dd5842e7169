"""Measure what a link really carries.

    bandwidth_probe.py receive PORT SETTLE_S SECONDS
    bandwidth_probe.py send ADDRESS PORT

The receiver prints the goodput of one TCP stream in 10^6 bit/s, then hangs up; the sender sends until it does. Started
by its path with nothing but the standard library.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress

CHUNK = 1 << 18
CONNECT_S = 10.0


def receive(port: int, settle_s: float, seconds: float) -> float:
    """Accept one stream, let it settle, and return its goodput over `seconds`, in 10^6 bit/s."""
    buffer = bytearray(CHUNK)
    with socket.create_server(("0.0.0.0", port)) as listener:
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
    deadline_s = time.perf_counter() + CONNECT_S
    while True:
        try:
            stream = socket.create_connection((address, port), timeout=CONNECT_S)
            break
        except ConnectionRefusedError:
            # The receiver is still starting.
            if time.perf_counter() > deadline_s:
                raise
            time.sleep(0.02)
    # On a slow link one chunk takes long; whoever started us ends us.
    stream.settimeout(None)
    payload = bytes(CHUNK)
    with stream, suppress(ConnectionError):
        while True:
            stream.sendall(payload)


def main(arguments: list[str]) -> None:
    """Be one end of a stream."""
    if arguments[0] == "receive":
        sys.stdout.write(f"{receive(int(arguments[1]), float(arguments[2]), float(arguments[3]))}\n")
    else:
        send(arguments[1], int(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
