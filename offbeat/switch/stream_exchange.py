"""One exchange of a worker's stream: what it brings, chunk by chunk, what the switch has made of it, and its packets.

Shapes: M chunks of V values, of P = ceil(M / V) packets with exponents, and so P + M packets; see `stream_client`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import NetworkError
from offbeat.switch.fixed_point import MOST_EXPONENT, exponents, quantize, scales, units
from offbeat.switch.packet import HEADER_BYTES, VALUES_STEP, VERSION, ZERO_EXPONENT, Flag
from offbeat.switch.packet_batch import HEADER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from offbeat.switch.job_shape import JobShape
    from offbeat.switch.packet_batch import PacketBatch


class StreamExchange:
    """One exchange: a sum over the workers, chunk by chunk.

    Args:
        parts: [D] float32 each; each begins with a chunk of its own. Packets are made from them where they lie, so
            nobody may change them before the exchange is done.
        shape: of the job.
        first: number of its first chunk.
        clock: its own number.

    Attributes:
        own, agreed: [M] int8, the exponents of its own chunks, and the largest of all workers'.
        announced: [P, V] int32, its own exponents as they are sent.
        sums: [M, V] float32.
        scale, unit: [M] float32, by which a chunk is multiplied before it is sent, and its sum behind that.
        attempts: [M] uint16, how often each chunk was summed before.
        headers, sizes: [P + M] of its packets, as `PacketBatch` has them.
        included: [M] uint64, workers whose values are in each chunk's sum, as bits; equal but for chunks that a worker
            did not live to send.
        is_in: whether this worker contributes; None while that is not settled.
        is_taken: whether its worker has come to the end of waiting for it, which that worker says.
        supplier: the worker whose result all take over; None if it is a sum.
        count: the workers that the sums stand for, once it is done; 0 if they are of zeros that were supplied.
    """

    def __init__(self, parts: Sequence[NDArray[np.float32]], shape: JobShape, first: int, clock: int) -> None:
        self.clock, self.floor, self.is_taken, self._workers = clock, clock, False, shape.workers
        self._sizes = [len(part) for part in parts]
        self._ends = np.cumsum([-(-size // shape.values) for size in self._sizes])
        self._chunks, self._values = int(self._ends[-1]), shape.values
        self.primes = -(-self._chunks // shape.values)
        self._brought = [rows for part in parts for rows in _rows_of(part, shape.values)]
        self._exponents = np.concatenate([exponents(rows) for rows in self._brought])
        self._is_capped = shape.cap is not None
        if shape.cap is not None:
            self._exponents = np.minimum(self._exponents, np.int8(shape.cap.exponent))
        self.place(first)

    def place(self, first: int, supplier: int | None = None) -> None:
        """Have it begin with chunk `first`, and know nothing of results."""
        chunks = self._chunks
        self.first, self.end, self.supplier = first, first + self.primes + chunks, supplier
        self._offer(self._exponents if supplier is None else np.full(chunks, ZERO_EXPONENT, np.int8))
        self.agreed = np.full(chunks, ZERO_EXPONENT, np.int8)
        self.known = 0  # chunks, from the first on, whose exponents are agreed on
        self.attempts = np.zeros(chunks, np.uint16)
        self.sums = np.empty((chunks, self._values), np.float32)  # each chunk's result fills its row
        self.included = np.zeros(chunks, np.uint64)
        self.has_retries = False
        self.missing = self.primes + chunks
        self.is_in: bool | None = None
        self.contributors = self.count = 0
        self._primed = [False] * self.primes
        self.headers = np.zeros(self.primes + chunks, HEADER)  # but for what changes
        self.sizes = np.full(self.primes + chunks, HEADER_BYTES, np.int64)
        self.scale = np.zeros(chunks, np.float32)
        self.unit = np.zeros(chunks, np.float32)

    def _offer(self, own: NDArray[np.int8]) -> None:
        """Announce these exponents of its chunks."""
        self.own = own
        self.announced = np.zeros((self.primes, self._values), np.int32)
        self.announced.reshape(-1)[: len(own)] = own.astype(np.int32) - ZERO_EXPONENT

    def supplied(self, first: int, supplier: int, *, is_supplier: bool) -> StreamExchange:
        """An exchange by which those that lack this one's result get it; this one stays as it is."""
        other = copy.copy(self)
        other.place(first, supplier)
        if is_supplier:
            other._brought = [self.sums]  # bits of floats need no exponent: it says of how many workers they are
            other._offer(np.where(self.sums.view(np.int32).any(axis=1), self.count, ZERO_EXPONENT).astype(np.int8))
        return other

    def finish(self) -> None:
        """Have the total as if the same workers were in all chunks; what was brought is forgotten.

        A worker that was lost in the middle is in some chunks only; these count for as many as the exchange settled on,
        or as are in the first chunk of the second part, if there is one, which says how many they are.

        Raises:
            NetworkError: if the one that was to supply the result is not in all.
        """
        self._brought = [self.sums]
        if self.supplier is not None:
            if not (self.included >> np.uint64(self.supplier) & np.uint64(1)).all():
                raise NetworkError(
                    f"Cannot go on: rank {self.supplier} was lost while it gave the others a sum that the switch had "
                    "lost. Start the job again from its last checkpoint."
                )
            self.count = max(0, int(self.agreed.max()))
            return
        settled = self.contributors if len(self._sizes) == 1 else self.included_in(1)
        self.count = settled.bit_count()
        uneven = np.flatnonzero(self.included != np.uint64(settled))
        if len(uneven):
            here = np.array([int(self.included[i]).bit_count() for i in uneven])
            self.sums[uneven] *= (self.count / np.maximum(here, 1)).astype(np.float32)[:, None]

    @property
    def is_done(self) -> bool:
        """Whether the result of every chunk is here."""
        return not self.missing

    @property
    def data(self) -> int:
        """The number of the first chunk of values."""
        return self.first + self.primes

    @property
    def totals(self) -> list[NDArray[np.float32]]:
        """The sums of each part, once it is done."""
        rows = np.split(self.sums, self._ends[:-1])
        return [one.reshape(-1)[:size] for one, size in zip(rows, self._sizes, strict=True)]

    @property
    def total(self) -> NDArray[np.float32]:
        """[D] The sums of the first part."""
        return self.totals[0]

    def included_in(self, part: int) -> int:
        """The workers that are in the first chunk of a part, as bits."""
        return int(self.included[self._ends[part - 1] if part else 0])

    def learn(self, prime: int, largest: NDArray[np.int32]) -> None:
        """Take over the largest exponents [V] that a result says."""
        at = prime * len(largest)
        agreed = self.agreed[at : at + len(largest)]
        agreed[:] = np.clip(largest[: len(agreed)] + ZERO_EXPONENT, ZERO_EXPONENT, MOST_EXPONENT)
        self._primed[prime] = True
        while self.known < len(self.agreed) and self._primed[self.known // len(largest)]:
            known = min(len(self.agreed), self.known + len(largest))
            self.lay_out(slice(self.known, known))  # the first one has said whether this worker is in
            self.known = known

    def lay_out(self, chunks: slice | NDArray[np.int64]) -> None:
        """Write into the headers of chunks with what exponents they are sent, and whether with values."""
        agreed, own = self.agreed[chunks], self.own[chunks]
        too_large = (own > agreed) & bool(self.is_in)
        headers, sizes = self.headers[self.primes :], self.sizes[self.primes :]
        has_values = ~too_large & (agreed != ZERO_EXPONENT) & bool(self.is_in)
        if self.supplier is not None:
            has_values &= own != ZERO_EXPONENT
        count = self._values // VALUES_STEP
        self.scale[chunks] = np.where(has_values, scales(agreed, self._workers), np.float32(0))
        self.unit[chunks] = units(agreed, self._workers)
        headers["exponent"][chunks] = np.where(too_large, own, agreed) if self.is_in else ZERO_EXPONENT
        headers["flags"][chunks] = VERSION << 4 | np.where(too_large, int(Flag.SATURATED), 0)
        headers["epoch"][chunks] = self.attempts[chunks]
        headers["count"][chunks] = np.where(has_values, count, 0)
        sizes[chunks] = HEADER_BYTES + 4 * VALUES_STEP * headers["count"][chunks].astype(np.int64)

    def write(self, start: int, stop: int, batch: PacketBatch) -> None:
        """Write the packets of numbers from `start` to `stop` into a batch of as many rows."""
        index = slice(start - self.first, stop - self.first)
        batch.header[:] = self.headers[index]
        batch.sizes[:] = self.sizes[index]
        primes = max(0, min(stop, self.data) - start)
        if primes:
            batch.values[:primes] = self.announced[index.start : index.start + primes]
        if primes < len(batch) and self.is_in:
            self._write_values(max(start, self.data) - self.data, stop - self.data, batch.values[primes:])

    def _write_values(self, start: int, stop: int, out: NDArray[np.int32]) -> None:
        """Write the integers of chunks from `start` to `stop`."""
        first = 0  # chunk of those that are in `rows`
        for rows in self._brought:
            here = slice(max(start - first, 0), max(stop - first, 0))
            if len(some := rows[here]):
                at = first + here.start
                to = out[at - start : at - start + len(some)]
                if self.supplier is None:
                    quantize(some, self.scale[at : at + len(some)], to, clips=self._is_capped)
                else:
                    to[:] = some.view(np.int32)
            first += len(rows)


def _rows_of(part: NDArray[np.float32], values: int) -> list[NDArray[np.float32]]:
    """The chunks [., V] of a vector: those that it fills, where they lie, and a copy of the last one with zeros."""
    whole = len(part) // values
    rows = [part[: whole * values].reshape(whole, values)] if whole else []
    if whole * values < len(part):
        rest = np.zeros((1, values), np.float32)
        rest[0, : len(part) - whole * values] = part[whole * values :]
        rows.append(rest)
    return rows
