"""A cluster with a life of its own, that lives on leases: random histories, and books kept beside the pool's."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from offbeat.batching import EndOfEpoch, Lease, Leases, NoDataYet
from offbeat.batching.lease_state import audit

if TYPE_CHECKING:
    from collections.abc import Callable

TERM_S = 50.0


@dataclass
class Worker:
    """Args: in_hand: leases it holds; told: epochs that it was told are over; first: the epoch it began in."""

    first: int
    in_hand: list[Lease] = field(default_factory=list)
    told: list[int] = field(default_factory=list)


class History:
    """Plays one random history; the same seed plays the same, with or without interruptions.

    Args:
        interrupted: save and load the pool between events, as a checkpoint does.
    """

    def __init__(self, seed: int, *, interrupted: bool = False) -> None:
        luck = self.luck = random.Random(seed)
        self.breaks = random.Random(seed) if interrupted else None
        samples = luck.choice([1, 2, 7, 12, 23, 40])
        self.epochs = luck.choice([1, 2, 3])
        self.leases = Leases(
            samples,
            seed=seed,
            drop_last=luck.random() < 0.25,
            epochs=self.epochs,
            term=timedelta(seconds=TERM_S),
        )
        self.pool = self.leases.init()
        self.now_s = 0.0
        self.workers: dict[int, Worker] = {}
        self.server: list[tuple[int, list[Lease]]] = []  # contributions that arrived and are not applied
        self.late: list[tuple[int, list[Lease]]] = []  # contributions on the way, of workers that may be gone by then
        self.used: Counter[tuple[int, int]] = Counter()
        self.happened: Counter[str] = Counter()
        self.log: list[object] = []

    def play(self, events: int) -> None:
        """Random events, and then what it takes to end all epochs."""
        for worker in range(self.luck.randint(1, 4)):
            self.join(worker)
        rare = [self.lose, self.come, self.hang, self.give_back, self.arrive_late]
        deeds: list[Callable[[], object]] = [*[self.take] * 8, *[self.contribute] * 6, *[self.apply] * 6, *rare]
        for _ in range(events):
            self.now_s += self.luck.expovariate(1.0)
            self.luck.choice(deeds)()
            self.after()
        self.finish()

    def after(self) -> None:
        """What holds at any time."""
        wrong = audit(self.pool, samples=self.leases.samples)
        assert wrong is None, wrong
        if self.breaks is not None and self.breaks.random() < 0.3:
            saved = json.dumps(self.leases.to_plain(self.pool))
            loaded = self.leases.from_plain(json.loads(saved))
            assert loaded == self.pool
            self.pool = loaded

    def unfinished(self, but: int = -1) -> list[int]:
        last = self.epochs - 1
        return [w for w, one in self.workers.items() if w != but and (not one.told or one.told[-1] < last)]

    def join(self, worker: int) -> None:
        self.pool = self.leases.join(self.pool, worker)
        self.workers[worker] = Worker(first=self.pool.at[worker])

    def come(self) -> None:
        """A new worker, or one that is back, or one that begins anew before it was missed."""
        worker = self.luck.randrange(6)
        if worker in self.workers and not self.may_go(worker):
            return
        self.happened["back" if worker in self.workers else "come"] += 1
        self.join(worker)

    def take(self, worker: int | None = None) -> Lease | EndOfEpoch | NoDataYet | None:
        asking = self.unfinished() if worker is None else [worker]
        if not asking:
            return None
        worker = self.luck.choice(asking)
        one = self.workers[worker]
        count = self.luck.randint(1, 6)
        if self.leases.drop_last:
            count = min(count, self.leases.samples)
        before = self.pool
        self.pool, answer = self.leases.take(self.pool, worker, count, self.now_s)
        if before.number % 8 == 0:
            assert self.leases.take(before, worker, count, self.now_s) == (self.pool, answer), "it is pure"
        self.log.append((worker, answer))
        self.happened[type(answer).__name__] += 1
        if isinstance(answer, Lease):
            assert 1 <= answer.count <= count
            assert answer.count == count or not self.leases.drop_last
            assert all(piece.epoch <= answer.epoch == one.first + len(one.told) for piece in answer.pieces)
            self.happened["second hand"] += any(piece.epoch < answer.epoch for piece in answer.pieces)
            one.in_hand.append(answer)
        elif isinstance(answer, EndOfEpoch):
            one.told.append(answer.epoch)
            assert one.told == list(range(one.first, one.first + len(one.told))), "each end once, in order"
        else:
            assert one.first + len(one.told) == self.epochs - 1, "only in the last epoch"
            assert worker not in answer.workers
            assert all(self.pool.leased_to(other) for other in answer.workers)
            assert self.now_s < answer.until_s <= self.now_s + TERM_S
        return answer

    def contribute(self, worker: int | None = None) -> None:
        """From one lease, or from several that were accumulated; it may be late, and its worker gone by then."""
        holding = [w for w, one in self.workers.items() if one.in_hand] if worker is None else [worker]
        if not holding:
            return
        worker = self.luck.choice(holding)
        one = self.workers[worker]
        some = self.luck.randint(1, len(one.in_hand))
        leases, one.in_hand = one.in_hand[:some], one.in_hand[some:]
        if self.luck.random() < 0.1:
            self.late.append((worker, leases))
        else:
            self.arrive(worker, leases)

    def arrive(self, worker: int, leases: list[Lease]) -> None:
        self.pool, valid = self.leases.deliver(self.pool, worker, [lease.number for lease in leases])
        self.log.append(("delivered", worker, valid))
        self.happened["valid" if valid else "void"] += 1
        if valid:
            self.server.append((worker, leases))

    def arrive_late(self) -> None:
        if self.late:
            self.arrive(*self.late.pop(0))

    def apply(self) -> None:
        """In any order, whoever is gone; a repeated word about it changes nothing."""
        if not self.server:
            return
        _, leases = self.server.pop(self.luck.randrange(len(self.server)))
        numbers = [lease.number for lease in leases]
        self.pool, right = self.leases.acknowledge(self.pool, numbers, dropped=self.luck.random() < 0.1)
        assert right
        assert self.leases.acknowledge(self.pool, numbers) == (self.pool, False)
        for lease in leases:
            for epoch, start, stop in lease.pieces:
                self.used.update((epoch, position) for position in range(start, stop))

    def may_go(self, worker: int) -> bool:
        return bool(self.unfinished(but=worker))

    def lose(self) -> None:
        gone = [worker for worker in self.workers if self.may_go(worker)]
        if not gone:
            return
        worker = self.luck.choice(gone)
        self.happened["lost with leases"] += bool(self.workers.pop(worker).in_hand)
        self.pool = self.leases.lose(self.pool, worker)
        assert worker not in self.pool.at
        assert not self.pool.leased_to(worker)

    def hang(self) -> None:
        self.now_s += TERM_S * self.luck.random() * 1.5

    def give_back(self) -> None:
        holding = [w for w, one in self.workers.items() if one.in_hand and w in self.unfinished()]
        if holding:
            worker = self.luck.choice(holding)
            lease = self.workers[worker].in_hand.pop()
            self.pool = self.leases.give_back(self.pool, worker, [lease.number])

    def finish(self) -> None:
        """Everybody who is left goes on to the end; who is told to wait does so, and asks again when it may."""
        rounds = 0
        while unfinished := self.unfinished():
            rounds += 1
            assert rounds < 2000, "somebody waits for ever"
            for worker in unfinished:
                answer = self.take(worker)
                if isinstance(answer, NoDataYet):
                    while self.workers[worker].in_hand:
                        self.contribute(worker)
                    # Those that finished with leases in hand have stopped: only time takes these back.
                    self.now_s = max(self.now_s, answer.until_s) if self.luck.random() < 0.5 else self.now_s
                elif isinstance(answer, Lease) and self.luck.random() < 0.9:
                    self.contribute(worker)
                self.after()
            self.now_s += 1.0
        for worker, one in self.workers.items():
            while one.in_hand:
                self.contribute(worker)
        while self.late:
            self.arrive_late()
        while self.server:
            self.apply()
        self.after()
