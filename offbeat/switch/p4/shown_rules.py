"""The commands of simple_switch_CLI that would set up, on a P4 switch, the jobs that another switch has.

Nobody but a worker is told its cookie, and at which port it is only the P4 switch can know: names stand for these, and
comments say what is to be filled in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.switch.job_shape import JobShape
from offbeat.switch.p4.rules import P4Job, P4Member, check_shape, check_strategy, create_job, place_jobs, serve_at
from offbeat.switch.p4.simple_switch_cli import SimpleSwitchCommands

if TYPE_CHECKING:
    from offbeat.protocol.switch_control import SwitchJobStatus, SwitchStatus

_HEAD = """# for simple_switch_CLI, on a switch that runs switch.p4 and has no entries yet
# fill in SWITCH_IP and SWITCH_UDP_PORT, where workers are to send; and of each worker, by job and rank:
# COOKIE (32 bits at random, which it alone is told), PORT (of the switch, where its link ends), MAC and IP"""


def commands_for(status: SwitchStatus) -> str:
    """The commands for all jobs of a switch; a comment in place of a job that a P4 switch cannot take.

    No line is empty: for simple_switch_CLI that means the one before once more. A job begins anew there: its table is
    empty, and its clock is that of its slowest worker.
    """
    taken: list[tuple[SwitchJobStatus, JobShape]] = []
    lines = [_HEAD]
    for job in status.jobs:
        try:
            shape = JobShape(job.number, job.workers, job.values, job.slots, job.ring, job.rows, job.most)
            check_shape(shape)
            check_strategy(job.strategy)
            place_jobs([*(one for _, one in taken), shape])
        except PlanError as error:
            lines.append(f"# job {_name(job)} is left out. {error}")
        else:
            taken.append((job, shape))
    switch = SimpleSwitchCommands()
    if taken:
        lines += switch.commands([serve_at("SWITCH_IP", "SWITCH_UDP_PORT")])
    for (job, shape), (index, first_slot, first_row) in zip(taken, place_jobs(one for _, one in taken), strict=True):
        members = tuple(_member(job.number, one.worker, job.low) for one in job.members)
        p4_job = P4Job(
            shape, job.strategy, index, first_slot, first_row, clock=job.low, exponent=job.exponent, epoch=job.epoch,
            members=members,
        )  # fmt: skip
        lines += [f"# job {_name(job)}", *switch.commands(create_job(p4_job))]
    return "\n".join(lines) + "\n"


def _member(job: int, worker: int, clock: int) -> P4Member:
    of = f"{job}_{worker}"
    return P4Member(worker, f"COOKIE_{of}", f"PORT_{of}", f"MAC_{of}", f"IP_{of}", until=clock)


def _name(job: SwitchJobStatus) -> str:
    """A job's name in one line, whatever it was called."""
    return f"{job.job!r} (number {job.number})"
