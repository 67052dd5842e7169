"""`offbeat switch`: a switch that sums gradients, and what its operator sees of it."""

from __future__ import annotations

import enum
import logging
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from offbeat.cli import serve as servers
from offbeat.cli.help_group import HelpGroup
from offbeat.cli.job_address import Authority, Certificate, Key, TokenFile, credentials_given
from offbeat.cli.switch_doctor import doctor
from offbeat.cli.timeout import check_timeout

if TYPE_CHECKING:
    from offbeat.protocol.switch_control import SwitchStatus


class SwitchTargetName(enum.Enum):
    """The targets of a switch, as they are named on the command line."""

    udp = "udp"
    ebpf = "ebpf"
    xdp = "xdp"


app = typer.Typer(cls=HelpGroup, help="Sum gradients in the network.", no_args_is_help=True)


app.command()(doctor)


@app.callback()
def switch() -> None:
    """Sum gradients in the network."""


@app.command()
def serve(
    bind: Annotated[
        str,
        typer.Option(help="IPv4 address to listen on; others than loopback need --trusted-network and credentials."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where control listens; 0 for a port of the kernel's choice.")
    ] = 0,
    token_file: servers.TokenFile = None,
    certificate: servers.Certificate = None,
    key: servers.Key = None,
    authority: servers.Authority = None,
    trusted_network: Annotated[
        bool,
        typer.Option("--trusted-network", help="Packets are neither secret nor signed: only workers can send here."),
    ] = False,
    timeout: Annotated[
        float, typer.Option(callback=check_timeout, help="A connection that is silent for so many seconds has ended.")
    ] = 5.0,
    target: Annotated[
        SwitchTargetName,
        typer.Option(
            help="Where packets are summed: in this process (udp), or in this machine's kernel, at the interfaces' tc "
            "hooks (ebpf) or before that at their XDP hooks (xdp); these two need root."
        ),
    ] = SwitchTargetName.udp,
    interfaces: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="Where the workers' links end, such as a bridge's ports (ebpf, xdp)."),
    ] = "",
    table_mib: Annotated[
        int, typer.Option(min=1, help="MiB for the tables of all jobs; the kernel sets them aside at once.")
    ] = 64,
) -> None:
    """Sum the gradients of any number of jobs, until Ctrl-C.

    Workers find it with `--fabric 'Switch("host:port")'` and with the same OFFBEAT_TOKEN, or certificates of the same
    authority.
    """
    from offbeat.server.launch import ShardSettings
    from offbeat.switch.serve import check_interfaces, check_memory, check_trust
    from offbeat.switch.serve import serve as serve_switch
    from offbeat.wire import busy_poll

    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    check_trust(bind, trusted_network=trusted_network)
    ports = [name for name in interfaces.split(",") if name]
    check_interfaces(target.value, ports)
    check_memory(table_mib)

    settings = ShardSettings(
        job="",
        token=servers.secret_of(token_file),
        certificate=str(certificate or ""),
        key=str(key or ""),
        authority=str(authority or ""),
    )

    def say(address: str) -> None:
        sys.stdout.write(f"summing at {address}: offbeat run --fabric 'Switch(\"{address}\")'; it ends with Ctrl-C\n")
        sys.stdout.flush()

    busy_poll.run(
        serve_switch(
            bind,
            port,
            settings.credentials(),
            timedelta(seconds=timeout),
            say,
            ports,
            table_mib=table_mib,
            at_xdp=target is SwitchTargetName.xdp,
        )
    )


@app.command()
def ctl(
    address: Annotated[str, typer.Argument(help="host:port of the switch's control.")],
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
    evict: Annotated[
        list[str] | None, typer.Option(metavar="JOB:RANK", help="Have a job go on without a worker.")
    ] = None,
    show_rules: Annotated[
        bool,
        typer.Option(
            "--show-rules", help="Show the simple_switch_CLI commands for the same jobs on a P4 switch instead."
        ),
    ] = False,
) -> None:
    """Show the jobs of a switch and how far each worker is, or have a job go on without a worker."""
    from offbeat.errors import PlanError
    from offbeat.switch.control_client import ControlClient

    credentials = credentials_given(token_file, certificate, key, authority)
    client = ControlClient(address, role="operator", credentials=credentials, patience=timedelta(seconds=3))
    try:
        for one in evict or []:
            job, _, rank = one.rpartition(":")
            if not job or not rank.isdecimal():
                raise PlanError(f"Cannot evict {one!r}: name the job and the rank, as in 'JOB:2'.")
            for name in _jobs_to_leave(client.status(), job, int(rank)):
                client.evict(name, int(rank), "an operator wants it so")
        if show_rules:
            from offbeat.switch.p4.shown_rules import commands_for

            sys.stdout.write(commands_for(client.status()))
        else:
            _show(client.status())
    finally:
        client.close()


def _jobs_to_leave(status: SwitchStatus, name: str, rank: int) -> list[str]:
    """Names of a job and of its tables, `JOB-0-0` and so on, in which a worker is.

    Raises:
        PlanError: if the switch has no such job, or the job no such worker.
    """
    from offbeat.errors import PlanError

    jobs = [job for job in status.jobs if job.job == name or job.job.startswith(f"{name}-")]
    members = sorted({one.worker for job in jobs for one in job.members})
    if not jobs:
        raise PlanError(f"Cannot evict rank {rank} of {name!r}: this switch has no such job. See `offbeat switch ctl`.")
    if rank not in members:
        raise PlanError(
            f"Cannot evict rank {rank} of {name!r}: its workers are {', '.join(map(str, members))}. Name one of them."
        )
    return [job.job for job in jobs if rank in (one.worker for one in job.members)]


def _show(status: SwitchStatus) -> None:
    from offbeat.switch.switch_doctor import refusals

    console = Console()
    for job in status.jobs:
        table = Table(box=SIMPLE_HEAD, title=f"job {job.job}, summed by {status.target}", title_justify="left")
        columns = ("rank", "packets", "duplicates", "behind", "left out", "clamped", "typical", "waited", "silent for")
        for column in columns:
            table.add_column(column, justify="right")
        for one in job.members:
            silent = "never heard" if one.silent_s is None else f"{one.silent_s:.1f} s"
            packets = sum(count for kind, count in one.counts.items() if kind != "duplicates")
            waited = f"{one.waited_s:.1f} s" if job.strategy.path == "table" else ""
            duplicates = f"{one.counts.get('duplicates', 0):,}"
            left_out = f"{one.left_out:,}" if job.strategy.wait_s else ""
            # A worker sends its gradient divided by the number of workers.
            given = (f"{one.clamped:.3%}", f"{one.typical * job.workers:.2g}") if job.most else ("", "")
            table.add_row(str(one.worker), f"{packets:,}", duplicates, str(one.lag), left_out, *given, waited, silent)
        console.print(table)
        if job.refused:
            console.print(f"refused: {refusals(job.refused)}")
    if not status.jobs:
        console.print(f"no job is summed by this switch ({status.target})")
    if dropped := {why: count for why, count in status.dropped.items() if count}:
        console.print("dropped: " + ", ".join(f"{count} {why}" for why, count in dropped.items()))
