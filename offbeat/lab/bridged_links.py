"""The links of a star: a bridge in a namespace of its own is the switch, with one port per host.

A link is the veth pair between a host's `eth0` and its port. Each direction is shaped where it starts: the host's way
out on `eth0`, the switch's way out on its port.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from offbeat.lab.emulated_link import EmulatedLink, whole_frames
from offbeat.lab.link_shaping import configure_stack, shape, write_sysctl
from offbeat.lab.namespace import inside

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from offbeat.lab.emulator import Counts, Law
    from offbeat.topology import Arc, Topology

INTERFACE = "eth0"
"""The one interface of every host."""
_SWITCH_ADDRESS = "10.77.0.254"


class BridgedLinks:
    """The hosts and links of one switch.

    Args:
        topology: one switch with one link per host.
        lab: the lab's identity.
        mtu: bytes that a frame carries.
        emulated: hosts whose links can be made bad (`worsen`).
        environment: of the programs that do it.
    """

    interface = INTERFACE

    def __init__(
        self, topology: Topology, lab: str, *, mtu: int, emulated: Collection[str], environment: Mapping[str, str]
    ) -> None:
        self._topology, self._mtu, self._environment = topology, mtu, environment
        self._index = {host.name: index for index, host in enumerate(topology.hosts)}
        self._lab, self._switch = lab, f"offbeat-{lab}-switch"
        self._emulated = {host: f"bad{index}" for index, host in enumerate(emulated)}
        self._emulators: dict[str, EmulatedLink] = {}
        self.namespaces = [self._switch, *map(self.namespace, self._index)]

    @property
    def switch(self) -> tuple[str, str]:
        """The namespace of the switch, and an address of it that every host reaches over its own link alone."""
        return self._switch, _SWITCH_ADDRESS

    def namespace(self, node: str) -> str:
        """Name of the network namespace that is this host."""
        return f"offbeat-{self._lab}-h{self._index[node]}"

    def address(self, node: str) -> str:
        """IPv4 address of this host."""
        return f"10.77.0.{self._index[node] + 1}"

    def interfaces(self, node: str) -> list[str]:
        """The interface of a host."""
        return [INTERFACE]

    def port(self, host: str) -> tuple[str, str]:
        """Namespace and name of the interface that is the switch's end of this host's link."""
        return self._switch, f"port{self._index[host]}"

    def start(self, arc: Arc) -> tuple[str, str]:
        """Namespace and name of the interface where a direction of a link starts, and is shaped."""
        if arc.source in self._index:
            return self.namespace(arc.source), INTERFACE
        return self.port(arc.target)

    def worsen(self, host: str, *, up: Law | None, down: Law | None) -> tuple[Counts, Counts]:
        """Have another law hold for the link of a host that was named `emulated`; see `Network.worsen`."""
        return self._emulators[host].change(up=up, down=down)

    def build(self) -> None:
        """Build everything, in namespaces that are there and empty."""
        for host in self._index:
            inside(self.namespace(host), configure_stack)
        inside(self._switch, self._build_switch)
        for host, tap in self._emulated.items():
            namespace, port = self.port(host)
            self._emulators[host] = EmulatedLink(namespace, port, tap, environment=self._environment)
        inside(self._switch, self._plug_in_taps)
        for host in self._index:
            inside(self.namespace(host), functools.partial(self._build_host, host))

    def close(self) -> None:
        """End the programs that make links bad; closing twice is allowed."""
        for emulator in self._emulators.values():
            emulator.close()

    def _rate_mbps(self, host: str) -> float | None:
        return self._topology.uplink(host).rate_mbps

    def _build_switch(self) -> None:
        from pyroute2 import IPRoute

        write_sysctl("ipv6/conf/all/disable_ipv6", "1")
        write_sysctl("ipv6/conf/default/disable_ipv6", "1")
        with IPRoute() as kernel:
            # No spanning tree, no multicast snooping: a plain switch that forwards from the first frame on.
            kernel.link("add", ifname="br0", kind="bridge", br_stp_state=0, br_forward_delay=0, br_mcast_snooping=0)
            bridge = kernel.link_lookup(ifname="br0")[0]
            kernel.addr("add", index=bridge, address=_SWITCH_ADDRESS, prefixlen=24)
            kernel.link("set", index=bridge, state="up")
            for host in self._index:
                peer = {"ifname": INTERFACE, "net_ns_fd": self.namespace(host), "mtu": self._mtu}
                _, name = self.port(host)
                kernel.link("add", ifname=name, kind="veth", mtu=self._mtu, peer=peer)
                port = kernel.link_lookup(ifname=name)[0]
                shape(kernel, port, self._rate_mbps(host), self._mtu)
                plugged_in = {} if host in self._emulated else {"master": bridge}
                kernel.link("set", index=port, state="up", **plugged_in)

    def _plug_in_taps(self) -> None:
        from pyroute2 import IPRoute

        with IPRoute() as kernel:
            for tap in self._emulated.values():
                bridge = kernel.link_lookup(ifname="br0")[0]
                kernel.link("set", index=kernel.link_lookup(ifname=tap)[0], master=bridge, state="up")

    def _build_host(self, host: str) -> None:
        from pyroute2 import IPRoute

        with IPRoute() as kernel:
            kernel.link("set", index=1, state="up")
            interface = kernel.link_lookup(ifname=INTERFACE)[0]
            shape(kernel, interface, self._rate_mbps(host), self._mtu)
            if host in self._emulated:
                whole_frames(INTERFACE)
            kernel.addr("add", index=interface, address=self.address(host), prefixlen=24)
            kernel.link("set", index=interface, state="up")
