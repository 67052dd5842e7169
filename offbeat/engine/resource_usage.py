"""The resources that this worker's process uses: processor time, memory, and what its exchanges send.

Sampled once a second on the thread that writes metrics; a step pays nothing for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_S = 1.0


@dataclass(frozen=True)
class ResourceUsage:
    """The resources that a worker used over about the last second.

    Args:
        cpu_cores: processor seconds per second, of all threads of the process; 1.0 is one core kept busy.
        memory_bytes: resident memory of the process.
        sent_bytes_per_s: payload that its exchanges handed to the fabric, as `bytes_sent` of a step counts it.
    """

    cpu_cores: float
    memory_bytes: int
    sent_bytes_per_s: float


class ResourceSampler:
    """A sampler of this process, at most once a second, whoever asks; between two samples the last one holds.

    Args:
        now_s: the clock.
        sent_bytes: what the exchanges have sent so far, in all.
    """

    def __init__(self, now_s: Callable[[], float], sent_bytes: Callable[[], int]) -> None:
        self._now_s, self._sent_bytes = now_s, sent_bytes
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._last: ResourceUsage | None = None
        self._before = self._read()

    def sample(self) -> ResourceUsage | None:
        """The newest; None within the first second."""
        with self._lock:
            then_s, then_cpu_s, then_bytes = self._before
            if self._now_s() - then_s >= EVERY_S:
                self._before = now_s, cpu_s, sent_bytes = self._read()
                past_s = now_s - then_s
                self._last = ResourceUsage(
                    max(0.0, cpu_s - then_cpu_s) / past_s,
                    self._process.memory_info().rss,
                    max(0, sent_bytes - then_bytes) / past_s,
                )
            return self._last

    def _read(self) -> tuple[float, float, int]:
        used = self._process.cpu_times()
        return self._now_s(), used.user + used.system, self._sent_bytes()
