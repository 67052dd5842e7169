"""The order in which a queue by urgency would send slices, played on a profile.

Such a queue lives on each worker in the systems that are compared here, and one worker's order is made that of all,
with a message each. Played on what all workers share, it needs none.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.scheduling.profile import BackwardProfile
    from offbeat.scheduling.schedule import GradientSlice


def sent_order(profile: BackwardProfile, slices: Sequence[GradientSlice], window_bytes: int) -> list[GradientSlice]:
    """Sort slices as a queue sends them that takes the most urgent of those that are complete, whenever there is room.

    Args:
        slices: in order of urgency.
        window_bytes: under way at a time; a slice that is larger goes alone.
    """
    waiting = sorted(range(len(slices)), key=lambda i: (profile.gradients[slices[i].gradient].ready_s, i), reverse=True)
    complete: list[int] = []
    under_way: list[tuple[float, int]] = []  # when done, size
    order, now_s, link_s, size = [], 0.0, 0.0, 0
    while waiting or complete:
        while waiting and profile.gradients[slices[waiting[-1]].gradient].ready_s <= now_s:
            heapq.heappush(complete, waiting.pop())
        while under_way and under_way[0][0] <= now_s:
            size -= heapq.heappop(under_way)[1]
        if complete:
            one = slices[complete[0]]
            # An empty one takes its turn, too.
            size_bytes = max(1, one.numel * profile.gradients[one.gradient].itemsize)
            if not under_way or size + size_bytes <= window_bytes:
                heapq.heappop(complete)
                order.append(one)
                link_s = max(now_s + profile.latency_s, link_s) + profile.takes_s(size_bytes)
                heapq.heappush(under_way, (link_s, size_bytes))
                size += size_bytes
                continue
            now_s = under_way[0][0]
        else:
            now_s = profile.gradients[slices[waiting[-1]].gradient].ready_s
    return order
