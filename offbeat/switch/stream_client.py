"""A worker's side of streaming all-reduce: which packets to send now, and what the switch's answers mean. No I/O.

One stream of chunks per job, numbered from 0 and never anew. An exchange of M chunks takes M + P numbers, P the window,
or M if that is less:

    number   first ... first + P - 1     first + P ... first + P + M - 1
    carries  exponents of chunks 0..P-1  chunk 0 ... M - 1, and the exponents of chunks P ... M - 1
    result   the largest of those        the sums, and the largest exponents

So the packet that carries chunk j is due when the result P numbers before it is here, which has the exponent that all
use. Results clock what is sent: no more than `window` packets with values are under way. What is not answered in time,
or has been overtaken by three results, is taken for lost, and sent again; what in time is says a `ResendTimer`.
Whenever one comes too late fewer packets are under way until results come again: a switch that has too much to do is
not given more.

Call order: `begin` for each exchange, in the same order on all workers; `packets` and `receive` until the exchange
`is_done`; both may be called at any time.

A switch that was started again knows nothing of them. `begin_again` then does what `offbeat.fabric.elastic` does behind
the loss of a worker, from the first exchange on whose result somebody lacks:

    completed by some           one of these supplies the result: the bits of its floats, as integers, plus zeros
    completed by none           summed again, without workers that were lost meanwhile

A result is kept for that until nobody can lack it: when an exchange is complete all have begun it, and whoever has
begun it had taken (`is_taken`) what was taken before it was begun here.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import NetworkError, NumericsError
from offbeat.protocol.group_progress import GroupProgress
from offbeat.switch.fixed_point import exponents, to_floats, to_integers
from offbeat.switch.packet import (
    HEADER_BYTES,
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from offbeat.switch.job_shape import JobShape

_OVERTAKEN = 3  # results of later chunks, after which a packet is taken for lost
_BURSTS = 4  # of a window; no smaller part of it is sent while something is under way
_LEAST_UNDER_WAY = 4  # packets, after some came too late
_MOST_ATTEMPTS = 8
_SUPPLIED = 1  # exponent of a chunk that carries the bits of floats
_FATAL = frozenset({Reason.UNKNOWN_JOB, Reason.NOT_A_MEMBER, Reason.STALE_COOKIE, Reason.WRONG_PORT, Reason.MALFORMED})


class StreamExchange:
    """One exchange: a sum over the workers, chunk by chunk.

    Args:
        values: [D] float32, which stay as they are.
        first: number of its first chunk.
        clock: its own number.

    Attributes:
        total: [D] the sums, once it is done.
        included: [M] workers whose values are in each chunk's sum, as bits; equal but for chunks that a worker did not
            live to send.
        is_in: whether this worker contributes; None while that is not settled.
        is_taken: whether its worker has come to the end of waiting for it, which that worker says.
        supplier: the worker whose result all take over; None if it is a sum.
    """

    def __init__(self, values: NDArray[np.float32], shape: JobShape, first: int, clock: int, window: int) -> None:
        self.clock, self.floor, self.is_taken = clock, clock, False
        chunks = -(-len(values) // shape.values)
        padded = np.zeros((chunks, shape.values), np.float32)
        padded.reshape(-1)[: len(values)] = values
        self._size = len(values)
        self.chunks = padded
        self.primes = min(chunks, window)
        self._own = exponents(padded)
        self.place(first)

    def place(self, first: int, supplier: int | None = None) -> None:
        """Have it begin with chunk `first`, and know nothing of results."""
        self.first, self.end, self.supplier = first, first + self.primes + len(self.chunks), supplier
        chunks = len(self.chunks)
        self.agreed = np.full(chunks, ZERO_EXPONENT, np.int8)
        self.is_known = np.zeros(chunks, np.bool_)
        self.attempts = np.zeros(chunks, np.uint16)
        self.sums = np.zeros_like(self.chunks)
        self.included = np.zeros(chunks, np.uint64)
        self.missing = self.primes + chunks
        self.is_in: bool | None = None
        self.contributors = 0
        self.own = self._own if supplier is None else np.full(chunks, ZERO_EXPONENT, np.int8)

    def supplied(self, first: int, supplier: int, *, is_supplier: bool) -> StreamExchange:
        """An exchange by which those that lack this one's result get it; this one stays as it is."""
        other = copy.copy(self)
        other.place(first, supplier)
        if is_supplier:
            other.chunks = self.sums
            other.own = np.where(self.sums.view(np.int32).any(axis=1), _SUPPLIED, ZERO_EXPONENT).astype(np.int8)
        return other

    def to_integers(self, chunks: NDArray[np.int64], workers: int) -> NDArray[np.int32]:
        """The integers of some of its chunks, as they are sent."""
        if self.supplier is not None:
            return self.chunks[chunks].view(np.int32)
        return to_integers(self.chunks[chunks], self.agreed[chunks], workers)

    def take_sums(self, chunks: NDArray[np.int64], integers: NDArray[np.int32], workers: int) -> None:
        """Take in the sums of some chunks, as they have come."""
        if self.supplier is not None:
            self.sums[chunks] = integers.view(np.float32)
        else:
            self.sums[chunks] = to_floats(integers, self.agreed[chunks], workers)

    def finish(self) -> None:
        """Have the total as if the same workers were in all chunks; what was brought is forgotten.

        A worker that was lost in the middle is in some chunks only; these count for as many as the exchange settled on.

        Raises:
            NetworkError: if the one that was to supply the result is not in all.
        """
        self.chunks = self.sums
        if self.supplier is not None:
            if not (self.included >> np.uint64(self.supplier) & np.uint64(1)).all():
                raise NetworkError(
                    f"Cannot go on: rank {self.supplier} was lost while it gave the others a sum that the switch had "
                    "lost. Start the job again from its last checkpoint."
                )
            return
        uneven = np.flatnonzero(self.included != np.uint64(self.contributors))
        if len(uneven):
            count = self.contributors.bit_count()
            here = np.array([int(self.included[i]).bit_count() for i in uneven])
            self.sums[uneven] *= (count / np.maximum(here, 1)).astype(np.float32)[:, None]

    @property
    def is_done(self) -> bool:
        """Whether the result of every chunk is here."""
        return not self.missing

    @property
    def total(self) -> NDArray[np.float32]:
        return self.sums.reshape(-1)[: self._size]


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
        self.sent = self.resent = 0
        self._begin(shape, cookie, chunk)

    def _begin(self, shape: JobShape, cookie: int, chunk: int) -> None:
        """Begin with chunk `chunk`, and nothing under way."""
        self.shape, self.cookie = shape, cookie
        self._allowed = float(self.window)  # packets under way, at present
        self._next = chunk  # of the next exchange
        self._acked = self._cursor = chunk  # first chunk without a result, first that was never sent
        self._exchanges: deque[StreamExchange] = deque()
        slots = shape.slots
        self._sent_s = np.zeros(slots)  # by slot, of what is under way
        self._is_under_way = np.zeros(slots, np.bool_)
        self._is_lost = np.zeros(slots, np.bool_)  # and not sent again yet
        self._was_resent = np.zeros(slots, np.bool_)
        self._is_received = np.zeros(slots, np.bool_)  # of chunks from `_acked` on
        self._overtaken = np.zeros(slots, np.int16)
        self._only_primes = np.zeros(slots, np.bool_)  # what carries exponents alone
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

    def next_exchange(self, values: NDArray[np.float32]) -> StreamExchange:
        """The exchange that comes next, which is to be enqueued before there is another; raises as `begin`.

        Most of what `begin` does; nobody else has to wait for it.
        """
        return StreamExchange(values, self.shape, self._next, self._clock, self.window)

    def enqueue(self, exchange: StreamExchange) -> None:
        """Begin an exchange that `next_exchange` has made."""
        if exchange.first != self._next:  # the job was begun again meanwhile
            exchange.place(self._next)
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
            elif exchange.is_done:
                again = exchange.supplied(self._next, supplier, is_supplier=supplier == self.worker)
            else:
                exchange.place(self._next, supplier)
            self._next = again.end
            self._exchanges.append(again)

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

    @property
    def _in_flight(self) -> int:
        """Packets with values that are under way; the others are small, and take no room."""
        return int((self._is_under_way & ~self._only_primes).sum())

    def wake_s(self) -> float:
        """The time when `packets` has something to send again if nothing is received; infinite for never."""
        if not self._is_under_way.any():
            return float("inf")
        return float(self._sent_s[self._is_under_way].min()) + self.rto_s

    # -- sending -------------------------------------------------------------------------------------------------

    def packets(self, now_s: float) -> PacketBatch:
        """The packets to send now; the batch is used again by the next call."""
        self._note_late(now_s)
        in_flight = self._in_flight
        room = max(0, int(self._allowed) - in_flight)
        if in_flight and room < self._allowed / _BURSTS:
            room = 0  # a packet for each result would cost a system call each, here and at the switch
        again = self._to_send_again(room)
        first = self._to_send_first(room - len(again), len(self._batch) - len(again))
        numbers = np.concatenate([again, first])
        batch = self._batch.first(len(numbers))
        if not len(numbers):
            return batch
        slots = numbers % self.shape.slots
        self._sent_s[slots], self._is_under_way[slots], self._overtaken[slots] = now_s, True, 0
        self._was_resent[slots] = numbers < self._cursor - (len(numbers) - len(again))
        self._is_lost[slots], self._only_primes[slots] = False, False
        header = batch.header
        header["magic"], header["kind"], header["job"] = MAGIC, PacketKind.DATA, self.shape.number
        header["worker"], header["cookie"] = self.worker, self.cookie
        header["chunk"], header["slot"], header["bitmap"] = numbers % (1 << 32), slots, wrapped(self._acked)
        header["window_old"] = header["window_new"] = 0
        for exchange in self._exchanges:
            mine = (numbers >= exchange.first) & (numbers < exchange.end)
            if mine.any():
                self._only_primes[slots[mine]] = numbers[mine] < exchange.first + exchange.primes
                self._fill(batch, np.flatnonzero(mine), numbers[mine] - exchange.first, exchange)
        self.sent += len(numbers)
        return batch

    def _note_late(self, now_s: float) -> None:
        """Take for lost what was not answered in time, or has been overtaken."""
        if not self._is_under_way.any():
            return
        late = self._is_under_way & (self._sent_s + self.rto_s <= now_s)
        if late.any():
            self._timer.expired()
            self._allowed = min(self.window, max(_LEAST_UNDER_WAY, self._allowed / 2))
        self._lose(late | (self._is_under_way & (self._overtaken >= _OVERTAKEN)))

    def _lose(self, slots: NDArray[np.bool_]) -> None:
        self._is_lost |= slots
        self._is_under_way &= ~slots

    def _to_send_again(self, room: int) -> NDArray[np.int64]:
        slots = np.flatnonzero(self._is_lost)
        numbers = np.sort(self._acked + (slots - self._acked) % self.shape.slots)[:room]
        self.resent += len(numbers)
        return numbers

    def _to_send_first(self, room: int, most: int) -> NDArray[np.int64]:
        """Find what was never sent, and is due: as far as there is room, and slots and exponents allow.

        What only primes takes no room: a bucket's exponents are on their way while the last one's values are, so that
        these do not have to wait.

        Args:
            room: packets with values.
            most: packets.
        """
        end, cursor = min(self._next, self._acked + self.shape.span), self._cursor
        for exchange in self._exchanges:
            if exchange.end <= cursor:
                continue
            cursor = max(cursor, min(exchange.first + exchange.primes, end))
            due = self._due(exchange, cursor, min(end, cursor + room))
            room, cursor = room - (due - cursor), due
            if cursor < min(exchange.end, end) or cursor >= end:
                break
        start = self._cursor
        self._cursor = min(cursor, start + most)
        return np.arange(start, self._cursor, dtype=np.int64)

    @staticmethod
    def _due(exchange: StreamExchange, cursor: int, end: int) -> int:
        """The first number from `cursor` to `end` on that is not due, or behind the exchange."""
        end = min(end, exchange.end)
        data = exchange.first + exchange.primes
        if end <= data:
            return end
        if exchange.is_in is None:
            return max(cursor, min(end, data))
        known = exchange.is_known[max(0, cursor - data) : end - data]
        return end if known.all() else max(cursor, data) + int(np.argmin(known))

    def _fill(
        self, batch: PacketBatch, rows: NDArray[np.int64], index: NDArray[np.int64], exchange: StreamExchange
    ) -> None:
        """Write packets of one exchange.

        Args:
            rows: [B] of the batch.
            index: [B] numbers, counted from the exchange's first.
        """
        header, values = batch.header, self.shape.values
        chunk = index - exchange.primes  # below 0 for those that prime
        primes = chunk < 0
        flags = np.where(primes, int(Flag.PRIME), 0) | np.where(index == 0, int(Flag.FIRST), 0)
        own = np.append(exchange.own, np.int8(ZERO_EXPONENT))
        header["ahead"][rows] = own[np.minimum(index, len(exchange.own))]
        header["clock"][rows] = wrapped(exchange.clock)
        header["exponent"][rows] = ZERO_EXPONENT
        header["epoch"][rows] = 0
        header["count"][rows] = 0
        batch.sizes[rows] = HEADER_BYTES
        if not primes.all():
            data = ~primes
            which, at = chunk[data], rows[data]
            header["epoch"][at] = exchange.attempts[which]
            if exchange.is_in:
                agreed = exchange.agreed[which]
                too_large = exchange.own[which] > agreed
                header["exponent"][at] = np.where(too_large, exchange.own[which], agreed)
                flags[data] |= np.where(too_large, int(Flag.SATURATED), 0)
                full = ~too_large & (agreed != ZERO_EXPONENT) & (exchange.supplier in (None, self.worker))
                header["count"][at[full]] = values // VALUES_STEP
                batch.sizes[at[full]] = HEADER_BYTES + 4 * values
                batch.values[at[full]] = exchange.to_integers(which[full], self.shape.workers)
        header["flags"][rows] = VERSION << 4 | flags

    # -- receiving -----------------------------------------------------------------------------------------------

    def receive(self, batch: PacketBatch, now_s: float) -> None:
        """Take in packets from the switch; what is none of this worker's is passed over.

        Raises:
            NumericsError: if a chunk's sum did not fit again and again.
        """
        ours = batch.are_ours(self.shape.number, from_workers=False)
        header = batch.header
        self.has_joined = self.has_joined or bool(((header["kind"] == PacketKind.JOIN_OK) & ours).any())
        if ((header["kind"] == PacketKind.NACK) & ours).any():
            self._refused(header[(header["kind"] == PacketKind.NACK) & ours])
        wide = np.isin(batch.header["count"], (0, self.shape.values // VALUES_STEP))
        which = np.flatnonzero(ours & wide & (header["kind"] == PacketKind.RESULT))
        if not len(which):
            return
        numbers = self._unwrapped(header["chunk"][which])
        _, once = np.unique(numbers, return_index=True)
        which, numbers = which[once], numbers[once]
        slots = numbers % self.shape.slots
        new = (numbers >= self._acked) & (numbers < self._cursor) & ~self._is_received[slots]
        which, numbers = which[new], numbers[new]
        if not len(which):
            return
        self._measure(numbers % self.shape.slots, now_s)
        for exchange in self._exchanges:
            mine = (numbers >= exchange.first) & (numbers < exchange.end)
            if mine.any():
                self._take(batch, which[mine], numbers[mine], exchange)
        under_way = self._is_under_way & (self._numbers_by_slot() < int(numbers.max()))
        self._overtaken[under_way] += 1 if len(numbers) < _OVERTAKEN else _OVERTAKEN
        self._advance()

    def _measure(self, slots: NDArray[np.int64], now_s: float) -> None:
        """Learn from answers how long they take, but for those of packets that were sent more than once."""
        self._allowed = min(self.window, self._allowed + len(slots))
        once = slots[self._is_under_way[slots] & ~self._was_resent[slots]]
        if not (primes := self._only_primes[once]).all():
            once = once[~primes]  # what only primes is small, and says little of how long values take
        if not len(once):
            return
        self._timer.measure(now_s - float(self._sent_s[once].mean()))

    def _take(
        self, batch: PacketBatch, which: NDArray[np.int64], numbers: NDArray[np.int64], exchange: StreamExchange
    ) -> None:
        header = batch.header
        index = numbers - exchange.first
        chunk = index - exchange.primes
        data = chunk >= 0
        is_this = ~data
        is_this[data] = header["epoch"][which[data]] == exchange.attempts[chunk[data]]
        saturated = is_this & data & (header["flags"][which] & Flag.SATURATED > 0)
        if saturated.any():
            wanted = header["exponent"][which[saturated]]
            self._sum_again(exchange, chunk[saturated], np.maximum(wanted, exchange.agreed[chunk[saturated]] + 1))
        good = is_this & ~saturated
        which, index, chunk, data = which[good], index[good], chunk[good], data[good]
        if not len(which):
            return
        first = np.flatnonzero(index == 0)
        if len(first):
            at = which[first[0]]
            exchange.contributors = int(header["bitmap"][at]) | int(header["cookie"][at]) << 32
            exchange.is_in = bool(exchange.contributors >> self.worker & 1)
        told = index < len(exchange.own)
        exchange.agreed[index[told]] = header["ahead"][which[told]]
        exchange.is_known[index[told]] = True
        at, chunk = which[data], chunk[data]
        if len(at):
            seen = header["bitmap"][at].astype(np.uint64) | header["cookie"][at].astype(np.uint64) << np.uint64(32)
            exchange.included[chunk] = seen
            full = header["count"][at] > 0
            if full.any():
                exchange.take_sums(chunk[full], batch.values[at[full]], self.shape.workers)
        exchange.missing -= len(which)
        if exchange.is_done:
            exchange.finish()
            self._forget(exchange.floor)
        slots = (exchange.first + index) % self.shape.slots
        self._is_received[slots], self._is_under_way[slots], self._is_lost[slots] = True, False, False
        self.held_up_by = None

    def _forget(self, floor: int) -> None:
        """Let go of what all others have, too."""
        while self._kept and self._kept[0].clock < floor:
            self._kept.popleft()

    def _sum_again(self, exchange: StreamExchange, chunk: NDArray[np.int64], exponent: NDArray[np.int8]) -> None:
        """Sum chunks that did not fit again, with larger exponents."""
        exchange.attempts[chunk] += 1
        if exchange.attempts.max() > _MOST_ATTEMPTS:
            raise NumericsError(
                f"Cannot sum a gradient in the switch: after {_MOST_ATTEMPTS} attempts it still does not fit. A worker "
                "sends other values than it announces; use Elastic(), which adds floats - at `plan.fabric`."
            )
        exchange.agreed[chunk] = exponent
        again = np.zeros(self.shape.slots, np.bool_)
        again[(exchange.first + exchange.primes + chunk) % self.shape.slots] = True
        self._lose(again & self._is_under_way)
        self._is_lost |= again

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
        ahead = (self._acked + np.arange(self._cursor - self._acked)) % self.shape.slots
        received = self._is_received[ahead]
        done = len(received) if received.all() else int(np.argmin(received))
        self._is_received[ahead[:done]] = False
        self._acked += done
        while self._exchanges and self._exchanges[0].is_done:
            self._exchanges.popleft()

    def _numbers_by_slot(self) -> NDArray[np.int64]:
        """[slots] the number, from the first without a result on, that each slot serves."""
        slots = np.arange(self.shape.slots)
        return self._acked + (slots - self._acked) % self.shape.slots

    def _unwrapped(self, chunk: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Numbers as they are counted here, of those in packets, which wrap around."""
        ahead = (chunk.astype(np.int64) - self._acked + (1 << 31)) % (1 << 32) - (1 << 31)
        return self._acked + ahead
