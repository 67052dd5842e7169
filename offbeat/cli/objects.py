"""`offbeat objects`: stores of tensors that tasks hand to each other."""

from __future__ import annotations

import functools
import logging
import os
import signal
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
from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from offbeat.wire.credentials import Credentials

app = typer.Typer(cls=HelpGroup, help="Hand tensors from task to task.", no_args_is_help=True)

_ADDRESS = "host:port of a store; else as OFFBEAT_OBJECTS says, or the one that the tasks of this machine have started."
_Job = Annotated[str, typer.Option(help="Name of the job; stores and clients of another one are refused.")]


@app.callback()
def objects() -> None:
    """Hand tensors from task to task."""


@app.command()
def serve(
    bind: Annotated[
        str, typer.Option(help="Address that other machines' stores reach; others than loopback need credentials.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="For other stores; 0: the kernel chooses.")] = 0,
    client_port: Annotated[
        int, typer.Option(min=0, max=65535, help="For tasks on this machine; 0: the kernel chooses.")
    ] = 0,
    directory: Annotated[
        bool, typer.Option("--directory", help="Keep the directory here, too: on one machine, or on a few.")
    ] = False,
    directory_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the directory; 0 for one of the kernel's choice.")
    ] = 0,
    directories: Annotated[
        str, typer.Option(metavar="HOST:PORT,...", help="The directories, in the same order on all machines.")
    ] = "",
    memory_mib: Annotated[int, typer.Option(min=1, help="MiB for objects.")] = 1024,
    until_unused: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="End when nobody has used it for so long.", show_default="never"),
    ] = None,
    job: _Job = "default",
    token_file: servers.TokenFile = None,
    certificate: servers.Certificate = None,
    key: servers.Key = None,
    authority: servers.Authority = None,
) -> None:
    """Keep the objects of this machine, until Ctrl-C.

    Tasks on this machine use it with `offbeat.objects.client.connect("host:port")`, or OFFBEAT_OBJECTS=host:port, and
    the same OFFBEAT_TOKEN.
    """
    from offbeat.objects.client import job_name
    from offbeat.objects.serve import ObjectServer, open_store
    from offbeat.objects.serve import serve as serve_objects
    from offbeat.server.launch import ShardSettings
    from offbeat.wire import busy_poll

    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    known = [address.strip() for address in directories.split(",") if address.strip()]
    if not (directory or known):
        raise NetworkError(
            "Cannot serve objects without a directory: say --directory on one machine, and --directories HOST:PORT, "
            "as that one prints it, on the others."
        )
    settings = ShardSettings(
        job="",
        token=servers.secret_of(token_file),
        certificate=str(certificate or ""),
        key=str(key or ""),
        authority=str(authority or ""),
    )

    def say(server: ObjectServer) -> None:
        where = ",".join(server.directories)
        sys.stdout.write(
            f"keeping objects at {server.store.address}: OFFBEAT_OBJECTS={server.client_address}; on other machines: "
            f"offbeat objects serve --directories {where}; it ends with Ctrl-C\n"
        )
        sys.stdout.flush()

    busy_poll.run(
        serve_objects(
            functools.partial(
                open_store,
                bind,
                port,
                client_port,
                job=job_name(job),
                credentials=settings.credentials(),
                memory_bytes=memory_mib << 20,
                directories=known,
                directory_port=directory_port if directory else None,
                patience=timedelta(seconds=20),
            ),
            say,
            until_unused,
        )
    )


@app.command()
def stop(job: _Job = "default") -> None:
    """End the store that the tasks of this machine have started, with its objects."""
    from offbeat.objects.local_store import find

    if (found := find(job)) is None:
        raise NetworkError(
            f"Cannot stop a store of job {job!r}: no task of this user has started one here that still runs."
        )
    os.kill(found.process, signal.SIGTERM)
    sys.stdout.write(f"ended the store at {found.address} (process {found.process})\n")


def _store_here(address: str, job: str, credentials: Credentials | None) -> tuple[str, Credentials | None]:
    """The store that is meant, and what to prove to it."""
    from offbeat.objects.local_store import STORE_VARIABLE, find

    if address := address or os.environ.get(STORE_VARIABLE, ""):
        return address, credentials
    if (found := find(job)) is None:
        raise NetworkError(
            f"Cannot look at a store of objects: say its address, or set {STORE_VARIABLE}. No task of this user has "
            f"started one of job {job!r} here that still runs."
        )
    return found.address, found.credentials(credentials)


@app.command()
def ls(
    address: Annotated[str, typer.Argument(help=_ADDRESS, show_default=False)] = "",
    job: _Job = "default",
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
) -> None:
    """Show the objects of a store."""
    from offbeat.objects.client import job_name
    from offbeat.objects.remote_store import RemoteStore

    address, credentials = _store_here(address, job, credentials_given(token_file, certificate, key, authority))
    store = RemoteStore(
        address,
        job=job_name(job),
        credentials=credentials,
        patience=timedelta(seconds=3),
        may_start=False,
        role="onlooker",
    )
    try:
        status = store.status()
    finally:
        store.close()
    title = (
        f"{status.used_bytes / 2**20:,.1f} of {status.most_bytes / 2**20:,.0f} MiB are used at {status.address}, which "
        f"has sent {status.sent_bytes / 2**20:,.1f} MiB to other stores, "
        f"received {status.received_bytes / 2**20:,.1f} MiB"
    )
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("object", "version", "tensor", "MiB", "here", "made here", "mapped by"):
        table.add_column(column, justify="left" if column in ("object", "tensor") else "right")
    for one in status.objects:
        size = one.meta.size_bytes
        here = 1.0 if not size else one.have_bytes / size
        table.add_row(
            one.name.id,
            str(one.name.version),
            str(one.meta),
            f"{size / 2**20:,.2f}",
            f"{here:.0%}",
            "yes" if one.is_own else "",
            str(one.readers) if one.readers else "",
        )
    Console().print(table)


@app.command()
def doctor(
    address: Annotated[str, typer.Argument(help=_ADDRESS, show_default=False)] = "",
    job: _Job = "default",
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Test the store of this machine and its directory with objects of its own. Exit code 1 if something fails."""
    from offbeat.cli.doctor import report
    from offbeat.objects.store_doctor import examine_store

    address, credentials = _store_here(address, job, credentials_given(token_file, certificate, key, authority))
    with Console(stderr=True).status("") as status:
        found = list(examine_store(address, job, credentials, status.update))
    report(found, json=json)
