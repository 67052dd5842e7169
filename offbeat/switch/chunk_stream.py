"""Streaming sums at a switch: the reference model of what becomes of each packet that carries a chunk.

    slot = chunk modulo slots. A newer chunk takes the slot over; an older one is refused; of the same chunk each
    worker's values are added once. It is complete when all who are to be in it are, which is noted by a flag of its
    own: workers that go on must not be able to undo it. The result is kept until its slot is taken over, for those
    that lost it, and that is refused as long as a member lacks the result.

An exchange is a bucket's chunks: first `PRIME` ones, of whose values, the exponents of what follows, the largest are
kept instead of sums; then those with values. Its first chunk settles who contributes: all members, the first `quorum`
of them, or those who are in it when control closes it. Who is not in it gets results only. A chunk in which a value did
not fit is flagged, and summed again in the same slot: a further attempt. What a worker brings is clamped where the job
has a cap (`cap`).

It is written to be read, not to be fast; `vector_stream` does the same to whole batches, and tests hold one against the
other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from offbeat.switch.cap import Brought
from offbeat.switch.fixed_point import saturating_sum
from offbeat.switch.members import ALL, Answer, Members, MemberState
from offbeat.switch.packet import NO_FLAGS, ZERO_EXPONENT, Flag, Packet, PacketKind, Reason, distance, is_newer

if TYPE_CHECKING:
    from offbeat.switch.cap import Cap
    from offbeat.switch.job_shape import JobShape


@dataclass
class ChunkSlot:
    """One chunk's sum.

    Args:
        chunk, clock, attempt: which chunk of which exchange, and how often it has been summed before.
        flags: what is said of it.
        seen: workers that are in it, as bits.
        exponent: the largest that one of them used or wants.
        values: the sum, or the largest if it primes; empty while it is one of zeros.
        is_complete: whether the result stands.
    """

    chunk: int
    clock: int
    attempt: int
    flags: Flag
    seen: int = 0
    exponent: int = ZERO_EXPONENT
    values: list[int] = field(default_factory=list)
    is_complete: bool = False


class ChunkStream:
    """The slots of one job.

    Args:
        shape, members: of the job.
        quorum: members whose contributions settle an exchange at once; None for all.
    """

    def __init__(self, shape: JobShape, members: Members, quorum: int | None = None) -> None:
        self._shape, self._members, self.quorum, self._cap = shape, members, quorum, shape.cap
        self.slots: list[ChunkSlot | None] = [None] * shape.slots
        self._settled: dict[int, tuple[int, int]] = {}  # exchange modulo slots: which it is, and who contributes

    def data(self, packet: Packet, member: MemberState) -> list[Answer]:
        """Take in a chunk of a member."""
        if packet.slot != packet.chunk % self._shape.slots or len(packet.values) not in (0, self._shape.values):
            return [self._members.refuse(packet, Reason.MALFORMED)]
        if is_newer(packet.bitmap, member.acked):
            member.acked = packet.bitmap
        slot, bit = self.slots[packet.slot], 1 << packet.worker
        lead = 1 if slot is None else distance(packet.chunk, slot.chunk)
        if slot is not None and (lead < 0 or (lead == 0 and packet.epoch < slot.attempt)):
            return [
                self._members.refuse(
                    packet, Reason.SUPERSEDED, chunk=slot.chunk, attempt=slot.attempt, exponent=slot.exponent
                )
            ]
        if slot is None or lead > 0 or packet.epoch > slot.attempt:
            if not self._is_in(packet, bit) and not self._has_no_contributor_left(packet.clock):
                return []
            if slot is not None and lead > 0 and (lacking := self._members.lacks(slot.chunk)) is not None:
                return [self._members.refuse(packet, Reason.HELD_UP, worker=lacking)]
            flags = packet.flags & (Flag.FIRST | Flag.PRIME)
            slot = self.slots[packet.slot] = ChunkSlot(packet.chunk, packet.clock, packet.epoch, flags)
        if slot.is_complete:
            return [self._result(slot, packet.worker)]
        if not slot.seen & bit and self._is_in(packet, bit):
            self._add(slot, packet if self._cap is None else self._clamped(slot, packet, member, self._cap))
            slot.seen |= bit
        else:
            member.counts["duplicates"] += 1
        return self._complete(slot)

    def evict(self, worker: int) -> list[Answer]:
        """Go on without a worker, which is no member any more; what it has contributed stays where it is."""
        self._settled = {key: (clock, who & ~(1 << worker)) for key, (clock, who) in self._settled.items()}
        return [answer for slot in self._waiting for answer in self._complete(slot)]

    def unsettled(self, least: int) -> dict[int, int]:
        """The exchanges that so many members have begun and that are not settled, with those who are in, as bits."""
        begun = {slot.clock: slot.seen & self._members.bits for slot in self._waiting if Flag.FIRST in slot.flags}
        return {clock: who for clock, who in begun.items() if who.bit_count() >= min(least, len(self._members))}

    def close(self, clock: int, least: int) -> list[Answer]:
        """Settle an exchange with those who are in it, if they are so many; complete what has waited for that."""
        answers = []
        for slot in self._waiting:
            answers += self._complete(slot, least if slot.clock == clock else None)
        return answers

    @property
    def _waiting(self) -> list[ChunkSlot]:
        """The chunks without a result; first those that settle an exchange, and with it who is to be in the others."""
        waiting = [slot for slot in self.slots if slot is not None and not slot.is_complete]
        return sorted(waiting, key=lambda slot: Flag.FIRST not in slot.flags)

    def _is_in(self, packet: Packet, bit: int) -> bool:
        """Whether a worker's part of a chunk counts: who contributes is settled, unless it only primes."""
        return Flag.PRIME in packet.flags or bool((self._contributors(packet.clock) or 0) & bit)

    def _contributors(self, clock: int) -> int | None:
        """The workers that contribute to an exchange, as bits; None while that is not settled."""
        settled, who = self._settled.get(clock % self._shape.slots, (None, 0))
        return who if settled == clock else None

    def _has_no_contributor_left(self, clock: int) -> bool:
        """Whether all who were to contribute are lost: what lacks then is zeros."""
        return (who := self._contributors(clock)) is not None and not who & self._members.bits

    def _clamped(self, slot: ChunkSlot, packet: Packet, member: MemberState, cap: Cap) -> Packet:
        """Clamp what a member brings, and count it; flag a chunk of which its packets do not say the same."""
        has_values, primes = bool(packet.values), Flag.PRIME in packet.flags
        values, exponent, clamped, squares = cap.clamp(
            np.array([packet.values], np.int32), np.array([packet.exponent], np.int8),
            np.array([packet.epoch], np.uint16), np.array([primes]),
        )  # fmt: skip
        packet = replace(packet, exponent=int(exponent[0]), values=tuple(values[0].tolist()))
        if has_values and not primes:
            member.brought = member.brought.plus(Brought(len(packet.values), int(clamped[0]), int(squares[0])))
        differs = packet.exponent != slot.exponent or (packet.flags ^ slot.flags) & Flag.PRIME
        if has_values and slot.values and differs:
            slot.flags |= Flag.SATURATED
        return packet

    def _add(self, slot: ChunkSlot, packet: Packet) -> None:
        slot.exponent = max(slot.exponent, packet.exponent)
        slot.flags |= packet.flags & Flag.SATURATED
        if packet.values:
            if not slot.values:
                slot.values = list(packet.values)
            elif Flag.PRIME in slot.flags:
                slot.values = [max(kept, value) for kept, value in zip(slot.values, packet.values, strict=True)]
            else:
                total, did_not_fit = saturating_sum(slot.values, packet.values)
                slot.values = total.tolist()
                slot.flags |= Flag.SATURATED if did_not_fit else NO_FLAGS

    def _complete(self, slot: ChunkSlot, quorum: int | None = None) -> list[Answer]:
        """Complete a slot if all are in it that are to be; `quorum` is another number that settles its exchange."""
        members = self._members.bits
        if Flag.FIRST in slot.flags:
            here = len(self._members)
            is_over = (slot.seen & members).bit_count() >= min(quorum or self.quorum or here, here)
        else:
            who = self._contributors(slot.clock)
            is_over = who is not None and slot.seen & who & members == who & members
        if not is_over:
            return []
        slot.is_complete = True
        if Flag.FIRST in slot.flags:
            self._settled[slot.clock % self._shape.slots] = (slot.clock, slot.seen & members)
        if slot.seen.bit_count() < self._shape.workers:
            slot.flags |= Flag.PARTIAL
        return [self._result(slot, ALL)]

    def _result(self, slot: ChunkSlot, worker: int) -> Answer:
        packet = Packet(
            PacketKind.RESULT, self._shape.number, worker, cookie=slot.seen >> 32, clock=slot.clock, chunk=slot.chunk,
            slot=slot.chunk % self._shape.slots, epoch=slot.attempt, bitmap=slot.seen & 0xFFFFFFFF,
            exponent=slot.exponent, flags=slot.flags, values=tuple(slot.values),
        )  # fmt: skip
        return Answer(worker, packet)
