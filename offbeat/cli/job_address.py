"""The address of a job and the credentials for it, from the command line."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from offbeat.cli.serve import read_token
from offbeat.errors import NetworkError
from offbeat.server.launch import ShardSettings, settings_from

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink
    from offbeat.wire.messages import Role
    from offbeat.wire.session import Receiver

# The file in a run folder with the secret that validators know and workers do not.
VALIDATOR_TOKEN = "validator.token"
# For how long to dial: a job that is looked at is there.
_DIAL = timedelta(seconds=3)

JobPlace = Annotated[
    str, typer.Option(help="Its run folder, or host:port of the first shard of its server.", show_default=False)
]
OptionalJobPlace = Annotated[
    str | None,
    typer.Option(
        "--job", help="The same as the argument: a run folder, or host:port of the first shard.", show_default=False
    ),
]
JobName = Annotated[str, typer.Option(help="Name of the job; OFFBEAT_JOB if left out, or default.", show_default=False)]
TokenFile = Annotated[
    Path | None, typer.Option(help="A secret that the workers know; that of OFFBEAT_TOKEN if left out.")
]
Certificate = Annotated[
    Path | None, typer.Option(help="For TLS: a certificate of one's own, PEM; OFFBEAT_CERTIFICATE if left out.")
]
Key = Annotated[Path | None, typer.Option(help="For TLS: its key, PEM; OFFBEAT_KEY if left out.")]
Authority = Annotated[
    Path | None,
    typer.Option(help="For TLS: the authority that signs the server's, PEM; OFFBEAT_AUTHORITY if left out."),
]


class _HubPlace(msgspec.Struct, frozen=True):
    """The address of the hub in rank 0's sentinel, which `offbeat.init` writes to hub.json; token in hexadecimal."""

    address: str
    token: str


class JobAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A job's server, as `offbeat.engine.server_session` leaves it in server.json; or the hub of its workers.

    Args:
        address: "host:port" of the first shard, or of the hub.
        validator_token: that workers do not know; "" if it is not known here either.
        folder: of the run, "" if unknown.
        servers: of all shards, the first one first; () if unknown.
    """

    address: str
    job: str
    token: str = ""
    validator_token: str = ""
    certificate: str = ""
    key: str = ""
    authority: str = ""
    folder: str = ""
    servers: tuple[str, ...] = ()

    @property
    def way_out(self) -> str:
        """The advice if there is no answer."""
        folder = self.folder
        return f"The run in {folder} has probably ended: `offbeat report {folder}` says how." if folder else ""

    @property
    def settings(self) -> ShardSettings:
        """The credentials of the command."""
        return ShardSettings(
            job=self.job,
            token=self.token,
            validator_token=self.validator_token,
            certificate=self.certificate,
            key=self.key,
            authority=self.authority,
        )


def read_target(folder: Path) -> JobAddress:
    """The server of the run in a folder.

    Raises:
        NetworkError: if it has none, or it cannot be read.
    """
    path = folder / "server.json"
    if not path.is_file():
        raise NetworkError(
            f"Cannot look at the job in {folder}: it has neither server.json nor hub.json. Either it has not "
            "reached offbeat.init yet: look again when it trains; or it is one worker alone, whose progress `offbeat "
            "run` shows; or this is not the folder of a run."
        )
    try:
        target = msgspec.json.decode(path.read_bytes(), type=JobAddress)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NetworkError(f"Cannot read {path}: {error}. Give host:port of the job's first shard instead.") from error
    # What workers leave does not say it.
    secret = folder / VALIDATOR_TOKEN
    known = read_token(secret) if secret.is_file() else os.environ.get("OFFBEAT_VALIDATOR_TOKEN", "")
    return msgspec.structs.replace(target, folder=str(folder), validator_token=known if target.token else "")


def _folder_of(where: str) -> Path:
    return Path(where).parent if Path(where).name in ("server.json", "hub.json") else Path(where)


def has_server(where: str) -> bool:
    """Whether this is the run folder of a job in which a server was named, and was not left since."""
    return (_folder_of(where) / "server.json").is_file()


def find_hub(where: str) -> JobAddress | None:
    """The hub of the workers whose run folder this is; None if it is none, or there is no hub.

    Raises:
        NetworkError: if it cannot be read where it is.
    """
    folder = _folder_of(where)
    path = folder / "hub.json"
    try:
        place = msgspec.json.decode(path.read_bytes(), type=_HubPlace)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NetworkError(f"Cannot read {path}: {error}. Look as the user who runs the job.") from error
    return JobAddress(address=place.address, job="", token=place.token, folder=str(folder))


def is_without_server(where: str) -> bool:
    """Whether this is the run folder of a job in which several workers train without a server."""
    folder = Path(where)
    return (folder / "metrics.jsonl").is_file() and not (folder / "server.json").exists()


def given(
    job_name: str, token_file: Path | None, certificate: Path | None, key: Path | None, authority: Path | None
) -> dict[str, str]:
    """The options that describe a job, but for where it is.

    Raises:
        NetworkError: if there is no secret in the file.
    """
    values = {
        "job": job_name,
        "token": "" if token_file is None else read_token(token_file),
        "certificate": str(certificate or ""),
        "key": str(key or ""),
        "authority": str(authority or ""),
    }
    return {name: value for name, value in values.items() if value}


def credentials_given(
    token_file: Path | None, certificate: Path | None, key: Path | None, authority: Path | None
) -> Credentials | None:
    """The credentials that the options and the environment say; None if they say none.

    Raises:
        NetworkError: if they cannot be used.
    """
    known = settings_from(os.environ, "default", timedelta())
    return msgspec.structs.replace(known, **given("", token_file, certificate, key, authority)).credentials()


def find(where: str, given: Mapping[str, str]) -> JobAddress:
    """The server of the job at `where`; `given` outranks what its server.json or the environment says.

    Raises:
        NetworkError: if it is neither a run folder with a server nor an address.
    """
    folder = _folder_of(where)
    if folder.is_dir():
        target = read_target(folder)
    elif ":" in where and "/" not in where:
        target = _from_environment(where)
    else:
        raise NetworkError(
            f"Cannot look at {where!r}: there is no such folder. Give one that `offbeat run` writes to, or host:port."
        )
    return msgspec.structs.replace(target, **given)


def _from_environment(address: str) -> JobAddress:
    known = settings_from(os.environ, "default", timedelta())
    return JobAddress(
        address=address,
        job=known.job,
        token=known.token,
        validator_token=known.validator_token,
        certificate=known.certificate,
        key=known.key,
        authority=known.authority,
    )


def credentials_of(where: str, given: Mapping[str, str]) -> JobAddress:
    """The result of `find`; for a job without a server only what the command line and the environment say.

    Raises:
        NetworkError: as `find`.
    """
    if has_server(where) or find_hub(where) is None:
        return find(where, given)
    return msgspec.structs.replace(_from_environment(""), **given)


async def dial(
    target: JobAddress, accept: Callable[[PeerLink], Receiver], role: Role, *, patience: timedelta | None = None
) -> PeerLink:
    """A link to a job's first shard.

    Args:
        accept: called with the link before anything comes over it; returns who takes that in.
        role: what it comes for.
        patience: for how long to dial; None for 3 s.

    Raises:
        NetworkError: if nobody can be reached there.
        PeerError: if it is another job, or there are other credentials.
    """
    from offbeat.wire.tcp import connect

    try:
        return await connect(
            target.address,
            accept=accept,
            job=target.job,
            rank=0,
            role=role,
            credentials=target.settings.credentials(),
            patience=_DIAL if patience is None else patience,
        )
    except NetworkError as error:
        # Without one nobody was tried: it is no address, or the credentials cannot be used.
        if isinstance(error.__cause__, OSError) and target.folder:
            raise NetworkError(f"{error} {target.way_out}") from error
        raise
