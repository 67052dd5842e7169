"""The rules of a job on a P4 switch: what control's verbs come to, as entries of tables and multicast groups.

A job has a place in the registers (`index`), a run of cells for its slots and one for its rows, and a multicast group,
`index` + 1. Each verb returns the job as it is then, and what is to be written, in that order.

A worker has to be in `job` before it may send, and may not send any more before it leaves there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from offbeat.errors import PlanError
from offbeat.switch.packet import is_newer
from offbeat.switch.strategy import check_window

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from offbeat.protocol.switch_control import Strategy
    from offbeat.switch.job_shape import JobShape

VALUES, MOST_WORKERS, MOST_JOBS, MOST_CELLS = 32, 32, 8, 4096  # of `switch.p4`
Value = int | str  # a number, or the name of one that whoever loads the rules has to fill in


@dataclass(frozen=True)
class TableEntry:
    """One entry of a table; without an action it only says which."""

    table: str
    keys: Mapping[str, Value]
    action: str = ""
    parameters: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class MulticastGroup:
    """The ports of a job's members, and whose they are."""

    number: int
    ports: Mapping[int, Value]


@dataclass(frozen=True)
class TableRule:
    """One thing to be written."""

    verb: Literal["insert", "modify", "delete"]
    entry: TableEntry | MulticastGroup


@dataclass(frozen=True)
class P4Member:
    """One worker at a port of the switch.

    Args:
        worker: its rank.
        cookie: that its packets carry.
        port: where its link ends.
        mac, ip: its addresses.
        chunk: the first of the stream that it takes part in.
        until: it may begin steps before this clock, whatever the windows say.
    """

    worker: int
    cookie: Value
    port: Value
    mac: Value
    ip: Value
    chunk: int = 0
    until: int = 0


@dataclass(frozen=True)
class P4Job:
    """One job on a P4 switch.

    Args:
        shape, strategy: of the job.
        index: its place in the registers of jobs.
        first_slot, first_row: where its cells begin.
        clock: the last step that all workers have finished.
        exponent: of all values of the table.
        epoch: counts changes of the policy.
        members: by rank.
    """

    shape: JobShape
    strategy: Strategy
    index: int = 0
    first_slot: int = 0
    first_row: int = 0
    clock: int = 0
    exponent: int = 0
    epoch: int = 0
    members: tuple[P4Member, ...] = ()

    @property
    def group(self) -> MulticastGroup:
        """The ports of its members."""
        return MulticastGroup(self.index + 1, {one.worker: one.port for one in self.members})

    @property
    def entry(self) -> TableEntry:
        """The entry of the job in the table `job`."""
        shape = self.shape
        parameters = {
            "index": self.index, "members": sum(1 << one.worker for one in self.members), "workers": shape.workers,
            "first_slot": self.first_slot, "slots": shape.slots, "first_row": self.first_row, "rows": shape.rows,
            "ring": shape.ring, "exponent": self.exponent % 256, "clock": self.clock, "group": self.index + 1,
        }  # fmt: skip
        return TableEntry("Ingress.job", {"job": shape.number}, "Ingress.set_job", parameters)

    def policy(self, slack: int) -> TableEntry:
        """The entry of its policy in the table `policy`; `slack` is that of the strategy before."""
        parameters = {
            "window": self.strategy.window_in(self.shape.ring), "slack": slack, "epoch": self.epoch,
            "quorum": self.strategy.quorum or 0,
        }  # fmt: skip
        return TableEntry("Ingress.policy", {"job": self.shape.number}, "Ingress.set_policy", parameters)

    def member(self, one: P4Member) -> TableEntry:
        """The entry of one of its workers in the table `member`."""
        parameters: dict[str, Value] = {
            "mask": 1 << one.worker, "cookie": one.cookie, "port": one.port, "ip": one.ip, "chunk": one.chunk,
            "until": one.until,
        }  # fmt: skip
        keys = {"job": self.shape.number, "worker": one.worker}
        return TableEntry("Ingress.member", keys, "Ingress.set_member", parameters)

    def receiver(self, one: P4Member) -> TableEntry:
        """The entry of one of its workers in the table `receiver`."""
        parameters: dict[str, Value] = {"mac": one.mac, "ip": one.ip, "place": self.index * MOST_WORKERS + one.worker}
        keys = {"job": self.shape.number, "worker": one.worker}
        return TableEntry("Egress.receiver", keys, "Egress.set_receiver", parameters)


def check_shape(shape: JobShape) -> None:
    """Check that a job fits the program.

    Raises:
        PlanError: if it does not.
    """
    if shape.values != VALUES:
        raise PlanError(
            f"Cannot sum packets of {shape.values} values on a P4 switch: its pipeline takes {VALUES} in each - at "
            "`plan.fabric.values`."
        )
    if shape.most:
        raise PlanError(
            "Cannot clamp gradients on a P4 switch: its pipeline adds what comes. Use cap=None, or the switch in "
            "software - at `plan.fabric.cap`."
        )
    if shape.workers > MOST_WORKERS:
        raise PlanError(
            f"Cannot sum for {shape.workers} workers on a P4 switch: its registers have {MOST_WORKERS} bits. Use the "
            "switch in software for so many."
        )


def check_strategy(strategy: Strategy) -> None:
    """Check that the program can carry out a strategy.

    Raises:
        PlanError: if it cannot.
    """
    if strategy.wait_s:
        raise PlanError(
            f"Cannot close a sum after {strategy.wait_s:g} s on a P4 switch: only its packets complete sums. Use "
            "wait_s=0, or the switch in software - at `plan.sync.wait_s`."
        )


def place_jobs(shapes: Iterable[JobShape]) -> list[tuple[int, int, int]]:
    """Find a place for each job: its index, its first slot and its first row.

    Raises:
        PlanError: if one does not fit the program, or all do not fit together.
    """
    places, start = [], 0
    for index, shape in enumerate(shapes):
        check_shape(shape)
        end = start + shape.slots + shape.rows
        if index >= MOST_JOBS or end > MOST_CELLS:
            raise PlanError(
                f"Cannot begin another job with {shape.slots} slots and {shape.rows} rows: this P4 switch has "
                f"{MOST_CELLS} cells for {MOST_JOBS} jobs. Use fewer - at `plan.fabric.slots`."
            )
        places.append((index, start, start + shape.slots))
        start = end
    return places


def serve_at(ip: Value, port: Value) -> TableRule:
    """The switch's own address, to which workers send."""
    return TableRule("insert", TableEntry("Ingress.service", {"ip": ip, "udp_port": port}, "Ingress.take"))


def create_job(job: P4Job) -> list[TableRule]:
    """Make room for a job, and let in the members that it has.

    Raises:
        PlanError: if it or its strategy does not fit the program, or its strategy not the shape.
    """
    check_shape(job.shape)
    check_window(job.strategy, job.shape.ring)
    check_strategy(job.strategy)
    entries: list[TableEntry | MulticastGroup] = [job.policy(0), job.group, job.entry]
    for one in job.members:
        entries += [job.receiver(one), job.member(one)]
    return [TableRule("insert", entry) for entry in entries]


def destroy_job(job: P4Job) -> list[TableRule]:
    """Forget a job."""
    entries: list[TableEntry | MulticastGroup] = []
    for one in job.members:
        entries += [job.member(one), job.receiver(one)]
    return [TableRule("delete", entry) for entry in [*entries, job.entry, job.group, job.policy(0)]]


def admit(job: P4Job, one: P4Member) -> tuple[P4Job, list[TableRule]]:
    """Take a worker in, or its new incarnation instead of the old one."""
    job, rules = evict(job, one.worker)
    job = replace(job, members=(*job.members, one))
    rules += [TableRule("insert", job.receiver(one)), TableRule("modify", job.group), TableRule("modify", job.entry)]
    return job, [*rules, TableRule("insert", job.member(one))]


def evict(job: P4Job, worker: int) -> tuple[P4Job, list[TableRule]]:
    """Go on without a worker."""
    gone = [one for one in job.members if one.worker == worker]
    if not gone:
        return job, []
    job = replace(job, members=tuple(one for one in job.members if one.worker != worker))
    rules = [TableRule("delete", job.member(gone[0])), TableRule("modify", job.entry), TableRule("modify", job.group)]
    return job, [*rules, TableRule("delete", job.receiver(gone[0]))]


def set_strategy(job: P4Job, strategy: Strategy) -> tuple[P4Job, list[TableRule]]:
    """Change the policy. The pipeline takes the change into use once the one before is in effect for all.

    Raises:
        PlanError: if the strategy does not fit the job's shape, or the program.
    """
    check_window(strategy, job.shape.ring)
    check_strategy(strategy)
    slack = job.strategy.slack_in(job.shape.ring)
    job = replace(job, strategy=strategy, epoch=(job.epoch + 1) % (1 << 16))
    return job, [TableRule("modify", job.policy(slack))]


def allow(job: P4Job, worker: int, until: int) -> tuple[P4Job, list[TableRule]]:
    """Let one worker begin steps before clock `until`; the caller sees to it that the strategy allows that."""
    # What was allowed before is not taken back: the worker knows of it.
    members = tuple(
        replace(one, until=until) if one.worker == worker and is_newer(until, one.until) else one for one in job.members
    )
    return replace(job, members=members), [
        TableRule("modify", job.member(one)) for one in members if one.worker == worker
    ]
