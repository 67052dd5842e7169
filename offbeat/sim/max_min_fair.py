"""Max-min fair sharing of links (Bertsekas and Gallager, Data Networks, section 6.5.2), with weights.

All flows are given more, in proportion to their weights, until a link on their way is full, or their own bound is
reached; those stay at that, and the others go on. Flows with the same way, bound and weight are one class: there may be
a thousand of them, and the work is the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class FlowPath(NamedTuple):
    """The path of a flow.

    Args:
        links: those that it shares with others, by name.
        most: bytes per second it has at most, such as the rate of a link that is its own.
        weight: what it gets where it shares, relative to others.
    """

    links: tuple[str, ...]
    most: float = math.inf
    weight: float = 1.0


def shares(counts: Mapping[FlowPath, int], rates: Mapping[str, float]) -> dict[FlowPath, float]:
    """Bytes per second of one flow of each class.

    Args:
        counts: flows of each class; at least 1.
        rates: of the links, in bytes per second.

    >>> one, other = FlowPath(("server",), most=10.0), FlowPath(("server",))
    >>> shares({one: 2, other: 1}, {"server": 90.0}) == {one: 10.0, other: 70.0}
    True
    """
    found: dict[FlowPath, float] = {}
    left, open_ = dict(rates), dict(counts)
    while open_:
        load: dict[str, float] = {}
        for way, count in open_.items():
            for link in way.links:
                load[link] = load.get(link, 0.0) + count * way.weight
        levels = {link: max(left[link], 0.0) / weight for link, weight in load.items()}
        level = min([*levels.values(), *(way.most / way.weight for way in open_)], default=math.inf)
        full = {link for link, its in levels.items() if its <= level * (1 + 1e-12)}
        done = [
            way for way in open_ if way.most <= level * way.weight * (1 + 1e-12) or not full.isdisjoint(way.links)
        ] or list(open_)
        for way in done:
            found[way] = min(way.most, level * way.weight)
            count = open_.pop(way)
            for link in way.links:
                left[link] -= count * found[way]
    return found
