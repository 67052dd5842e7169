"""Sums in the network: gradients go to a switch, which adds them up and sends each worker the sum.

Each worker sends its gradient once, and receives the sum once, where a ring of N workers moves 2 (N - 1) / N of it in
both directions. The switch adds integers (`offbeat.switch.fixed_point`), so that all workers have the same bits, and so
has every run; they are not those of a float addition.

Only what is large and float32 goes that way. All else stays with a companion, an elastic all-reduce among the workers:
trailers, whose counts must be exact, small sums, other types, questions, broadcasts, and what says that it has to be
exact (`Sum.exact`). The companion also finds out who is lost; the switch is told, and goes on without. A switch that is
lost itself may be started again (`switch_session`).

Where a sum is of the first k workers (`KSync`) nothing of a step may wait for all. Then trailers go through the switch,
in chunks of their own behind the values, so that both are of the same workers, and so do small sums with a trailer:

    chunks   values | trailer, whole numbers | trailer, fractions

Whole numbers and fractions are apart since the numbers of a chunk have one exponent: so whole numbers below 2^24 are
exact, and fractions to 2^(L - 31), with 2^L workers. What has no trailer is of all, and goes over the companion.
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat.errors import NetworkError, PlanError
from offbeat.fabric.elastic import Elastic
from offbeat.fabric.fabric import BindContext, Offers
from offbeat.fabric.in_memory import InMemory
from offbeat.fabric.staging import CudaCopies, StagedFabric
from offbeat.fabric.switch_session import OtherWorkers, SwitchSession
from offbeat.fabric.switch_table import SwitchTable
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.payload import Gather, Sum, Total
from offbeat.protocol.bounds import SECRET_BYTES
from offbeat.protocol.switch_control import SetSwitchStrategy, Strategy, SwitchReturn
from offbeat.switch.client_thread import ClientThread, client_thread_of, socket_to
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import MOST_SLOTS, RING, JobShape
from offbeat.switch.memory_switch import MemorySwitch
from offbeat.switch.strategy import compile_policy
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.table_client import TableClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from offbeat.errors import OffbeatError
    from offbeat.fabric.elastic_group import ElasticGroup
    from offbeat.fabric.fabric import Fabric
    from offbeat.payload import Payload, Reply
    from offbeat.pending import Pending
    from offbeat.switch.stream_exchange import StreamExchange
    from offbeat.sync import Policy

MEMORY = "memory://"
_OFFERS = Offers(exact=False, holds="switch", partial=True, elastic=True)
_POLL = timedelta(milliseconds=20)
_RTO_S = 0.01
_LEAST_SLOTS = 4  # of a job that sums no stream
_QUORUM_BYTES = 8 << 20  # of the sums that are kept for workers that come too late for them
_TEXT_BYTES = 16


@dataclass(frozen=True)
class Switch:
    """Sums in the network, by a switch that `offbeat switch serve` has started; of float32, on CPUs or GPUs.

    Args:
        address: "host:port" of the switch's control; "" for that of OFFBEAT_SWITCH; `memory://` for a worker that is
            alone, in tests and docs.
        values: int32 in a packet: 352 at most fit an Ethernet frame, 2048 a jumbo frame.
        window: packets that a worker has under way; more than a port's queue has room for are lost.
        slots: chunks of which the switch keeps sums and results; a power of two, at least twice the window.
        cap: the largest magnitude that an element of one worker's gradient has in a sum; the switch clamps what is
            larger. None for no bound.

    Raises:
        PlanError: if the address names no host and port, or a number does not fit.

    >>> Switch("10.0.0.254:7100")
    Switch(address='10.0.0.254:7100', values=256, window=64, slots=512, cap=None)
    """

    address: str = ""
    values: int = 256
    window: int = 64
    slots: int = 512
    cap: float | None = None

    def __post_init__(self) -> None:
        if self.address not in ("", MEMORY) and not _is_address(self.address):
            raise PlanError(
                f"Cannot reach a switch at {self.address!r}: name its control as host:port, as `offbeat switch serve` "
                "says it, with a port from 1 to 65535 - at `plan.fabric.address`."
            )
        for name in ("values", "window", "slots"):
            if (value := getattr(self, name)) not in WholeNumbers(1):
                raise PlanError(f"Cannot use {name}={value!r}: choose a whole number from 1 - at `plan.fabric.{name}`.")
        if self.cap is not None and self.cap not in RealNumbers(above=0):
            raise PlanError(
                f"Cannot clamp gradients to {self.cap!r}: choose a number above 0, or None - at `plan.fabric.cap`."
            )
        self.shape(0, 1)
        if 2 * self.window > self.slots:
            raise PlanError(
                f"Cannot have {self.window} packets under way over {self.slots} slots: choose at least twice as many "
                "slots - at `plan.fabric.slots`."
            )

    def shape(self, number: int, workers: int, slots: int | None = None) -> JobShape:
        """The shape of a stream's job; a worker sends its gradient divided by the number of workers."""
        most = 0.0 if self.cap is None else self.cap / workers
        return JobShape(number, workers, self.values, slots or self.slots, RING, most=most)

    @property
    def offers(self) -> Offers:
        return _OFFERS

    @property
    def slots_for_late(self) -> int:
        """The slots that a job asks for whose workers may come too late for a sum: by so many chunks can one be late.

        As many as 8 MiB hold, rounded down to a power of two, and no more than a switch takes; it may have fewer.
        """
        return max(self.slots, min(MOST_SLOTS, 1 << (_QUORUM_BYTES // (4 * self.values)).bit_length() - 1))

    @property
    def connecting(self) -> str:
        """The purpose of the wait while a worker is bound."""
        return f"the connection to the switch{f' at {self.address}' if self.address else ''} and to the others"

    @property
    def companion(self) -> Elastic:
        """The fabric of all that does not go to the switch."""
        return Elastic()

    def bind(self, context: BindContext) -> Fabric:
        """Make one worker's end, once all have joined the switch. Collective: every rank calls it.

        Raises:
            PlanError: if there are too many workers, nobody answers at the address, or the switch has no room.
            PeerError: if the switch refuses this worker.
        """
        if context.backend != "gloo":
            return StagedFabric(self.bind(replace(context, backend="gloo")), CudaCopies())
        if self.address == MEMORY:
            return BoundSwitch(InMemory().bind(context), SwitchStream.in_memory(MemorySwitch(), self, 0, 1))
        if context.rank >= context.world:
            raise PlanError(
                f"Cannot join a job that trains on {self!r}: a switch is told at the beginning how many workers there "
                "are. Start the job again with more, or use Elastic() - at `plan.fabric`."
            )
        companion: Fabric = InMemory().bind(context) if context.world == 1 else self.companion.bind(context)
        try:
            stream = self._join(companion, context)
        except BaseException:
            companion.abandon()
            raise
        return BoundSwitch(companion, stream, context.group)

    def _join(self, companion: Fabric, context: BindContext) -> SwitchStream:
        if not (address := self.address or context.switch):
            raise PlanError(
                f"Cannot run {self!r}: no switch is named. Start one with `offbeat switch serve`, and name it: "
                'Switch("host:port"), or OFFBEAT_SWITCH=host:port - at `plan.fabric.address`.'
            )
        deadline_s = time.monotonic() + context.timeout.total_seconds()
        job = _same_for_all(companion, secrets.token_hex(8), deadline_s)
        credentials = None if context.settings is None else context.settings.credentials()
        patience, secret = context.timeout, secrets.token_bytes(SECRET_BYTES)

        def dial(on_lost: Callable[[], None]) -> ControlClient:
            return ControlClient(
                address,
                rank=context.rank,
                credentials=credentials,
                secret=secret,
                timeout=patience,
                patience=patience,
                on_lost=on_lost,
            )

        try:
            session = SwitchSession(dial, OtherWorkers(context.rank, context.group), patience)
        except NetworkError as error:
            why = str(error).removesuffix(" Is the server running, and is this its address?")
            raise PlanError(
                f"{why} Start the switch with `offbeat switch serve`, or name another - at `plan.fabric.address`."
            ) from error
        strategy = _strategy_of(context.sync)
        try:
            slots = self.slots if strategy.quorum is None else self.slots_for_late
            wanted = self.shape(0, context.world, slots)
            shape, joined = session.control.join(job, wanted, strategy, least_slots=self.slots)
            client = StreamClient(shape, context.rank, joined.cookie, window=self.window, rto_s=_RTO_S, keeps=True)
            thread = client_thread_of(client, session.control, joined, patience)
        except BaseException:
            session.close()
            raise
        stream = SwitchStream(client, thread, session, job, strategy)
        try:
            _same_for_all(companion, "", deadline_s)  # from here on all are members
        except BaseException:
            stream.close()
            raise
        session.add(stream)
        return stream


class SwitchStream:
    """One worker's way to the switch.

    Args:
        client, thread: its end of the stream, and what keeps it going.
        session: at the switch; None within one process.
        job: its name there.
        strategy: whose parts a sum is made of.
    """

    def __init__(
        self,
        client: StreamClient,
        thread: ClientThread,
        session: SwitchSession | None = None,
        job: str = "",
        strategy: Strategy | None = None,
    ) -> None:
        self._client, self._thread = client, thread
        self.session, self.job = session, job
        self._strategy = strategy or Strategy()
        self._openings = itertools.count()  # of tables: each has a name of its own

    def open_table(self, number: int, size: int, strategy: Strategy, exponent: int) -> SwitchTable:
        """Join one model's table; see `HoldsTables`."""
        shape, window = self._client.shape, self._client.window
        if self.session is None:
            raise PlanError(
                "Cannot have workers go on at their own pace on memory://: it is for one that is alone. Use BSP(), or "
                "start a switch with `offbeat switch serve` - at `plan.sync`."
            )
        wanted = JobShape(0, shape.workers, shape.values, _LEAST_SLOTS, RING, -(-size // shape.values))
        client = TableClient(wanted, self._client.worker, 0, exponent=exponent, window=window, rto_s=_RTO_S)
        return SwitchTable(client, strategy, self.session, f"{self.job}-{number}-{next(self._openings)}")

    @classmethod
    def in_memory(
        cls, switch: MemorySwitch, spec: Switch, worker: int, workers: int, strategy: Strategy | None = None
    ) -> SwitchStream:
        """Join a switch within this process; rank 0 first, and all before the first sum."""
        shape = spec.shape(1, workers)
        with switch.lock:
            if not worker:
                switch.plane.create_job(shape, strategy or Strategy())
            switch.plane.admit(shape.number, worker, cookie=worker)
        client = StreamClient(shape, worker, worker, window=spec.window, rto_s=_RTO_S)
        return cls(client, ClientThread(client, switch.open_port(), 0), strategy=strategy)

    @property
    def has_quorum(self) -> bool:
        """Whether a sum may be of some workers."""
        return self._strategy.quorum is not None

    def takes(self, payload: Sum) -> bool:
        """Whether a sum is made by the switch, the same on all workers: not what is smaller than a packet, nor, where
        sums may be of some workers, what has no tail.
        """
        tensor = payload.tensor
        if tensor.dtype != torch.float32 or tensor.is_cuda or payload.exact:
            return False
        return payload.tail is not None if self.has_quorum else tensor.numel() >= self._client.shape.values

    def set_strategy(self, strategy: Strategy) -> None:
        """Have sums be made by another policy; see `SumsSome`."""
        if self.session is not None:  # each tells, since any may be lost before it has
            self.session.ask(lambda number: SetSwitchStrategy(number, self.job, strategy))
        self._strategy = strategy

    def begin(self, *parts: NDArray[np.float32]) -> StreamExchange:
        """Begin to sum vectors, which are of the same workers."""
        exchange = self._client.next_exchange(*parts)
        self._thread.do(lambda: self._client.enqueue(exchange))
        return exchange

    def wait(self, exchange: StreamExchange, timeout: timedelta) -> bool:
        """Wait until a sum is there; whether it is. Raises as `ClientThread.wait`."""
        exchange.is_taken = self._thread.wait(lambda: exchange.is_done, timeout)
        return exchange.is_taken

    @property
    def trouble(self) -> str:
        """The trouble that keeps sums from being made, in a sentence; "" if none is known."""
        return self._thread.trouble

    def evict(self, worker: int, tables: Iterable[str] = ()) -> None:
        """Have the switch go on without a worker that is lost, at these tables, too."""
        if self.session is not None:
            for job in (self.job, *tables):
                self.session.evict(job, worker, "the other workers have gone on without it")

    def close(self) -> None:
        """Leave the switch."""
        if self.session is not None:
            self.session.close()
        self._thread.close()

    # -- a job of its session ------------------------------------------------------------------------------------

    def pause(self) -> None:
        self._thread.pause()

    def join_again(self, control: ControlClient, others: OtherWorkers) -> None:
        client, members = self._client, others.members
        again = SwitchReturn(members=members, cookie=client.cookie, progress=client.progress)
        shape, joined = control.join(
            self.job,
            client.shape,
            self._strategy,
            again=again,
            while_waiting=lambda: others.evict_lost(control, self.job, members),
        )
        if (shape.number, joined.cookie) == (client.shape.number, client.cookie):
            self._thread.resume()
            return
        self._thread.do(lambda: client.begin_again(shape, joined.cookie, joined.progress))
        self._thread.go_on(*socket_to(control, joined))

    def fail(self, error: OffbeatError) -> None:
        self._thread.fail(error)


class BoundSwitch:
    """One worker's end of the fabric. A `Fabric`.

    Args:
        companion: of all that does not go to the switch.
        stream: to the switch.
        group: the workers, of whom the switch is told who is lost; None if there are no others.
    """

    def __init__(self, companion: Fabric, stream: SwitchStream, group: ElasticGroup | None = None) -> None:
        self._companion, self._stream, self._group = companion, stream, group
        self._members = () if group is None else group.members
        self._tables: list[SwitchTable] = []
        self.rank, self.world, self.offers = companion.rank, companion.world, _OFFERS

    def start(self, payload: Payload) -> Pending:
        if not isinstance(payload, Sum) or not self._stream.takes(payload):
            return self._companion.start(payload)
        if self._stream.has_quorum:
            return PartialPending(self, self._stream, payload)
        exchange = self._stream.begin(payload.tensor.numpy())
        # How many are in it is known from the companion, whose exchanges also show who is lost.
        tail = torch.ones(1) if payload.tail is None else payload.tail
        return SwitchPending(self, self._stream, exchange, payload, self._companion.start(Sum(tail)))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        return self._companion.broadcast(tensor, source)

    def open_table(self, number: int, size: int, strategy: Strategy, exponent: int) -> SwitchTable:
        """Join one model's table; see `HoldsTables`."""
        table = self._stream.open_table(number, size, strategy, exponent)
        table.while_held_up = self.evict_lost
        self._tables.append(table)
        return table

    def set_strategy(self, strategy: Strategy) -> None:
        """Have sums be made by another policy; see `SumsSome`."""
        self._stream.set_strategy(strategy)

    def evict_lost(self, *, meets_nobody: bool = False) -> None:
        """Tell the switch which workers the others have gone on without, or will where they meet; each does.

        Args:
            meets_nobody: whether this worker waits for the switch alone, so that it does not meet the others meanwhile.
        """
        if self._group is None:
            return
        gone = set(self._members) - set(self._group.members)
        self._tables = [table for table in self._tables if not table.has_left]
        if meets_nobody or self._stream.has_quorum or self._tables:  # they need not meet for long
            gone |= set(self._group.lost_members(self._members))
        for rank in gone:
            self._stream.evict(rank, (table.job for table in self._tables))
        self._members = tuple(rank for rank in self._members if rank not in gone)

    def close(self) -> None:
        self._leave()
        self._companion.close()

    def abandon(self) -> None:
        self._leave()
        self._companion.abandon()

    def _leave(self) -> None:
        for table in self._tables:
            table.leave()
        self._stream.close()


class SwitchPending:
    """One sum under way: its values at the switch, its trailer beside it. A `Pending`."""

    def __init__(
        self, fabric: BoundSwitch, stream: SwitchStream, exchange: StreamExchange, payload: Sum, trailer: Pending
    ) -> None:
        self._fabric, self._stream = fabric, stream
        self._exchange, self._payload, self._trailer = exchange, payload, trailer
        self.sent_bytes = payload.size_bytes
        self._has_trailer = False

    def wait(self, timeout: timedelta) -> bool:
        """Wait for both.

        Raises:
            NetworkError: if the switch is lost, or will not go on with this worker.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        self._has_trailer = self._has_trailer or self._trailer.wait(timeout)
        self._fabric.evict_lost(meets_nobody=self._has_trailer)
        left = timedelta(seconds=max(0.0, deadline_s - time.monotonic()))
        return self._has_trailer and self._stream.wait(self._exchange, left)

    def done(self) -> bool:
        return self._exchange.is_done and (self._has_trailer or self._trailer.done())

    @property
    def trouble(self) -> str:
        return self._stream.trouble

    def result(self) -> Reply:
        reply, tensor = self._trailer.result(), self._payload.tensor
        assert isinstance(reply, Total)
        self._exchange.is_taken = True
        tensor.copy_(torch.from_numpy(self._exchange.total).view_as(tensor))
        # Who was lost between the two is in one of them only; values count for as many as the trailer is of.
        count, here = self._exchange.count, round(reply.weight * self._fabric.world)
        if count and count != here:
            tensor *= here / count
        return Total(self._payload.tensor, reply.weight, None if self._payload.tail is None else reply.tensor)


class PartialPending:
    """One sum under way of the first workers that bring their parts, trailers and all. A `Pending`.

    Args:
        fabric, stream: that it goes by.
        payload: with a tail.
    """

    def __init__(self, fabric: BoundSwitch, stream: SwitchStream, payload: Sum) -> None:
        assert payload.tail is not None, "a sum without a tail is of all"
        self._fabric, self._stream, self._payload = fabric, stream, payload
        tail = payload.tail.numpy()
        whole = np.floor(tail)
        self._exchange = stream.begin(payload.tensor.numpy(), whole, tail - whole)
        self.sent_bytes = payload.size_bytes

    def wait(self, timeout: timedelta) -> bool:
        """Wait for it.

        Raises:
            NetworkError: if the switch is lost, or will not go on with this worker.
        """
        self._fabric.evict_lost()
        return self._stream.wait(self._exchange, timeout)

    def done(self) -> bool:
        return self._exchange.is_done

    @property
    def trouble(self) -> str:
        return self._stream.trouble

    def result(self) -> Reply:
        payload, who = self._payload, self._exchange.included_in(1)
        total, whole, rest = self._exchange.totals
        assert payload.tail is not None
        payload.tensor.copy_(torch.from_numpy(total).view_as(payload.tensor))
        payload.tail.copy_(torch.from_numpy(whole.astype(np.float64) + rest))
        weight = who.bit_count() / self._fabric.world
        return Total(payload.tensor, weight, payload.tail, bool(who >> self._fabric.rank & 1))


def _is_address(address: object) -> bool:
    """Whether this can be a "host:port"."""
    found = re.fullmatch(r"\S+:([0-9]{1,5})", address) if isinstance(address, str) else None
    return found is not None and 1 <= int(found[1]) <= 65535


def _strategy_of(sync: Policy | None) -> Strategy:
    """The strategy of the stream of a job that begins with a policy."""
    strategy = Strategy() if sync is None or sync.replicated else compile_policy(sync)
    return strategy if strategy.path == "stream" else Strategy()


def _same_for_all(companion: Fabric, text: str, deadline_s: float) -> str:
    """The first worker's text, on all workers. Collective.

    Raises:
        NetworkError: if not all are there in time.
    """
    mine = torch.tensor(list(text.encode().ljust(_TEXT_BYTES)), dtype=torch.uint8)
    pending = companion.start(Gather((mine,)))
    while not pending.wait(_POLL):
        if time.monotonic() > deadline_s:
            raise NetworkError("Cannot join the switch: not all workers have come to it in time.")
    reply = pending.result()
    assert not isinstance(reply, Total)
    return bytes(reply[0].tensors[0].tolist()).decode().strip()
