"""The links of any other network: every host and every switch is a namespace that forwards by static routes.

A link is a veth pair, `link0`, `link1`, ... by its number, with the same name at both ends, and each direction is
shaped where it starts. No end of a link has an address of its own: a node's one address is on `stub`, which leads
nowhere, so that it is the same whichever way others come, and programs that are told one interface find one address.
There is a route for each host at each node (`Topology.next_arc`), and none by default.

So what a host forwards for others leaves by its own interfaces, and is in their counters.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from offbeat.lab.link_shaping import configure_stack, shape
from offbeat.lab.namespace import inside

if TYPE_CHECKING:
    from offbeat.topology import Arc, Topology

STUB = "stub"
"""The interface with the address of a host or switch."""
_STUB_END = "stub-end"
_SCOPE_LINK = 253


class RoutedLinks:
    """The hosts, switches and links of a network.

    Args:
        topology: no two nodes of it have several links between them.
        lab: the lab's identity.
        mtu: bytes that a frame carries.
    """

    interface = STUB

    def __init__(self, topology: Topology, lab: str, *, mtu: int) -> None:
        self._topology, self._mtu = topology, mtu
        names = [(f"h{index}", f"10.77.0.{index + 1}") for index in range(len(topology.hosts))]
        names += [(f"s{index}", f"10.77.1.{index + 1}") for index in range(len(topology.switches))]
        self._names = {
            node: (f"offbeat-{lab}-{name}", address)
            for node, (name, address) in zip(topology.nodes, names, strict=True)
        }
        self._leaving: dict[str, list[Arc]] = {node: [] for node in self._names}
        for arc in topology.arcs:
            self._leaving[arc.source].append(arc)
        self.namespaces = [namespace for namespace, _ in self._names.values()]

    def namespace(self, node: str) -> str:
        """Name of the network namespace that is this host or switch."""
        return self._names[node][0]

    def address(self, node: str) -> str:
        """IPv4 address of this host or switch; a switch's is known to its neighbours alone."""
        return self._names[node][1]

    def interfaces(self, node: str) -> list[str]:
        """The interfaces by which anything leaves a node."""
        return [_interface(arc) for arc in self._leaving[node]]

    def start(self, arc: Arc) -> tuple[str, str]:
        """Namespace and name of the interface where a direction of a link starts, and is shaped."""
        return self.namespace(arc.source), _interface(arc)

    def build(self) -> None:
        """Build everything, in namespaces that are there and empty."""
        for node in self._names:
            inside(self.namespace(node), functools.partial(self._build_cables, node))
        for node in self._names:
            inside(self.namespace(node), functools.partial(self._build_node, node))

    def close(self) -> None:
        """Do nothing: links end with their namespaces."""

    def _build_cables(self, node: str) -> None:
        from pyroute2 import IPRoute

        configure_stack(forwards=True)
        with IPRoute() as kernel:
            kernel.link("set", index=1, state="up")
            kernel.link("add", ifname=STUB, kind="veth", mtu=self._mtu, peer={"ifname": _STUB_END, "mtu": self._mtu})
            for name in (_STUB_END, STUB):
                stub = kernel.link_lookup(ifname=name)[0]
                kernel.link("set", index=stub, state="up")
            kernel.addr("add", index=stub, address=self.address(node), prefixlen=32)
            for arc in self._leaving[node]:
                if self._topology.links[arc.link].a == node:  # by the other end it is there already, or will be
                    name = _interface(arc)
                    peer = {"ifname": name, "net_ns_fd": self.namespace(arc.target), "mtu": self._mtu}
                    kernel.link("add", ifname=name, kind="veth", mtu=self._mtu, peer=peer)

    def _build_node(self, node: str) -> None:
        from pyroute2 import IPRoute

        with IPRoute() as kernel:
            source, interfaces = self.address(node), {}
            for arc in self._leaving[node]:
                interface = interfaces[arc.link] = kernel.link_lookup(ifname=_interface(arc))[0]
                shape(kernel, interface, arc.rate_mbps, self._mtu)
                kernel.link("set", index=interface, state="up")
                address = self.address(arc.target)
                kernel.route("add", dst=f"{address}/32", oif=interface, scope=_SCOPE_LINK, prefsrc=source)
            for host in self._topology.hosts:
                if host.name == node or (arc := self._topology.next_arc(node, host.name)).target == host.name:
                    continue
                kernel.route(
                    "add",
                    dst=f"{self.address(host.name)}/32",
                    gateway=self.address(arc.target),
                    oif=interfaces[arc.link],
                    prefsrc=source,
                )


def _interface(arc: Arc) -> str:
    return f"link{arc.link}"
