"""`offbeat top`: look at a job while it runs."""

from __future__ import annotations

import importlib.util
import ipaddress
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from offbeat.cli.job_address import (
    Authority,
    Certificate,
    JobName,
    Key,
    OptionalJobPlace,
    TokenFile,
    credentials_of,
    given,
)
from offbeat.cli.status_client import JobEnded, JobOnlooker
from offbeat.cli.top_view import TopView, lasting
from offbeat.errors import NetworkError
from offbeat.report.formatting import listed
from offbeat.report.prometheus import Figures

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from offbeat.protocol.status import ModelStatus

_INTERVAL_S = 0.5
_PATIENCE_S = 10.0  # for the answer, where there is only one look
_WIDEST = 1 << 12  # a pipe has no width


def top(
    run_dir: Annotated[
        str | None,
        typer.Argument(
            help="The job's run folder, or host:port of the first shard of its server.",
            show_default=False,
        ),
    ] = None,
    job: OptionalJobPlace = None,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave; so it is in a pipe.")] = False,
    interval: Annotated[
        float | None, typer.Option(min=0.05, help="Look every so many seconds, also in a pipe; 0.5 if left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the status as JSON, one object per look.")] = False,
    prometheus: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve the figures at /metrics on this port instead; 0 for any."),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(help="Address for --prometheus; beyond this machine figures need certificates, on both sides."),
    ] = "127.0.0.1",
    job_name: JobName = "",
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
) -> None:
    """Look at a job: what each worker does, how far and how fast it is, its loss, who keeps the others waiting.

    A run folder has address and credentials: server.json holds the address, the job's name and the token of the
    parameter server; options outrank it. A job without a server is reached by its hub.json, on the machine of rank 0.
    Looking costs the job nothing; leave at any time with Ctrl-C.
    """
    if prometheus is not None and (once or json):
        raise NetworkError("Cannot print anything with --prometheus, which only serves. Leave out --once and --json.")
    if prometheus is not None and importlib.util.find_spec("prometheus_client") is None:
        raise NetworkError(
            "Cannot serve figures: the package prometheus-client is not installed. Install it with pip install "
            "'offbeat[dashboard]'."
        )
    if (job is None) == (run_dir is None):
        named = "no job is named" if job is None else "two jobs are named"
        raise NetworkError(f"Cannot look at a job: {named}. Give its run folder once, as `offbeat top RUN_FOLDER`.")
    job = run_dir if job is None else job
    assert job is not None
    about = given(job_name, token_file, certificate, key, authority)
    tls = _tls_of(job, about, bind) if prometheus is not None else {}
    before = signal.signal(signal.SIGTERM, _leave)
    is_terminal = sys.stdout.isatty()
    show = _Show(json=json, is_terminal=is_terminal)
    every_s = _INTERVAL_S if interval is None else interval
    try:
        with JobOnlooker(job, about) as onlooker:
            if prometheus is not None:
                _serve(onlooker, show, every_s, bind, prometheus, tls)
            elif once or (interval is None and not is_terminal):
                _once(onlooker, show)
            else:
                _follow(onlooker, show, every_s)
    except JobEnded:
        typer.echo(last_lines(show.view.model_statuses), err=json)
    except KeyboardInterrupt:
        pass  # the way to leave
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: object) -> NoReturn:
    """End as by Ctrl-C: the cursor is back on the terminal, and the server has heard a good-bye."""
    raise SystemExit(128 + number)


def last_lines(model_statuses: Sequence[ModelStatus]) -> str:
    """The last lines about a job that has ended.

    Args:
        model_statuses: that were seen last.
    """
    if not model_statuses:
        return "The job has ended."
    several = len(model_statuses) > 1
    made = listed([f"{s.version:,} {s.counts}{f' of model {s.model}' if several else ''}" for s in model_statuses])
    return (
        f"The job has ended. When last seen it had made {made} in {lasting(max(s.running_s for s in model_statuses))}."
    )


class _Show:
    """The output of `offbeat top`.

    Args:
        json: as objects; else as a table.
        is_terminal: whether somebody watches it change.
    """

    def __init__(self, *, json: bool, is_terminal: bool) -> None:
        self.view = TopView()
        self.json, self.is_live = json, is_terminal and not json
        self.console = Console(highlight=False, width=None if is_terminal else _WIDEST)

    def print(self) -> None:
        """Print the latest status."""
        if self.json:
            typer.echo(msgspec.json.encode({"time_s": time.time(), "scenes": self.view.model_statuses}).decode())
        else:
            self.console.print(self.view)


def _once(onlooker: JobOnlooker, show: _Show) -> None:
    model_statuses = onlooker.look(_PATIENCE_S)
    if model_statuses is None:
        raise NetworkError(f"Cannot look at the job: it has not answered for {_PATIENCE_S:g} s. Try again.")
    show.view.add(model_statuses)
    show.print()


def _follow(onlooker: JobOnlooker, show: _Show, interval_s: float) -> None:
    looks = _looks(onlooker, show.view, interval_s)
    if show.is_live:
        with Live(show.view, console=show.console, auto_refresh=False) as live:
            for _ in looks:
                live.refresh()
    for answered in looks:
        if answered:
            show.print()
            if not show.json:
                show.console.print()


def _tls_of(job: str, given: Mapping[str, str], bind: str) -> dict[str, Any]:
    """The options under which figures are served at `bind`: to this machine as they are, to others by mutual TLS only.

    Raises:
        NetworkError: if there are no certificates for that.
    """
    try:
        is_private = ipaddress.ip_address(bind.partition("%")[0]).is_loopback
    except ValueError as error:
        raise NetworkError(f"Cannot serve figures on {bind!r}: it is no IP address, such as 127.0.0.1.") from error
    if is_private:
        return {}
    target = credentials_of(job, given)
    if not (target.certificate and target.key and target.authority):
        raise NetworkError(
            f"Cannot serve figures on {bind} without certificates: anybody could read them. Use a loopback address, or "
            "give --certificate, --key and --authority; Prometheus then needs a certificate of the same authority."
        )
    return {
        "certfile": target.certificate,
        "keyfile": target.key,
        "client_cafile": target.authority,
        "client_auth_required": True,
    }


def _serve(onlooker: JobOnlooker, show: _Show, interval_s: float, bind: str, port: int, tls: Mapping[str, Any]) -> None:
    """Serve the figures for as long as the job runs; a scrape is answered from the last look, so it asks nobody."""
    from prometheus_client import CollectorRegistry, start_http_server

    looks = _looks(onlooker, show.view, interval_s)
    while not next(looks):
        pass
    figures = Figures(show.view.model_statuses, time.time())
    registry = CollectorRegistry()  # the usual one tells of this process
    registry.register(figures)
    try:
        server, _ = start_http_server(port, addr=bind, registry=registry, **tls)
    except OSError as error:
        raise NetworkError(f"Cannot serve figures on {bind}, port {port}: {error}. Choose another.") from error
    try:
        host, port = server.server_address[0], server.server_port
        address = f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"
        typer.echo(f"serving figures at http{'s' if tls else ''}://{address}/metrics until the job ends, or Ctrl-C")
        for answered in looks:
            if answered:
                figures.latest = (show.view.model_statuses, time.time())
    finally:
        server.shutdown()
        server.server_close()


def _looks(onlooker: JobOnlooker, view: TopView, interval_s: float) -> Iterator[bool]:
    """Look again and again; whether there was an answer."""
    answered_s = time.monotonic()
    while True:
        began_s = time.monotonic()
        model_statuses = onlooker.look(min(interval_s, _INTERVAL_S))
        if model_statuses is None:
            view.silent_s = time.monotonic() - answered_s
        else:
            answered_s = time.monotonic()
            view.add(model_statuses)
        yield model_statuses is not None
        onlooker.rest(began_s + interval_s - time.monotonic())
