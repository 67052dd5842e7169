"""A worker's side of streaming all-reduce: which packets to send now, and what the switch's answers mean. No I/O.

One stream of chunks per job, numbered from 0 and never anew. An exchange of M chunks of V values takes P + M numbers,
P = ceil(M / V):

    number   first ... first + P - 1          first + P ... first + P + M - 1
    carries  the exponents of V chunks each   a chunk each, as integers by the exponent that all use
    result   the largest of each              their sums

So a chunk is due when the result is here that has its exponent. Exponents go ahead of the values of the exchange
before, and take no room, so that nothing but the first exchange waits for them. Results clock what is sent: no more
than `window` packets with values are under way. What is not answered in time, or has been overtaken by three results,
is taken for lost, and sent again; what in time is says a `ResendTimer`. Whenever one comes too late fewer packets are
under way until results come again: a switch that has too much to do is not given more.

Call order: `begin` for each exchange, in the same order on all workers; `packets` and `receive` until the exchange
`is_done`; both may be called at any time.

A switch that was started again knows nothing of them. `begin_again` then does what `offbeat.fabric.elastic` does behind
the loss of a worker, from the first exchange on whose result somebody lacks:

    completed by some           one of these supplies the result: the bits of its floats, as integers, plus zeros
    completed by none           summed again, without workers that were lost meanwhile

A result is kept for that until nobody can lack it: when an exchange is complete all have begun it, and whoever has
begun it had taken (`is_taken`) what was taken before it was begun here.

Packets are made and taken in by runs of consecutive numbers, which have the same place in each array: what is done for
each of many packets is a copy of a slice. What is lost, late or out of order is rare, and may cost more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import NetworkError, NumericsError
from offbeat.protocol.group_progress import GroupProgress
from offbeat.switch.cap import MOST_ATTEMPTS
from offbeat.switch.fixed_point import to_sums
from offbeat.switch.packet import (
    MAGIC,
    VALUES_STEP,
    VERSION,
    ZERO_EXPONENT,
    Flag,
    PacketKind,
    Reason,
    wrapped,
)
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.resend_timer import ResendTimer
from offbeat.switch.stream_exchange import StreamExchange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from offbeat.switch.job_shape import JobShape

_OVERTAKEN = 3  # results of later chunks, after which a packet is taken for lost
_BURSTS = 4  # of a window; no smaller part of it is sent while something is under way
_LEAST_UNDER_WAY = 4  # packets, after some came too late
_FATAL = frozenset({Reason.UNKNOWN_JOB, Reason.NOT_A_MEMBER, Reason.STALE_COOKIE, Reason.WRONG_PORT, Reason.MALFORMED})


class StreamClient:
    """One worker's end of a job's stream.

    Args:
        shape: of the job.
        worker: its rank.
        cookie: of its incarnation.
        window: packets that may be under way.
        rto_s: the shortest time after which an unanswered packet is sent again.
        chunk, clock: the numbers that the next exchange begins with.
        keeps: whether results are kept until nobody can lack them, for `begin_again`.

    Attributes:
        has_joined: whether the switch has answered to its `JOIN`.
        refusal: why the switch will not go on with this worker; None as long as it does.
        held_up_by: a worker that lacks results which others wait to replace; None if there is none.
        resent: packets that were sent again.
        damaged: packets that were damaged on their way here.
    """

    def __init__(
        self,
        shape: JobShape,
        worker: int,
        cookie: int,
        *,
        window: int = 64,
        rto_s: float = 0.005,
        chunk: int = 0,
        clock: int = 0,
        keeps: bool = False,
    ) -> None:
        self.worker, self._keeps = worker, keeps
        self.window = min(window, shape.span)
        self._timer = ResendTimer(rto_s)
        self._clock = clock  # of the next exchange
        self._kept: deque[StreamExchange] = deque()  # in order, from the first whose result another may lack
        self.sent = self.resent = self.damaged = 0
        self._begin(shape, cookie, chunk)

    def _begin(self, shape: JobShape, cookie: int, chunk: int) -> None:
        """Begin with chunk `chunk`, and nothing under way."""
        self.shape, self.cookie = shape, cookie
        self._allowed = float(self.window)  # packets under way, at present
        self._next = chunk  # of the next exchange
        self._acked = self._cursor = chunk  # first chunk without a result, first that was never sent
        self._exchanges: deque[StreamExchange] = deque()
        slots = shape.slots
        self._is_under_way = np.zeros(slots, np.bool_)  # by slot, as all of these
        self._is_lost = np.zeros(slots, np.bool_)  # and not sent again yet
        self._has_values = np.zeros(slots, np.bool_)
        self._was_resent = np.zeros(slots, np.bool_)
        self._is_received = np.zeros(slots, np.bool_)  # of chunks from `_acked` on
        self._overtaken = np.zeros(slots, np.int16)
        self._sent_s = np.full(slots, np.inf)  # infinite for what is not under way
        self._oldest_s = float("inf")  # no packet under way was sent before
        self._in_flight = 0  # packets with values that are under way; the others take no room
        self._losses = self._early = 0  # packets that are lost; received ones behind one that is not
        self._batch = PacketBatch(2 * self.window, shape.values)
        self.has_joined = False
        self.refusal: Reason | None = None
        self.held_up_by: int | None = None

    # -- exchanges -----------------------------------------------------------------------------------------------

    def begin(self, values: NDArray[np.float32]) -> StreamExchange:
        """Begin to sum `values` [D] over the workers; in the same order on all of them, of the same size.

        Raises:
            NumericsError: if a value is NaN, infinite or too large.
        """
        exchange = self.next_exchange(values)
        self.enqueue(exchange)
        return exchange

    def next_exchange(self, *parts: NDArray[np.float32]) -> StreamExchange:
        """The exchange that comes next, which is to be enqueued before there is another; raises as `begin`.

        Most of what `begin` does; nobody else has to wait for it.
        """
        return self._with_headers(StreamExchange(parts, self.shape, self._next, self._clock))

    def enqueue(self, exchange: StreamExchange) -> None:
        """Begin an exchange that `next_exchange` has made."""
        header = exchange.headers[0]
        if (exchange.first, header["job"], header["cookie"]) != (self._next, self.shape.number, self.cookie):
            exchange.place(self._next)  # the job was begun again meanwhile
            self._with_headers(exchange)
        self._next, self._clock = exchange.end, self._clock + 1
        self._exchanges.append(exchange)
        if self._keeps:
            exchange.floor = next((one.clock for one in self._kept if not one.is_taken), exchange.clock)
            self._kept.append(exchange)

    # -- a switch that was started again -------------------------------------------------------------------------

    @property
    def progress(self) -> GroupProgress:
        """The exchanges whose results are here."""
        below = next((one.clock for one in self._kept if not one.is_done), self._clock)
        return GroupProgress(below, tuple(one.clock for one in self._kept if one.is_done and one.clock > below))

    def begin_again(self, shape: JobShape, cookie: int, progress: Mapping[int, GroupProgress]) -> None:
        """Do again, in a new job, what somebody lacks.

        Args:
            progress: of all workers of the job, by rank.

        Raises:
            NetworkError: if that cannot be done.
        """
        first = min(one.below for one in progress.values())
        if first < (self._kept[0].clock if self._kept else self._clock):
            raise NetworkError(f"Cannot go on: another worker lacks the result of exchange {first}, which is not kept.")
        self._begin(shape, cookie, 0)
        for exchange in self._kept:
            if exchange.clock < first:
                continue
            again, supplier = exchange, min((w for w, p in progress.items() if p.has(exchange.clock)), default=None)
            if supplier is None:
                exchange.place(self._next)
            elif shape.most:
                raise NetworkError(
                    f"Cannot go on at a switch that has lost exchange {exchange.clock}: some workers have its sum, and "
                    "with a cap they cannot give it to the others. Start the job again from its last checkpoint."
                )
            elif exchange.is_done:
                again = exchange.supplied(self._next, supplier, is_supplier=supplier == self.worker)
            else:
                exchange.place(self._next, supplier)
            self._next = again.end
            self._exchanges.append(self._with_headers(again))

    @property
    def rto_s(self) -> float:
        """Seconds after which an unanswered packet is sent again."""
        return self._timer.rto_s

    @property
    def pause_s(self) -> float:
        """Seconds in which to let answers gather before they are taken in."""
        return self._timer.pause_s if self._in_flight > self._allowed / _BURSTS else 0.0

    @property
    def trouble(self) -> str:
        """A sentence for reports about who holds the stream up; "" if nobody is known to."""
        if self.held_up_by is None:
            return ""
        return f"The switch waits for rank {self.held_up_by}, which lacks results that are to be replaced."

    @property
    def is_idle(self) -> bool:
        """Whether no exchange is under way."""
        return not self._exchanges

    def wake_s(self) -> float:
        """The time when `packets` has something to send again if nothing is received; infinite for never."""
        return self._oldest_s + self.rto_s

    # -- sending -------------------------------------------------------------------------------------------------

    def packets(self, now_s: float) -> PacketBatch:
        """The packets to send now; the batch is used again by the next call."""
        if self._oldest_s + self.rto_s <= now_s:
            self._note_late(now_s)
        room = max(0, int(self._allowed) - self._in_flight)
        if self._in_flight and room < self._allowed / _BURSTS:
            room = 0  # a packet for each result would cost a system call each, here and at the switch
        written = 0
        for start, stop in self._to_send_again(room) if self._losses else ():
            self._write(start, stop, written)
            self._was_resent[self._slots(start, stop)] = True
            written += stop - start
        self.resent += written
        start, stop = self._cursor, self._to_send_first(room - written, len(self._batch) - written)
        if start < stop:
            self._write(start, stop, written)
            self._cursor, written = stop, written + stop - start
        batch = self._batch.first(written)
        if written:
            self._oldest_s = min(self._oldest_s, now_s)
            self._sent_s[batch.header["slot"]] = now_s
            batch.header["bitmap"] = wrapped(self._acked)
            batch.seal()
            self.sent += written
        return batch

    def _write(self, start: int, stop: int, row: int) -> None:
        """Write the packets of some numbers into the batch, from a row on; they are under way then."""
        for exchange in self._exchanges:
            one, end = max(start, exchange.first), min(stop, exchange.end)
            if one < end:
                at = row + one - start
                exchange.write(one, end, self._batch.first(at + end - one).behind(at))
                first = min(max(one, exchange.data), end)
                self._has_values[self._slots(one, first)] = False
                self._has_values[self._slots(first, end)] = True
                self._in_flight += end - first
        slots = self._slots(start, stop)
        self._is_under_way[slots] = True

    def _slots(self, start: int, stop: int) -> slice | NDArray[np.int64]:
        """The slots of consecutive numbers."""
        first = start % self.shape.slots
        if (last := first + stop - start) <= self.shape.slots:
            return slice(first, last)
        return np.arange(first, last) % self.shape.slots

    def _note_late(self, now_s: float) -> None:
        """Take for lost what was not answered in time."""
        late = self._sent_s + self.rto_s <= now_s
        if late.any():
            self._timer.expired()
            self._allowed = min(self.window, max(_LEAST_UNDER_WAY, self._allowed / 2))
            self._lose(late)
        self._oldest_s = float(self._sent_s.min())

    def _lose(self, slots: NDArray[np.bool_]) -> None:
        self._is_lost |= slots
        self._is_under_way &= ~slots
        self._sent_s[slots] = np.inf
        self._overtaken[slots] = 0
        self._losses = int(self._is_lost.sum())
        self._in_flight = int((self._is_under_way & self._has_values).sum())

    def _to_send_again(self, room: int) -> Iterator[tuple[int, int]]:
        """The first so many numbers that are lost, as runs from a number to another."""
        slots = np.flatnonzero(self._is_lost)
        numbers = np.sort(self._acked + (slots - self._acked) % self.shape.slots)[:room]
        self._is_lost[numbers % self.shape.slots] = False
        self._losses -= len(numbers)
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
            if len(run):
                yield int(run[0]), int(run[-1]) + 1

    def _to_send_first(self, room: int, most: int) -> int:
        """Find what was never sent, and is due: as far as there is room, and slots and exponents allow.

        What only primes takes no room: a bucket's exponents are on their way while the last one's values are, so that
        these do not have to wait.

        Args:
            room: packets with values.
            most: packets.

        Returns:
            The number behind the last of them.
        """
        end, cursor = min(self._next, self._acked + self.shape.span), self._cursor
        for exchange in self._exchanges:
            if exchange.end <= cursor:
                continue
            cursor = max(cursor, min(exchange.data, end))
            due = max(cursor, min(exchange.data + exchange.known, end, cursor + room))
            room, cursor = room - (due - cursor), due
            if cursor < min(exchange.end, end) or cursor >= end:
                break
        return min(cursor, self._cursor + most)

    def _with_headers(self, exchange: StreamExchange) -> StreamExchange:
        """Write what does not change into the headers of an exchange's packets."""
        header, primes = exchange.headers, exchange.primes
        numbers = np.arange(exchange.first, exchange.end)
        header["magic"], header["kind"], header["job"] = MAGIC, PacketKind.DATA, self.shape.number
        header["worker"], header["cookie"], header["clock"] = self.worker, self.cookie, wrapped(exchange.clock)
        header["chunk"], header["slot"] = numbers % (1 << 32), numbers % self.shape.slots
        header["exponent"], header["flags"] = ZERO_EXPONENT, VERSION << 4
        header["flags"][:primes] = VERSION << 4 | Flag.PRIME
        header["flags"][0] = VERSION << 4 | Flag.PRIME | Flag.FIRST
        header["count"][:primes] = self.shape.values // VALUES_STEP
        exchange.sizes[:primes] += 4 * self.shape.values
        return exchange

    # -- receiving -----------------------------------------------------------------------------------------------

    def receive(self, batch: PacketBatch, now_s: float) -> None:
        """Take in packets from the switch; what is none of this worker's is passed over.

        Raises:
            NumericsError: if a chunk's sum did not fit again and again.
        """
        intact = batch.intact()
        self.damaged += len(batch) - len(intact)
        if not len(batch := intact):
            return
        if not batch.are_all(PacketKind.RESULT, self.shape.number):
            batch = self._results_among(batch)
        numbers = self._unwrapped(batch.header["chunk"])
        if not self._is_awaited_run(numbers):
            _, which = np.unique(numbers, return_index=True)
            which = which[self._are_awaited(numbers[which])]
            batch, numbers = batch.among(which), numbers[which]
        if not len(numbers):
            return
        self._measure(self._slots_of(numbers), now_s)
        for exchange in self._exchanges:
            first, last = np.searchsorted(numbers, (exchange.first, exchange.end)).tolist()
            if first < last:
                self._take(batch.first(last).behind(first), numbers[first:last], exchange)
        self._advance()
        self._note_overtaken(int(numbers[-1]), len(numbers))
        self._oldest_s = float(self._sent_s.min())

    def _results_among(self, batch: PacketBatch) -> PacketBatch:
        """Copy those that are results of this job, and take in the others."""
        ours = batch.are_ours(self.shape.number, from_workers=False)
        header = batch.header
        self.has_joined = self.has_joined or bool(((header["kind"] == PacketKind.JOIN_OK) & ours).any())
        if ((header["kind"] == PacketKind.NACK) & ours).any():
            self._refused(header[(header["kind"] == PacketKind.NACK) & ours])
        return batch.among(ours & (header["kind"] == PacketKind.RESULT))

    def _is_awaited_run(self, numbers: NDArray[np.int64]) -> bool:
        """Whether numbers follow one another, and no result of them is here: so it is as long as nothing is lost."""
        if not len(numbers) or numbers[0] < self._acked or numbers[-1] >= self._cursor or not _are_a_run(numbers):
            return False
        return not self._early or not self._is_received[self._slots_of(numbers)].any()

    def _are_awaited(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_received = self._is_received[numbers % self.shape.slots]
        awaited: NDArray[np.bool_] = (numbers >= self._acked) & (numbers < self._cursor) & ~is_received
        return awaited

    def _slots_of(self, numbers: NDArray[np.int64]) -> slice | NDArray[np.int64]:
        """The slots of numbers that grow."""
        first, last = int(numbers[0]), int(numbers[-1])
        return self._slots(first, last + 1) if last - first + 1 == len(numbers) else numbers % self.shape.slots

    def _measure(self, slots: slice | NDArray[np.int64], now_s: float) -> None:
        """Learn from answers how long they take, but for those of packets that were sent more than once."""
        sent_s = self._sent_s[slots]
        self._allowed = min(self.window, self._allowed + len(sent_s))
        # What only primes goes ahead of others, and says little of how long values take.
        once = sent_s[self._has_values[slots] & ~self._was_resent[slots]]
        once = once[once < np.inf]
        if len(once):
            self._timer.measure(now_s - float(once.mean()))

    def _take(self, batch: PacketBatch, numbers: NDArray[np.int64], exchange: StreamExchange) -> None:
        """Take in results of one exchange, ordered by their numbers."""
        header = batch.header
        count = header["count"]
        fits = (count == self.shape.values // VALUES_STEP) | (count == 0)
        primes = int(np.searchsorted(numbers, exchange.data))
        if self.shape.most:
            flags = header["flags"] & (Flag.PRIME | Flag.SATURATED)
            if (flags[:primes] != Flag.PRIME).any() or (flags[primes:] & Flag.PRIME).any():
                raise _lies("exponents and values are mixed up")
        if header["epoch"].any() or exchange.has_retries:
            chunk = numbers[primes:] - exchange.data
            fits[primes:] &= header["epoch"][primes:] == exchange.attempts[chunk]
        saturated = fits & (header["flags"] & Flag.SATURATED > 0)
        if saturated[primes:].any():
            at = primes + np.flatnonzero(saturated[primes:])
            chunk = numbers[at] - exchange.data
            self._sum_again(exchange, chunk, np.maximum(header["exponent"][at], exchange.agreed[chunk] + 1))
            fits[at] = False
        if not fits.all():
            batch, numbers = batch.among(fits), numbers[fits]
            header, primes = batch.header, int(np.searchsorted(numbers, exchange.data))
        for index in range(primes):
            if numbers[index] == exchange.first:
                exchange.contributors = int(header["bitmap"][index]) | int(header["cookie"][index]) << 32
                exchange.is_in = bool(exchange.contributors >> self.worker & 1)
        for index in range(primes):
            largest = batch.values[index] if header["count"][index] else np.zeros_like(batch.values[index])
            exchange.learn(int(numbers[index]) - exchange.first, largest)
        if primes < len(numbers):
            self._take_sums(batch.behind(primes), numbers[primes:] - exchange.data, exchange)
        if len(numbers):
            self._have_received(self._slots_of(numbers), len(numbers))
        if exchange.missing == len(numbers):
            exchange.finish()  # before it counts as done: what cannot be finished never does
            self._forget(exchange.floor)
        exchange.missing -= len(numbers)

    def _forget(self, floor: int) -> None:
        """Let go of what all others have, too."""
        while self._kept and self._kept[0].clock < floor:
            self._kept.popleft()

    def _take_sums(self, batch: PacketBatch, chunk: NDArray[np.int64], exchange: StreamExchange) -> None:
        header = batch.header
        at: slice | NDArray[np.int64] = chunk
        if len(chunk) == chunk[-1] - chunk[0] + 1:
            at = slice(int(chunk[0]), int(chunk[-1]) + 1)
        exchange.included[at] = header["bitmap"] | header["cookie"].astype(np.uint64) << np.uint64(32)
        if not header["count"].all():  # chunks of zeros
            full = header["count"] > 0
            exchange.sums[chunk[~full]] = 0
            batch, at = batch.among(full), chunk[full]
        if exchange.supplier is not None:
            exchange.sums[at] = batch.values.view(np.float32)
        elif isinstance(at, slice):
            to_sums(batch.values, exchange.unit[at], exchange.sums[at])
        else:
            exchange.sums[at] = batch.values.astype(np.float32) * exchange.unit[at, None]

    def _have_received(self, slots: slice | NDArray[np.int64], results: int) -> None:
        """Note that the results of so many slots are here."""
        self._in_flight -= int((self._is_under_way[slots] & self._has_values[slots]).sum())
        self._is_received[slots], self._is_under_way[slots], self._was_resent[slots] = True, False, False
        self._sent_s[slots], self._overtaken[slots] = np.inf, 0
        if self._losses:
            self._is_lost[slots] = False
            self._losses = int(self._is_lost.sum())
        self._early += results
        self.held_up_by = None

    def _sum_again(self, exchange: StreamExchange, chunk: NDArray[np.int64], exponent: NDArray[np.int8]) -> None:
        """Sum chunks that did not fit again, with larger exponents."""
        exchange.attempts[chunk] += 1
        if exchange.attempts.max() > MOST_ATTEMPTS:
            raise _lies(f"after {MOST_ATTEMPTS} attempts it still does not fit")
        exchange.agreed[chunk], exchange.has_retries = exponent, True
        exchange.lay_out(chunk)
        again = np.zeros(self.shape.slots, np.bool_)
        again[(exchange.first + exchange.primes + chunk) % self.shape.slots] = True
        self._lose(again)

    def _refused(self, header: NDArray[np.void]) -> None:
        for one in header:
            reason = Reason(int(one["window_new"])) if 1 <= one["window_new"] <= len(Reason) else Reason.MALFORMED
            number = int(self._unwrapped(one["chunk"][None])[0])
            if reason in _FATAL:
                self.refusal = self.refusal or reason
            elif reason is Reason.HELD_UP:
                self.held_up_by = int(one["worker"])
            elif reason is Reason.SUPERSEDED and self._acked <= number < self._cursor:
                exchange = next(e for e in self._exchanges if e.first <= number < e.end)
                chunk = number - exchange.first - exchange.primes
                if chunk >= 0 and one["epoch"] > exchange.attempts[chunk]:
                    exchange.attempts[chunk] = one["epoch"] - 1
                    self._sum_again(exchange, np.array([chunk]), np.array([one["exponent"]], np.int8))

    def _advance(self) -> None:
        """Pass over chunks whose results are here, and exchanges that are done."""
        received = self._is_received[self._slots(self._acked, self._acked + self._early)]
        done = self._early if received.all() else int(np.argmin(received))
        self._is_received[self._slots(self._acked, self._acked + done)] = False
        self._acked, self._early = self._acked + done, self._early - done
        while self._exchanges and self._exchanges[0].is_done:
            self._exchanges.popleft()

    def _note_overtaken(self, newest: int, results: int) -> None:
        """Take for lost what results of later numbers have overtaken.

        Args:
            newest: the last number of those whose results have come now.
            results: how many have.
        """
        if self._acked > newest:
            return
        missed = np.arange(self._acked, newest) % self.shape.slots
        self._overtaken[missed[self._is_under_way[missed]]] += min(results, _OVERTAKEN)
        if (overtaken := self._overtaken >= _OVERTAKEN).any():
            self._lose(overtaken)

    def _unwrapped(self, chunk: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Numbers as they are counted here, of those in packets, which wrap around."""
        ahead = (chunk.astype(np.int64) - self._acked + (1 << 31)) % (1 << 32) - (1 << 31)
        return self._acked + ahead


def _lies(what: str) -> NumericsError:
    """Say what of a sum shows that a worker does not do as it says."""
    return NumericsError(
        f"Cannot sum a gradient in the switch: {what}. A worker sends other values than it announces; use Elastic(), "
        "which adds floats - at `plan.fabric`."
    )


def _are_a_run(numbers: NDArray[np.int64]) -> bool:
    return bool((numbers[1:] == numbers[:-1] + 1).all())
