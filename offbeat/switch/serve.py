"""A switch as a process: its data plane, and control over authenticated links, on one event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import NetworkError, PlanError
from offbeat.switch.control_client import JOB
from offbeat.switch.control_server import ControlServer
from offbeat.switch.data_plane import TABLE_MIB
from offbeat.switch.kernel.kernel_switch import KernelSwitch
from offbeat.switch.udp_switch import UdpSwitch
from offbeat.wire.session import Limits
from offbeat.wire.tcp import listen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from offbeat.switch.data_plane import DataPlane
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.listener import Listener


_LOOK_S = 0.005  # at the clocks of tables


def check_trust(bind: str, *, trusted_network: bool) -> None:
    """Refuse to take packets from a network that nobody has vouched for.

    Raises:
        NetworkError: if others than this machine can reach `bind`, and nobody has said that they may be trusted.
    """
    try:
        is_loopback = ipaddress.ip_address(bind).is_loopback
    except ValueError as error:
        raise NetworkError(f"Cannot listen on {bind!r}: name an IPv4 address of this machine.") from error
    if not is_loopback and not trusted_network:
        raise NetworkError(
            f"Cannot take packets on {bind}: they are neither secret nor signed, so whoever can send there can change "
            "the sums. If only the workers can, say --trusted-network; else use ParameterServer()."
        )


def check_interfaces(target: str, interfaces: Sequence[str]) -> None:
    """Refuse interfaces that do not fit the target.

    Raises:
        PlanError: if the kernel is to sum and is not told where, or is told where and is not to.
    """
    if target != "udp" and not interfaces:
        raise PlanError(
            "Cannot sum in the kernel without knowing where packets come in: name the ports where the workers' links "
            "end, as in --interfaces port0,port1 (lo for workers on this machine)."
        )
    if target == "udp" and interfaces:
        raise PlanError(
            f"Cannot use --interfaces with --target {target}: it takes packets by a socket. Leave them out."
        )


def check_memory(table_mib: int) -> None:
    """Refuse to promise tables for which there is no memory.

    Raises:
        PlanError: if this machine has less to spare.
    """
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free_mib = next(int(words[1]) for words in lines if words[0] == "MemAvailable:") >> 10
    if table_mib > free_mib:
        raise PlanError(
            f"Cannot keep {table_mib:,} MiB of tables: this machine has {free_mib:,} MiB of memory to spare. Use less "
            "- at `--table-mib`."
        )


class SwitchTarget(Protocol):
    """The Protocol of a data plane with a way in for packets: `UdpSwitch`, `KernelSwitch`."""

    target: str
    port: int

    @property
    def plane(self) -> DataPlane: ...

    def attach(self, loop: asyncio.AbstractEventLoop) -> None: ...

    def close(self) -> None: ...


class SwitchServer:
    """A switch that takes packets and links; made by `open_switch`.

    Args:
        switch: its data plane and socket.
        control: who takes part in which job.
        listener: of its control.
    """

    def __init__(self, switch: SwitchTarget, control: ControlServer, listener: Listener) -> None:
        self._switch, self._listener = switch, listener
        self.address = listener.address
        self._looking = asyncio.create_task(_look(control))

    async def close(self) -> None:
        """Say good-bye to all, and stop."""
        self._looking.cancel()
        links = self._listener.links
        self._listener.close()
        await asyncio.gather(*(link.close() for link in links))
        self._switch.close()


async def open_switch(
    bind: str,
    port: int,
    credentials: Credentials | None,
    timeout: timedelta,
    interfaces: Sequence[str] = (),
    *,
    table_mib: int = TABLE_MIB,
    at_xdp: bool = False,
) -> SwitchServer:
    """Open a switch on this event loop.

    Args:
        bind, port: where control listens; packets are taken at the same address, on a UDP port of the kernel's choice.
        timeout: after which a silent link is lost.
        interfaces: at which the kernel sums what comes in; none for a switch in this process.
        table_mib: of all jobs' tables.
        at_xdp: whether it does so at their XDP hooks.

    Raises:
        NetworkError: if an address, the credentials, or the kernel cannot be used.
    """
    switch: SwitchTarget
    if interfaces:
        switch = KernelSwitch(bind, interfaces, table_mib=table_mib, at_xdp=at_xdp)
    else:
        switch = UdpSwitch(bind, table_mib=table_mib)
    switch.attach(asyncio.get_running_loop())
    control = ControlServer(switch.plane, target=switch.target, port=switch.port)
    try:
        limits = Limits(timeout=timeout)
        listener = await listen(bind, port, accept=control.accept, job=JOB, credentials=credentials, limits=limits)
    except BaseException:
        switch.close()
        raise
    return SwitchServer(switch, control, listener)


async def _look(control: ControlServer) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        control.look()


async def serve(
    bind: str,
    port: int,
    credentials: Credentials | None,
    timeout: timedelta,
    say: Callable[[str], None],
    interfaces: Sequence[str] = (),
    *,
    table_mib: int = TABLE_MIB,
    at_xdp: bool = False,
) -> None:
    """Serve jobs until SIGTERM or SIGINT comes.

    Args:
        say: called with "host:port" of control when workers may come; for the others see `open_switch`.

    Raises:
        NetworkError: if an address or the credentials cannot be used.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await open_switch(bind, port, credentials, timeout, interfaces, table_mib=table_mib, at_xdp=at_xdp)
    say(server.address)
    await stop.wait()
    await server.close()
