"""The profile of a step: when each gradient is complete in backward, when the next forward pass needs it, and the link.

All workers plan from the same profile: of the slowest worker's times, and of the slowest link.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class GradientTimes:
    """One gradient.

    Args:
        name: of its parameter.
        numel: its elements.
        itemsize: bytes of one.
        kind: only gradients of the same kind, one for each dtype and device, can be in one block.
        ready_s: when it is complete, in seconds since backward began.
        forward_s: what the forward pass computes between needing this one's parameter and needing the next one's.
    """

    name: str
    numel: int
    itemsize: int
    kind: str
    ready_s: float
    forward_s: float

    @property
    def size_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class BackwardProfile:
    """The profile of a step, which a scheduler plans from.

    Args:
        gradients: in the order in which the forward pass needs their parameters, the most urgent first.
        backward_s: how long backward takes.
        latency_s: what an exchange takes beyond its bytes while no other is under way.
        bandwidth: bytes of gradients that are exchanged in a second while nothing else is.
        gap_s: the least time that an exchange takes of the link, however small it is: the gap of LogGP (Alexandrov et
            al., 1995).
    """

    gradients: tuple[GradientTimes, ...]
    backward_s: float
    latency_s: float
    bandwidth: float
    gap_s: float = 0.0

    def takes_s(self, size_bytes: float) -> float:
        """The time that the exchange of so many bytes takes of the link."""
        return max(self.gap_s, size_bytes / self.bandwidth)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.gradients)

    @property
    def forward_s(self) -> float:
        """Seconds that the forward pass takes."""
        return sum(one.forward_s for one in self.gradients)

    @property
    def trouble(self) -> str:
        """The part of it that cannot be, in words; "" if all can: what a worker has told is checked by it."""
        for one in self.gradients:
            if not all(math.isfinite(s) and s >= 0 for s in (one.ready_s, one.forward_s)):
                return f"{one.name} is complete after {one.ready_s} s, and its layer takes {one.forward_s} s"
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            return f"a bandwidth of {self.bandwidth} bytes in a second"
        times = {"backward": self.backward_s, "latency": self.latency_s, "gap": self.gap_s}
        wrong = (f"a {name} of {s} s" for name, s in times.items() if not (math.isfinite(s) and s >= 0))
        return next(wrong, "")

    @property
    def arrivals(self) -> list[int]:
        """Indices of the gradients in the order in which they are complete."""
        last = len(self.gradients) - 1
        return sorted(range(last + 1), key=lambda i: (self.gradients[i].ready_s, last - i))


def slowest(profiles: Sequence[BackwardProfile]) -> BackwardProfile:
    """The profile of which each time is the longest, and the bandwidth the least, of these of the same gradients."""
    first = profiles[0]
    return BackwardProfile(
        tuple(
            dataclasses.replace(
                gradient,
                ready_s=max(one.gradients[i].ready_s for one in profiles),
                forward_s=max(one.gradients[i].forward_s for one in profiles),
            )
            for i, gradient in enumerate(first.gradients)
        ),
        backward_s=max(one.backward_s for one in profiles),
        latency_s=max(one.latency_s for one in profiles),
        bandwidth=min(one.bandwidth for one in profiles),
        gap_s=max(one.gap_s for one in profiles),
    )
