"""The data plane in the kernel: jobs, members and policies in the maps of `switch.bpf.c`, and what it says of them.

Packets are its own affair. What control changes it changes by calling the program, so that it holds the same locks as
packets do: who takes part, windows, and which sums an eviction completes. The answers to that are sent from here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.errors import PlanError
from offbeat.switch.cap import Brought
from offbeat.switch.clocks import Windows, first_windows
from offbeat.switch.data_plane import JobClocks, JobStats, MemberStats, lags, no_room_for_table, who_settled
from offbeat.switch.kernel.layout import COMMAND, EXCHANGE, JOB, MEMBER, row_of, slot_of
from offbeat.switch.members import ALL
from offbeat.switch.packet import MOST_WORKERS, NO_FLAGS, VALUES_STEP, Flag, Packet, PacketKind, Reason
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.strategy import check_window

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from offbeat.protocol.switch_control import Strategy
    from offbeat.switch.job_shape import JobShape
    from offbeat.switch.kernel.libbpf import KernelObject
    from offbeat.switch.software_plane import SendBatch

_ETHERNET = bytes(14)  # in front of a command, which is called as if it were a frame


class _Operation(enum.IntEnum):
    ADMIT = 1
    EVICT = 2
    SET_STRATEGY = 3
    COMPLETE = 4
    ALLOW = 5
    FIND = 6


@dataclass
class _KernelJob:
    shape: JobShape
    strategy: Strategy
    index: int
    first_slot: int
    first_row: int


class KernelPlane:
    """Jobs whose packets are summed by the kernel's program. A `DataPlane`.

    Args:
        program: that is loaded.
        send: takes what control has to send.
        sizes: with which it was compiled.
    """

    def __init__(self, program: KernelObject, send: SendBatch, sizes: Mapping[str, int]) -> None:
        self._program, self._send, self._sizes = program, send, sizes
        self._jobs: dict[int, _KernelJob] = {}
        values = sizes["MOST_VALUES"]
        self._job_of = program.map("numbers", np.dtype("<u4"))
        self._state = program.map("jobs", JOB, is_locked=True)
        self._members = program.map("members", MEMBER)
        self._slots = program.map("slots", slot_of(values), is_locked=True)
        self._exchanges = program.map("exchanges", EXCHANGE, is_locked=True)
        self._used_rows = 0  # by any job so far: those behind them are zero
        self._rows = program.map("rows", row_of(values), is_locked=True)

    @property
    def dropped(self) -> dict[str, int]:
        """Packets that were not taken in, by why; see `DataPlane`."""
        names = ("foreign", "unknown job", "refused", "fragments", "bundles", "damaged")
        return dict(zip(names, self._program.counts("counters", len(names)), strict=True))

    # -- control -------------------------------------------------------------------------------------------------

    @property
    def most_slots(self) -> int:
        most = start = 0
        for first, slots in sorted((job.first_slot, job.shape.slots) for job in self._jobs.values()):
            most, start = max(most, first - start), first + slots
        return max(most, self._sizes["MOST_SLOTS"] - start)

    def create_job(
        self, shape: JobShape, strategy: Strategy, *, clock: int = 0, exponent: int = 0, windows: Windows | None = None
    ) -> None:
        assert shape.number not in self._jobs, f"job {shape.number} is there already"
        check_window(strategy, shape.ring)
        if shape.values > self._sizes["MOST_VALUES"]:
            raise PlanError(
                f"Cannot put {shape.values} values into a packet: this switch takes {self._sizes['MOST_VALUES']} at "
                "most, as its ports' frames do - at `plan.fabric.values`."
            )
        used = {job.index for job in self._jobs.values()}
        index = next((index for index in range(self._sizes["MOST_JOBS"]) if index not in used), None)
        if index is None:
            raise PlanError(f"Cannot begin another job: this switch has {self._sizes['MOST_JOBS']}.")
        job = _KernelJob(
            shape,
            strategy,
            index,
            self._room("MOST_SLOTS", shape.slots, [(one.first_slot, one.shape.slots) for one in self._jobs.values()]),
            self._room("MOST_ROWS", shape.rows, [(one.first_row, one.shape.rows) for one in self._jobs.values()]),
        )
        self._clear(job)
        windows = windows or first_windows(strategy, shape.ring, clock)
        state = np.zeros((), JOB)
        for name, value in {
            "index": index, "number": shape.number, "workers": shape.workers, "blocks": shape.values // VALUES_STEP,
            "slots": shape.slots, "ring": shape.ring, "rows": shape.rows, "first_slot": job.first_slot,
            "first_row": job.first_row, "quorum": strategy.settling or 0, "exponent": exponent, "low": clock,
            "high": clock, "window_old": windows.old, "window_new": windows.new, "effective": windows.effective,
            "epoch": windows.epoch, "is_capped": shape.cap is not None,
            "cap_exponent": 0 if shape.cap is None else shape.cap.exponent,
            "limits": 0 if shape.cap is None else shape.cap.limits,
        }.items():  # fmt: skip
            state[name] = value
        self._state[index] = state
        self._jobs[shape.number] = job
        self._job_of[shape.number] = np.array(index, np.uint32)

    def _room(self, pool: str, size: int, taken: list[tuple[int, int]]) -> int:
        """The first place with room for `size` among those that are taken."""
        start = 0
        for first, length in sorted(taken):
            if first - start >= size:
                break
            start = max(start, first + length)
        most = self._sizes[pool]
        if start + size <= most:
            return start
        if pool == "MOST_ROWS":
            row_bytes = 4 * self._sizes["MOST_VALUES"]  # of a row, however few of them its job uses
            raise no_room_for_table(size, (start + size) * row_bytes, most * row_bytes)
        raise PlanError(
            f"Cannot begin another job with {size} slots: this switch has {most} for all jobs. Use fewer - at "
            "`plan.fabric.slots`."
        )

    def _clear(self, job: _KernelJob) -> None:
        for pool in (self._slots, self._exchanges):
            pool.clear(job.first_slot, job.shape.slots)
        end = job.first_row + job.shape.rows
        self._rows.clear(job.first_row, max(0, min(end, self._used_rows) - job.first_row))
        self._used_rows = max(end, self._used_rows)

    def destroy_job(self, number: int) -> None:
        if self._jobs.pop(number, None) is not None:
            del self._job_of[number]

    def admit(self, number: int, worker: int, cookie: int, *, chunk: int = 0) -> None:
        job = self._jobs[number]
        member = np.zeros((), MEMBER)
        member["cookie"] = cookie
        self._members[job.index * MOST_WORKERS + worker] = member
        self._do(job, _Operation.ADMIT, worker=worker, number=chunk)

    def evict(self, number: int, worker: int) -> None:
        job = self._jobs[number]
        has_moved = self._do(job, _Operation.EVICT, worker=worker)
        self._members[job.index * MOST_WORKERS + worker] = np.zeros((), MEMBER)
        if has_moved:
            self._tell_windows(job)
        self._complete(job)

    def _complete(self, job: _KernelJob, closing: int | None = None, least: int = 0) -> list[Packet]:
        """Complete all slots in which all are that are to be; `least` are enough for the exchange `closing`.

        First those that settle an exchange: they say who is to be in the others.
        """
        results = []
        slots = {index: self._slots[job.first_slot + index] for index in self._waiting(job)}
        for index in sorted(slots, key=lambda index: not slots[index]["flags"] & Flag.FIRST):
            quorum = least if slots[index]["clock"] == closing else 0
            if self._do(job, _Operation.COMPLETE, number=index, quorum=quorum):
                results.append(self._result(job, index))
                self._tell(job, results[-1])
        return results

    def _waiting(self, job: _KernelJob, flags: Flag = NO_FLAGS) -> Iterator[int]:
        """Find the slots without a result that have these flags."""
        found = 0
        while found := self._do(job, _Operation.FIND, number=found, window=flags):
            yield found - 1

    def leave(self, packet: Packet, port: int) -> None:
        """Go on without a member that says good-bye from its own port; from elsewhere it changes nothing.

        Args:
            port: where the packet came from; see `udp_socket.address_of`.
        """
        job = self._jobs.get(packet.job)
        if job is None or packet.worker >= MOST_WORKERS:
            return
        member = self._members[job.index * MOST_WORKERS + packet.worker]
        if member["is_bound"] and member["cookie"] == packet.cookie and _port_of(member) == port:
            self.evict(packet.job, packet.worker)
            self._send_to(job, Packet(PacketKind.LEAVE_OK, packet.job, packet.worker), [port])

    def set_strategy(self, number: int, strategy: Strategy) -> Windows | None:
        job = self._jobs[number]
        ring = job.shape.ring
        check_window(strategy, ring)
        if not self._do(
            job, _Operation.SET_STRATEGY, window=strategy.window_in(ring), quorum=strategy.settling or 0,
        ):  # fmt: skip
            return None
        job.strategy = strategy
        self._tell_windows(job)
        return _windows(self._state[job.index])

    def allow(self, number: int, worker: int, until: int) -> None:
        job = self._jobs[number]
        slack = job.strategy.slack_in(job.shape.ring)
        if self._do(job, _Operation.ALLOW, worker=worker, number=until, slack=slack):
            member = self._members[job.index * MOST_WORKERS + worker]
            packet = self._grant(job, worker)
            self._send_to(job, packet, [_port_of(member)] if member["is_bound"] else [])

    def unsettled(self, number: int, least: int) -> dict[int, int]:
        job = self._jobs[number]
        members = int(self._state[job.index]["members"])
        slots = [self._slots[job.first_slot + index] for index in self._waiting(job, Flag.FIRST)]
        begun = {int(slot["clock"]): int(slot["seen"]) & members for slot in slots if not slot["is_complete"]}
        return {clock: who for clock, who in begun.items() if who.bit_count() >= min(least, members.bit_count())}

    def close(self, number: int, clock: int, least: int) -> int:
        return who_settled(clock, self._complete(self._jobs[number], clock, least))

    def clocks(self, number: int) -> JobClocks:
        state = self._state[self._jobs[number].index]
        here = _workers(int(state["members"]))
        finished, until = ({worker: int(state[of][worker]) for worker in here} for of in ("finished", "until"))
        return JobClocks(int(state["low"]), _windows(state), finished, until)

    def stats(self, number: int, now_s: float) -> JobStats:
        job = self._jobs[number]
        state, members = self._state[job.index], {}
        here = _workers(int(state["members"]))
        finished, acked = ({worker: int(state[of][worker]) for worker in here} for of in ("finished", "acked"))
        behind = lags(int(state["high"]), finished, acked)
        for worker in here:
            one = self._members[job.index * MOST_WORKERS + worker]
            silent_s = now_s - int(one["heard_ns"]) / 1e9 if one["is_bound"] else float("inf")
            counts = {kind.name: int(one["packets"][kind]) for kind in PacketKind if one["packets"][kind]}
            members[worker] = MemberStats(
                finished[worker], behind[worker], max(0.0, silent_s), counts | {"duplicates": int(one["duplicates"])},
                Brought(*(int(one[name]) for name in Brought._fields)),
            )  # fmt: skip
        refused = {reason.name: int(state["refused"][reason]) for reason in Reason if state["refused"][reason]}
        return JobStats(int(state["low"]), int(state["high"]), _windows(state), members, refused)

    # -- what control does and sends -----------------------------------------------------------------------------

    def _do(self, job: _KernelJob, operation: _Operation, **arguments: int) -> int:
        """Call the program with a command; 0 if it has not done it, or what it has found."""
        command = np.zeros((), COMMAND)
        command["operation"], command["job"] = operation, job.index
        for name, value in arguments.items():
            command[name] = value
        answer = self._program.call("take_command", _ETHERNET + command.tobytes())
        return int(np.frombuffer(answer, COMMAND, offset=len(_ETHERNET))[0]["is_done"])

    def _tell_windows(self, job: _KernelJob) -> None:
        self._tell(job, self._grant(job, ALL))

    def _grant(self, job: _KernelJob, worker: int) -> Packet:
        """Make the packet that tells one worker, or all, how far all are, and which steps may be begun."""
        state = self._state[job.index]
        return Packet(
            PacketKind.GRANT, job.shape.number, worker, cookie=0 if worker == ALL else int(state["until"][worker]),
            clock=int(state["low"]), epoch=int(state["epoch"]), bitmap=int(state["effective"]),
            window_old=int(state["window_old"]), window_new=int(state["window_new"]),
        )  # fmt: skip

    def _result(self, job: _KernelJob, index: int) -> Packet:
        slot = self._slots[job.first_slot + index]
        seen = int(slot["seen"])
        values = tuple(slot["values"][: job.shape.values].tolist()) if slot["has_values"] else ()
        return Packet(
            PacketKind.RESULT, job.shape.number, ALL, cookie=seen >> 32, clock=int(slot["clock"]),
            chunk=int(slot["chunk"]), slot=index, epoch=int(slot["attempt"]), bitmap=seen & 0xFFFFFFFF,
            exponent=int(slot["exponent"]), flags=Flag(int(slot["flags"])), values=values,
        )  # fmt: skip

    def _tell(self, job: _KernelJob, packet: Packet) -> None:
        members = [
            self._members[job.index * MOST_WORKERS + worker]
            for worker in _workers(int(self._state[job.index]["members"]))
        ]
        self._send_to(job, packet, [_port_of(one) for one in members if one["is_bound"]])

    def _send_to(self, job: _KernelJob, packet: Packet, ports: Sequence[int]) -> None:
        if ports:
            batch = PacketBatch.of([packet], job.shape.values)
            self._send(batch, np.array(ports, np.uint64), np.zeros(len(ports), np.int64))


def _port_of(member: Any) -> int:
    return int(member["ip"]) << 16 | int(member["port"])


def _workers(bits: int) -> list[int]:
    return [worker for worker in range(MOST_WORKERS) if bits >> worker & 1]


def _windows(state: Any) -> Windows:
    return Windows(*(int(state[name]) for name in ("window_old", "window_new", "effective", "epoch")))
