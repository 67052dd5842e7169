"""The machines of one job: `offbeat run --nodes` starts a part of its workers on each of several.

The launchers meet in a store, a TCPStore of torch's, which the launcher of node 0 keeps at `--master-addr`; the workers
meet in the same one. No worker keeps it, so on `Elastic()` it outlives each of them, rank 0 as well. It ends with that
launcher, which therefore stays until those of the other machines have ended.

    offbeat-run/node/K      how node K was started; all have to be there before any worker starts
    offbeat-run/refused     why the job cannot begin; every launcher ends with that sentence
    offbeat-run/failed      which worker has ended the job, where the others cannot continue without it
    offbeat-run/beat/K      grows while the launcher of node K lives
    offbeat-run/ended/K     the launcher of node K has ended

Once the workers run, only a thread speaks with the store: an answer that never arrives must not hold up the launcher.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import msgspec

from offbeat.errors import NetworkError, OffbeatError, PlanError
from offbeat.version import __version__
from offbeat.wire.interfaces import is_loopback, shown_address
from offbeat.wire.messages import MAX_WORLD

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

_POLL_S = 0.1  # while the machines meet
_BEAT_S = 0.5
_SILENT_S = 15.0  # a launcher that has not been heard of for so long is not waited for
_FAREWELL_S = 6.0  # for the other launchers to learn why the job has ended, and to end their workers
_ANSWER = timedelta(seconds=10)


@dataclass(frozen=True)
class NodeSpec:
    """A machine of a job, as the command line describes it.

    Args:
        count: of machines.
        rank: of this one; 0 is where all meet.
        address, port: of node 0.
    """

    count: int
    rank: int
    address: str
    port: int

    @classmethod
    def of(cls, count: int, rank: int | None, address: str, port: int) -> NodeSpec | None:
        """Check the options; None for a job on one machine.

        Raises:
            PlanError: if they do not go together.
        """
        if not 0 <= (rank or 0) < count:
            bounds = f"from 0 to {count - 1}, and is {rank}" if count > 1 else f"0 on the only machine, and is {rank}"
            raise PlanError(
                f"Cannot start node {rank} of {count}: --node-rank must be {bounds}. Give --nodes the number of "
                "machines."
            )
        if count == 1:
            return None
        if rank is None:
            raise PlanError(
                f"Cannot tell which of the {count} machines this is: give --node-rank, 0 on the first one, 1 on the "
                "next."
            )
        if not address:
            raise PlanError(
                f"Cannot find the other machines of {count}: give --master-addr, the address of node 0, the same on "
                "all."
            )
        return cls(count, rank, address, port)

    @property
    def place(self) -> str:
        """The address at which the machines meet, as "host:port"."""
        return shown_address((self.address, self.port))


class _NodeStart(msgspec.Struct, frozen=True):
    """The options with which the launcher of one machine was started."""

    nodes: int
    workers: int
    plan: str
    version: str
    host: str
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]

    @property
    def is_gone(self) -> bool:
        """Whether the launcher ran on this machine, and runs no more."""
        if self.host != socket.gethostname():
            return False
        with contextlib.suppress(PermissionError):  # another user's
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
        return False

    def difference(self, rank: int, first: _NodeStart) -> str:
        """The reason why this node cannot take part in the job of node 0; "" if it can."""
        if self.nodes != first.nodes:
            return (
                f"Cannot start the job: node {rank} was started with --nodes {self.nodes}, and node 0 with --nodes "
                f"{first.nodes}. Give the same number on every machine."
            )
        if self.version != first.version:
            return (
                f"Cannot start the job: node {rank} has offbeat {self.version}, and node 0 offbeat {first.version}. "
                "Install the same version on every machine."
            )
        if self.plan != first.plan:
            return (
                f"Cannot start the job: the plan differs between machines: node {rank} has {_shown(self.plan)}, and "
                f"node 0 {_shown(first.plan)}. Give every machine the same plan."
            )
        return ""


class NodeGroup:
    """The launchers of one job, seen from one of them.

    Call `meet` before any worker starts, then `watch`; `leave` when the workers of this machine have ended.

    Args:
        spec: this machine.
        say: called with what people should know.

    Attributes:
        first_rank: of the workers on this machine.
        world: number of workers on all machines.
    """

    def __init__(self, spec: NodeSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say = spec, say
        self.first_rank = self.world = 0
        self._store: Store
        self._server: Store | None = None
        self._thread: threading.Thread | None = None
        self._leaves = threading.Event()
        self._last_word = ""
        self._failure = ""
        self._heard: dict[int, tuple[int, float]] = {}  # of other nodes: how often they beat, and when we saw it grow
        self._all_others = frozenset(range(spec.count)) - {spec.rank}
        self._others = self._all_others  # whose launchers have not ended

    # -- before the workers start --------------------------------------------------------------------------------

    def meet(self, workers: int, plan: str, patience_s: float) -> None:
        """Wait for the launchers of all machines, and number the workers.

        Args:
            workers: on this machine.
            plan: as TOML; all need the same.
            patience_s: after so long it is said for whom this machine waits.

        Raises:
            PlanError: if the machines were not started alike.
            NetworkError: if this one cannot listen or connect, or node 0 is gone.
        """
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed import DistError

        spec = self._spec
        try:
            self._store = PrefixStore("offbeat-run", self._open(patience_s))
            mine = _NodeStart(spec.count, workers, plan, __version__, socket.gethostname(), os.getpid())
            key = f"node/{spec.rank}"
            own = msgspec.json.encode(mine).decode()
            there = _read(found := self._store.compare_set(key, "", own))
            if there.is_gone and not self._store.add(f"beat/{spec.rank}", 0):  # before it started any worker
                there = _read(self._store.compare_set(key, found.decode(), own))
            if there != mine:
                raise PlanError(
                    f"Cannot start as node {spec.rank}: process {there.pid} on {there.host} already has that number in "
                    f"the job at {spec.place}. Give each machine its own --node-rank, or wait until that job has ended."
                )
            try:
                self._number(self._wait_for_all(mine, patience_s))
            except BaseException:
                with contextlib.suppress(DistError):
                    self._store.delete_key(key)  # so that it can be started again
                raise
        except DistError as error:
            raise NetworkError(
                f"Cannot start node {spec.rank}: node 0 at {spec.place} ended before all machines were there. Start it "
                "again there, then here."
            ) from error

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the workers find each other: torchrun's."""
        return {
            "WORLD_SIZE": str(self.world),
            "MASTER_ADDR": self._spec.address,
            "MASTER_PORT": str(self._spec.port),
            "GROUP_RANK": str(self._spec.rank),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no worker keeps the store
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def told(self, workers: int) -> str:
        """Say which workers start on this machine."""
        last = self.first_rank + workers - 1
        ranks = {1: f"rank {last}", 2: f"ranks {self.first_rank} and {last}"}
        which = ranks.get(workers, f"ranks {self.first_rank} to {last}")
        return (
            f"Node {self._spec.rank} of {self._spec.count}: {which} of {self.world}, which meet at {self._spec.place}."
        )

    def _open(self, patience_s: float) -> Store:
        spec = self._spec
        if spec.rank == 0:
            from torch._C._distributed_c10d import TCPStore

            listener = _listen(spec)
            self._server = TCPStore(
                spec.address,
                spec.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                timeout=_ANSWER,
            )
        else:
            self._wait_for_first(patience_s)
        return _connect(spec)

    def _wait_for_first(self, patience_s: float) -> None:
        spec, speaks_s = self._spec, time.monotonic() + patience_s
        while True:
            try:
                socket.create_connection((spec.address, spec.port), timeout=_ANSWER.total_seconds()).close()
                return
            except (socket.gaierror, UnicodeError) as error:
                raise _unknown(spec, error) from error
            except OSError as error:
                if time.monotonic() > speaks_s:
                    self._say(f"Waiting for node 0 at {spec.place}: {error.strerror or error}.")
                    speaks_s = float("inf")
            time.sleep(_POLL_S)

    def _wait_for_all(self, mine: _NodeStart, patience_s: float) -> list[_NodeStart]:
        """Return the options of all machines, in their order."""
        count, speaks_s = self._spec.count, time.monotonic() + patience_s
        while True:
            if self._store.check(["node/0"]):
                self._refuse(mine.difference(self._spec.rank, _read(self._store.get("node/0"))))
            missing = [rank for rank in range(count) if not self._store.check([f"node/{rank}"])]
            if not missing:
                starts = [_read(self._store.get(f"node/{rank}")) for rank in range(count)]
                for rank, start in enumerate(starts):  # a machine that differs may not have said so yet
                    self._refuse(start.difference(rank, starts[0]))
                return starts
            if time.monotonic() > speaks_s:
                nodes = ", ".join(map(str, missing))
                self._say(f"Waiting for node {nodes} of {count} to start `offbeat run` with --node-rank {nodes}.")
                speaks_s = float("inf")
            time.sleep(_POLL_S)

    def _refuse(self, why: str) -> None:
        """End with a reason why the job cannot begin, of this machine or of another one.

        Raises:
            PlanError: if there is one.
        """
        if why:
            self._store.set("refused", why)
        elif self._store.check(["refused"]):
            why = self._store.get("refused").decode()
        if why:
            self._all_others = frozenset(rank for rank in self._all_others if self._store.check([f"node/{rank}"]))
            self.leave(why)
            raise PlanError(why)

    def _number(self, nodes: list[_NodeStart]) -> None:
        counts = [node.workers for node in nodes]
        self.first_rank, self.world = sum(counts[: self._spec.rank]), sum(counts)
        if self.world > MAX_WORLD:  # each machine says it to the others, which may not have come so far
            self._refuse(f"Cannot start {self.world} workers on all machines: a job has at most {MAX_WORLD}.")

    # -- while the workers run -----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Begin to tell the other launchers that this one lives, and to hear of them."""
        self._thread = threading.Thread(target=self._speak, name="offbeat-nodes", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """The reason why the job has ended on another machine, as a sentence; "" if it has not."""
        return self._failure

    @property
    def is_needed(self) -> bool:
        """Whether this launcher keeps the store of workers that still train on other machines."""
        return self._server is not None and bool(self._others)

    @property
    def waits_for(self) -> str:
        """The nodes whose launchers have not ended."""
        return ", ".join(map(str, sorted(self._others)))

    def leave(self, why: str) -> None:
        """Say that this launcher ends, and why, if the job ends with it; node 0 gives the others time to hear it."""
        self._last_word = why
        self._leaves.set()
        if self._thread is None:
            self.watch()
        assert self._thread is not None
        self._thread.join(_FAREWELL_S)

    def _speak(self) -> None:
        from torch.distributed import DistError

        rank, farewell_s = self._spec.rank, 0.0
        try:
            while self._others or not farewell_s:
                if self._leaves.is_set() and not farewell_s:
                    farewell_s = time.monotonic() + _FAREWELL_S
                    if self._last_word:
                        self._store.set("failed", f"node {rank}: {self._last_word}")
                    self._store.set(f"ended/{rank}", "")
                    if self._server is None or not self._last_word:
                        return
                if farewell_s and time.monotonic() > farewell_s:
                    return
                self._store.add(f"beat/{rank}", 1)
                self._hear()
                if farewell_s:
                    time.sleep(_POLL_S)
                else:
                    self._leaves.wait(_BEAT_S)
        except DistError:  # node 0 is gone; the workers that need the store say so themselves
            self._failure = self._failure or f"node 0: its `offbeat run` at {self._spec.place} is gone."

    def _hear(self) -> None:
        now_s = time.monotonic()
        for rank in self._all_others:
            beats = self._store.add(f"beat/{rank}", 0)
            if beats != self._heard.get(rank, (-1, 0.0))[0]:
                self._heard[rank] = (beats, now_s)
        silent = {rank for rank in self._all_others if now_s - self._heard[rank][1] > _SILENT_S}
        ended = {rank for rank in self._all_others if self._store.check([f"ended/{rank}"])}
        self._others = self._all_others - silent - ended
        if not self._failure and self._store.check(["failed"]):
            self._failure = self._store.get("failed").decode()
        never = min((rank for rank in silent if not self._heard[rank][0]), default=None)
        if not self._failure and never is not None:
            self._failure = f"node {never}: its `offbeat run` was lost before it started any worker."


def _read(data: bytes) -> _NodeStart:
    try:
        return msgspec.json.decode(data, type=_NodeStart)
    except msgspec.MsgspecError as error:
        raise NetworkError(f"Cannot read how another machine was started: {error}. Is that offbeat's store?") from error


def _shown(plan: str) -> str:
    from offbeat.plan import Plan

    try:
        return repr(Plan.from_toml(plan))
    except OffbeatError:
        return repr(plan)


def load_quietly() -> None:
    """Import torch so that a lost store leaves no page of C++ in the output, of this process or of its workers.

    It is an error that is handled. Call this before anything else imports torch, which reads the variable then.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    importlib.import_module("torch")


def _unknown(spec: NodeSpec, error: socket.gaierror | UnicodeError) -> NetworkError:
    why = error.strerror if isinstance(error, OSError) else "that cannot be the name of a machine"
    return NetworkError(
        f"Cannot find node 0 at {spec.address}: {why}. Give --master-addr an address that every machine knows."
    )


def _connect(spec: NodeSpec) -> Store:
    """Connect to the store of node 0, in a thread: torch waits without a limit for the first answer.

    Raises:
        NetworkError: if something else listens there.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    found: list[Store] = []

    def connect() -> None:
        with contextlib.suppress(DistError):
            found.append(TCPStore(spec.address, spec.port, is_master=False, wait_for_workers=False, timeout=_ANSWER))

    thread = threading.Thread(target=connect, name="offbeat-nodes-connect", daemon=True)
    thread.start()
    thread.join(_ANSWER.total_seconds())
    if not found:
        raise NetworkError(
            f"Cannot start node {spec.rank}: the process that listens at {spec.place} does not answer as the "
            "`offbeat run` of node 0 does. Start node 0 there, or choose another --master-port, on every machine."
        )
    return found[0]


def _listen(spec: NodeSpec) -> socket.socket:
    """Listen at the address of node 0 alone; at all, if its name is loopback's on that machine itself, as on Debian.

    Raises:
        NetworkError: if that cannot be.
    """
    try:
        entries = socket.getaddrinfo(spec.address, spec.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise _unknown(spec, error) from error
    family, kind, protocol, _, where = entries[0]
    host = str(where[0])
    is_own_name = is_loopback(host) and spec.address not in (host, "localhost")
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", spec.port) if is_own_name else where)
        listener.listen(MAX_WORLD)
    except OSError as error:
        listener.close()
        why = f"{error.strerror}. Choose another --master-port, on every machine."
        if not is_own_name and error.errno == errno.EADDRNOTAVAIL:
            why = f"{spec.address} is no address of this machine. Node 0 is the machine that --master-addr names."
        raise NetworkError(f"Cannot let the machines meet at {spec.place}: {why}") from error
    return listener
