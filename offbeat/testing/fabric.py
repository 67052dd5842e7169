"""The promises of every fabric, checked."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.clock import to_timedelta
from offbeat.fabric import ReduceScatters
from offbeat.payload import Gather, Reply, Sum, Total

if TYPE_CHECKING:
    from offbeat.fabric import Fabric, Scattered
    from offbeat.pending import Pending

_SHORT = timedelta(milliseconds=20)
_LATE_S = 0.3


def check_fabric(fabric: Fabric, *, timeout: timedelta | float = 10) -> None:
    """Check that a bound fabric keeps what every fabric promises. Collective: every rank calls it on its own end.

    Args:
        fabric: this worker's end; closed afterwards.
        timeout: how long an exchange may take before the check gives up: seconds, or a timedelta.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    checker = _Checker(fabric, to_timedelta(timeout, "Cannot give up"))
    if Sum in fabric.offers.carries:
        checker.sums()
        checker.tails()
        checker.flights_do_not_mix()
        checker.late_worker()
    if Gather in fabric.offers.carries:
        checker.gathers()
    if fabric.offers.carries >= {Sum, Gather}:
        checker.same_bits()
        checker.kinds_do_not_mix()
    checker.broadcasts()
    if fabric.offers.reduce_scatter:
        checker.sums_in_two_rounds()
        checker.gathers_go_in_an_order_of_their_own()
    fabric.close()
    fabric.close()  # a second time does nothing


class _Checker:
    def __init__(self, fabric: Fabric, timeout: timedelta) -> None:
        self._fabric, self._timeout = fabric, timeout
        self._rank, self._world = fabric.rank, fabric.world
        assert 0 <= self._rank < self._world, f"rank {self._rank} of {self._world}"

    def sums(self) -> None:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            for size in (1, 7, 100_003):
                mine = (torch.arange(size) % 5 + self._rank).to(dtype)
                expected = (torch.arange(size) % 5 * self._world + sum(range(self._world))).to(dtype)
                total = self._total(self._fabric.start(Sum(mine)))
                assert total.tensor.dtype == dtype, f"a sum of {dtype} came back as {total.tensor.dtype}"
                assert torch.equal(total.tensor, expected), f"a sum of {size} {dtype} is wrong"
                assert total.weight == 1.0, f"all workers took part, but the weight is {total.weight}"
                assert total.tail is None, "a sum without a tail came back with one"

    def tails(self) -> None:
        memory = torch.ones(14)
        for tensor, tail in ((memory[:11], memory[11:]), (torch.ones(11), torch.ones(3))):
            total = self._total(self._fabric.start(Sum(tensor, tail)))
            assert total.tail is not None, "the tail was lost"
            assert torch.equal(total.tensor, torch.full((11,), float(self._world))), "a sum with a tail is wrong"
            assert torch.equal(total.tail, torch.full((3,), float(self._world))), "the tail's sum is wrong"
            tensor.fill_(1)
            tail.fill_(1)

    def flights_do_not_mix(self) -> None:
        """Eight in flight, of different sizes, waited for in another order than they were issued."""
        pendings = [self._fabric.start(Sum(torch.full((n + 1,), float(n + self._rank)))) for n in range(8)]
        shift = sum(range(self._world))
        order = range(8) if self._fabric.offers.ordered and self._rank % 2 else range(7, -1, -1)
        for n in order:
            total = self._total(pendings[n])
            assert total.tensor.tolist() == [float(n * self._world + shift)] * (n + 1), (
                f"exchange {n} got another's sum"
            )

    def late_worker(self) -> None:
        """`wait` gives up after its timeout, says so, and the exchange goes on."""
        late = self._world - 1
        if self._world == 1:
            return
        if self._rank == late:
            time.sleep(_LATE_S)
        pending = self._fabric.start(Sum(torch.ones(3)))
        if self._rank != late:
            began_s = time.monotonic()
            assert not pending.wait(_SHORT), "wait() returned True although a worker had not arrived"
            assert not pending.done(), "done() although a worker had not arrived"
            assert time.monotonic() - began_s < _LATE_S, "wait() took much longer than its timeout"
        assert self._total(pending).tensor.tolist() == [float(self._world)] * 3, "a late worker spoilt the sum"
        assert pending.done(), "waited for, but not done()"
        assert pending.sent_bytes > 0, "a sum of several workers that sent no bytes"

    def gathers(self) -> None:
        for empty in (False, True):
            rows = 0 if empty and self._rank == 0 else self._rank + 1
            ints, floats = torch.full((2, rows), self._rank), torch.full((rows, 3, 1), 0.5)
            kept = ints.clone()
            reply = self._wait(self._fabric.start(Gather((ints, floats))))
            assert isinstance(reply, list), f"the reply to a Gather is {type(reply).__name__}, not a list"
            assert [c.worker for c in reply] == list(range(self._world)), "contributions are not in rank order"
            for worker, contribution in enumerate(reply):
                there = 0 if empty and worker == 0 else worker + 1
                first, second = contribution.tensors
                assert first.shape == (2, there), f"a contribution changed its shape to {list(first.shape)}"
                assert second.shape == (there, 3, 1), f"a contribution changed its shape to {list(second.shape)}"
                assert first.dtype == ints.dtype, f"a contribution changed its dtype to {first.dtype}"
                assert bool((first == worker).all()), "a contribution changed on its way"
            assert torch.equal(ints, kept), "a Gather overwrote what was given to it"

    def same_bits(self) -> None:
        """Every worker ends with the same bits; with two workers, those of a float addition."""
        generators = [torch.Generator().manual_seed(rank) for rank in range(self._world)]
        parts = [torch.randn(10_007, generator=generator) for generator in generators]
        for exact in (False, True):
            total = self._total(self._fabric.start(Sum(parts[self._rank].clone(), exact=exact))).tensor
            reply = self._wait(self._fabric.start(Gather((total,))))
            assert isinstance(reply, list)
            assert all(torch.equal(c.tensors[0], total) for c in reply), "the workers' sums differ in their bits"
            if self._world == 2 and (exact or self._fabric.offers.exact):
                assert torch.equal(total, parts[0] + parts[1]), "the sum of two is not that of a float addition"

    def kinds_do_not_mix(self) -> None:
        gather = self._fabric.start(Gather((torch.tensor([self._rank]),)))
        sum_ = self._fabric.start(Sum(torch.ones(5)))
        both = self._wait(gather), self._total(sum_)
        assert isinstance(both[0], list)
        assert [int(c.tensors[0]) for c in both[0]] == list(range(self._world)), "a Gather before a Sum came back wrong"
        assert both[1].tensor.tolist() == [float(self._world)] * 5, "a Sum behind a Gather came back wrong"

    def sums_in_two_rounds(self) -> None:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            for size in (1, 7, 100_003):
                mine = (torch.arange(size) % 5 + self._rank).to(dtype)
                kept, tail = mine.clone(), torch.ones(3, dtype=dtype)
                scattered = self._scattered(Sum(mine, tail))
                assert torch.equal(mine, kept), "a reduce-scatter overwrote what was given to it"
                total = self._total(scattered.all_gather())
                expected = (torch.arange(size) % 5 * self._world + sum(range(self._world))).to(dtype)
                assert torch.equal(total.tensor, expected), f"a sum of {size} {dtype} in two rounds is wrong"
                assert total.tensor.data_ptr() == mine.data_ptr(), "a sum in two rounds is not where it was brought"
                assert total.tail is not None, "the tail of a sum in two rounds was lost"
                assert total.tail.tolist() == [float(self._world)] * 3, "the tail of a sum in two rounds is wrong"
        assert self._world == 1 or scattered.sent_bytes > 0, "a reduce-scatter of several workers that sent no bytes"

    def gathers_go_in_an_order_of_their_own(self) -> None:
        """Three are reduced, with other exchanges between them, and gathered in reverse; all have the same bits."""
        generators = [torch.Generator().manual_seed(rank) for rank in range(self._world)]
        parts = [[torch.randn(1009 * (n + 1), generator=one) for one in generators] for n in range(3)]
        memory = [torch.cat([brought[self._rank], torch.ones(2)]) for brought in parts]
        begun = [self._starter.reduce_scatter(Sum(whole[:-2], whole[-2:])) for whole in memory[:2]]
        between = self._fabric.start(Sum(torch.ones(3)))
        begun.append(self._starter.reduce_scatter(Sum(memory[2][:-2], memory[2][-2:])))
        for one in (begun[0], begun[1], between, begun[2]):
            self._wait(one)
        gathered = {n: begun[n].all_gather() for n in (2, 1, 0)}
        for n, pending in gathered.items():
            total = self._total(pending)
            assert total.tail is not None
            assert total.tail.tolist() == [float(self._world)] * 2, "the tail of a sum in two rounds is wrong"
            reply = self._wait(self._fabric.start(Gather((total.tensor.clone(),))))
            assert isinstance(reply, list)
            assert all(torch.equal(c.tensors[0], total.tensor) for c in reply), (
                "sums in two rounds differ in their bits"
            )
            if self._world == 2:
                assert torch.equal(total.tensor, parts[n][0] + parts[n][1]), "the sum of two is not a float addition's"

    @property
    def _starter(self) -> ReduceScatters:
        assert isinstance(self._fabric, ReduceScatters), "it offers sums in two rounds, and has no reduce_scatter()"
        return self._fabric

    def _scattered(self, payload: Sum) -> Scattered:
        scattered = self._starter.reduce_scatter(payload)
        self._wait(scattered)
        return scattered

    def broadcasts(self) -> None:
        for source in range(self._world):
            tensor = torch.full((9,), float(self._rank))
            total = self._total(self._fabric.broadcast(tensor, source))
            assert tensor.tolist() == [float(source)] * 9, f"a broadcast from {source} did not overwrite the tensor"
            assert torch.equal(total.tensor, tensor), "the reply to a broadcast is not what was sent"
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.complex64):
            tensor = torch.full((3,), self._rank == 0).to(dtype)
            self._wait(self._fabric.broadcast(tensor, 0))
            assert bool(tensor.all()), f"a broadcast of {dtype} did not overwrite the tensor"

    def _total(self, pending: Pending) -> Total:
        reply = self._wait(pending)
        assert isinstance(reply, Total), f"the reply to a Sum is {type(reply).__name__}, not a Total"
        assert reply.weight == 1.0 or self._fabric.offers.partial, "a sum left workers out, and is not partial"
        return reply

    def _wait(self, pending: Pending) -> Reply:
        assert pending.wait(self._timeout), f"an exchange was not done after {self._timeout.total_seconds()} s"
        return pending.result()
