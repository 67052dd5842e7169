"""`offbeat serve`: one shard of a parameter server, by itself."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.timeout import check_timeout
from offbeat.errors import NetworkError
from offbeat.wire import busy_poll

TokenFile = Annotated[
    Path | None,
    typer.Option(help="A secret of at least 16 bytes that the workers know, too; that of OFFBEAT_TOKEN if left out."),
]
Certificate = Annotated[Path | None, typer.Option(help="For TLS: this server's certificate, PEM.")]
Key = Annotated[Path | None, typer.Option(help="For TLS: its key, PEM.")]
Authority = Annotated[
    Path | None, typer.Option(help="For TLS: the authority that signs the workers' certificates, PEM.")
]
Bind = Annotated[str, typer.Option(help="Address to listen on; others than loopback need credentials.")]


def serve(
    bind: Bind = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for one of the kernel's choice.")] = 0,
    job: Annotated[str, typer.Option(help="Name of the job; workers of another one are refused.")] = "default",
    coordinator: Annotated[
        str, typer.Option(help="host:port of the first shard, which coordinates; left out if this is it.")
    ] = "",
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
    timeout: Annotated[
        float, typer.Option(callback=check_timeout, help="A worker that is silent for so many seconds is gone.")
    ] = 5.0,
    snapshots: Annotated[
        Path | None,
        typer.Option(help="Keep snapshots in this folder, and resume from them if there are any; none if left out."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Updates between two snapshots.")] = 100,
    history: Annotated[
        Path | None,
        typer.Option(
            help="Record in this folder what `offbeat verify-run` checks; that of OFFBEAT_HISTORY if left out."
        ),
    ] = None,
) -> None:
    """Hold a part of the parameters for one job; end when its last worker has gone.

    Workers find it with `ParameterServer(addresses=("host:port",))` or OFFBEAT_SERVERS=host:port,host:port, the first
    shard first, and with the same OFFBEAT_JOB and OFFBEAT_TOKEN. Validators show OFFBEAT_VALIDATOR_TOKEN as well,
    another secret, which this server is given and workers are not; or a certificate of `offbeat certs --validator`.
    Both secrets have at least 16 bytes: openssl rand -hex 32.
    """
    from offbeat.cli.shard_main import prepare_process
    from offbeat.cli.shard_main import serve as serve_job
    from offbeat.server.launch import ShardSettings

    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    settings = ShardSettings(
        job=job,
        bind=bind,
        port=port,
        coordinator=coordinator,
        token=secret_of(token_file),
        validator_token=os.environ.get("OFFBEAT_VALIDATOR_TOKEN", ""),
        certificate=str(certificate or ""),
        key=str(key or ""),
        authority=str(authority or ""),
        timeout_s=timeout,
        patience_s=0.0,
        snapshots=str(snapshots or ""),
        every=every,
        history=str(history or os.environ.get("OFFBEAT_HISTORY", "")),
    )

    def say(address: str) -> None:
        sys.stdout.write(f"serving job {job} at {address}; it ends with the last worker, or with Ctrl-C\n")
        sys.stdout.flush()

    prepare_process()
    busy_poll.run(serve_job(settings, say))


_MOST_TOKEN_BYTES = 4096


def secret_of(file: Path | None) -> str:
    """The secret in a file, or that of OFFBEAT_TOKEN if none is named; "" if there is neither.

    Raises:
        NetworkError: as `read_token`.
    """
    return os.environ.get("OFFBEAT_TOKEN", "") if file is None else read_token(file)


def read_token(path: Path) -> str:
    """The secret in a file.

    Raises:
        NetworkError: if it cannot be read, there is none, or it is longer than any token.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_TOKEN_BYTES + 1)  # the file may have no end, as /dev/zero
        token = data.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise NetworkError(f"Cannot read the token in {path}: {why}. Write one: openssl rand -hex 32.") from error
    if len(data) > _MOST_TOKEN_BYTES:
        raise NetworkError(
            f"Cannot use the token in {path}: the file has more than {_MOST_TOKEN_BYTES} bytes. Write a token: openssl "
            "rand -hex 32."
        )
    if not token:
        raise NetworkError(f"Cannot use the token in {path}: the file is empty. Write one: openssl rand -hex 32.")
    return token
