"""The data plane of a switch: where packets are summed. One Protocol, several targets.

* `software_plane` - NumPy in this process, whole batches at a time; without sockets (`memory`) or with them (`udp`)
* `kernel`         - an eBPF program at the ports of this machine (`ebpf`, `xdp`)

A P4 switch (`p4`) is one more place where packets are summed; its rules are written by whoever controls it.

What is asked of it is the same for each: jobs, members, policies. What becomes of packets is the same for each, too:
the reference model (`job_state`) says it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from offbeat.errors import PlanError
from offbeat.switch.cap import Brought
from offbeat.switch.packet import Flag, distance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from offbeat.protocol.switch_control import Strategy
    from offbeat.switch.clocks import Windows
    from offbeat.switch.job_shape import JobShape
    from offbeat.switch.packet import Packet


TABLE_MIB = 64  # of all jobs' tables
MIB = 20  # bits of the bytes in one


class MemberStats(NamedTuple):
    """The statistics of one worker.

    Args:
        finished: its last step that is over (table).
        lag: steps that it is behind the furthest (table), or chunks (stream).
        silent_s: seconds since its last packet; infinite if there was none.
        counts: its packets by kind, and its duplicates.
        brought: what was added of it, where that is capped.
    """

    finished: int
    lag: int
    silent_s: float
    counts: Mapping[str, int]
    brought: Brought = Brought()


class JobStats(NamedTuple):
    """The statistics of one job.

    Args:
        low, high: the newest step that all members, or any, have finished.
        windows: which steps may be begun.
        members: by rank.
        refused: packets, by reason.
    """

    low: int
    high: int
    windows: Windows
    members: Mapping[int, MemberStats]
    refused: Mapping[str, int]


class JobClocks(NamedTuple):
    """The clocks of one job, as they are read every few milliseconds.

    Args:
        low: the newest step that all members have finished.
        windows: which steps may be begun.
        finished: by rank, the last step that is over.
        until: by rank, the clock before which it may begin steps by name.
    """

    low: int
    windows: Windows
    finished: Mapping[int, int]
    until: Mapping[int, int]


def lags(high: int, finished: Mapping[int, int], acked: Mapping[int, int]) -> dict[int, int]:
    """Say by rank how far each worker is behind the furthest one: by steps, or by chunks if it is not by steps.

    Args:
        high: the newest step that any has finished.
        finished, acked: by rank, the last step that is over, and the first chunk whose result the worker lacks.

    >>> lags(0, {0: 0, 1: 0}, {0: 0x7FFFFFFF, 1: 0x90000000})
    {0: 268435457, 1: 0}
    """
    return {
        rank: max(0, distance(high, step)) or max(distance(other, acked[rank]) for other in acked.values())
        for rank, step in finished.items()
    }


def who_settled(clock: int, results: Iterable[Packet]) -> int:
    """Say who contributes to an exchange that one of these results settles, as bits; 0 if none does."""
    return next((one.contributors for one in results if one.clock == clock and Flag.FIRST in one.flags), 0)


def no_room_for_table(rows: int, needed_bytes: int, most_bytes: int) -> PlanError:
    """Say that a table does not fit.

    Args:
        rows: that it has.
        needed_bytes, most_bytes: of all jobs' tables together, with it, and that the switch has.
    """
    needed_mib = -(-needed_bytes >> MIB)
    return PlanError(
        f"Cannot make room for a table of {rows:,} rows: all jobs' tables together would take {needed_mib:,} MiB, and "
        f"this switch has {most_bytes >> MIB:,}. Start it with --table-mib {needed_mib}."
    )


class DataPlane(Protocol):
    """The Protocol of where packets are summed."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Packets that were not taken in, by why; what is refused by a job's stream or table is none of them."""

    @property
    def most_slots(self) -> int:
        """The most slots for which there is room now."""

    def create_job(
        self, shape: JobShape, strategy: Strategy, *, clock: int = 0, exponent: int = 0, windows: Windows | None = None
    ) -> None:
        """Make room for a job.

        Args:
            clock: the last step that all workers have finished.
            windows: that another switch had; None for those of the strategy.

        Raises:
            PlanError: if the strategy does not fit the shape, or the target cannot carry it out.
        """

    def destroy_job(self, number: int) -> None:
        """Forget a job."""

    def admit(self, number: int, worker: int, cookie: int, *, chunk: int = 0) -> None:
        """Take a worker into a job, or its new incarnation instead of the old one."""

    def evict(self, number: int, worker: int) -> None:
        """Go on without a worker."""

    def set_strategy(self, number: int, strategy: Strategy) -> Windows | None:
        """Change a job's policy; None while the change before is not in effect for all.

        Raises:
            PlanError: if it does not fit the job's shape.
        """

    def allow(self, number: int, worker: int, until: int) -> None:
        """Let one worker begin steps before clock `until`, as far as the strategy allows it for single workers."""

    def unsettled(self, number: int, least: int) -> Mapping[int, int]:
        """Find the exchanges that so many members have begun and that are not settled, with who is in, as bits."""

    def close(self, number: int, clock: int, least: int) -> int:
        """Settle an exchange with those who are in it, if they are so many.

        Returns:
            Who they are, as bits; 0 if it stays open.
        """

    def clocks(self, number: int) -> JobClocks:
        """Read the clocks of a job."""

    def stats(self, number: int, now_s: float) -> JobStats:
        """Return what is known of a job."""
