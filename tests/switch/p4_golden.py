"""The rules of one job's life, as tests/data/p4 keeps them: `python -m tests.switch.p4_golden` writes them anew.

It writes `switch.p4info.txtpb` beside the program, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.protocol.switch_control import Strategy, SwitchJobStatus, SwitchMemberStatus, SwitchStatus
from offbeat.switch.job_shape import JobShape
from offbeat.switch.p4.p4runtime import P4INFO, write_request
from offbeat.switch.p4.rules import (
    P4Job,
    P4Member,
    TableRule,
    admit,
    allow,
    create_job,
    destroy_job,
    evict,
    serve_at,
    set_strategy,
)
from offbeat.switch.p4.shown_rules import commands_for
from offbeat.switch.p4.simple_switch_cli import SimpleSwitchCommands
from tests.switch.p4_program import p4info, read_program

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parent.parent / "data" / "p4"
SHAPE = JobShape(0x1234, workers=3, values=32, slots=64, ring=16, rows=100)


def worker(rank: int, cookie: int) -> P4Member:
    """A worker at port rank + 1."""
    return P4Member(rank, cookie, rank + 1, 0x020000000000 + rank, 0x0A000001 + rank)


def life() -> list[tuple[str, list[TableRule]]]:
    """One job's life: what happens, and the rules that it comes to."""
    job = P4Job(
        SHAPE, Strategy("table", window=4, most=8), index=1, first_slot=512, first_row=576, clock=7, exponent=-3
    )
    story = [("the switch's address", [serve_at(0x0A0000FE, 7100)]), ("create_job", create_job(job))]
    for rank in range(3):
        job, rules = admit(job, worker(rank, 0xC0FFEE00 + rank))
        story.append((f"admit worker {rank}", rules))
    job, rules = set_strategy(job, Strategy("table", window=2))
    story.append(("set_strategy", rules))
    job, rules = allow(job, 2, 12)
    story.append(("allow worker 2", rules))
    job, rules = evict(job, 1)
    story.append(("evict worker 1", rules))
    job, rules = admit(job, worker(1, 0xBEEF))
    story.append(("admit worker 1 again", rules))
    return [*story, ("destroy_job", destroy_job(job))]


def status() -> SwitchStatus:
    """A switch with two jobs, of which one does not fit a P4 switch."""

    def job(name: str, number: int, values: int) -> SwitchJobStatus:
        members = tuple(SwitchMemberStatus(rank, 0, 0, None, {}) for rank in range(2))
        return SwitchJobStatus(
            job=name, number=number, workers=2, values=values, slots=64, ring=64, rows=0, exponent=-5,
            strategy=Strategy(), low=0, high=0, window_old=0, window_new=0, effective=0, epoch=0,
            members=members, refused={},
        )  # fmt: skip

    return SwitchStatus(1, "udp", (job("digits", 7, 32), job("wide\nreset_state", 8, 256)), {})


def cli_text() -> str:
    """The commands of simple_switch_CLI."""
    switch = SimpleSwitchCommands()
    return "\n".join(line for what, rules in life() for line in [f"# {what}", *switch.commands(rules)]) + "\n"


def requests_text() -> str:
    """The requests of P4Runtime. It needs the package p4runtime."""
    return "".join(f"# {what}\n{text_of(write_request(rules))}" for what, rules in life())


def text_of(message: object) -> str:
    """A message as text."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(message))


GOLDEN: dict[Path, Callable[[], str]] = {
    P4INFO: lambda: p4info(read_program()),
    DATA / "commands.txt": cli_text,
    DATA / "shown_rules.txt": lambda: commands_for(status()),
    DATA / "requests.txtpb": requests_text,
}

if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for path, text in GOLDEN.items():
        path.write_text(text())
