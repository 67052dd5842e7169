"""Carriers between the workers of a fit: what one has computed, another one needs, or all of them need the sum.

`ObjectCarrier` stands on stores of objects that are embedded in the workers, each with the directory of a part of the
names, so each worker notices at once that another one is lost. `LocalCarrier` is for workers that are threads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch

from offbeat.errors import NetworkError, OffbeatError
from offbeat.fabric.introduction import introduce
from offbeat.objects.adding import TorchArithmetic
from offbeat.objects.client import ObjectClient, job_name
from offbeat.objects.directory_server import DirectoryServer
from offbeat.objects.embedded_store import EmbeddedStore
from offbeat.objects.node_store import NodeStore
from offbeat.objects.object_future import ObjectFuture
from offbeat.objects.serve import LINK
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.session import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.wire.credentials import Credentials

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
_LIMITS = Limits(timeout=timedelta(seconds=10), max_body_bytes=1 << 20)  # a fit holds the GIL for seconds
_MOST_BYTES = 1 << 62  # of what is under way; the workers see to its size
_PATIENCE = timedelta(seconds=60)
_LOOK = timedelta(milliseconds=20)
_PARTING_S = 10.0


class Carrier(Protocol):
    """The Protocol of a worker's way to the others: names stand for tensors, each given once by one of them."""

    @property
    def rank(self) -> int:
        """Return the place of this worker."""

    @property
    def world(self) -> int:
        """Return how many workers there are."""

    def publish(self, name: str, values: Tensors) -> None:
        """Give the others tensors, which are copied."""

    def move(self, name: str) -> ObjectFuture[Tensors]:
        """Begin to fetch what one has published; it ends with an error once a worker is lost."""

    def reduce(self, name: str, part: torch.Tensor, ranks: Sequence[int], op: Literal["sum", "max"]) -> SumUnderWay:
        """Give one's part of a sum, and begin to fetch that.

        Args:
            ranks: of those who have a part, in the order in which parts are added; all of them call this.
        """

    def drop(self, name: str) -> None:
        """Let go of what was published here."""


@dataclass
class SumUnderWay:
    """A sum of the workers' parts, under way.

    Args:
        future: of the sum.
        own: the names that this worker lets go of once all have it.
    """

    future: ObjectFuture[torch.Tensor]
    own: list[str] = field(default_factory=list)


class MeetingPlace(Protocol):
    """The Protocol of where workers have met."""

    def tell_all(self, text: str) -> list[str]:
        """Tell the others a text, and return what all say, by rank. Collective."""

    def note_failure(self, text: str) -> None:
        """Leave a note why one's fit has failed, unless there is one."""

    def failure(self) -> str:
        """Return the note; "" if there is none."""


class ObjectCarrier:
    """A carrier over stores in the workers. A `Carrier`. Made by all workers at once.

    Args:
        rank, world: of this worker.
        meeting: where the workers have met.

    Raises:
        NetworkError: if a worker cannot be reached.
    """

    def __init__(self, rank: int, world: int, meeting: MeetingPlace) -> None:
        self.rank, self.world, self._meeting = rank, world, meeting
        self._directory, self._loop = DirectoryServer(LINK, waits_for_stopped=True), LoopThread("offbeat-groups")
        self._under_way: set[ObjectFuture[Any]] = set()
        self._error: NetworkError | None = None
        self._left: set[int] = set()
        job, made = job_name("groups"), list[NodeStore]()
        bound_at = ""

        def listen(bind: str, credentials: Credentials) -> str:
            nonlocal bound_at
            bound_at = bind
            made.append(
                NodeStore(
                    job=job,
                    credentials=credentials,
                    most_bytes=_MOST_BYTES,
                    arithmetic=TorchArithmetic,
                    limits=_LIMITS,
                    waits_for_stopped=True,
                )
            )
            return self._loop.run(self._directory.open(bind, 0, job=job, credentials=credentials, limits=_LIMITS))

        try:
            self._directories = [one.address for one in introduce(meeting.tell_all, None, listen)]
            made[0].on_directory_lost = self._lost
            self._client = ObjectClient(EmbeddedStore(made[0], bound_at, self._directories, _PATIENCE))
            meeting.tell_all("connected")
        except BaseException:
            self._end()
            raise

    def publish(self, name: str, values: Tensors) -> None:
        self._check()
        self._put(name, values)

    def move(self, name: str) -> ObjectFuture[Tensors]:
        self._check()
        return self._watched(self._client.start_get_tensors(name))

    def reduce(self, name: str, part: torch.Tensor, ranks: Sequence[int], op: Literal["sum", "max"]) -> SumUnderWay:
        self._check()
        names = [f"{name}/{rank}" for rank in ranks]
        own = [f"{name}/{self.rank}"]
        self._put(own[0], part)
        if self.rank == ranks[0]:
            self._client.reduce(name, names, op=op, deterministic=True)
            own.append(name)
        return SumUnderWay(self._watched(self._client.start_get(name)), own)

    def drop(self, name: str) -> None:
        self._client.delete(name)

    def close(self) -> None:
        """Leave once the others have what they need from here."""
        self.publish(f"end/{self.rank}", {"": torch.zeros(1)})
        ends = {rank: self._client.start_get_tensors(f"end/{rank}") for rank in range(self.world)}
        looks = int(_PARTING_S / _LOOK.total_seconds())
        for rank, end in ends.items():
            while looks and not end.wait(_LOOK) and rank not in self._left:
                looks -= 1
        self._end()

    def abandon(self, error: BaseException) -> None:
        """Leave at once: the others fail, and say why this worker has."""
        self._meeting.note_failure(str(error) if self._error is not None else f"worker {self.rank} failed: {error}")
        self._end()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _put(self, name: str, values: Tensors | torch.Tensor) -> None:
        """Begin to put; nobody would get it if that failed, so all that follows fails, too."""
        future = self._watched(self._client.start_put(name, values))

        def over() -> None:
            if future.error is not None and self._error is None:
                self._fail(NetworkError(str(future.error)))

        future.add_done_callback(over)

    def _fail(self, error: NetworkError) -> None:
        self._error = error
        for future in list(self._under_way):
            future.end(error)

    def _watched(self, future: ObjectFuture[T]) -> ObjectFuture[T]:
        self._under_way.add(future)
        future.add_done_callback(lambda: self._under_way.discard(future))
        if self._error is not None:
            future.end(self._error)
        return future

    def _lost(self, address: str, error: OffbeatError | None) -> None:
        rank = self._directories.index(address)
        self._left.add(rank)
        why = f"Cannot fit without worker {rank}: {'it has left' if error is None else error}"
        self._fail(NetworkError((self._meeting.failure() if error is None else "") or why))

    def _end(self) -> None:
        if (client := getattr(self, "_client", None)) is not None:
            client.close()
        self._loop.run(self._directory.close())
        self._loop.close()


class LocalBoard:
    """The names that workers of one process have given tensors."""

    def __init__(self) -> None:
        self._values: dict[str, Tensors] = {}
        self._wanted: dict[str, list[ObjectFuture[Tensors]]] = {}
        self._lock = threading.Lock()

    def put(self, name: str, values: Tensors) -> None:
        """Give a name its tensors, which are copied, and tell those who wait."""
        copied = _copied(values)
        with self._lock:
            self._values[name] = copied
            wanted = self._wanted.pop(name, [])
        for future in wanted:
            future.finish(_copied(copied))

    def want(self, name: str) -> ObjectFuture[Tensors]:
        """Wait for a name."""
        future: ObjectFuture[Tensors] = ObjectFuture(f"get {name!r}")
        with self._lock:
            found = self._values.get(name)
            if found is None:
                self._wanted.setdefault(name, []).append(future)
        if found is not None:
            future.finish(_copied(found))
        return future

    def drop(self, name: str) -> None:
        """Forget a name."""
        with self._lock:
            self._values.pop(name, None)


@dataclass(frozen=True)
class LocalCarrier:
    """A carrier between threads of one process. A `Carrier`.

    Args:
        board: which all of them share.
    """

    rank: int
    world: int
    board: LocalBoard

    def publish(self, name: str, values: Tensors) -> None:
        self.board.put(name, values)

    def move(self, name: str) -> ObjectFuture[Tensors]:
        return self.board.want(name)

    def reduce(self, name: str, part: torch.Tensor, ranks: Sequence[int], op: Literal["sum", "max"]) -> SumUnderWay:
        self.board.put(f"{name}/{self.rank}", {"": part})
        total: ObjectFuture[torch.Tensor] = ObjectFuture(f"get {name!r}")
        parts = [self.board.want(f"{name}/{rank}") for rank in ranks]
        left, lock = len(parts), threading.Lock()

        def one_more() -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            values = [one.outcome()[""] for one in parts]
            made = values[0].clone()
            for value in values[1:]:
                made = made + value if op == "sum" else torch.maximum(made, value)
            total.finish(made)

        for one in parts:
            one.add_done_callback(one_more)
        return SumUnderWay(total, [f"{name}/{self.rank}"])

    def drop(self, name: str) -> None:
        self.board.drop(name)


def _copied(values: Tensors) -> Tensors:
    return {key: value.clone() for key, value in values.items()}
