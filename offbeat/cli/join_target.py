"""Workers that join a job while it trains, and validators: where it is, and who they are to be there."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from offbeat.cli.job_address import dial, find
from offbeat.cli.operator_client import ask_coordinator
from offbeat.cli.plan import read_plan
from offbeat.cli.status_client import JobEnded, StatusClient
from offbeat.errors import NetworkError, OffbeatError, PeerError, PlanError
from offbeat.report.records import has_ended
from offbeat.server.launch import settings_from
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.cli.job_address import JobAddress
    from offbeat.plan import Plan

_TCP = "tcp://"  # before the place of a store that other machines reach
_PATIENCE_S = 10.0
_START_S = 300.0  # for a job that is to be validated to begin
_LOOK_S = 0.1
_GOOD_BYE_S = 0.5
_MOST_RANKS = 4096


class JobStore(msgspec.Struct, frozen=True):
    """The store where the workers of a job without a server met, as its first one leaves it in store.json.

    Args:
        place: the path of a file, or tcp:// and an address.
        prefix: of this run in it.
        world: with how many workers the job began.
    """

    place: str
    prefix: str
    world: int


@dataclass(frozen=True)
class JoinTarget:
    """A job that trains.

    Args:
        environment: by which workers find it.
        first_rank: that nobody in it has had.
        plan: the one that holds with a server, or that it began with without one; those that train have the last word.
        history: folder in which it records one; None if it does not, or where it is is not known.
        folder: its run folder; None if it is not known.
        found: what was found there, in words.
        validates: those who come are validators.
    """

    environment: dict[str, str]
    first_rank: int
    plan: Plan
    history: Path | None = None
    folder: Path | None = None
    found: str = ""
    validates: bool = False

    def told(self, workers: int) -> str:
        """Say which job was found, and which workers are about to join it."""
        ranks = [str(self.first_rank + place) for place in range(workers)]
        one = workers == 1
        does = ("validates" if one else "validate") + " for" if self.validates else "joins" if one else "join"
        return f"Reached the job: {self.found}. Starting rank {', '.join(ranks)}, which {does} it."

    @property
    def reaches_machines(self) -> bool:
        """Whether the job's workers may be on other machines, and are to be connected with these."""
        return self.environment.get("OFFBEAT_STORE", "").startswith(_TCP)

    def has_ended(self) -> bool:
        """Whether all workers it began with are done, as far as that is known."""
        return self.folder is not None and has_ended(self.folder / "metrics.jsonl")


def look_for(where: str, workers: int, *, validates: bool = False) -> JoinTarget:
    """The job in a run folder, or at host:port with the credentials of the environment.

    Args:
        workers: how many are to join; each gets a rank of its own.
        validates: they are validators, without which it does not begin: so it is waited for.

    Raises:
        NetworkError: if there is none, it does not train yet, or its folder cannot be written to.
        PeerError: if there are other credentials.
        PlanError: if its plan cannot be read, or it has no validator, and those who come are.
    """
    if validates:
        _wait_for_server(Path(where))
    from offbeat.plan import Plan

    folder = Path(where)
    if not (folder / "server.json").exists():
        if any((folder / name).is_file() for name in ("store", "store.json")):
            return _without_server(folder, workers)
        if has_ended(folder / "metrics.jsonl"):
            raise _over(folder)
        if folder.is_dir():
            raise NetworkError(
                f"Cannot join the job in {where}: it has no server.json, which one with a parameter server has, and no "
                "store.json, which one on Elastic() has. Name the run folder of one of these, while it trains."
            )
    target = find(where, _own_certificate() if validates else {})  # what workers left names theirs
    # Those who joined may train on when all it began with are done: whether there is a server is what counts.
    done = bool(target.folder) and has_ended(Path(target.folder) / "metrics.jsonl")
    try:
        with StatusClient(target, timedelta() if done else None, has_options=False) as onlooker:
            if validates:
                asyncio.run(_show_credential(where, target))
            model_statuses = onlooker.look(_PATIENCE_S)
            deadline_s = time.monotonic() + _START_S
            if validates and not model_statuses:
                typer.echo(f"Waiting up to {_START_S:g} s for the workers of the job at {where}.", err=True)
            while validates and not model_statuses and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
                model_statuses = onlooker.look(_PATIENCE_S)
    except JobEnded:
        model_statuses = ()
    except NetworkError as error:
        if not done:
            raise
        raise _over(target.folder) from error
    if not model_statuses or not (validates or all(model_status.started for model_status in model_statuses)):
        raise NetworkError(
            f"Cannot join the job at {where}: it does not train now. Try again while its workers do; `offbeat top` "
            "shows them."
        )
    began_with = model_statuses[0].world
    newcomers = Path(target.folder) / "newcomers" if target.folder else None
    try:
        # A server that was restarted has forgotten ranks that nobody has come with yet; the folder has not.
        first_rank = _reserve_ranks(where, target, workers, least=_first_free(newcomers))
        if newcomers is not None:
            first_rank = _take_ranks(newcomers, first_rank, workers)
    except OSError as error:
        raise _unreadable(folder, error) from error
    environment = {
        "WORLD_SIZE": "1",
        "OFFBEAT_JOINS": str(began_with),
        "OFFBEAT_SERVERS": ",".join(target.servers or (target.address,)),
        "OFFBEAT_JOB": target.job,
        "OFFBEAT_TOKEN": target.token,
        "OFFBEAT_CERTIFICATE": target.certificate,
        "OFFBEAT_KEY": target.key,
        "OFFBEAT_AUTHORITY": target.authority,
    }
    try:
        plan = Plan.from_toml(model_statuses[0].plan)
    except PlanError as error:
        raise PlanError(f"Cannot read the plan of the job at {where}: {error} Give it with --plan.") from error
    if validates:
        if plan.validator is None:
            raise PlanError(
                f"Cannot validate for the job at {where}: its plan has no validator. Start it with one that has, such "
                "as Plan(validator=ZenoPS(), ...) - at `plan.validator`."
            )
        environment |= {"OFFBEAT_ROLE": "validator", "OFFBEAT_VALIDATOR_TOKEN": target.validator_token}
    training = sum(not seen.validates for seen in model_statuses[0].present)
    updates = model_statuses[0].version
    found = (
        f"{model_statuses[0].policy}, {training} worker{'' if training == 1 else 's'} train, {updates:,} updates so far"
    )
    run_folder = Path(target.folder) if target.folder else None
    return JoinTarget(environment, first_rank, plan, _history(folder), run_folder, found, validates)


def _reserve_ranks(where: str, target: JobAddress, workers: int, *, least: int) -> int:
    """Have the server give these workers ranks; the first of them.

    Args:
        least: none is below this one.

    Raises:
        NetworkError: if it cannot, or does not answer.
    """
    from offbeat.protocol.rank_reservation import RanksReserved, ReserveRanks

    request = ask_coordinator(
        target,
        ReserveRanks(workers, least),
        RanksReserved,
        patience_s=_PATIENCE_S,
        ended=f"Cannot join the job at {where}: it has ended.",
        silent=f"Cannot join the job at {where}: its server has not answered for {_PATIENCE_S:g} s. Try again.",
    )
    reserved = asyncio.run(request)
    if reserved.refusal:
        raise NetworkError(f"Cannot join the job at {where}: {reserved.refusal}")
    return reserved.first


def _first_free(folder: Path | None) -> int:
    """The rank behind all that newcomers in this folder have taken."""
    taken = [] if folder is None else [path.name.removeprefix("rank-") for path in folder.glob("rank-*")]
    return max([-1, *(int(rank) for rank in taken if rank.isdecimal() and int(rank) < _MOST_RANKS)]) + 1


def _own_certificate() -> dict[str, str]:
    """The certificate that the environment names, and what belongs to it."""
    known = settings_from(os.environ, "", timedelta())
    files = {"certificate": known.certificate, "key": known.key, "authority": known.authority}
    return {name: file for name, file in files.items() if file}


def _wait_for_server(folder: Path) -> None:
    """Wait until the workers of a job that is being started have said in its folder where its server is."""
    deadline_s = time.monotonic() + _START_S
    if (folder / "server.json").exists() or (":" in str(folder) and not folder.exists()):  # or it is an address
        return
    there = "" if folder.is_dir() else "There is no such folder yet. "
    typer.echo(f"{there}Waiting up to {_START_S:g} s for the job in {folder} to begin.", err=True)
    while not (folder / "server.json").exists() and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)


async def _show_credential(where: str, target: JobAddress) -> None:
    """See that the server takes us for a validator, before it is waited for workers.

    Raises:
        PeerError: if it does not.
    """
    try:
        link = await dial(target, lambda link: _NothingExpected(), "validator")
    except PeerError as error:
        raise PeerError(
            f"Cannot validate for the job at {where}. {error} Give the token that its server has for validators "
            "(OFFBEAT_VALIDATOR_TOKEN), or a certificate of `offbeat certs --validator`."
        ) from error
    try:
        await asyncio.wait_for(link.close(), _GOOD_BYE_S)
    except (TimeoutError, OffbeatError):
        link.abort()


class _NothingExpected:
    """The receiver of a link over which nothing is asked."""

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse: nothing was asked."""
        raise NetworkError("The server sends a body where none is expected.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Pass over what is for workers that train."""

    def lost(self, error: OffbeatError | None) -> None:
        """Ignore it: no more was to come."""


def _over(folder: Path | str) -> NetworkError:
    return NetworkError(f"Cannot join the job in {folder}: it has ended. `offbeat report {folder}` says how.")


def _unreadable(folder: Path, error: Exception) -> NetworkError:
    return NetworkError(f"Cannot join the job in {folder}: {error}. Join as the user who runs it.")


def _without_server(folder: Path, workers: int) -> JoinTarget:
    """The job whose workers sum among themselves.

    Raises:
        NetworkError: if it cannot be read where they met, or that is gone.
        PlanError: if the plan cannot be read, or nobody can join a job that trains by it.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while not (folder / "store.json").exists() and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)  # its workers are starting
    try:
        met = msgspec.json.decode((folder / "store.json").read_bytes(), type=JobStore)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(folder, error) from error
    plan = read_plan(folder / "plan.toml")
    plan.check_newcomers()
    try:
        first_rank = _take_ranks(folder / "newcomers", met.world, workers)
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not met.place.startswith(_TCP) and not Path(met.place).is_file():
        raise NetworkError(f"Cannot join the job in {folder}: it has ended, or it runs on a machine with other files.")
    environment = {
        "WORLD_SIZE": "1",
        "OFFBEAT_JOINS": str(met.world),
        "OFFBEAT_STORE": met.place,
        "OFFBEAT_STORE_PREFIX": met.prefix,
    }
    if met.place.startswith(_TCP):
        environment["MASTER_ADDR"], _, environment["MASTER_PORT"] = met.place.removeprefix(_TCP).rpartition(":")
    found = f"{short_name(plan.fabric)}, begun with {met.world} workers"
    return JoinTarget(environment, first_rank, plan, _history(folder), found=found)


def _history(folder: Path) -> Path | None:
    history = folder.resolve() / "history"
    return history if history.is_dir() else None


def _take_ranks(folder: Path, least: int, workers: int) -> int:
    """The first of as many ranks in a row, from `least` on, that nobody has had, and nobody gets any more.

    Raises:
        NetworkError: if there are none.
    """
    folder.mkdir(exist_ok=True)
    first = rank = least
    while rank < first + workers:
        if rank >= _MOST_RANKS:
            raise NetworkError(f"Cannot join the job in {folder.parent}: it has had {_MOST_RANKS} workers.")
        try:
            os.close(os.open(folder / f"rank-{rank}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            first = rank + 1
        rank += 1
    return first
