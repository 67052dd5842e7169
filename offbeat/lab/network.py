"""Build and remove the network of one scenario.

Division of labour: every host is a namespace. Where hosts hang on one switch, that is a bridge (`bridged_links`);
everywhere else each switch is a namespace, too, and hosts and switches forward by static routes (`routed_links`). How a
link is shaped is said in `link_shaping`.
"""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, ScenarioError
from offbeat.lab import command_lines, lab_registry, memory_cgroup
from offbeat.lab.bridged_links import BridgedLinks
from offbeat.lab.link_shaping import reshape
from offbeat.lab.namespace import inside
from offbeat.lab.routed_links import RoutedLinks

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path
    from types import TracebackType

    from offbeat.lab.emulator import Counts, Law
    from offbeat.topology import Arc, Topology

MAX_HOSTS = 250
"""One /24 of addresses; another one for switches."""


class Network:
    """The hosts and links of a topology, real from construction to `close`.

    Args:
        topology: to build.
        emulated: hosts of a star whose links can be made bad (`worsen`); each costs a process.
        mtu: bytes that a frame carries at most, IP header included.
        directory: where it is written down who built what.

    Use as a context manager. Needs root rights. Everything is removed on `close`, and by the reaper if this process is
    killed before.

    Raises:
        NetworkError: if this process is not root, pyroute2 is missing, memory cannot be limited where it is to be, or
            the kernel refuses a part.
        ScenarioError: if the topology is none that can be built.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        emulated: Collection[str] = (),
        mtu: int = 1500,
        directory: Path = lab_registry.RUN_DIRECTORY,
    ) -> None:
        require_rights()
        check_topology(topology)
        check_memory(topology)
        self.topology, self.mtu = topology, mtu
        self.lab = secrets.token_hex(4)
        self._directory = directory
        self._links: BridgedLinks | RoutedLinks
        if topology.is_star:
            self._links = BridgedLinks(topology, self.lab, mtu=mtu, emulated=emulated, environment=self.mark())
        else:
            self._links = RoutedLinks(topology, self.lab, mtu=mtu)
        self._most_mbps = {arc: arc.rate_mbps for arc in topology.arcs}  # that each direction has had
        lab_registry.clean(directory=directory)
        self._claim = lab_registry.LabRecord.mine(self.lab, self._links.namespaces)
        self._record = lab_registry.write(self._claim, directory)
        self.scratch = lab_registry.scratch_of(self.lab, directory)
        self._reaper = subprocess.Popen(
            command_lines.module("offbeat.lab.reaper", str(self._record)),
            env=command_lines.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._build()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, NetworkError):
                raise NetworkError(
                    f"Cannot build the lab: the kernel refused a part of it ({error}). "
                    "Run `offbeat doctor` to see what is missing."
                ) from error
            raise

    @property
    def interface(self) -> str:
        """The interface of every host that has its address, and no other."""
        return self._links.interface

    def namespace(self, node: str) -> str:
        """Name of the network namespace that is this host, for `ip netns exec`; or this switch, if it routes."""
        return self._links.namespace(node)

    def address(self, node: str) -> str:
        """IPv4 address of this host within the lab; or of a switch that routes, for its neighbours."""
        return self._links.address(node)

    def interfaces(self, node: str) -> list[str]:
        """The interfaces of a host, or a switch that routes, by which anything leaves it."""
        return self._links.interfaces(node)

    @property
    def switch(self) -> tuple[str, str]:
        """The namespace of the one switch, and an address of it that every host reaches over its own link alone."""
        return self._bridged.switch

    def port(self, host: str) -> tuple[str, str]:
        """Namespace and name of the interface that is the one switch's end of this host's link."""
        return self._bridged.port(host)

    def start(self, arc: Arc) -> tuple[str, str]:
        """Namespace and name of the interface where a direction of a link starts: it is shaped and counted there."""
        return self._links.start(arc)

    def worsen(self, host: str, *, up: Law | None = None, down: Law | None = None) -> tuple[Counts, Counts]:
        """Have another law hold for a host's link from now on; what became of its frames so far, up and down.

        Args:
            host: one of those that were named `emulated`.
            up: for what the host sends; None to leave it as it is.
            down: for what it is sent.

        Raises:
            NetworkError: if the emulator is gone.
        """
        return self._bridged.worsen(host, up=up, down=down)

    def shape(self, host: str, rate_mbps: float | None) -> None:
        """Have all links of a host carry so much from now on, in each direction; see `shape_arc`."""
        for arc in self.topology.arcs:
            if host in (arc.source, arc.target):
                self.shape_arc(arc, rate_mbps)

    def shape_arc(self, arc: Arc, rate_mbps: float | None, *, is_cut: bool = False) -> None:
        """Have one direction of a link carry so much from now on; what is on its way stays there.

        Args:
            rate_mbps: in 10^6 bit/s.
            is_cut: it carries nothing, until it is shaped again.

        Raises:
            NetworkError: if the link was not shaped when it was built, or is not to be any more, or the kernel refuses.
        """
        before_mbps = self._most_mbps[arc]
        name = f"from {arc.source} to {arc.target}"
        if rate_mbps is None or before_mbps is None:
            raise NetworkError(
                f"Cannot change the rate of the link {name}: it {'has none' if before_mbps is None else 'needs one'}"
                ". Give the link a rate (hosts.rate_mbps, topology.rate_mbps)."
            )
        self._most_mbps[arc] = most_mbps = max(before_mbps, rate_mbps)
        namespace, interface = self.start(arc)
        try:
            inside(namespace, functools.partial(reshape, interface, rate_mbps, most_mbps, self.mtu, is_cut=is_cut))
        except NetworkError:
            raise
        except Exception as error:
            raise NetworkError(
                f"Cannot change the rate of the link {name}: the kernel refused it ({error}). Run `offbeat doctor` to "
                "see what is missing."
            ) from error

    def mark(self) -> dict[str, str]:
        """Environment for a process of this lab, by which `offbeat lab clean` knows it."""
        return {**command_lines.environment(), lab_registry.MARK: self.lab}

    def close(self) -> None:
        """Remove every host and link, and end what still runs inside; closing twice is allowed."""
        self._links.close()
        lab_registry.remove(self._claim, self._directory)
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()
        self._reaper.wait()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _bridged(self) -> BridgedLinks:
        assert isinstance(self._links, BridgedLinks), "refused before: this takes one switch"
        return self._links

    def _build(self) -> None:
        from pyroute2 import netns

        self.scratch.mkdir(mode=0o700)
        for name in self._claim.namespaces:
            netns.create(name)
        for host in self.topology.hosts:
            if host.memory_mb is not None:
                memory_cgroup.make(self.namespace(host.name), host.memory_mb)
        self._links.build()


def require_rights() -> None:
    """Refuse to go on without what building a network takes.

    Raises:
        NetworkError: if this process is not root, or pyroute2 is not installed.
    """
    if os.geteuid() != 0:
        raise NetworkError(
            f"Cannot build a lab as user {os.geteuid()}: making network namespaces needs root. "
            'Run it with sudo, or use a scenario with hosts.network = "loopback".'
        )
    try:
        import pyroute2  # noqa: F401
    except ImportError as error:
        raise NetworkError(
            "Cannot build a lab: the package pyroute2 is not installed. Install it with pip install 'offbeat[lab]'."
        ) from error


def check_memory(topology: Topology) -> None:
    """Refuse hosts with less memory where this machine cannot limit it.

    Raises:
        NetworkError: if so.
    """
    if any(host.memory_mb is not None for host in topology.hosts):
        memory_cgroup.check()


def check_topology(topology: Topology) -> None:
    """Refuse what no lab can be built of.

    Raises:
        ScenarioError: if there are too many hosts or switches, links add latency, or two nodes have several links.
    """
    for count, what in ((len(topology.hosts), "hosts"), (len(topology.switches), "switches")):
        if count > MAX_HOSTS:
            raise ScenarioError(
                f"Cannot build {count} {what}: a lab has at most {MAX_HOSTS}, one per address. Use fewer, or `offbeat "
                f"simulate` ({what})."
            )
    ends = set()
    for link in topology.links:
        if link.latency_ms:
            # netem is in few kernels, and a program at each end of each link would take more time than it adds.
            raise ScenarioError(
                f"Cannot add {link.latency_ms:g} ms of latency to the link between {link.a} and {link.b}: the lab "
                "shapes rates alone. Leave it out, or use [impair] where all hosts hang on one switch "
                "(topology.latency_ms)."
            )
        if (pair := frozenset((link.a, link.b))) in ends:
            raise ScenarioError(
                f"Cannot build several links between {link.a} and {link.b}: packets go by one of them. Use one with "
                "the rate of all (link)."
            )
        ends.add(pair)
