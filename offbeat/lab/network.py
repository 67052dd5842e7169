"""Build and remove the network of one scenario.

Division of labour: every host is a namespace with one interface `eth0`; the switch is a bridge `br0` in a namespace of
its own, with one port per host; a link is the veth pair between the two. Each direction of a link is shaped where it
starts: the host's way out on `eth0`, the switch's way out on its port.

Rules, each measured with plain TCP at 20, 200 and 1000 Mbit/s (goodput 92 to 96 % of the rate, headers included):

* A token bucket passes a packet only if it fits in the bucket, and splits larger GSO packets in software, which costs
  four times the CPU. So packets are limited (`gso_max_size`) to 0.6 ms of the link, or a frame if that is more, and the
  bucket holds two of them.
* The queue before the bucket holds 25 ms, as a switch with shallow buffers, and at least 128 KiB for slow links.
* A rate can change while the link is in use (`tc qdisc change`): what waits in the queue stays there. The bucket does
  not shrink with it: a packet that was made for a larger one would never pass.
* All hosts run TCP Reno: the only algorithm that every kernel lets a namespace choose. Without competing traffic it
  fills these links as CUBIC does, while BBR's probing makes step times of the same work differ.
* IPv6 is off: its neighbour and multicast chatter would be in every byte count.
"""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import NetworkError, ScenarioError
from offbeat.lab import command_lines, lab_registry
from offbeat.lab.emulated_link import EmulatedLink, whole_frames
from offbeat.lab.namespace import inside
from offbeat.topology import queue_bytes

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from offbeat.lab.emulator import Counts, Law
    from offbeat.topology import Topology

INTERFACE = "eth0"
"""The one interface of every host."""
CONGESTION_CONTROL = "reno"
MAX_HOSTS = 250
"""One /24 of addresses."""
_ETHERNET_BYTES = 14
_SWITCH_ADDRESS = "10.77.0.254"


class Network:
    """The hosts and links of a topology, real from construction to `close`.

    Args:
        topology: to build.
        emulated: hosts whose links can be made bad (`worsen`); each costs a process.
        mtu: bytes that a frame carries at most, IP header included.
        directory: where it is written down who built what.

    Use as a context manager. Needs root rights. Everything is removed on `close`, and by the reaper if this process is
    killed before.

    Raises:
        NetworkError: if this process is not root, pyroute2 is missing, or the kernel refuses a part.
        ScenarioError: if the topology is not one switch with one link per host.
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
        self.topology, self.mtu = topology, mtu
        self.lab = secrets.token_hex(4)
        self._directory = directory
        self._emulated = {host: f"bad{index}" for index, host in enumerate(emulated)}
        self._emulators: dict[str, EmulatedLink] = {}
        self._rates_mbps = {host.name: topology.uplink(host.name).rate_mbps for host in topology.hosts}
        self._most_mbps = dict(self._rates_mbps)  # that each link has had
        self._index = {host.name: index for index, host in enumerate(topology.hosts)}
        self._switch = f"offbeat-{self.lab}-switch"
        lab_registry.clean(directory=directory)
        self._claim = lab_registry.LabRecord.mine(self.lab, [self._switch, *map(self.namespace, self._index)])
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

    def namespace(self, host: str) -> str:
        """Name of the network namespace that is this host, for `ip netns exec`."""
        return f"offbeat-{self.lab}-h{self._index[host]}"

    def address(self, host: str) -> str:
        """IPv4 address of this host within the lab."""
        return f"10.77.0.{self._index[host] + 1}"

    @property
    def switch(self) -> tuple[str, str]:
        """The namespace of the switch, and an address of it that every host reaches over its own link alone."""
        return self._switch, _SWITCH_ADDRESS

    def port(self, host: str) -> tuple[str, str]:
        """Namespace and name of the interface that is the switch's end of this host's link."""
        return self._switch, f"port{self._index[host]}"

    def worsen(self, host: str, *, up: Law | None = None, down: Law | None = None) -> tuple[Counts, Counts]:
        """Have another law hold for a host's link from now on; what became of its frames so far, up and down.

        Args:
            host: one of those that were named `emulated`.
            up: for what the host sends; None to leave it as it is.
            down: for what it is sent.

        Raises:
            NetworkError: if the emulator is gone.
        """
        return self._emulators[host].change(up=up, down=down)

    def shape(self, host: str, rate_mbps: float | None) -> None:
        """Have a host's link carry so much from now on, in each direction; what is on its way stays there.

        Args:
            rate_mbps: in 10^6 bit/s.

        Raises:
            NetworkError: if the link was not shaped when it was built, or is not to be any more, or the kernel refuses.
        """
        before_mbps = self._most_mbps[host]
        if rate_mbps is None or before_mbps is None:
            raise NetworkError(
                f"Cannot change the rate of the link of {host}: it {'has none' if before_mbps is None else 'needs one'}"
                ". Give the link a rate (hosts.rate_mbps)."
            )
        self._most_mbps[host] = most_mbps = max(before_mbps, rate_mbps)
        for namespace, interface in ((self.namespace(host), INTERFACE), self.port(host)):
            try:
                inside(namespace, functools.partial(_reshape, interface, rate_mbps, most_mbps, self.mtu))
            except NetworkError:
                raise
            except Exception as error:
                raise NetworkError(
                    f"Cannot change the rate of the link of {host}: the kernel refused it ({error}). Run `offbeat "
                    "doctor` to see what is missing."
                ) from error

    def mark(self) -> dict[str, str]:
        """Environment for a process of this lab, by which `offbeat lab clean` knows it."""
        return {**command_lines.environment(), lab_registry.MARK: self.lab}

    def close(self) -> None:
        """Remove every host and link, and end what still runs inside; closing twice is allowed."""
        for emulator in self._emulators.values():
            emulator.close()
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

    def _build(self) -> None:
        from pyroute2 import netns

        self.scratch.mkdir(mode=0o700)
        for name in self._claim.namespaces:
            netns.create(name)
        for host in self._index:
            inside(self.namespace(host), _configure_stack)
        inside(self._switch, self._build_switch)
        for host, tap in self._emulated.items():
            namespace, port = self.port(host)
            self._emulators[host] = EmulatedLink(namespace, port, tap, environment=self.mark())
        inside(self._switch, self._plug_in_taps)
        for host in self._index:
            inside(self.namespace(host), functools.partial(self._build_host, host))

    def _build_switch(self) -> None:
        from pyroute2 import IPRoute

        _write_sysctl("ipv6/conf/all/disable_ipv6", "1")
        _write_sysctl("ipv6/conf/default/disable_ipv6", "1")
        with IPRoute() as kernel:
            # No spanning tree, no multicast snooping: a plain switch that forwards from the first frame on.
            kernel.link("add", ifname="br0", kind="bridge", br_stp_state=0, br_forward_delay=0, br_mcast_snooping=0)
            bridge = kernel.link_lookup(ifname="br0")[0]
            kernel.addr("add", index=bridge, address=_SWITCH_ADDRESS, prefixlen=24)
            kernel.link("set", index=bridge, state="up")
            for host in self._index:
                peer = {"ifname": INTERFACE, "net_ns_fd": self.namespace(host), "mtu": self.mtu}
                _, name = self.port(host)
                kernel.link("add", ifname=name, kind="veth", mtu=self.mtu, peer=peer)
                port = kernel.link_lookup(ifname=name)[0]
                _shape(kernel, port, self._rates_mbps[host], self.mtu)
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
            _shape(kernel, interface, self._rates_mbps[host], self.mtu)
            if host in self._emulated:
                whole_frames(INTERFACE)
            kernel.addr("add", index=interface, address=self.address(host), prefixlen=24)
            kernel.link("set", index=interface, state="up")


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


def check_topology(topology: Topology) -> None:
    """Refuse what no lab can be built of.

    Raises:
        ScenarioError: if it is not one switch with one link per host, or there are too many hosts.
    """
    if len(topology.switches) != 1:
        raise ScenarioError(
            f"Cannot build {len(topology.switches)} switches: the lab builds exactly 1. Use one switch (switches)."
        )
    if len(topology.hosts) > MAX_HOSTS:
        raise ScenarioError(
            f"Cannot build {len(topology.hosts)} hosts: a lab has at most {MAX_HOSTS}, one per address. Use fewer, "
            "or `offbeat simulate` (hosts)."
        )


def bucket_bytes(rate_mbps: float, mtu: int = 1500) -> tuple[int, int]:
    """Largest packet and size of the token bucket, in bytes, with which a link of `rate_mbps` is shaped."""
    packet = int(min(max(rate_mbps * 1e6 / 8 * 0.0006, 4096, mtu + _ETHERNET_BYTES), 65536))
    return packet, 2 * packet


def _shape(kernel: Any, interface: int, rate_mbps: float | None, mtu: int) -> None:
    if rate_mbps is not None:
        _set_rate(kernel, "add", interface, rate_mbps, mtu, bucket_bytes(rate_mbps, mtu)[1])


def _reshape(name: str, rate_mbps: float, most_mbps: float, mtu: int) -> None:
    """Give an interface of this namespace another rate; `most_mbps` is the highest that it has had."""
    from pyroute2 import IPRoute

    with IPRoute() as kernel:
        interface = kernel.link_lookup(ifname=name)[0]
        _set_rate(kernel, "change", interface, rate_mbps, mtu, bucket_bytes(most_mbps, mtu)[1])


def _set_rate(kernel: Any, command: str, interface: int, rate_mbps: float, mtu: int, burst_bytes: int) -> None:
    packet_bytes, _ = bucket_bytes(rate_mbps, mtu)
    rate_bytes_per_s = rate_mbps * 1e6 / 8
    limit_bytes = burst_bytes + queue_bytes(rate_mbps)
    kernel.link("set", index=interface, gso_max_size=packet_bytes, gro_max_size=packet_bytes)
    kernel.tc(command, "tbf", interface, rate=int(rate_bytes_per_s), burst=burst_bytes, limit=limit_bytes)


def _configure_stack() -> None:
    _write_sysctl("ipv6/conf/all/disable_ipv6", "1")
    _write_sysctl("ipv6/conf/default/disable_ipv6", "1")
    _write_sysctl("ipv4/tcp_congestion_control", CONGESTION_CONTROL)
    # As on machines that are set up for training (`offbeat doctor` asks for it): links rest between two steps.
    _write_sysctl("ipv4/tcp_slow_start_after_idle", "0")


def _write_sysctl(name: str, value: str) -> None:
    path = Path("/proc/sys/net") / name
    # A kernel built without IPv6 has nothing to switch off.
    if path.exists() or not name.startswith("ipv6/"):
        path.write_text(value)
