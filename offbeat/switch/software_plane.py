"""A switch in software: NumPy over whole batches of packets, whatever carries them.

A packet that is not whole, of no job that is known, or not from the port and with the cookie of its worker, is found
with all others of its batch at once, so that garbage costs little more than its bytes. The first few of a batch are
told why they are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat.switch.data_plane import (
    MIB,
    TABLE_MIB,
    JobClocks,
    JobStats,
    MemberStats,
    lags,
    no_room_for_table,
    who_settled,
)
from offbeat.switch.job_shape import MOST_SLOTS
from offbeat.switch.job_state import JobState, Send
from offbeat.switch.members import ALL, refusal
from offbeat.switch.packet import MOST_WORKERS, PacketKind, Reason
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.vector_stream import VectorStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from offbeat.protocol.switch_control import Strategy
    from offbeat.switch.clocks import Windows
    from offbeat.switch.job_shape import JobShape

    # Packets, the address that each goes to, and which packet goes there.
    SendBatch = Callable[[PacketBatch, NDArray[np.uint64], NDArray[np.int64]], None]

_TOLD = 16  # of a batch, why they are refused
_NO_PORT = np.uint64(0)


class _Job:
    """One job, and what of it is looked up for whole batches."""

    def __init__(self, state: JobState, stream: VectorStream) -> None:
        self.state, self.stream = state, stream
        self.cookies = np.zeros(MOST_WORKERS, np.uint32)
        self.ports = np.full(MOST_WORKERS, _NO_PORT)
        self.is_in = np.zeros(MOST_WORKERS, np.bool_)

    def note_members(self) -> None:
        self.cookies[:], self.ports[:], self.is_in[:] = 0, _NO_PORT, False
        for worker in self.state.members:
            member = self.state.members[worker]
            self.cookies[worker], self.is_in[worker] = member.cookie, True
            self.ports[worker] = member.port if isinstance(member.port, int) else _NO_PORT

    def senders(
        self, header: NDArray[np.void], ports: NDArray[np.uint64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[B] which packets come from where a member is known to be, and which are the `JOIN` by which one is."""
        worker = header["worker"].astype(np.int64)
        index = np.minimum(worker, MOST_WORKERS - 1)
        is_its_own = (worker < MOST_WORKERS) & self.is_in[index] & (self.cookies[index] == header["cookie"])
        known = self.ports[index]
        binds = is_its_own & (known == _NO_PORT) & (header["kind"] == PacketKind.JOIN)
        return is_its_own & (known == ports) & (ports != _NO_PORT), binds


class SoftwarePlane:
    """Jobs whose packets are summed in this process. A `DataPlane`.

    Args:
        send: takes what is to be sent; called within `handle` and whenever control changes something.
        table_mib: of all jobs' tables.

    Attributes:
        dropped: packets that were not taken in, by why.
    """

    def __init__(self, send: SendBatch, table_mib: int = TABLE_MIB) -> None:
        self._send, self._table_bytes = send, table_mib << MIB
        self._jobs: dict[int, _Job] = {}
        self.dropped = {"foreign": 0, "unknown job": 0, "refused": 0, "damaged": 0}
        self._told = 0  # of this batch, why they are refused

    # -- control -------------------------------------------------------------------------------------------------

    @property
    def most_slots(self) -> int:
        return MOST_SLOTS

    def create_job(
        self, shape: JobShape, strategy: Strategy, *, clock: int = 0, exponent: int = 0, windows: Windows | None = None
    ) -> None:
        assert shape.number not in self._jobs, f"job {shape.number} is there already"
        tables = [(job.state.shape.rows, job.state.shape.values) for job in self._jobs.values()]
        needed = sum(4 * rows * values for rows, values in [*tables, (shape.rows, shape.values)])
        if shape.rows and needed > self._table_bytes:
            raise no_room_for_table(shape.rows, needed, self._table_bytes)
        state = JobState(shape, strategy, clock=clock, exponent=exponent, windows=windows, stream=VectorStream)
        assert isinstance(state.stream, VectorStream)
        self._jobs[shape.number] = _Job(state, state.stream)

    def destroy_job(self, number: int) -> None:
        self._jobs.pop(number, None)

    def admit(self, number: int, worker: int, cookie: int, *, chunk: int = 0) -> None:
        job = self._jobs[number]
        job.state.admit(worker, cookie, chunk=chunk)
        job.note_members()

    def evict(self, number: int, worker: int) -> None:
        job = self._jobs[number]
        self._send_each(job, job.state.evict(worker))
        job.note_members()

    def set_strategy(self, number: int, strategy: Strategy) -> Windows | None:
        job = self._jobs[number]
        sends = job.state.set_strategy(strategy)
        if sends is None:
            return None
        self._send_each(job, sends)
        return job.state.clocks.windows

    def allow(self, number: int, worker: int, until: int) -> None:
        job = self._jobs[number]
        self._send_each(job, job.state.allow(worker, until))

    def unsettled(self, number: int, least: int) -> dict[int, int]:
        return self._jobs[number].stream.unsettled(least)

    def close(self, number: int, clock: int, least: int) -> int:
        job = self._jobs[number]
        sends = job.state.close(clock, least)
        self._send_each(job, sends)
        return who_settled(clock, (send.packet for send in sends))

    def clocks(self, number: int) -> JobClocks:
        clocks, members = self._jobs[number].state.clocks, self._jobs[number].state.members
        finished = {worker: members[worker].finished for worker in members}
        return JobClocks(clocks.low, clocks.windows, finished, {worker: members[worker].until for worker in members})

    def stats(self, number: int, now_s: float) -> JobStats:
        state = self._jobs[number].state
        clocks, here = state.clocks, {worker: state.members[worker] for worker in state.members}
        behind = lags(
            clocks.high,
            {rank: one.finished for rank, one in here.items()},
            {rank: one.acked for rank, one in here.items()},
        )
        members = {}
        for worker, one in here.items():
            silent_s = now_s - one.heard_s if one.port is not None else float("inf")
            members[worker] = MemberStats(one.finished, behind[worker], silent_s, dict(one.counts), one.brought)
        return JobStats(clocks.low, clocks.high, clocks.windows, members, dict(state.members.refused))

    # -- packets -------------------------------------------------------------------------------------------------

    def handle(self, batch: PacketBatch, ports: NDArray[np.uint64], now_s: float) -> None:
        """Take in packets of any job, in the order in which they came.

        Args:
            batch: packets; rows may be cut short by what they were received into.
            ports: [B] where each came from.
        """
        self._told = 0
        damaged = batch.are_damaged()
        if damaged.any():
            self.dropped["damaged"] += int(damaged.sum())
            batch, ports = batch.among(~damaged), ports[~damaged]
        numbers = batch.header["job"]
        known = np.zeros(len(batch), np.bool_)
        for number in np.unique(numbers):
            if (job := self._jobs.get(int(number))) is None:
                continue
            ours = batch.are_ours(int(number), from_workers=True)
            known |= numbers == number
            self.dropped["foreign"] += int((numbers == number).sum() - ours.sum())
            if ours.any():
                which = np.flatnonzero(ours)
                left, where = batch if len(which) == len(batch) else batch.among(which), ports[which]
                while len(left):
                    taken = self._handle_job(job, left, where, now_s)
                    left, where = left.behind(taken), where[taken:]
        if not known.all():
            self._refuse_strangers(batch.among(~known), ports[~known])

    def _handle_job(self, job: _Job, batch: PacketBatch, ports: NDArray[np.uint64], now_s: float) -> int:
        """Take in packets up to the first by which a worker joins or leaves; how many they are, with it."""
        header = batch.header
        is_member, binds = job.senders(header, ports)
        data = is_member & (header["kind"] == PacketKind.DATA)
        if data.all():
            self._sum(job, batch, now_s)
            return len(batch)
        turns = np.flatnonzero(binds | (is_member & (header["kind"] == PacketKind.LEAVE)))
        end = int(turns[0]) + 1 if len(turns) else len(batch)
        # In the order in which they came: an update that comes before a clock is in before it.
        cuts = np.flatnonzero(data[1:end] != data[: end - 1]) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), end], strict=True):
            if data[start]:
                self._sum(job, batch.among(np.arange(start, stop)), now_s)
                continue
            sends: list[Send] = []
            for i in range(start, stop):
                if not is_member[i] and not binds[i]:
                    self.dropped["refused"] += 1
                    self._told += 1
                    if self._told > _TOLD:
                        continue
                sends += job.state.handle(batch.packet(i), int(ports[i]), now_s)
            self._send_each(job, sends)
        if len(turns):
            job.note_members()
        return end

    def _sum(self, job: _Job, batch: PacketBatch, now_s: float) -> None:
        workers, counts = np.unique(batch.header["worker"], return_counts=True)
        for worker, count in zip(workers.tolist(), counts.tolist(), strict=True):
            member = job.state.members[worker]
            member.heard_s = now_s
            member.counts[PacketKind.DATA.name] += count
        to, answers = job.stream.handle(batch.narrowed(job.state.shape.values))
        if not len(to):
            return
        everyone = job.ports[job.ports != _NO_PORT]
        broadcast = to == ALL
        times = np.where(broadcast, len(everyone), 1)
        rows = np.repeat(np.arange(len(to)), times)
        where = np.empty(len(rows), np.uint64)
        is_broadcast = broadcast[rows]
        where[is_broadcast] = np.tile(everyone, int(broadcast.sum()))
        where[~is_broadcast] = job.ports[to[~broadcast]]
        self._send(answers, where, rows)

    def _send_each(self, job: _Job, sends: Sequence[Send]) -> None:
        if sends:
            batch = PacketBatch.of([send.packet for send in sends], job.state.shape.values)
            ports = np.array([send.port for send in sends], np.uint64)
            self._send(batch, ports, np.arange(len(sends)))

    def _refuse_strangers(self, batch: PacketBatch, ports: NDArray[np.uint64]) -> None:
        """Tell whoever speaks this protocol that its job is not known here."""
        ours = np.zeros(len(batch), np.bool_)
        for number in np.unique(batch.header["job"])[:_TOLD]:
            ours |= batch.are_ours(int(number), from_workers=True)
        self.dropped["foreign"] += int((~ours).sum())
        self.dropped["unknown job"] += int(ours.sum())
        which = np.flatnonzero(ours)[: max(0, _TOLD - self._told)]
        if len(which):
            packets = [batch.packet(i) for i in which.tolist()]
            refusals = [refusal(packet, Reason.UNKNOWN_JOB, packet.worker, packet.chunk) for packet in packets]
            self._send(PacketBatch.of(refusals, 0), ports[which], np.arange(len(which)))
