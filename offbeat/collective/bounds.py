"""Bounds: in what time no method can do it, by what the cuts of a network carry.

S bytes on each of N hosts, which alone can add. Links are full duplex.

* All-gather: hosts in a set A have |A| / N of the vector, which has to leave A if there is a host outside. So it takes
  at least S / N max_A |A| / capacity out of A, and there are trees that reach it (Zhao et al., "ForestColl", 2024).
  A reduce-scatter is an all-gather backwards. One after the other is the bound of a *sequential* all-reduce.
* Any all-reduce: each element has to leave and to enter each set of hosts that is not all of them: S / min cut. And to
  tell G groups of hosts what all of them have takes 2 (G - 1) messages (Harary and Schwenk, "The communication problem
  on graphs and digraphs", 1974), each of which leaves a group and enters one: 2 (G - 1) S / capacity out of all groups.
  Groups are single hosts, those at one switch, or those that remain together without slow links. With single hosts at
  one switch this is max(S / min b, 2 (N - 1) S / sum b).

Cuts come from maximum flows (Dinic) over whole numbers, where rates are rounded up, to 10^3 bit/s or to a millionth of
what a host hears: so a bound may be lower by as much as it might be, and is never higher.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offbeat.collective.paths import Paths
from offbeat.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat.topology import Topology

_PER_MBPS = 1000
_MOST = (1 << 31) - 1  # that scipy's flows hold


class Bounds(NamedTuple):
    """Least times, in seconds.

    Args:
        all_gather_s, reduce_scatter_s: of either alone.
        any_method_s: of an all-reduce, by whatever method.
    """

    all_gather_s: float
    reduce_scatter_s: float
    any_method_s: float

    @property
    def sequential_s(self) -> float:
        """The least time of an all-reduce that gathers only after all is reduced."""
        return self.all_gather_s + self.reduce_scatter_s


def bound(network: Topology, size_bytes: float) -> Bounds:
    """Least times for a vector of so many bytes per host; links that are not shaped take none.

    Raises:
        PlanError: if scipy is not installed, or the network cannot be planned for.

    >>> from offbeat.topology import Topology
    >>> found = bound(Topology.mesh(4, 4, rate_mbps=8), 1e6)
    >>> found.sequential_s, found.any_method_s
    (0.9375, 0.625)
    """
    paths = Paths(network)
    if paths.ranks == 1:
        return Bounds(0.0, 0.0, 0.0)
    forward, backward = _Cuts(paths, reverse=False), _Cuts(paths, reverse=True)
    gather_s, scatter_s = (_seconds(size_bytes / paths.ranks, cuts.share_mbps()) for cuts in (forward, backward))
    any_s = max(
        _seconds(size_bytes, forward.least_mbps()),
        *(_seconds(size_bytes * 2 * (len(groups) - 1), _between_mbps(paths, groups)) for groups in _groupings(paths)),
    )
    return Bounds(gather_s, scatter_s, any_s)


class _Cuts:
    """The cuts of a network, or of it with all arcs turned round. Its nodes are numbers, ranks first."""

    def __init__(self, paths: Paths, *, reverse: bool) -> None:
        self.flows, self.sparse = _scipy()
        names = list(dict.fromkeys([*paths.names, *(arc.source for arc in paths.arcs)]))
        numbers = {name: number for number, name in enumerate(names)}
        self.ranks, self.nodes = paths.ranks, len(names)
        ends = [(numbers[arc.source], numbers[arc.target]) for arc in paths.arcs]
        self.ends = np.array(ends)[:, ::-1] if reverse else np.array(ends)
        rates = np.array([math.inf if arc.rate_mbps is None else arc.rate_mbps for arc in paths.arcs])
        self.is_shaped = np.isfinite(rates)
        self.degree = int(np.bincount(self.ends.ravel()).max())
        # N times what a host hears at most is to be a number that a flow can hold.
        heard = np.bincount(self.ends[:, 1], weights=rates, minlength=self.nodes)[: self.ranks]
        self.first = int(heard.argmin()) if np.isfinite(heard).any() else None
        most_mbps = heard[self.first] if self.first is not None else rates[self.is_shaped].sum()
        per_mbps = min(_PER_MBPS, _MOST / 8 / paths.ranks / max(most_mbps, 1.0))
        whole = np.ceil(np.where(self.is_shaped, rates, 0.0) * per_mbps - 1e-6).astype(np.int64)
        common = max(1, int(np.gcd.reduce(whole)))
        self.capacities = whole // common
        self.unit_mbps: float = common / float(per_mbps)

    def share_mbps(self) -> float:
        """The most that each host can send to all others at the same time.

        It is the least capacity out of a set of hosts, for each host in it. From cut to cut it goes down (Dinkelbach's
        method): what is too much for one host to hear is as much as the cut lets through that holds it up. What was
        not too much for the hosts before is not now.
        """
        if not self.is_shaped.any():
            return math.inf
        heard = self.ends[:, 1] == self.first if self.first is not None else self.is_shaped
        share = Fraction(int(self.capacities[heard].sum()), self.ranks - 1)
        graph = self._graph(share)
        for host in range(self.ranks):
            while True:
                found = self.flows.maximum_flow(graph, self.nodes, host)
                if found.flow_value >= self.ranks * share.numerator:
                    break
                inside = self._inside(graph - found.flow, self.nodes)
                leaves = inside[self.ends[:, 0]] & ~inside[self.ends[:, 1]]
                share = Fraction(int(self.capacities[leaves].sum()), int(inside[: self.ranks].sum()))
                graph = self._graph(share)
        return float(share) * self.unit_mbps

    def least_mbps(self) -> float:
        """The least capacity of a cut with hosts on both sides."""
        no_limit = _MOST // 2 // self.degree
        capacities = np.where(self.is_shaped, np.minimum(self.capacities, no_limit), no_limit)
        graph = self._matrix(self.ends, capacities, self.nodes)
        pairs = [pair for host in range(1, self.ranks) for pair in ((0, host), (host, 0))]
        least = float(min(self.flows.maximum_flow(graph, *pair).flow_value for pair in pairs))
        return math.inf if least >= no_limit else least * self.unit_mbps

    def _graph(self, share: Fraction) -> Any:
        """The network, times the denominator of a share, and one more node that sends its numerator to each host."""
        most = self.ranks * share.numerator
        scaled = np.where(self.is_shaped, np.minimum(self.capacities * share.denominator, most), most)
        supply = [(self.nodes, rank) for rank in range(self.ranks)]
        ends = np.concatenate([self.ends, np.array(supply)])
        return self._matrix(ends, np.concatenate([scaled, np.full(self.ranks, share.numerator)]), self.nodes + 1)

    def _matrix(self, ends: np.ndarray, capacities: np.ndarray, nodes: int) -> Any:
        matrix = self.sparse.coo_matrix((capacities, (ends[:, 0], ends[:, 1])), shape=(nodes, nodes))
        return matrix.tocsr().astype(np.int32)

    def _inside(self, left: Any, source: int) -> np.ndarray:
        """Find the nodes that can be reached over what a flow leaves: a bool for each."""
        left.eliminate_zeros()
        inside = np.zeros(left.shape[0], dtype=bool)
        inside[self.flows.breadth_first_order(left, source, return_predecessors=False)] = True
        return inside


def _groupings(paths: Paths) -> list[list[set[str]]]:
    """Ways to put all hosts into groups, each with the switches that belong to it: by the links within groups."""
    links: dict[frozenset[str], float] = {}
    for arc in paths.arcs:
        ends = frozenset((arc.source, arc.target))
        links[ends] = max(links.get(ends, 0.0), math.inf if arc.rate_mbps is None else arc.rate_mbps)
    degree = Counter(name for link in links for name in link)
    alone = {name for name in paths.names if degree[name] == 1}
    within = [set(), {link for link in links if link & alone}]
    within += [{link for link in links if links[link] > rate} for rate in sorted(set(links.values()))]
    found = [_groups(paths, one) for one in within]
    return [groups for groups in found if len(groups) > 1]


def _groups(paths: Paths, links: Iterable[frozenset[str]]) -> list[set[str]]:
    """Nodes that these links join, where there are hosts among them."""
    group_of = {name: {name} for name in paths.names}
    for link in links:
        joined = set(link).union(*(group_of.get(name, set()) for name in link))
        group_of.update(dict.fromkeys(joined, joined))
    groups = {id(group): group for group in group_of.values() if not group.isdisjoint(paths.names)}
    return list(groups.values())


def _between_mbps(paths: Paths, groups: Sequence[set[str]]) -> float:
    """The capacity out of all groups, or into all, whichever is less."""
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    out = into = 0.0
    for arc in paths.arcs:
        rate = math.inf if arc.rate_mbps is None else arc.rate_mbps
        source, target = group_of.get(arc.source), group_of.get(arc.target)
        if source != target:
            out += rate if source is not None else 0.0
            into += rate if target is not None else 0.0
    return min(out, into)


def _seconds(size_bytes: float, rate_mbps: float) -> float:
    return size_bytes * 8e-6 / rate_mbps


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import sparse
        from scipy.sparse import csgraph
    except ImportError as error:
        raise PlanError(
            f"Cannot compute a bound: {error}. Install what plans need: pip install 'offbeat[plan]'."
        ) from error
    return csgraph, sparse
