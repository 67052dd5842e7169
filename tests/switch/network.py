"""A made-up network between workers and a switch: packets are lost, duplicated and overtake each other, by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.protocol.switch_control import Strategy
from offbeat.switch.fixed_point import error_bound
from offbeat.switch.job_shape import JobShape
from offbeat.switch.job_state import JobState, Send
from offbeat.switch.packet import decode, encode
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.vector_stream import VectorStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.switch.stream_exchange import StreamExchange

VALUES = 16
_MOST_TURNS = 30_000
_TICK_S = 0.004
_OVERTAKES = 6  # packets that one may overtake


@dataclass
class Network:
    """What is under way, and what becomes of it.

    Args:
        chance: decides.
        loss, doubled: parts of the packets that are lost, and that come twice.
    """

    chance: random.Random
    loss: float = 0.0
    doubled: float = 0.0
    under_way: list[tuple[str, int, bytes]] = field(default_factory=list)
    lost: int = 0

    def put(self, to: str, worker: int, data: bytes) -> None:
        """Send a packet to the "switch" from a worker, or to a "worker"."""
        if self.chance.random() < self.loss:
            self.lost += 1
            return
        self.under_way += [(to, worker, data)] * (1 + (self.chance.random() < self.doubled))

    def take(self) -> tuple[str, int, bytes]:
        """The packet that arrives next."""
        return self.under_way.pop(self.chance.randrange(min(len(self.under_way), _OVERTAKES)))


class StreamPlay:
    """One job of a few workers that sum a few vectors, with all that can happen to it; see `run`.

    Args:
        seed: decides everything.
        model: makes the reference model; one that notes what happens to it, for other planes.
    """

    caps: tuple[float, ...] = (np.inf, np.inf, 2.0**22, 3e6)  # above the whole numbers

    def __init__(self, seed: int, model: type[JobState] = JobState) -> None:
        self.seed = seed
        self._chance = chance = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.workers = chance.randint(1, 4)
        self.quorum = chance.choice([None, None, max(1, self.workers - 1), chance.randint(1, self.workers)])
        self._hurries = [chance.choice([0.2, 0.2, 0.02]) for _ in range(self.workers)]  # who is late skips nothing
        self._waits = self.quorum is not None and chance.random() < 0.5  # for the others, until a sum is closed
        self._crash = chance.choice([None, None, chance.randint(5, 60)]) if self.workers > 1 else None
        start = chance.choice([0, (1 << 32) - 5])  # the numbers of chunks wrap around
        self.cap = chance.choice(self.caps)
        most = 0.0 if self.cap == np.inf else self.cap
        shape = JobShape(7, self.workers, values=VALUES, slots=chance.choice([4, 8, 16]), most=most)
        strategy = Strategy(quorum=self.quorum, wait_s=1.0 if self._waits else 0.0)
        self.state, self._vector = model(shape, strategy), JobState(shape, strategy, stream=VectorStream)
        self._network = Network(chance, chance.choice([0, 0.05, 0.3]), chance.choice([0, 0.1]))
        self.clients = []
        for worker in range(self.workers):
            for state in (self.state, self._vector):
                state.admit(worker, 100 + worker, chunk=start)
                state.members[worker].port = worker
            self.clients.append(StreamClient(shape, worker, 100 + worker, window=4, chunk=start))
        sizes = [chance.randint(1, chance.choice([5, 5, 5, 40]) * VALUES) for _ in range(chance.randint(1, 4))]
        self.vectors = [
            [
                numbers.normal(size=size).astype(np.float32) * np.float32((most or 1) * 10.0 ** chance.randint(-3, 3))
                for size in sizes
            ]
            for _ in range(self.workers)
        ]
        # Behind each vector a few whole numbers of its workers, which have to come out exact.
        self.tails = [[numbers.integers(0, 1 << 20, size=2).astype(np.float32) for _ in sizes] for _ in self.vectors]
        self.closed = 0
        self.exchanges: list[list[StreamExchange]] = [[] for _ in range(self.workers)]
        self.alive = set(range(self.workers))
        self._recorded: list[bytes] = []
        self._answers: list[tuple[Any, bytes]] = []
        self._now_s = 0.0

    # -- playing -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Play until all that are alive have all sums, and check them, and `VectorStream` against the model."""
        restless, chance = set(self.alive), self._chance
        for turn in range(_MOST_TURNS):
            restless |= self._begin_some()
            for worker in sorted(restless & self.alive):
                for data in self.clients[worker].packets(self._now_s).datagrams():
                    self._network.put("switch", worker, data)
            if turn == self._crash:
                self._lose(self.workers - 1)
            if self._waits and chance.random() < 0.1:
                self._close_one()
            self._strike(turn)
            if all(self._is_through(worker) for worker in self.alive):
                break
            restless = self._next()
        else:
            raise AssertionError(f"seed {self.seed}: no end; refused {dict(self.state.members.refused)}")
        self._compare_planes()
        self._check_sums()

    def _strike(self, turn: int) -> None:
        """Do what else happens in this turn: nothing."""

    def _begin_some(self) -> set[int]:
        begun = set()
        for worker in sorted(self.alive):
            mine = self.exchanges[worker]
            if len(mine) < len(self.vectors[worker]) and self._chance.random() < self._hurries[worker]:
                number, client = len(mine), self.clients[worker]
                mine.append(client.next_exchange(self.vectors[worker][number], self.tails[worker][number]))
                client.enqueue(mine[-1])
                begun.add(worker)
        return begun

    def _is_through(self, worker: int) -> bool:
        mine = self.exchanges[worker]
        return len(mine) == len(self.vectors[worker]) and all(one.is_done for one in mine)

    def _next(self) -> set[int]:
        """Let one packet arrive, or time pass; returns which workers may have something to send."""
        if not self._network.under_way or self._chance.random() < 0.1:
            self._now_s += _TICK_S
            return set(self.alive)
        to, worker, data = self._network.take()
        if to == "worker":
            self.clients[worker].receive(PacketBatch.of([data], VALUES), self._now_s)
            return {worker}
        sends = self.state.handle(decode(data), worker, self._now_s)
        if worker in self.alive:
            self._recorded.append(data)
            self._answers += _as_data(sends)
            if self._chance.random() < 0.15:
                self._compare_planes()
        self._send(sends)
        return set()

    def _send(self, sends: Sequence[Send]) -> None:
        for port, packet in sends:
            assert isinstance(port, int)
            if port in self.alive:
                self._network.put("worker", port, encode(packet))

    def _lose(self, worker: int) -> None:
        self._compare_planes()
        self.alive.discard(worker)
        sends = self.state.evict(worker)
        assert _as_data(sends) == _as_data(self._vector.evict(worker)), f"seed {self.seed}: evictions differ"
        self._send(sends)

    def _close_one(self) -> None:
        """Have a sum wait no longer for those who are not in it."""
        self._compare_planes()
        assert self.quorum is not None
        unsettled = self.state.stream.unsettled(self.quorum)
        assert unsettled == self._vector.stream.unsettled(self.quorum), f"seed {self.seed}: other exchanges are open"
        clock = self._chance.choice([*unsettled, 99])
        sends = self.state.close(clock, self.quorum)
        assert _as_data(sends) == _as_data(self._vector.close(clock, self.quorum)), f"seed {self.seed}: closings differ"
        assert clock not in self.state.stream.unsettled(self.quorum), f"seed {self.seed}: {clock} is still open"
        self.closed += clock in unsettled
        self._send(sends)

    # -- checking ------------------------------------------------------------------------------------------------

    def _compare_planes(self) -> None:
        """Replay what has come since to the vectorised switch as one batch: it has to answer the same."""
        if not self._recorded:
            return
        stream = self._vector.stream
        assert isinstance(stream, VectorStream)
        batch = PacketBatch.of([decode(data) for data in self._recorded], VALUES)
        to, answers = stream.handle(batch)
        got = [
            (one, data)
            for worker, data in zip(to.tolist(), answers.datagrams(), strict=True)
            for one in (self._vector.members if worker == 255 else (worker,))
        ]
        assert got == self._answers, f"seed {self.seed}: the planes differ"
        for worker in self.state.members:
            brought = self.state.members[worker].brought
            assert self._vector.members[worker].brought == brought, f"seed {self.seed}: they count differently"
        self._recorded, self._answers = [], []

    def _check_sums(self) -> None:
        for index in range(len(self.vectors[0])):
            mine = [self.exchanges[worker][index] for worker in sorted(self.alive)]
            mine.sort(key=lambda one: one.supplier is not None)  # whose values are in it says who has summed it
            inside = mine[0].included_in(1)
            tail = sum((self.tails[w][index] for w in range(self.workers) if inside >> w & 1), np.zeros(2, np.float32))
            assert mine[0].totals[1].tolist() == tail.tolist(), f"seed {self.seed}: whole numbers are not exact"
            totals = {one.total.tobytes() + one.totals[1].tobytes() for one in mine}
            assert len(totals) == 1, f"seed {self.seed}: workers have different bits"
            assert len({one.count for one in mine} - {0}) <= 1, f"seed {self.seed}: sums stand for different numbers"
            who = mine[0].contributors
            least = self.workers if self.quorum is None else min(self.quorum, self.workers)
            if len(self.alive) == self.workers:
                assert who.bit_count() >= least, f"seed {self.seed}: {who:b} are too few"
            if mine[0].supplier is None:
                self._check_chunks(mine[0], index)

    def _check_chunks(self, exchange: StreamExchange, index: int) -> None:
        vectors = [np.clip(vector[index].astype(np.float64), -self.cap, self.cap) for vector in self.vectors]
        for chunk, exponent in enumerate(exchange.agreed.tolist()[:-1]):  # the last one has the whole numbers
            part = slice(chunk * VALUES, (chunk + 1) * VALUES)
            inside = [vectors[w][part] for w in range(self.workers) if int(exchange.included[chunk]) >> w & 1]
            scale = exchange.included_in(1).bit_count() / max(1, len(inside))
            expected = np.sum(inside, axis=0) * scale if inside else np.zeros_like(vectors[0][part])
            error = np.abs(exchange.total[part] - expected).max()
            bound = error_bound(exponent, self.workers) * self.workers + np.abs(expected).max() * 2**-22
            assert error <= bound, f"seed {self.seed}: chunk {chunk} is off by {error:g}, at most {bound:g} is right"


def _as_data(sends: Sequence[Send]) -> list[tuple[Any, bytes]]:
    return [(port, encode(packet)) for port, packet in sends]
