"""How many bytes did each direction of each link carry? The kernel's counters, read while a row runs.

A direction is counted where it starts, behind its shaping: what left, headers and what hosts forward for others
included. Some 2 ms in every 200 ms, none of it in a measured process. What had passed at a moment between two readings
is interpolated.

A packet that is cut into frames only by the next machine's card is here one packet, with one header. So what programs
sent is bytes less `HEADER_BYTES` for each packet, whatever the kernel made of it; acknowledgements come to nothing.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy

from offbeat.lab.namespace import inside

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO

    from offbeat.lab.network import Network
    from offbeat.topology import Arc

INTERVAL_S = 0.2
HEADER_BYTES = 66
"""Ethernet's 14, IPv4's 20, and TCP's 32 with timestamps."""
_BYTES_SENT, _PACKETS_SENT = 8, 9


class Carried(NamedTuple):
    """The bytes and packets that a direction of a link has carried."""

    sent_bytes: int
    packets: int


class ArcCounters:
    """A thread that reads the counters of all directions of all links, until its `with` block ends.

    Args:
        network: whose links they are.
        interval_s: between two readings.

    Raises:
        NetworkError: if a namespace of it is gone.
    """

    def __init__(self, network: Network, *, interval_s: float = INTERVAL_S) -> None:
        self._arcs = network.topology.arcs
        self._starts = [network.start(arc) for arc in self._arcs]
        self._interval_s = interval_s
        # Opened inside, a file shows that namespace for ever, whoever reads it.
        self._files: dict[str, FileIO] = {
            name: inside(name, lambda: open("/proc/thread-self/net/dev", "rb", buffering=0))  # noqa: SIM115 - closed on exit
            for name in dict.fromkeys(namespace for namespace, _ in self._starts)
        }
        self._readings: list[tuple[float, list[int]]] = []  # bytes of each direction, and then packets of each
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counters of all links", daemon=True)

    def __enter__(self) -> ArcCounters:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        for file in self._files.values():
            file.close()

    def between(self, spans: Mapping[str, tuple[float, float]], whole_s: tuple[float, float]) -> dict[Arc, Carried]:
        """Count what each direction carried from one moment to another, in seconds of `time.perf_counter`.

        Args:
            spans: of each host's measured steps: what it still had to send at the beginning counts, and what it has to
                send at the end does not.
            whole_s: for what leaves another node.
        """
        times_s = [time_s for time_s, _ in self._readings]
        columns = list(zip(*(counters for _, counters in self._readings), strict=True))
        found = {}
        for index, arc in enumerate(self._arcs):
            moments_s = spans.get(arc.source, whole_s)
            both = (columns[index], columns[index + len(self._arcs)])
            amounts = (round(float(numpy.diff(numpy.interp(moments_s, times_s, one))[0])) for one in both)
            found[arc] = Carried(*amounts)
        return found

    def _run(self) -> None:
        self._read()
        while not self._ended.wait(self._interval_s):
            self._read()
        self._read()

    def _read(self) -> None:
        counters: dict[tuple[str, str], list[str]] = {}
        for namespace, file in self._files.items():
            file.seek(0)
            for line in file.read().decode().splitlines():
                interface, _, fields = line.partition(":")
                counters[namespace, interface.strip()] = fields.split()
        now_s = time.perf_counter()
        now = [int(counters[start][field]) for field in (_BYTES_SENT, _PACKETS_SENT) for start in self._starts]
        self._readings.append((now_s, now))
