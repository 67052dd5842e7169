"""How a worker finds its parameter server, and what it asks all workers through it."""

from __future__ import annotations

import collections
import functools
import json
import logging
import os
import secrets
import threading
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.engine.border import Border
from offbeat.engine.waiting import Awaited
from offbeat.engine.witness import meeting_address
from offbeat.errors import ModelError, NetworkError, OffbeatError, PlanError
from offbeat.fabric.server import LEAVING, Client, ParameterServer
from offbeat.plan import Plan

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Awaitable, Callable, Sequence

    from offbeat.engine.control import Control
    from offbeat.engine.waiting import Waiter
    from offbeat.payload import Reply
    from offbeat.serve import Settings
    from offbeat.wire.link import Link
    from offbeat.wire.loop import Loop
    from offbeat.wire.session import Receiver

_FIRST_PATIENCE = timedelta(seconds=20)
_log = logging.getLogger("offbeat")


class Plans:
    """The plan that holds, as the server says; asked about on the event loop's thread, read by the training thread.

    Args:
        plan: the present one.
        stays: why this worker could not do without the server, or "".

    Attributes:
        taken: the one that the training thread goes by.
        border: where it leaves the server.
    """

    def __init__(self, plan: Plan, stays: Callable[[], str] = lambda: "") -> None:
        self.present = self.taken = plan
        self.told: collections.deque[str] = collections.deque()  # what has changed, for people
        self.border = Border()
        self._stays = stays

    def judge(self, plan: str) -> tuple[str, str, int]:
        """The digest of a plan that is proposed; or why this worker cannot go by it; and how many places it has passed.

        If it is to leave the server, it passes no other place until it hears what becomes of it.
        """
        try:
            new = self.present.swapped(plan, whole=True)
        except PlanError as error:
            return "", str(error), 0
        if new.is_served:
            return new.digest, "", 0
        if refusal := self._stays():
            return "", refusal, 0
        return new.digest, "", self.border.hold()

    def adopt(self, plan: str, text: str, border: int | None = None) -> None:
        """It holds from now on; all leave the server once they have passed `border` places, unless that is None."""
        before, self.present = self.present, Plan.from_toml(plan)
        if text or self.present != before:
            self.told.append(text or f"The plan of this job has become {self.present!r}.")
        self.border.settle(border)

    def let_go(self) -> None:
        """The server is away."""
        self.border.settle()


class Server:
    """A worker's connection to all shards.

    Args:
        client: its end.
        spec: the plan's.
        loop: where the links live; ended by `close`.
        shards: how many there are.
        plans: which one holds.
        job: its name.
    """

    def __init__(
        self, client: Client, spec: ParameterServer, loop: Loop, shards: int, plans: Plans, job: str = ""
    ) -> None:
        self.client, self.plans, self.job = client, plans, job
        self.block_bytes = spec.block_bytes
        self.shards = shards
        # Leases of data, by loader and number: drawn for the step at hand, and used by steps that were not brought yet.
        self.drawn: list[tuple[int, int]] = []
        self.used: list[tuple[int, int]] = []
        self._loop = loop

    def keep_drawn(self) -> None:
        """What was drawn is used in this worker's next contribution."""
        self.used += self.drawn
        self.drawn = []

    def sum(self, question: str, numbers: Sequence[float], waiter: Waiter) -> tuple[float, ...]:
        """The sums of numbers over all workers that are there. Collective.

        Raises:
            DisagreementError: if the workers ask different questions.
            NetworkError: if the server is gone.
        """
        asked = self.client.ask(question, numbers)
        waiter.wait(asked, Awaited(question, outlives=True))
        return asked.numbers

    def settle(self, waiter: Waiter) -> None:
        """Wait until all workers are here, and take the newest parameters of all models. Collective.

        Raises:
            NetworkError: if the server is gone.
        """
        asked = self.client.ask("the newest parameters", refresh=True)
        waiter.wait(asked, Awaited("the others, for the newest parameters", outlives=True))

    def take_over(self, waiter: Waiter, refusal: str = "") -> None:
        """Wait until all workers have taken over a checkpoint, and take the newest parameters. Collective.

        Args:
            refusal: why this worker cannot; "" if it has, and if it is rank 0 has brought it to the server.

        Raises:
            ModelError: on all workers, if one cannot, or rank 0 is gone.
            NetworkError: if the server is gone.
        """
        brought = float(self.client.rank == 0 and not refusal)
        asked = self.client.ask(
            "what a checkpoint holds", (brought, float(bool(refusal))), refresh=True, refusal=refusal
        )
        waiter.wait(asked, Awaited("the others, to go on from a checkpoint", outlives=True))
        if asked.numbers != (1.0, 0.0):
            why = asked.refused or "Rank 0, which brings it to the server, is gone."
            raise ModelError(f"Cannot load this state, because one of the workers cannot. {why}")

    def pace(self, waiter: Waiter) -> str:
        """Who paces the rounds and why, as the coordinator sees it; "" if it cannot be asked any more."""
        try:
            look = self.client.look()
            waiter.wait(look, Awaited("a last look at the server", outlives=True))
        except OffbeatError:
            return ""
        return " ".join(scene.pace for scene in look.scenes if scene.pace)

    def swap(self, plan: str, waiter: Waiter) -> None:
        """Have another plan hold for all workers.

        Args:
            plan: as TOML.

        Raises:
            PlanError: if it cannot be; the present one goes on.
            NetworkError: if the server is gone.
        """
        asked = self.client.swap(plan, whole=True)
        waiter.wait(asked, Awaited("all workers to agree on another plan", outlives=True))
        if asked.refused:
            raise PlanError(asked.refused)

    def leave(self, waiter: Waiter) -> int:
        """Come together with all workers that are there, and take the newest parameters; how many they are. Collective.

        Raises:
            NetworkError: if the server is gone.
        """
        asked = self.client.ask(LEAVING, (1.0,), refresh=True)
        waiter.wait(asked, Awaited("the others, to leave the server", outlives=True))
        return int(asked.numbers[0])

    def abort(self) -> None:
        """Leave without a good-bye, because of an error: nobody is to wait for this worker."""
        self.client.abort()
        self._loop.close()

    def close(self) -> None:
        """Say good-bye."""
        self.client.close()
        self._loop.close()


class Starting:
    """The server of a job that trains without one, started beside rank 0 meanwhile; other ranks have nothing to start.

    Args:
        settings: of the first shard; None on other ranks.
    """

    sent_bytes = 0

    def __init__(self, settings: Settings | None) -> None:
        self._settings = settings
        self._started: Future[tuple[subprocess.Popen[bytes], str]] = Future()
        if settings is not None:
            threading.Thread(target=self._start, args=(settings,), name="offbeat-server", daemon=True).start()

    def _start(self, settings: Settings) -> None:
        from offbeat.serve import start_shard

        try:
            self._started.set_result(start_shard(settings))
        except BaseException as error:
            self._started.set_exception(error)

    def where(self, waiter: Waiter) -> str:
        """Its address, job and token, for all; waits until it is there.

        Raises:
            NetworkError: if it cannot be started.
        """
        settings = self._settings
        if settings is None:
            return ""
        waiter.wait(self, Awaited("starting the parameter server", alone=True))
        _, address = self._started.result()
        return f"{address} {settings.job} {settings.token}"

    def abandon(self) -> None:
        """Nobody will come."""
        self._started.add_done_callback(_terminate)

    # -- something to wait for -----------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it is there, or cannot be."""
        return self._settings is None or self._started.done()

    def wait(self, timeout: timedelta) -> bool:
        """Wait until it is."""
        return bool(futures.wait([self._started], timeout.total_seconds()).done)

    def result(self) -> Reply:
        """Nothing."""
        return []


def _terminate(started: Future[tuple[subprocess.Popen[bytes], str]]) -> None:
    if started.exception() is None:
        started.result()[0].terminate()


def start_beside(control: Control, timeout: timedelta, run_dir: Path | None) -> Starting:
    """Have rank 0 begin to start the first shard of a server, with a job and a token of its own. Collective.

    Args:
        run_dir: where snapshots are kept; None for none.
    """
    from offbeat.serve import from_environment

    bind = meeting_address(control)
    if control.rank:
        return Starting(None)
    job, token = secrets.token_hex(8), secrets.token_hex(32)
    settings = msgspec.structs.replace(from_environment("default", timeout), job=job, token=token, bind=bind)
    return Starting(_with_snapshots(settings, run_dir, 0))


def addresses_of(spec: ParameterServer, *, again: bool = False) -> tuple[str, ...]:
    """Where the shards are that somebody else has started; empty if nobody has.

    Args:
        again: the job had left a server, which has ended: it is not the one in the environment any more.
    """
    named = "" if again else os.environ.get("OFFBEAT_SERVERS", "")
    return spec.addresses or tuple(filter(None, named.split(",")))


def connect(
    plan: Plan,
    spec: ParameterServer,
    control: Control,
    waiter: Waiter,
    timeout: timedelta,
    run_dir: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
    place: tuple[int, int] | None = None,
    stays: Callable[[], str] = lambda: "",
    patience: timedelta = _FIRST_PATIENCE,
    again: bool = False,
    starting: Starting | None = None,
) -> Server:
    """Connect with the plan's server; rank 0, or every rank, starts a shard if there is none. Collective.

    Args:
        plan: of the job; `spec` is its fabric.
        waiter: waits for the server to be there, and asks it from then on what is wrong with it.
        tell: called, on another thread, with what people should know about the server.
        run_dir: where rank 0 leaves how to look at the job (`offbeat top`); None for nowhere.
        place: rank of this worker, and how many the job began with, if it joins later; else as `control` has them.
        stays: why this worker could not leave the server, or "".
        patience: for how long to dial it for the first time.
        again: as of `addresses_of`.
        starting: its first shard, if that is being started already.

    Raises:
        PlanError: if there is a server, and the plan wants shards beside the workers.
        NetworkError: on all ranks if it cannot be started; on one that cannot reach it.
        PeerError: if it refuses this worker.
    """
    from offbeat.serve import from_environment
    from offbeat.wire.loop import Loop
    from offbeat.wire.session import Limits
    from offbeat.wire.tcp import connect as dial_shard

    addresses = addresses_of(spec, again=again)
    settings = from_environment("default", timeout)
    if addresses and spec.collocated:
        raise PlanError(
            f"Cannot start shards beside the workers: this job has a server, at {', '.join(addresses)}. Leave out "
            "--servers and OFFBEAT_SERVERS, or collocated - at `plan.fabric.collocated`."
        )
    if not addresses:
        starting = starting or start_beside(control, timeout, run_dir)
        addresses, settings = _beside_workers(control, waiter, settings, run_dir, starting, everywhere=spec.collocated)
    if "OFFBEAT_OUTLIVES" in os.environ:  # for the launcher: a worker that is lost does not end the job
        Path(os.environ["OFFBEAT_OUTLIVES"]).touch()
    if run_dir is not None and control.rank == 0 and place is None:
        _leave_address(run_dir / "server.json", addresses, settings)
    rank, world = place or (control.rank, control.world)
    loop = Loop()
    credentials, limits = settings.credentials(), Limits(timeout=timeout)

    def dial(address: str, accept: Callable[[Link], Receiver], patience: timedelta) -> Awaitable[Link]:
        return dial_shard(
            address,
            accept=accept,
            job=settings.job,
            rank=rank,
            credentials=credentials,
            limits=limits,
            patience=patience,
        )

    plans = Plans(plan, stays)
    client = Client(
        loop,
        rank=rank,
        world=world,
        dials=[functools.partial(dial, address) for address in addresses],
        hosts=[address.rpartition(":")[0] for address in addresses],
        patience=timedelta(seconds=spec.patience_s),
        tell=tell,
        plans=plans,
    )
    dialling = Awaited(f"dialling the parameter server at {', '.join(addresses)}", alone=True)
    try:
        waiter.call(lambda: loop.run(client.connect(patience)), dialling)
    except OffbeatError:
        loop.close()
        raise
    waiter.ask_server = client.trouble
    return Server(client, spec, loop, len(addresses), plans, settings.job)


def _leave_address(path: Path, addresses: Sequence[str], settings: Settings) -> None:
    """Write down where the job can be looked at, and joined, for this user only: the token is in it."""
    about: dict[str, Any] = {"address": addresses[0], "job": settings.job, "token": settings.token}
    about["servers"] = list(addresses)
    # Whoever looks does so from any folder.
    for kind in ("certificate", "key", "authority"):
        file = getattr(settings, kind)
        about[kind] = str(Path(file).absolute()) if file else ""
    part = path.with_suffix(".part")
    try:
        # Exchanged whole: who looks may come at any moment, and a file that was there may be readable for others.
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(about, file, indent=1)
        part.replace(path)
    except OSError as error:  # a full disk is no reason to end the run
        _log.warning("Cannot write %s: %s. `offbeat top` will need the address and the token.", path, error.strerror)


def _beside_workers(
    control: Control,
    waiter: Waiter,
    settings: Settings,
    run_dir: Path | None,
    starting: Starting,
    *,
    everywhere: bool,
) -> tuple[tuple[str, ...], Settings]:
    """Wait for the shard that rank 0 starts; where it is, and how to connect. Collective.

    Args:
        run_dir: where snapshots are kept; None for none.
        everywhere: the other ranks start one each, which follows rank 0's.
    """
    try:
        said = starting.where(waiter)
    except NetworkError as error:
        said = f"! {error}"
    said = control.texts("the parameter server's address", said)[0]
    if said.startswith("!"):
        raise NetworkError(said[2:])
    address, job, token = said.split()
    settings = msgspec.structs.replace(settings, job=job, token=token)
    if not everywhere:
        return (address,), settings
    said = address
    bind = meeting_address(control)
    if control.rank > 0:
        try:
            fresh = msgspec.structs.replace(settings, bind=bind, coordinator=address)
            said = _start(_with_snapshots(fresh, run_dir, control.rank), waiter)
        except NetworkError as error:
            said = f"! {error}"
    addresses = list(control.texts("the addresses of the shards", said).values())
    for one in addresses:
        if one.startswith("!"):
            raise NetworkError(one[2:])
    return tuple(addresses), settings


def _start(settings: Settings, waiter: Waiter) -> str:
    """Start a shard, which imports torch: for seconds, in which the others are told what they wait for. Its address."""
    from offbeat.serve import start_shard

    what = Awaited("starting a shard of the parameter server", alone=True)
    _, address = waiter.call(lambda: start_shard(settings), what)
    return address


def _with_snapshots(settings: Settings, run_dir: Path | None, shard: int) -> Settings:
    """The same, with a folder for snapshots, so that the shard can be started again if it dies."""
    from offbeat.serve import RESTARTS

    if run_dir is None:
        return settings
    folder = run_dir / "server" / f"shard-{shard}"
    return msgspec.structs.replace(settings, snapshots=str(folder), is_fresh=True, restarts=RESTARTS)
