"""Streaming sums at a switch for batches of packets: what `chunk_stream` does to each, without a loop over packets.

Packets of different chunks do not touch each other, but for the first of an exchange, which settles who contributes. So
a batch is cut at those, and between them the packets of the same slot are taken in the order in which they came: the
first of each slot together, then the second of each, and so on. That is one round per worker, as a rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat.switch.cap import Brought
from offbeat.switch.members import ALL, Answer, Members, MemberState
from offbeat.switch.packet import (
    HEADER_BYTES,
    MAGIC,
    VALUES_STEP,
    VERSION,
    ZERO_EXPONENT,
    Flag,
    Packet,
    PacketKind,
    Reason,
    decode,
)
from offbeat.switch.packet_batch import PacketBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from offbeat.switch.cap import Cap
    from offbeat.switch.job_shape import JobShape

# As flags stand in headers: of the same type as these, so that arrays of them stay what they are.
_FIRST, _PRIME, _PARTIAL, _SATURATED = map(np.uint8, (Flag.FIRST, Flag.PRIME, Flag.PARTIAL, Flag.SATURATED))
_ONE = np.uint64(1)


class VectorStream:
    """The slots of one job, as arrays: [S] of each of S slots, `values` [S, V] of V values in a packet.

    Args:
        shape, members: of the job.
        quorum: members whose contributions settle an exchange at once; None for all.
    """

    def __init__(self, shape: JobShape, members: Members, quorum: int | None = None) -> None:
        self._shape, self._members, self.quorum, self._cap = shape, members, quorum, shape.cap
        slots = shape.slots
        self.is_used = np.zeros(slots, np.bool_)
        self.chunk = np.zeros(slots, np.uint32)
        self.clock = np.zeros(slots, np.uint32)
        self.attempt = np.zeros(slots, np.uint16)
        self.flags = np.zeros(slots, np.uint8)
        self.seen = np.zeros(slots, np.uint64)
        self.exponent = np.full(slots, ZERO_EXPONENT, np.int8)
        self.has_values = np.zeros(slots, np.bool_)
        self.is_complete = np.zeros(slots, np.bool_)
        self.values = np.zeros((slots, shape.values), np.int32)
        self._is_settled = np.zeros(slots, np.bool_)
        self._settled_clock = np.zeros(slots, np.uint32)
        self._settled = np.zeros(slots, np.uint64)  # who contributes to the exchange of that clock
        self._answers: list[tuple[NDArray[np.int64], NDArray[np.uint8], PacketBatch]] = []

    # -- one packet, as `chunk_stream` takes it ------------------------------------------------------------------------

    def data(self, packet: Packet, member: MemberState) -> list[Answer]:
        """Take in a chunk of a member."""
        batch = PacketBatch.of([packet], self._shape.values)
        return self._as_packets(*self.handle(batch))

    def evict(self, worker: int) -> list[Answer]:
        """Go on without a worker, which is no member any more; what it has contributed stays where it is."""
        self._settled &= ~np.uint64(1 << worker)
        return self._complete_waiting()

    def unsettled(self, least: int) -> dict[int, int]:
        """Do what `ChunkStream` does."""
        slots = np.flatnonzero(self.is_used & ~self.is_complete & (self.flags & _FIRST > 0))
        seen, least = self.seen[slots] & np.uint64(self._members.bits), min(least, len(self._members))
        begun = zip(self.clock[slots].tolist(), seen.tolist(), strict=True)
        return {clock: who for clock, who in begun if who.bit_count() >= least}

    def close(self, clock: int, least: int) -> list[Answer]:
        """Do what `ChunkStream` does."""
        return self._complete_waiting(clock, least)

    def _complete_waiting(self, closing: int | None = None, least: int | None = None) -> list[Answer]:
        """Look at what has no result again; of the exchange `closing` with another quorum."""
        slots = np.flatnonzero(self.is_used & ~self.is_complete)
        self._answers = []
        # As in `chunk_stream`, those that settle an exchange do so before others of it are looked at.
        for at, slot in enumerate(slots[np.argsort(self.flags[slots] & _FIRST == 0, kind="stable")]):
            self._complete(np.array([at]), np.array([slot]), least if self.clock[slot] == closing else None)
        return self._as_packets(*self._collected())

    @staticmethod
    def _as_packets(to: NDArray[np.uint8], batch: PacketBatch) -> list[Answer]:
        return [Answer(int(worker), decode(data)) for worker, data in zip(to, batch.datagrams(), strict=True)]

    # -- many ----------------------------------------------------------------------------------------------------

    def handle(self, batch: PacketBatch) -> tuple[NDArray[np.uint8], PacketBatch]:
        """Take in chunks of members, in the order in which they came.

        Args:
            batch: `DATA` of members, each from its port and with its cookie.

        Returns:
            [A] to whom answers go, a worker or `ALL` each, and the A answers.
        """
        self._answers = []
        header = batch.header
        whole = (header["slot"] == header["chunk"] % self._shape.slots) & np.isin(
            header["count"], (0, self._shape.values // VALUES_STEP)
        )
        if not whole.all():
            self._refuse(batch, np.flatnonzero(~whole), Reason.MALFORMED)
        order = np.flatnonzero(whole)
        firsts = np.flatnonzero(header["flags"][order] & _FIRST)
        start = 0
        for first in [*firsts.tolist(), len(order)]:
            self._segment(batch, order[start:first])
            self._segment(batch, order[first : first + 1])
            start = first + 1
        return self._collected()

    def _segment(self, batch: PacketBatch, order: NDArray[np.int64]) -> None:
        """Take in packets during which it stays as it is who contributes."""
        if not len(order):
            return
        header = batch.header
        slots = header["slot"][order].astype(np.int64)
        chunk = header["chunk"][order]
        kept = self.chunk[slots[self.is_used[slots] & (_lead(chunk, self.chunk[slots]) > 0)]]
        ahead = _lead(chunk, chunk[:1])
        if int(ahead.max()) - int(ahead.min()) >= self._shape.slots:  # a slot may be taken over twice
            kept = np.concatenate([kept, chunk])
        before = self._acked()
        self._note_acked(header["worker"][order], header["bitmap"][order])
        # A slot that is to be taken over may be needed by another at the end than at the beginning, or by nobody.
        if len(order) > 1 and (_lacking(kept, before) != _lacking(kept, self._acked())).any():
            for worker, acked in zip(self._members, before, strict=True):
                self._members[worker].acked = int(acked)
            for one in order:
                self._segment(batch, np.array([one]))
            return
        by_slot = np.argsort(slots, kind="stable")
        ordered = slots[by_slot]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        rank = np.empty(len(order), np.int64)
        rank[by_slot] = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
        for number in range(int(rank.max()) + 1):
            self._round(batch, order[rank == number])

    def _note_acked(self, workers: NDArray[np.uint8], bitmap: NDArray[np.uint32]) -> None:
        for worker in np.unique(workers):
            member = self._members[int(worker)]
            told = bitmap[workers == worker].astype(np.int64)
            ahead = (told - member.acked + (1 << 31)) % (1 << 32) - (1 << 31)
            if (most := int(ahead.max())) > 0:
                member.acked = (member.acked + most) % (1 << 32)

    def _acked(self) -> NDArray[np.uint32]:
        """[N] of each member, by rank, the first chunk whose result it lacks."""
        return np.array([self._members[worker].acked for worker in self._members], np.uint32)

    def _round(self, batch: PacketBatch, at: NDArray[np.int64]) -> None:
        """Take in packets of different slots."""
        header = batch.header
        one = header[at]
        slots, workers = one["slot"].astype(np.int64), one["worker"].astype(np.uint64)
        bits = _ONE << workers
        lead = np.where(self.is_used[slots], _lead(one["chunk"], self.chunk[slots]), 1)
        later_attempt = (lead == 0) & (one["epoch"] > self.attempt[slots])
        old = (lead < 0) | ((lead == 0) & (one["epoch"] < self.attempt[slots]))
        if old.any():
            self._refuse(batch, at[old], Reason.SUPERSEDED)
        is_settled, contributors = self._contributors(one["clock"])
        is_in = (one["flags"] & _PRIME > 0) | (contributors & bits > 0)
        none_left = is_settled & (contributors & np.uint64(self._members.bits) == 0)
        claims = (lead > 0) | later_attempt
        may_claim = is_in | none_left
        over = np.flatnonzero(claims & may_claim & (lead > 0) & self.is_used[slots])
        lacking = _lacking(self.chunk[slots[over]], self._acked())
        for index, who in zip(over[lacking >= 0], lacking[lacking >= 0], strict=True):
            claims[index], old[index] = False, True
            self._refuse(batch, at[index : index + 1], Reason.HELD_UP, list(self._members)[who])
        self._claim(one, slots, claims & may_claim)
        live = ~old & (may_claim | ~claims)
        done = live & self.is_complete[slots]
        if done.any():
            self._answer(at[done], one["worker"][done], slots[done])
        live &= ~done
        fresh = live & is_in & (self.seen[slots] & bits == 0)
        for worker in one["worker"][live & ~fresh]:
            self._members[int(worker)].counts["duplicates"] += 1
        self._add(batch, at[fresh], one[fresh], slots[fresh], bits[fresh])
        if live.any():
            self._complete(at[live], slots[live])

    def _claim(self, one: NDArray[np.void], slots: NDArray[np.int64], claims: NDArray[np.bool_]) -> None:
        own, header = slots[claims], one[claims]
        self.is_used[own], self.is_complete[own], self.has_values[own] = True, False, False
        self.chunk[own], self.clock[own], self.attempt[own] = header["chunk"], header["clock"], header["epoch"]
        self.flags[own], self.seen[own] = header["flags"] & (_FIRST | _PRIME), 0
        self.exponent[own] = ZERO_EXPONENT

    def _add(
        self, batch: PacketBatch, at: NDArray[np.int64], one: NDArray[np.void], slots: NDArray[np.int64],
        bits: NDArray[np.uint64],
    ) -> None:  # fmt: skip
        if not len(at):
            return
        if self._cap is not None:
            self._clamp(batch, at, one, slots, self._cap)
        self.exponent[slots] = np.maximum(self.exponent[slots], one["exponent"])
        self.flags[slots] |= one["flags"] & _SATURATED
        self.seen[slots] |= bits
        full = one["count"] > 0
        at, slots = at[full], slots[full]
        if not len(at):
            return
        begun = self.has_values[slots]
        self.values[slots[~begun]] = batch.values[at[~begun]]
        self.has_values[slots] = True
        if not begun.any():
            return
        at, slots = at[begun], slots[begun]
        primes = self.flags[slots] & _PRIME > 0
        if primes.any():
            self.values[slots[primes]] = np.maximum(self.values[slots[primes]], batch.values[at[primes]])
        at, more = at[~primes], slots[~primes]
        addends, sums = batch.values[at], self.values[more]
        total = sums + addends  # wraps around where it does not fit
        overflown = ((sums ^ total) & (addends ^ total)) < 0
        if overflown.any():
            total = np.where(overflown, np.where(addends < 0, np.int32(-(1 << 31)), np.int32((1 << 31) - 1)), total)
            self.flags[more[overflown.any(axis=1)]] |= _SATURATED
        self.values[more] = total

    def _clamp(
        self, batch: PacketBatch, at: NDArray[np.int64], one: NDArray[np.void], slots: NDArray[np.int64], cap: Cap
    ) -> None:
        """Clamp what members bring, and count it; flag chunks of which their packets do not say the same."""
        primes, full = one["flags"] & _PRIME > 0, one["count"] > 0
        # What has no values is looked at with those that stand in its row, and they do not count.
        values, exponent, clamped, squares = cap.clamp(batch.values[at], one["exponent"], one["epoch"], primes)
        batch.values[at], one["exponent"] = values, exponent
        for index in np.flatnonzero(full & ~primes):
            member = self._members[int(one["worker"][index])]
            added = Brought(self._shape.values, int(clamped[index]), int(squares[index]))
            member.brought = member.brought.plus(added)
        differs = (exponent != self.exponent[slots]) | ((one["flags"] ^ self.flags[slots]) & _PRIME > 0)
        self.flags[slots[full & self.has_values[slots] & differs]] |= _SATURATED

    def _complete(self, at: NDArray[np.int64], slots: NDArray[np.int64], quorum: int | None = None) -> None:
        """Complete those of some slots in which all are that are to be; tell all members."""
        members = np.uint64(self._members.bits)
        is_over, contributors = self._contributors(self.clock[slots])
        seen, expected = self.seen[slots], contributors & members
        is_over &= seen & expected == expected
        first = self.flags[slots] & _FIRST > 0
        if first.any():
            here = len(self._members)
            enough = min(quorum or self.quorum or here, here)
            is_over[first] = [int(bits).bit_count() >= enough for bits in seen[first] & members]
        at, slots, first, seen = at[is_over], slots[is_over], first[is_over], seen[is_over]
        if not len(slots):
            return
        self.is_complete[slots] = True
        if first.any():
            key = self.clock[slots[first]].astype(np.int64) % self._shape.slots
            self._is_settled[key] = True
            self._settled_clock[key], self._settled[key] = self.clock[slots[first]], seen[first] & members
        everyone = np.uint64((1 << self._shape.workers) - 1)
        self.flags[slots[seen != everyone]] |= _PARTIAL
        self._answer(at, np.full(len(slots), ALL, np.uint8), slots)

    def _contributors(self, clock: NDArray[np.uint32]) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """Whether it is settled who contributes to exchanges, and who does, as bits."""
        key = clock.astype(np.int64) % self._shape.slots
        is_settled = self._is_settled[key] & (self._settled_clock[key] == clock)
        return is_settled, np.where(is_settled, self._settled[key], np.uint64(0))

    # -- answers -------------------------------------------------------------------------------------------------

    def _answer(self, at: NDArray[np.int64], to: NDArray[np.uint8], slots: NDArray[np.int64]) -> None:
        """Answer the packets `at` with the results in `slots`, as they are now."""
        batch = PacketBatch(len(slots), self._shape.values)
        header = batch.header
        header["magic"], header["kind"], header["job"], header["worker"] = (
            MAGIC,
            PacketKind.RESULT,
            self._shape.number,
            to,
        )
        header["flags"] = VERSION << 4 | self.flags[slots]
        header["count"] = np.where(self.has_values[slots], self._shape.values // VALUES_STEP, 0)
        seen = self.seen[slots]
        header["cookie"], header["bitmap"] = seen >> np.uint64(32), seen & np.uint64(0xFFFFFFFF)
        header["clock"], header["chunk"], header["slot"] = self.clock[slots], self.chunk[slots], slots
        header["epoch"], header["exponent"] = self.attempt[slots], self.exponent[slots]
        full = self.has_values[slots]
        batch.values[full] = self.values[slots[full]]
        batch.sizes[:] = HEADER_BYTES + np.where(full, 4 * self._shape.values, 0)
        batch.seal()
        self._answers.append((at, to, batch))

    def _refuse(self, batch: PacketBatch, at: NDArray[np.int64], reason: Reason, about: int | None = None) -> None:
        """Refuse packets `at`, each by itself: that is rare."""
        for index in at:
            one = batch.header[index]
            slot = int(one["slot"])
            worker = int(one["worker"])
            packet = Packet(PacketKind.DATA, int(one["job"]), worker, clock=int(one["clock"]), chunk=int(one["chunk"]),
                            slot=slot)  # fmt: skip
            if reason is Reason.SUPERSEDED:
                kept, attempt, exponent = self.chunk[slot], self.attempt[slot], self.exponent[slot]
                answer = self._members.refuse(
                    packet, reason, chunk=int(kept), attempt=int(attempt), exponent=int(exponent)
                )
            else:
                answer = self._members.refuse(packet, reason, worker=about)
            refused = PacketBatch.of([answer.packet], self._shape.values)
            self._answers.append((np.array([index]), np.array([worker], np.uint8), refused))

    def _collected(self) -> tuple[NDArray[np.uint8], PacketBatch]:
        """All answers, in the order of the packets that they answer."""
        answers, self._answers = self._answers, []
        if not answers:
            return np.zeros(0, np.uint8), PacketBatch(0, self._shape.values)
        at = np.concatenate([one for one, _, _ in answers])
        if len(answers) == 1:
            return answers[0][1], answers[0][2]
        order = np.argsort(at, kind="stable")
        together = PacketBatch(len(at), self._shape.values)
        np.concatenate([batch.rows for _, _, batch in answers], out=together.rows)
        np.concatenate([batch.sizes for _, _, batch in answers], out=together.sizes)
        return np.concatenate([to for _, to, _ in answers])[order], together.among(order)


def _lacking(chunk: NDArray[np.uint32], acked: NDArray[np.uint32]) -> NDArray[np.int64]:
    """[K] of each chunk the first member, counted from 0, that lacks its result; -1 if none does.

    Args:
        chunk: [K].
        acked: [N] of each member.
    """
    lacks_KN = _lead(acked[None, :], chunk[:, None]) <= 0
    return np.where(lacks_KN.any(axis=1), lacks_KN.argmax(axis=1), -1)


def _lead(number: NDArray[np.uint32], other: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The distances by which numbers of 32 bits lie behind others; below 0 if they lie before them."""
    return (np.asarray(number, np.uint32) - np.asarray(other, np.uint32)).astype(np.int32)
